"""What commands print: for people and as JSON."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from featcache.errors import FeatcacheError, counted, without_secrets

if TYPE_CHECKING:
    from featcache.care.verify import Problem
    from featcache.version.index import Index
    from featcache.version.version import Version


_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)

FAILURES_LEFT = 3
"""The exit code of a command that has finished, though some utterances failed."""


class MessageFile(io.FileIO):
    """A file of messages: a full disk below it, or a terminal that was closed, does not
    decide how the work ends."""

    def write(self, data: Any, /) -> int:
        """Write what can be written, and drop the rest."""
        try:
            return super().write(data)
        except OSError:
            return len(data)


@dataclass
class Printing:
    """How the command that runs prints, by its options."""

    quiet: bool = False
    """Whether nothing is printed for people but errors."""
    as_json: bool = False
    """Whether the result, or an error, is printed as one document, and not for people."""
    document: Any = None
    """The result, until the command has ended."""
    is_part: bool = False
    """Whether the command runs for a part of a corpus."""

    def end(self) -> None:
        """Be as it was before: another command may follow."""
        vars(self).update(vars(Printing()))


printing = Printing()
"""How the command that runs prints."""


def printable(text: str) -> str:
    """Text without users and passwords of URLs, and without what a terminal would obey, or
    show as something else: control characters, also line ends, marks that turn the
    direction of writing, and halves of characters are written as Python's escapes.

    Ids, paths, units and messages may come from a stranger's cache or manifest. A query is
    left, since a manifest has one only if its user has allowed it."""
    shown = without_secrets(text, allow_query=True)
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), shown)


def say(*columns: object) -> None:
    """Print a line for people on stdout, unless `--json` is given; of several columns,
    with tabs between them."""
    if not (printing.as_json or printing.quiet):
        click.echo("\t".join(printable(str(column)) for column in columns))


def say_table(rows: Sequence[Mapping[str, str]], to_the_right: Container[int]) -> None:
    """Print rows of cells, by the names of their columns, on stdout under these names,
    each column as wide as it must be; the columns of these numbers end in line."""
    lines = [*map(list, rows[:1]), *(row.values() for row in rows)]
    shown = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = enumerate(zip(row, widths, strict=True))
        say(
            "  ".join(
                cell.rjust(w) if at in to_the_right else cell.ljust(w) for at, (cell, w) in cells
            ).rstrip()
        )


def first_few(values: Sequence[object], at_most: int) -> str:
    """The first values for people, and a mark if there are more."""
    shown = ", ".join(map(str, values[:at_most]))
    return f"{shown} …" if len(values) > at_most else shown


def count_are(count: int, thing: str) -> str:
    """`1 shard is`, `2,500 shards are`."""
    return f"{counted(count, thing)} {'is' if count == 1 else 'are'}"


def say_problems(problems: Iterable[Problem]) -> None:
    """Print what `verify` or `copy` has found wrong, a line each."""
    for problem in problems:
        say(f"  {problem.message}" + (f" (shard {problem.shard})" if problem.shard else ""))


def note(message: str) -> None:
    """Print a message for people on stderr. Where it has several lines, all but the first
    are indented."""
    if not printing.quiet:
        _print_message(message)


def advise(message: str) -> None:
    """Print what to do about a result on stderr, as `note` does, unless `--json` is given."""
    if not printing.as_json:
        note(message)


def complain(error: object) -> None:
    """Print an error on stderr, even with `-q`."""
    _print_message(f"featcache: {error}")


def _print_message(message: str) -> None:
    message = without_secrets(message)
    click.echo("\n  ".join(map(printable, message.split("\n  "))), err=True)


def note_unfinished(version: Version, index: Index | None = None) -> bool:
    """Warn on stderr if runs have not extracted everything that they were to extract;
    returns whether that is so."""
    from featcache.version.indexing import open_index
    from featcache.version.wanted import find_lacking

    findings = find_lacking(version, open_index(version) if index is None else index)
    for finding in findings:
        note(f"{version.path}: {finding}")
    return bool(findings)


_JSON_NAMES = {"num_bytes": "bytes"}


def error_document(error: FeatcacheError) -> dict[str, Any]:
    """An error as JSON."""
    return {
        "error": {"type": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
    }


def as_document(result: Any) -> dict[str, Any]:
    """A dataclass as JSON has it, with what is in it: see docs/json.md."""
    return asdict(
        result,
        dict_factory=lambda fields: {_JSON_NAMES.get(name, name): value for name, value in fields},
    )


def say_json(document: Any) -> None:
    """With `--json`, print a document on stdout when the command has ended."""
    if printing.as_json:
        printing.document = document


def print_json(document: Any) -> None:
    """Print a document on stdout: the only one that a command prints."""
    printing.as_json = False
    text = json.dumps(_as_printed(document), indent=2, ensure_ascii=False, allow_nan=False)
    # JSON itself escapes the first 32 characters; what it leaves is escaped its way, so
    # that it is the same when read.
    click.echo(
        "\n".join(
            _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", line)
            for line in text.split("\n")
        )
    )


def _as_printed(value: Any) -> Any:
    """A document with null for NaN and infinity, which JSON does not have, and without
    the users and passwords of URLs."""
    if isinstance(value, dict):
        return {_as_printed(key): _as_printed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_printed(inner) for inner in value]
    if isinstance(value, str):
        return without_secrets(value, allow_query=True)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_fastest(fastest: dict[str, Any] | None) -> str:
    """The fastest way that a probe found, for people: `fastest without a mismatch:
    padded, fp32: 151 × …`."""
    if fastest is None:
        return "every combination has mismatches"
    speed = f"{fastest['times_real_time']:,.0f} × real time"
    return f"fastest without a mismatch: {fastest['policy']}, {fastest['precision']}: {speed}"
