"""Commands on a corpus: each part in turn, with one summary and the worst exit code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from featcache.cli import options
from featcache.cli.common import Document, complain, error_document, printing, say, say_json
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
    """Return the worst exit code: interrupted, failed or damaged, wrong usage, some
    utterances failed, fine."""
    codes = {0, *codes}
    return next(code for code in (INTERRUPTED, 1, 2, 3, 0) if code in codes)


def for_each_part(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Call a command that takes a cache as `path` for each part of a corpus: with the
    part's cache, the manifest of its name, and as `to` the part of its name. An `utterance`
    only has to be in one of the parts."""

    @functools.wraps(command)
    def on_any(**arguments: Any) -> int | None:
        from featcache.version.selection import corpus_of

        corpus = corpus_of(arguments["path"])
        if corpus is None:
            return command(**arguments)
        return _call_for_parts(command, arguments, *corpus)

    return on_any


def version_or_corpus(command: Callable[..., int | None]) -> Callable[..., Any]:
    """Add the argument CACHE[/VERSION] to a command, and call it for each part of a corpus."""
    return options.version_location(for_each_part(command))


def _call_for_parts(
    command: Callable[..., int | None], arguments: dict[str, Any], corpus: Location, version: str
) -> int:
    """Call a command for each part, or for one version of each. Returns the worst code."""
    from featcache.version.corpus import by_part_name, gone_parts, manifests_of_parts, read_parts

    parts = read_parts(corpus)
    gone = gone_parts(corpus, parts)
    is_search = arguments.get("utterance") is not None
    printing.is_part = True
    if arguments.get("csv"):
        raise ArgumentError(
            f"{corpus}: is a corpus: --csv is about one version, as {corpus / parts[0].name}"
        )
    manifest, manifests = arguments.get("manifest"), {}
    if manifest:
        manifests = manifests_of_parts([manifest]) or by_part_name([Path(manifest)])
    to = arguments.get("to")
    if to is not None and not arguments["dry_run"]:
        from featcache.care.copying import copy_parts_list

        copy_parts_list(corpus, to)

    codes: dict[str, int] = {}
    documents: list[Document] = []
    missing: MissingItemError | None = None
    for part in parts:
        name = part.name
        if not is_search:
            say(f"part {name}")
        of_part = {**arguments, "path": corpus / name / version}
        if to is not None:
            of_part["to"] = to / name
        try:
            if manifest:
                if name not in manifests:
                    raise ManifestError(f"part {name}: none of these manifests has its name")
                of_part["manifest"] = str(manifests[name])
            if name in gone:
                raise StoreError(gone[name])
            codes[name] = command(**of_part) or 0
            document = printing.document or {}
            printing.document = None
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
        if len(parts) > 1:
            missing = MissingItemError(f"{missing}; nor is it in the other parts of {corpus}")
        raise missing
    code = worst(codes.values())
    say_json({"corpus": str(corpus), "exit_code": code, "parts": documents})
    if not is_search:
        outcomes = []
        for outcome, what in _OUTCOMES.items():
            names = [name for name, its_code in codes.items() if its_code == outcome]
            if names:
                outcomes.append(f"{len(names):,} {what}: {listing(names)}")
        say(f"{corpus}: {counted(len(parts), 'part')}: {'; '.join(outcomes) or 'no errors'}")
    return code
