"""What commands print: for people and as JSON."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from featcache.errors import (
    DamagedError,
    FeatcacheError,
    StoreError,
    counted,
    real_time,
    without_secrets,
)

if TYPE_CHECKING:
    from featcache.care.report import Problem
    from featcache.loader.cache import Cache
    from featcache.storage.location import Location
    from featcache.version.index import Index
    from featcache.version.version import Version


_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

FAILURES_LEFT = 3
"""The exit code of a command that has finished, though some utterances failed."""


class MessageFile(io.FileIO):
    """A file of messages. A full disk, or a terminal that was closed, raises no error."""

    def write(self, data: Any, /) -> int:
        """Write what can be written, and drop the rest."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


@dataclass
class Printing:
    """The options of the current command that change what it prints."""

    quiet: bool = False
    """True if only errors are printed for people."""
    as_json: bool = False
    """True if the result, or an error, is printed as one document, and not for people."""
    document: Any = None
    """The result, until the command has ended."""
    is_part: bool = False
    """True if the command runs for a part of a corpus."""

    def end(self) -> None:
        """Return to the defaults: another command may follow."""
        self.quiet = self.as_json = self.is_part = False
        self.document = None


printing = Printing()


def printable(text: str) -> str:
    """Return text without users and passwords of URLs, and with Python's escapes for
    control characters, line ends, marks that turn the direction of writing, and halves of
    characters."""
    shown = without_secrets(text, allow_query=True)
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), shown)


def say(*columns: object) -> None:
    """Print a line for people on stdout, unless `--json` is given; a tab separates columns."""
    if not (printing.as_json or printing.quiet):
        click.echo("\t".join(printable(str(column)) for column in columns))


def say_table(rows: Sequence[Mapping[str, str]], to_the_right: Container[int]) -> None:
    """Print rows of cells under the names of their columns, some of them aligned to the
    right."""
    if not rows:
        return
    lines = [list(rows[0])] + [list(row.values()) for row in rows]
    columns = []
    for number, cells in enumerate(zip(*lines, strict=True)):
        shown = [printable(cell) for cell in cells]
        align = str.rjust if number in to_the_right else str.ljust
        width = max(map(len, shown))
        columns.append([align(cell, width) for cell in shown])
    for line in zip(*columns, strict=True):
        say("  ".join(line).rstrip())


def first_few(values: Sequence[object], at_most: int) -> str:
    """List the first values for people."""
    shown = ", ".join(map(str, values[:at_most]))
    return f"{shown} …" if len(values) > at_most else shown


def cells(values: Mapping[str, object]) -> str:
    """List names with values for people, without values that are None."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def count_are(count: int, thing: str) -> str:
    """Return `1 shard is`, `2,500 shards are`."""
    return counted(count, f"{thing} is", f"{thing}s are")


def open_versions(path: Location) -> Iterator[Version]:
    """Open one version after the other, of a cache or alone."""
    from featcache.version.selection import version_folders
    from featcache.version.version import Version

    return map(Version.open, version_folders(path))


def open_each(path: Location, tag: str | None) -> Iterator[tuple[Location, Version | DamagedError]]:
    """Open one version after the other, of a cache or alone, or those with a tag as they
    were then. Yields the folder of each, and the error instead of a damaged version."""
    from featcache.version.selection import select_versions, version_folders
    from featcache.version.version import Version

    if tag is not None:
        for version in select_versions(path, tag=tag):
            yield version.path, version
        return
    for folder in version_folders(path):
        try:
            yield folder, Version.open(folder)
        except DamagedError as error:
            yield folder, error


def need_columns(path: Location) -> bool:
    """Tell whether a version at `path` finds its label files by columns of the manifest."""
    from featcache.manifest.label_files import needs_columns
    from featcache.version.selection import select_versions

    with suppress(StoreError):  # whoever opens them reports it
        return any(needs_columns(version.info.config) for version in select_versions(path))
    return False


def open_cache(path: Location) -> tuple[Cache, list[str]]:
    """Open a version, or all parts of a corpus as one. Returns also messages about what it
    lacks."""
    from featcache.loader.cache import Cache
    from featcache.loader.corpus import Corpus, open_parts
    from featcache.version.selection import corpus_of, select_version
    from featcache.version.wanted import find_lacking

    in_corpus = corpus_of(path)
    if in_corpus is None:
        cache = Cache(select_version(path))
        lacking = find_lacking(cache.version, cache.index)
        return cache, [f"{cache.version.path}: {finding}" for finding in lacking]
    corpus, name = in_corpus
    parts, messages = open_parts(corpus, name or None, None, strict=False)
    return Corpus(corpus, parts), messages


def say_problems(problems: Iterable[Problem]) -> None:
    """Print what `verify` or `copy` found wrong."""
    for problem in problems:
        shard = f" (shard {problem.shard})" if problem.shard else ""
        say(f"  {problem.message}{shard}")


def note(message: str) -> None:
    """Print a message for people on stderr. Its second and later lines are indented."""
    if not printing.quiet:
        _print_message(message)


def advise(message: str) -> None:
    """Print on stderr what to do about a result, unless `--json` is given."""
    if not printing.as_json:
        note(message)


def complain(error: object) -> None:
    """Print an error on stderr, even with `-q`."""
    _print_message(f"featcache: {error}")


def _print_message(message: str) -> None:
    message = without_secrets(message)
    click.echo("\n  ".join(map(printable, message.split("\n  "))), err=True)


def note_unfinished(version: Version, index: Index | None = None) -> bool:
    """Warn on stderr if a version lacks something that runs were to extract. Returns True
    if so."""
    from featcache.version.indexing import open_index
    from featcache.version.wanted import find_lacking

    findings = find_lacking(version, index or open_index(version))
    for finding in findings:
        note(f"{version.path}: {finding}")
    return bool(findings)


_JSON_NAMES = {"num_bytes": "bytes"}


Document = dict[str, Any]


def error_document(error: FeatcacheError) -> Document:
    """Return an error as JSON."""
    return as_error(type(error).__name__, str(error), error.exit_code)


def as_error(kind: str, message: str, exit_code: int) -> Document:
    """Return an error as JSON, by the name of its class or another word."""
    return {"error": {"type": kind, "message": message, "exit_code": exit_code}}


def as_document(result: Any) -> Document:
    """Return a dataclass, and the dataclasses in it, as JSON: see docs/json.md."""

    def by_name(fields: list[tuple[str, Any]]) -> Document:
        return {_JSON_NAMES.get(name, name): value for name, value in fields}

    return asdict(result, dict_factory=by_name)


def say_json(document: Any) -> None:
    """Print a document on stdout when the command has ended, with `--json`."""
    if printing.as_json:
        printing.document = document


def print_json(document: Any) -> None:
    """Print a document on stdout: the only one that a command prints."""
    printing.as_json = False
    text = json.dumps(_as_printed(document), indent=2, ensure_ascii=False, allow_nan=False)
    # JSON itself escapes the first 32 characters, so these are the ends of lines
    unprintable = re.compile(rf"(?!\n){_UNPRINTABLE.pattern}")
    click.echo(unprintable.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def _as_printed(value: Any) -> Any:
    """Return a document with null for NaN and infinity, which JSON does not have, and
    without the users and passwords of URLs."""
    if isinstance(value, dict):
        return {_as_printed(key): _as_printed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_printed(inner) for inner in value]
    if isinstance(value, str):
        return without_secrets(value, allow_query=True)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def describe_fastest(fastest: Document | None) -> str:
    """Describe the fastest way that a probe found."""
    if fastest is None:
        return "every combination has mismatches"
    way = f"{fastest['policy']}, {fastest['precision']}"
    return f"fastest without a mismatch: {way}: {real_time(fastest['times_real_time'])}"
