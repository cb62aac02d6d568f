"""Commands on a corpus: each part in turn, with one summary and the exit code of the worst."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from featcache.storage.location import Location

if TYPE_CHECKING:
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


def for_each_part(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Make a command that takes a cache as `path` take a corpus too.

    On a corpus, it is called with the cache of each part, and, if it takes one, with the part's manifest: of those that
    `--manifest` names, the one of the part's name. A command that copies, copies to the part of that name. With
    `--json`, the parts' documents become one. An `utterance` that it looks for only has to be in one of the parts.
    """

    @functools.wraps(command)
    def on_any(**given: Any) -> int | None:
        from featcache.version.selection import corpus_of

        found = corpus_of(given["path"])
        return command(**given) if found is None else _Loop(command, given, *found).run()

    return on_any


class _Loop:
    """A command's calls, one for each part of a corpus; of one version of each if that is named."""

    def __init__(
        self, command: Callable[..., int | None], given: dict[str, Any], corpus: Location, version: str
    ) -> None:
        from featcache.version.corpus import gone_parts, read_parts

        self._command, self._given, self._corpus, self._version = command, given, corpus, version
        self._parts = read_parts(corpus)
        self._gone = gone_parts(corpus, self._parts)
        self._is_search = given.get("utterance") is not None
        self._codes: dict[str, int] = {}
        self._missing: MissingItemError | None = None

    def run(self) -> int:
        """Call the command for each part. Returns the exit code of the worst."""
        as_json = self._given.get("as_json")
        if self._given.get("as_csv"):
            one = self._corpus / self._parts[0].name
            raise ArgumentError(f"{self._corpus}: is a corpus: --csv is about one version, as {one}")
        manifests = self._manifests()
        if (to := self._given.get("to")) is not None:
            from featcache.care.copying import copy_parts_list

            copy_parts_list(self._corpus, to)
        documents = []
        for part in self._parts:
            if not as_json and not self._is_search:
                say(f"part {part.name}")
            with collected_documents() as found:
                fault = self._call(part, manifests)
            code = self._codes.get(part.name, 0)
            if not (self._is_search and fault):
                documents.append({"part": part.name, "exit_code": code, **(fault or (found[0] if found else {}))})
            if code == INTERRUPTED:
                break
        if self._missing is not None and not documents:
            if len(self._parts) == 1:
                raise self._missing
            raise MissingItemError(f"{self._missing}; nor is it in the other parts of {self._corpus}")
        code = worst(self._codes.values())
        if as_json:
            print_json({"corpus": str(self._corpus), "exit_code": code, "parts": documents})
        elif not self._is_search:
            self._summarize()
        return code

    def _call(self, part: Part, manifests: dict[str, Path] | None) -> dict[str, Any]:
        """Call the command for a part; returns the error, as JSON has it, if the part could not be looked at."""
        cache = self._corpus / part.name
        given = {**self._given, "path": cache / self._version if self._version else cache}
        if "to" in given:
            given["to"] /= part.name
        try:
            if manifests is not None:
                if part.name not in manifests:
                    raise ManifestError(f"part {part.name}: none of these manifests has its name")
                given["manifest"] = str(manifests[part.name])
            if part.name in self._gone:
                raise StoreError(self._gone[part.name])
            self._codes[part.name] = self._command(**given) or 0
        except FeatcacheError as error:
            if self._is_search and isinstance(error, MissingItemError):
                self._missing = self._missing or error
            else:
                complain(error)
                self._codes[part.name] = error.exit_code
            return error_document(error)
        return {}

    def _manifests(self) -> dict[str, Path] | None:
        from featcache.version.corpus import by_part_name, manifests_of_parts

        manifest = self._given.get("manifest")
        return None if manifest is None else manifests_of_parts([manifest]) or by_part_name([Path(manifest)])

    def _summarize(self) -> None:
        named = {code: [name for name, found in self._codes.items() if found == code] for code in _OUTCOMES}
        bad = [f"{len(names):,} {_OUTCOMES[code]}: {listing(names)}" for code, names in named.items() if names]
        say(f"{self._corpus}: {counted(len(self._parts), 'part')}: {'; '.join(bad) or 'no errors'}")
