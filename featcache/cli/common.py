"""What several commands share: printing, for people and as JSON, and checks before the work."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

import click

from featcache import __version__
from featcache.errors import ArgumentError, FeatcacheError, StoreError, counted, listing

if TYPE_CHECKING:
    from tqdm import tqdm

    from featcache.care.verify import Problem
    from featcache.manifest import Manifest
    from featcache.version.version import Version


_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

_LOGGED = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")
"""How a line of a log begins."""

FAILURES_LEFT = 3
"""The exit code of a command that has finished, though some utterances failed."""


class MessageFile(io.FileIO):
    """A file of messages: a full disk below it does not decide how the work ends."""

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
    """Whether the result is printed as one document, and not for people."""
    errors_as_json: bool = False
    """Whether an error is to be this document, as none is printed yet."""
    document: Any = None
    """The result, until the command has ended."""
    is_part: bool = False
    """Whether the command runs for a part of a corpus."""
    log: MessageFile | None = None


_printing = Printing()


def printing() -> Printing:
    """How the command that runs prints."""
    return _printing


@contextmanager
def printing_of_a_command() -> Iterator[None]:
    """Within the block, one command runs, with options of its own."""
    global _printing
    _printing = Printing()
    try:
        yield
    finally:
        if _printing.log is not None:
            _printing.log.close()
        _printing = Printing()


def terminal_columns() -> int:
    """The width of the terminal that stderr goes to; 0 if it goes elsewhere, the terminal has no size, or with `-q`."""
    if _printing.quiet or not sys.stderr.isatty():
        return 0
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 0


def progress_bar(total: int | None, unit: str, **settings: Any) -> tqdm[Never]:
    """A bar on a terminal, which is gone in the end; elsewhere, it shows nothing."""
    from tqdm import tqdm

    columns = terminal_columns()
    return tqdm(total=total, unit=f" {unit}", leave=False, file=sys.stderr, disable=not columns, **settings)


def printable(text: str) -> str:
    """Text without what a terminal would obey, or show as something else: control characters, also line ends, marks
    that turn the direction of writing, and halves of characters are written as Python's escapes.

    Ids, paths, units and messages may come from a stranger's cache or manifest."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*columns: object) -> None:
    """Print a line for people on stdout, unless `--json` is given; of several columns, with tabs between them."""
    if _printing.as_json:
        return
    line = "\t".join(printable(str(column)) for column in columns)
    log(line)
    if not _printing.quiet:
        click.echo(line)


def say_table(rows: Sequence[Mapping[str, str]], to_the_right: Container[int]) -> None:
    """Print rows of cells, by the names of their columns, on stdout under these names, each column as wide as it must
    be; the columns of these numbers end in line."""
    shown = [[printable(cell) for cell in cells] for cells in (*map(list, rows[:1]), *(row.values() for row in rows))]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = enumerate(zip(row, widths, strict=True))
        say("  ".join(cell.rjust(w) if at in to_the_right else cell.ljust(w) for at, (cell, w) in cells).rstrip())


def first_few(values: Sequence[object], at_most: int) -> str:
    """The first values for people, and a mark if there are more."""
    shown = ", ".join(str(values[number]) for number in range(min(len(values), at_most)))
    return f"{shown} …" if len(values) > at_most else shown


def count_are(count: int, thing: str) -> str:
    """`1 shard is`, `2,500 shards are`."""
    return f"{counted(count, thing)} {'is' if count == 1 else 'are'}"


def say_problems(problems: Iterable[Problem]) -> None:
    """Print what `verify` or `copy` has found wrong, a line each."""
    for problem in problems:
        say(f"  {problem.message}" + (f" (shard {problem.shard})" if problem.shard else ""))


def note(message: str) -> None:
    """Print a message for people on stderr. Where it has several lines, all but the first are indented."""
    text = log(message)
    if not _printing.quiet:
        click.echo(text, err=True)


def advise(message: str) -> None:
    """Print what to do about a result on stderr, as `note` does, unless `--json` is given."""
    if not _printing.as_json:
        note(message)


def complain(error: object) -> None:
    """Print an error on stderr, even with `-q`."""
    click.echo(log(f"featcache: {error}"), err=True)


def log(message: str) -> str:
    """Add a message to the file of `--log`, if there is one. Returns it as it is printed."""
    lines = [printable(line) for line in message.split("\n  ")]
    if _printing.log is not None:
        now = datetime.now(UTC)
        _printing.log.write("".join(f"{now:%Y-%m-%dT%H:%M:%SZ} {line}\n" for line in lines).encode())
    return "\n  ".join(lines)


def keep_log(path: Path) -> None:
    """Add what is printed for people to a file, with the time in UTC, until the command has ended. Raises ArgumentError
    if there is such a file, and it is no log; StoreError if the file cannot be written."""
    try:
        with suppress(FileNotFoundError), path.open("rb") as file:
            if (begin := file.read(64)) and not _LOGGED.match(begin):
                raise ArgumentError(f"--log: {path} is there, and is no log of featcache: give another file")
        _printing.log = MessageFile(path, "a")
    except OSError as error:
        raise StoreError(f"--log: {path}: cannot be written: {error.strerror}") from error
    log(f"featcache {__version__}, process {os.getpid()} on {os.uname().nodename}")


def note_unfinished(version: Version) -> None:
    """Warn on stderr if runs have not extracted everything that they were to extract."""
    from featcache.version.index import open_index
    from featcache.version.wanted import find_lacking

    for finding in find_lacking(version, open_index(version)):
        note(f"{version.path}: {finding}")


def read_manifest(source: str, reading: Mapping[str, Any], keys: Sequence[str] = (), **options: Any) -> Manifest:
    """Read a manifest, and say on stderr what there is to say about it.

    Args:
        reading: What `options.manifest_format` gives.
        keys: The keys of configs that `--set` could have meant.
        options: Other arguments of `featcache.manifest.read_manifest`.

    Raises:
        ArgumentError: A name that `--set` gives is none of the manifest's placeholders.
    """
    from featcache.manifest import read_manifest as read

    manifest = read(source, **reading, **options)
    for line in manifest.notes:
        note(line)
    refuse_unused(reading["values"], keys, manifest)
    return manifest


def refuse_unused(values: Iterable[str], keys: Sequence[str], manifest: Manifest | None = None) -> None:
    """Refuse names that `--set` gives, and that are no placeholders of the manifest; see `read_manifest`. Raises
    ArgumentError if there is such a name; the message says which key may be meant."""
    placeholders = manifest.placeholders if manifest else frozenset()
    for name in sorted({*values} - placeholders):
        meant = [key for key in keys if key.rpartition(".")[2] == name] or get_close_matches(name, keys, 1, 0.8)
        if _printing.is_part and not meant:
            continue  # another part may have it
        what = [f"a key of the config{f' (did you mean {meant[0]}?)' if meant else ''}"] if keys else []
        if manifest is not None:
            there = f", which has {listing(sorted(placeholders))}" if placeholders else ""
            what.append(f"a placeholder of {manifest.source}{there}")
        raise ArgumentError(f"--set {name}: it is {'not' if len(what) == 1 else 'neither'} {' nor '.join(what)}")


def refuse_output(path: Path, force: bool) -> None:
    """Refuse a file that cannot be written, before the work and not after it. Raises ArgumentError if the file exists,
    and `force` is not set, or it is read by this command, or a version's; StoreError if its folder does not exist, or
    cannot be written to."""
    from featcache.stats.mean_variance import refuse_to_replace

    if path.exists():
        context = click.get_current_context()
        paths = [one.name or "" for one in context.command.params if isinstance(one.type, click.Path)]
        read = [context.params[name] for name in paths if name != "output"]
        if any(isinstance(given, str | Path) and os.path.exists(given) and path.samefile(given) for given in read):
            raise ArgumentError(f"{path}: is what this command reads: give another file")
        if versions := [folder for folder in path.resolve().parents if (folder / "shards" / "zarr.json").exists()]:
            raise ArgumentError(f"{path}: is a file of the version {versions[0]}, which only featcache writes")
    refuse_to_replace(path, force)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise StoreError(f"{path}: cannot be written: there is no folder {path.parent}")
    if not os.access(folder, os.W_OK):
        raise StoreError(f"{path}: cannot be written: the folder {path.parent} may not be written")


_JSON_NAMES = {"num_bytes": "bytes"}


def error_document(error: FeatcacheError) -> dict[str, Any]:
    """An error as JSON."""
    return {"error": {"type": type(error).__name__, "message": str(error), "exit_code": error.exit_code}}


def as_document(result: Any) -> dict[str, Any]:
    """A dataclass as JSON has it, with what is in it: see docs/json.md."""
    return asdict(result, dict_factory=lambda fields: {_JSON_NAMES.get(name, name): value for name, value in fields})


def say_json(document: Any) -> None:
    """With `--json`, print a document on stdout when the command has ended."""
    if _printing.as_json:
        _printing.document = document


def take_document() -> Any:
    """What `say_json` was called with since the last call of this; None if it was not called."""
    document, _printing.document = _printing.document, None
    return document


def print_json(document: Any) -> None:
    """Print a document on stdout: the only one that a command prints."""
    _printing.errors_as_json = False
    text = json.dumps(_without_nan(document), indent=2, ensure_ascii=False, allow_nan=False)
    # JSON itself escapes the first 32 characters; what it leaves is escaped its way, so that it is the same when read.
    click.echo("\n".join(_UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", line) for line in text.split("\n")))


def _without_nan(value: Any) -> Any:
    """A document with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe_fastest(fastest: dict[str, Any] | None) -> str:
    """The fastest way that a probe found, for people: `fastest without a mismatch: padded, fp32: 151 × …`."""
    if fastest is None:
        return "every combination has mismatches"
    speed = f"{fastest['times_real_time']:,.0f} × real time"
    return f"fastest without a mismatch: {fastest['policy']}, {fastest['precision']}: {speed}"
