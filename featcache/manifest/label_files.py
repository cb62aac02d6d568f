"""The files of rows from which a version is made instead of audio: label files, or imported
features.

The parameter `label_files` of a config of labels is a template, such as
`align/{id}.TextGrid`. For such a version, the path of a row is the path of its label file.
So a label file that has moved, changed or gone is treated as an audio file is.

The manifest of imported features names their files as paths. Any other manifest is compared
with them by ids alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from featcache.errors import ConfigError, ManifestError, did_you_mean, listing
from featcache.manifest.copies import copies_of, expand
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import Manifest

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")

_FEATURES = re.compile(r"\.(?:npy|pt|llc)$|\.(?:lca|h5)/|\.ark:[0-9]+$")
"""Matches a path of features."""

_OF_PATH: Mapping[str, Callable[[str], str]] = {
    "path": str,
    "folder": lambda path: os.path.dirname(path) or ".",
    "stem": lambda path: os.path.splitext(os.path.basename(path))[0],
}
"""The placeholders that stand for the row's path, or a part of it."""


def template_of(config: Mapping[str, Any]) -> str | None:
    """Return the template of a resolved config; None if it takes audio."""
    if is_imported(config):
        return "{path}"
    if config.get("extractor") != "labels" or not isinstance(config.get("params"), Mapping):
        return None
    return str(config["params"].get("label_files"))


def is_imported(config: Mapping[str, Any]) -> bool:
    """Tell whether a resolved config is one of imported features."""
    return config.get("extractor") == "imported"


def needs_columns(config: Mapping[str, Any]) -> bool:
    """Tell whether a resolved config's template names other columns of the manifest."""
    names = _PLACEHOLDER.findall(template_of(config) or "")
    return not {*names} <= {"id", *_OF_PATH}


def rows_of(manifest: Manifest, config: Mapping[str, Any]) -> Manifest:
    """Return the rows that a version of a resolved config has for a manifest: one for each
    clip, with the path of its label file, and all copies. Raises ManifestError and
    ConfigError as `expand` and `with_label_files`."""
    rows = with_own_paths(manifest, config).clips()
    return expand(rows, copies_of(config))


def with_own_paths(manifest: Manifest, config: Mapping[str, Any]) -> Manifest:
    """Return a manifest with the paths that rows have in a version of a resolved config. A
    row that names no file of features has no path in a version of imported features."""
    if not is_imported(config):
        return with_label_files(manifest, template_of(config))
    paths = (path if _FEATURES.search(path) else "" for path in manifest.paths)
    return replace(manifest, paths=Strings.of(paths))


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
    if not rows.has_repeats:
        return rows
    path_of: dict[str, str] = {}
    for id_, path in zip(rows.ids, rows.paths, strict=True):
        if path_of.setdefault(id_, path) != path:
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
    columns = ["id", *_OF_PATH, *manifest.columns]
    raise ManifestError(
        f"{manifest.source}: has no column {name!r}{did_you_mean(name, columns)}, which "
        f"params.label_files names; there are {listing(columns)}"
    )
