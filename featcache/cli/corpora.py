"""Commands on a corpus: each part in turn, with one summary and the exit code of the
worst."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from featcache.cli import options
from featcache.cli.common import complain, error_document, printing, say, say_json
from featcache.cli.process import INTERRUPTED
from featcache.errors import (
    ArgumentError,
    FeatcacheError,
    ManifestError,
    MissingItemError,
    StoreError,
    counted,
    listing,
)
from featcache.storage.location import Location

_OUTCOMES = {
    1: "failed, or damaged",
    2: "refused",
    3: "with utterances that failed",
    INTERRUPTED: "interrupted",
}


def worst(codes: Iterable[int]) -> int:
    """The exit code that says the worst: interrupted, failed or damaged, wrong usage,
    some utterances failed, fine."""
    found = {0, *codes}
    return next(code for code in (INTERRUPTED, 1, 2, 3, 0, *found) if code in found)


def for_each_part(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Make a command that takes a cache as `path` take a corpus too.

    On a corpus, it is called with the cache of each part, and, if it takes one, with the
    part's manifest: of those that `--manifest` names, the one of the part's name. A
    command that copies, copies to the part of that name. With `--json`, the parts'
    documents become one. An `utterance` that it looks for only has to be in one of the
    parts."""

    @functools.wraps(command)
    def on_any(**given: Any) -> int | None:
        from featcache.version.selection import corpus_of

        found = corpus_of(given["path"])
        return command(**given) if found is None else _call_for_parts(command, given, *found)

    return on_any


def version_or_corpus(command: Callable[..., int | None]) -> Callable[..., Any]:
    """The argument CACHE[/VERSION], for a command that does what it does for each part of
    a corpus."""
    return options.version_location(for_each_part(command))


def _call_for_parts(
    command: Callable[..., int | None], given: dict[str, Any], corpus: Location, version: str
) -> int:
    """Call a command for each part of a corpus; of one version of each if that is named.
    Returns the worst code."""
    from featcache.version.corpus import by_part_name, gone_parts, manifests_of_parts, read_parts

    parts = read_parts(corpus)
    gone = gone_parts(corpus, parts)
    is_search = given.get("utterance") is not None
    printing.is_part = True
    if given.get("csv"):
        raise ArgumentError(
            f"{corpus}: is a corpus: --csv is about one version, as {corpus / parts[0].name}"
        )
    manifest = given.get("manifest")
    manifests = manifest and (manifests_of_parts([manifest]) or by_part_name([Path(manifest)]))
    if (to := given.get("to")) is not None and not given["dry_run"]:
        from featcache.care.copying import copy_parts_list

        copy_parts_list(corpus, to)

    codes: dict[str, int] = {}
    documents: list[dict[str, Any]] = []
    missing: MissingItemError | None = None
    for name in [part.name for part in parts]:
        if not is_search:
            say(f"part {name}")
        of_part = {
            **given,
            "path": corpus / name / version,
            **({} if to is None else {"to": to / name}),
        }
        try:
            if manifests is not None:
                if name not in manifests:
                    raise ManifestError(f"part {name}: none of these manifests has its name")
                of_part["manifest"] = str(manifests[name])
            if name in gone:
                raise StoreError(gone[name])
            codes[name] = command(**of_part) or 0
            document, printing.document = printing.document or {}, None
        except FeatcacheError as error:
            if is_search and isinstance(error, MissingItemError):
                missing = missing or error
                continue
            complain(error)
            codes[name] = error.exit_code
            if is_search:
                continue
            document = error_document(error)
        documents.append({"part": name, "exit_code": codes[name], **document})
        if codes[name] == INTERRUPTED:
            break
    if missing is not None and not documents:
        raise (
            missing
            if len(parts) == 1
            else MissingItemError(f"{missing}; nor is it in the other parts of {corpus}")
        )
    code = worst(codes.values())
    say_json({"corpus": str(corpus), "exit_code": code, "parts": documents})
    if not is_search:
        named = {
            code: [name for name, found in codes.items() if found == code] for code in _OUTCOMES
        }
        bad = [
            f"{len(names):,} {_OUTCOMES[code]}: {listing(names)}"
            for code, names in named.items()
            if names
        ]
        say(f"{corpus}: {counted(len(parts), 'part')}: {'; '.join(bad) or 'no errors'}")
    return code
