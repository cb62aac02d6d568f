"""The label files of rows, from which a version of labels is made instead of audio.

Its config's parameter `label_files` is a template, such as `align/{id}.TextGrid`. For such a
version, the path of a row is that of its label file. So a label file that has moved,
changed or gone is treated as an audio file is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from featcache.errors import ConfigError, ManifestError, listing
from featcache.manifest.copies import copies_of, expand
from featcache.manifest.utterances import Manifest
from featcache.strings import Strings

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")

_OF_PATH: Mapping[str, Callable[[str], str]] = {
    "path": str,
    "folder": lambda path: os.path.dirname(path) or ".",
    "stem": lambda path: os.path.splitext(os.path.basename(path))[0],
}
"""The placeholders that stand for the row's path, or a part of it."""


def template_of(config: Mapping[str, Any]) -> str | None:
    """Return the template of a resolved config; None if it takes audio."""
    if config.get("extractor") != "labels" or not isinstance(config.get("params"), Mapping):
        return None
    return str(config["params"].get("label_files"))


def needs_columns(config: Mapping[str, Any]) -> bool:
    """Tell whether a resolved config's template names other columns of the manifest."""
    names = _PLACEHOLDER.findall(template_of(config) or "")
    return not {*names} <= {"id", *_OF_PATH}


def rows_of(manifest: Manifest, config: Mapping[str, Any]) -> Manifest:
    """Return the rows that a version of a resolved config has for a manifest: one for each
    clip, with the path of its label file, and all copies. Raises ManifestError and
    ConfigError as `expand` and `with_label_files`."""
    rows = with_label_files(manifest, template_of(config)).clips()
    return expand(rows, copies_of(config))


def with_label_files(manifest: Manifest, template: str | None) -> Manifest:
    """Return a manifest with the paths of label files, unless the template is None. Raises
    ManifestError if it names no column, or two files for a clip; ConfigError if it has a
    fault."""
    if template is None:
        return manifest
    names = _PLACEHOLDER.findall(template)
    # A template may come from a cache, and only a manifest may name a URL or a command.
    if not names or re.search("[:|{}]", _PLACEHOLDER.sub("", template)):
        raise ConfigError(
            f"params.label_files: {template}: give a path with {{id}}, {{stem}}, {{folder}} or "
            "{a column}, and without ':' and '|'"
        )
    form = _PLACEHOLDER.sub("%s", template.replace("%", "%%"))
    cells = zip(manifest.paths, *(_values(name, manifest) for name in names), strict=True)
    # a row without a path is compared by its id alone, here too
    paths = (form % tuple(values) if path and all(values) else "" for path, *values in cells)
    rows = replace(manifest, paths=Strings.of(paths))
    clips = rows.clips()
    if len(clips) < len(rows):
        path_of = dict(zip(clips.ids, clips.paths, strict=True))
        for id_, path in zip(rows.ids, rows.paths, strict=True):
            if path_of[id_] != path:
                raise ManifestError(
                    f"{manifest.source}: rows of the clip {id_} have the label files "
                    f"{path_of[id_]} and {path}: give each row an id of its own"
                )
    return rows


def _values(name: str, manifest: Manifest) -> Iterable[str]:
    if name == "id":
        return manifest.ids
    if name in _OF_PATH:
        return map(_OF_PATH[name], manifest.paths)
    if name in manifest.columns:
        return manifest.columns[name]
    columns = listing(["id", *_OF_PATH, *manifest.columns])
    raise ManifestError(
        f"{manifest.source}: has no column {name!r}, which params.label_files names; there are "
        f"{columns}"
    )
