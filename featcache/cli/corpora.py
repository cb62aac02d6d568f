"""Commands on a corpus: each part in turn, with one summary and the exit code of the worst."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

from featcache.cli.common import collected_documents, complain, error_document, print_json, say
from featcache.cli.signals import INTERRUPTED
from featcache.errors import (
    ArgumentError,
    FeatcacheError,
    ManifestError,
    MissingItemError,
    StoreError,
    counted,
    listing,
)

if TYPE_CHECKING:
    from pathlib import Path

    from featcache.version.corpus import Part

_BY_SEVERITY = (INTERRUPTED, 1, 2, 3, 0)
_OUTCOMES = {
    1: "failed, or damaged",
    2: "refused",
    3: "with utterances that failed",
    INTERRUPTED: "interrupted",
}


def worst(codes: Iterable[int]) -> int:
    """The exit code that says the worst: interrupted, failed or damaged, wrong usage, some utterances failed, fine."""
    found = {0, *codes}
    return next(code for code in (*_BY_SEVERITY, *found) if code in found)


def for_each_part() -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make the callback of a command that takes a cache as `path` take a corpus too.

    On a corpus, it is called with the cache of each part, and, if it takes one, with the part's manifest: of those that
    `--manifest` names, the one of the part's name. A command that copies, copies to the part of that name. With
    `--json`, the parts' documents become one. An `utterance` that it looks for only has to be in one of the parts.
    """

    def decorate(callback: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(callback)
        def on_any(*args: Any, **given: Any) -> None:
            from featcache.version.corpus import read_parts
            from featcache.version.selection import corpus_of

            found = corpus_of(given["path"])
            if found is None:
                callback(*args, **given)
                return
            corpus, version = found
            loop = _Loop(callback, args, given)
            loop.over(corpus, version, read_parts(corpus))

        return on_any

    return decorate


def _as_json(error: FeatcacheError) -> dict[str, Any]:
    return error_document(type(error).__name__, str(error), error.exit_code)


class _Loop:
    """A command's calls, one for each part."""

    def __init__(self, callback: Callable[..., None], args: tuple[Any, ...], given: dict[str, Any]) -> None:
        self._callback, self._args, self._given = callback, args, given
        self._is_search = given.get("utterance") is not None
        self._codes: dict[str, int] = {}
        self._missing: MissingItemError | None = None
        self._gone: dict[str, str] = {}

    def over(self, corpus: Any, version: str, parts: list[Part]) -> None:
        """Call the command for each part, and end with the exit code of the worst."""
        from featcache.version.corpus import gone_parts

        if self._given.get("as_csv"):
            raise ArgumentError(f"{corpus}: is a corpus: --csv is about one version, as {corpus / parts[0].name}")
        manifests = self._manifests()
        if (to := self._given.get("to")) is not None:
            from featcache.care.copying import copy_parts_list

            copy_parts_list(corpus, to)
        self._gone = gone_parts(corpus, parts)
        documents = []
        for part in parts:
            path = corpus / part.name / version if version else corpus / part.name
            if not self._given.get("as_json") and not self._is_search:
                say(f"part {part.name}")
            with collected_documents() as found:
                fault = self._call(part, path, manifests)
            if not (self._is_search and fault):
                documents.append({"part": part.name, "exit_code": self._codes.get(part.name, 0)})
                documents[-1] |= fault or (found[0] if found else {})
            if self._codes.get(part.name) == INTERRUPTED:
                break
        if self._is_search and self._missing is not None and not documents:
            if len(parts) == 1:
                raise self._missing
            raise MissingItemError(f"{self._missing}; nor is it in the other parts of {corpus}")
        code = worst(self._codes.values())
        if self._given.get("as_json"):
            print_json({"corpus": str(corpus), "exit_code": code, "parts": documents})
        elif not self._is_search:
            self._summarize(corpus, parts)
        click.get_current_context().exit(code)

    def _call(self, part: Part, path: Any, manifests: dict[str, Path] | None) -> dict[str, Any]:
        """Call the command for a part; returns the error, as JSON has it, if the part could not be looked at."""
        given = {**self._given, "path": path}
        if "to" in given:
            given["to"] /= part.name
        try:
            if manifests is not None:
                if part.name not in manifests:
                    raise ManifestError(f"part {part.name}: none of these manifests has its name")
                given["manifest"] = str(manifests[part.name])
            if part.name in self._gone:
                raise StoreError(self._gone[part.name])
            self._callback(*self._args, **given)
        except click.exceptions.Exit as ended:
            self._codes[part.name] = ended.exit_code
        except FeatcacheError as error:
            if self._is_search and isinstance(error, MissingItemError):
                self._missing = self._missing or error
                return _as_json(error)
            complain(error)
            self._codes[part.name] = error.exit_code
            return _as_json(error)
        return {}

    def _manifests(self) -> dict[str, Path] | None:
        from pathlib import Path

        from featcache.version.corpus import by_part_name, manifests_of_parts

        if self._given.get("manifest") is None:
            return None
        manifest = self._given["manifest"]
        return manifests_of_parts([manifest]) or by_part_name([Path(manifest)])

    def _summarize(self, corpus: Any, parts: list[Part]) -> None:
        named = {code: [name for name, found in self._codes.items() if found == code] for code in _OUTCOMES}
        bad = [f"{len(names):,} {_OUTCOMES[code]}: {listing(names)}" for code, names in named.items() if names]
        say(f"{corpus}: {counted(len(parts), 'part')}: {'; '.join(bad) or 'no errors'}")
