"""A manifest's source: a file, a folder or standard input, opened once; and its faults."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import stat
import sys
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, islice
from operator import itemgetter
from pathlib import Path
from shutil import copyfileobj
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, NamedTuple, cast

from featcache.errors import ManifestError, counted
from featcache.manifest.segments import SegmentColumns, repeated_rows
from featcache.manifest.strings import Strings
from featcache.manifest.times import Time

_KINDS = (
    "wav wave bwf rf64 w64 flac caf aif aiff aifc au snd sph nist voc avr paf pvf sds sf ircam svx "
    "8svx wve mp1 mp2 mp3 mpa mpga ogg oga opus aac adts amr awb ac3 ec3 eac3 m4a m4b m4r mp4 m4v "
    "mov qt 3ga 3gp 3gpp 3g2 f4a f4v mka mkv webm weba wma wmv asf avi ts"
)
AUDIO_SUFFIXES = tuple(f".{kind}" for kind in _KINDS.split())

PLACE = "audio.path"
"""The column with the places of audio in a container: a name without a meaning."""

ROWS_PER_BATCH = 256
"""So few that they stay in a core's caches."""

HEAD_BYTES = 1 << 20
"""The most bytes of a file by which its format is recognised."""

_HEAD_LINES = 200

_TO_SEGMENTS = (
    "write its times as `segments` (utterance, recording, start, end) beside a `wav.scp`, "
    "and give their folder"
)
_AUDIO = "is an audio file, not a manifest: give its folder, or a list of paths"
_NO_MANIFESTS = {
    rb"RIFF....WAVE|fLaC\0|OggS\0|ID3[\x02-\x04]|FORM....AIF|NIST_1A\n": _AUDIO,
    rb"caff\0|\.snd\0|#!AMR|\xff[\xe0-\xfd]": _AUDIO,
    rb"\0...ftyp|\x1a\x45\xdf\xa3": _AUDIO,
    rb"\xfd7zXZ|\x28\xb5\x2f\xfd|BZh[1-9]1AY|PK\x03\x04|\x1f\x8b": "is compressed; only "
    "gzip, once, is read: unpack it",
    rb'File type = "ooTextFile"': f"is a TextGrid of Praat: {_TO_SEGMENTS}",
    rb"(?:;;[^\n]*\n)*(?:SPEAKER|SPKR-INFO|LEXEME|SEGMENT|NON-LEX|NON-SPEECH|NOSCORE)"
    rb"[ \t]+\S+[ \t]+[0-9AB<]": f"is RTTM: {_TO_SEGMENTS}",
    rb"(?:;;[^\n]*\n)*\S+[ \t]+[0-9AB][ \t]+(?:\S+[ \t]+)?[0-9.]+[ \t]+[0-9.]+[ \t]+\S": "is "
    f"CTM or STM: {_TO_SEGMENTS}",
    rb'\s*\[\s*\{[^}]{0,9999}"(?:sources|sampling_rate|recording_id|supervisions)"\s*:': "is a "
    "JSON array of Lhotse's: jq -c '.[]' makes lines of it",
    rb'\s*\{.{0,9999}?"audios"\s*:\s*\[\s*\{': "is JSON of GigaSpeech or WenetSpeech: "
    "jq -c '.audios[] | {path} + (.segments[] | {id: .sid} + .)' makes a table of it",
    rb"ARROW1|\xff\xff\xff\xff": "is an Arrow file: give the folder that save_to_disk "
    "of datasets wrote, or Parquet",
}
"""The beginnings of files that are plainly no table or list."""

_FAULTS_SHOWN = 20
_ALIKE_SHOWN = 3
"""More faults that differ by their place alone are shown as the first, and counted."""

_LINE_BYTES = 4 << 20
_COPY_IN_MEMORY = 16 << 20
_BLOCK_BYTES = 256 << 10
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_FILE_SHIFT = 40
"""The bits of a line in a place."""

Cells = dict[str, Sequence[Any]]
"""The cells of some rows, by column."""

Batch = tuple[Sequence[int], Cells]
"""The places and the cells of some rows."""

Rows = Iterator[tuple[int, Any]]
"""The place and the cells of each row, as a list or by key."""


class Faults:
    """The faults of a manifest: their number, and the first by place.

    A place is a line's number, plus the place of its file. Line 0 is the whole file."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = source
        # by message: the number, and the first places
        self._first: dict[str, tuple[int, list[int]]] = {}
        self._files = [("", "line")]

    def file(self, name: str, unit: str = "line") -> int:
        """Begin a file, nameless if it is the only one. Returns the place of its line 0."""
        self._files.append((name, unit))
        return (len(self._files) - 1) << _FILE_SHIFT

    def add(self, place: int, what: str) -> None:
        """Add what is wrong at a place."""
        self.count += 1
        times, places = self._first.get(what, (0, []))
        insort(places, place)
        self._first[what] = times + 1, places[:_ALIKE_SHOWN]
        if len(self._first) > _FAULTS_SHOWN:
            del self._first[max(self._first, key=lambda what: self._first[what][1][0])]

    def parsed(
        self,
        places: Iterable[int],
        what: str,
        parse: Callable[..., Any],
        *cells: Sequence[Any],
        default: Any = None,
    ) -> list[Any]:
        """Parse the cells at each place. A ValueError is a fault, whose message begins
        with `what`, and gives the default."""
        with suppress(ValueError):  # takes half the time
            return [*map(parse, *cells)]
        values = []
        for place, *arguments in zip(places, *cells, strict=True):
            try:
                values.append(parse(*arguments))
            except ValueError as error:
                self.add(place, f"{what}{error}")
                values.append(default)
        return values

    def add_repeated(self, ids: Strings, places: Sequence[int], segments: SegmentColumns) -> int:
        """Add each id that repeats an earlier one of another segment. Returns the number of
        rows that repeat both."""
        rows, repeats = repeated_rows(ids.hashes()), 0
        hashes = segments.segments(rows).hashes()
        first_rows: dict[str, tuple[int, int]] = {}
        for row, segment in zip(rows.tolist(), hashes.tolist(), strict=True):
            name = ids[row]
            first, first_segment = first_rows.setdefault(name, (row, segment))
            if name and first != row and segment == first_segment:
                repeats += 1
            elif name and first != row:
                what = "for another path, start, duration or channel"
                first_place = self.where(places[first])
                self.add(places[row], f"id {name!r} is already on {first_place}, {what}")
        return repeats

    def where(self, place: int) -> str:
        """Name a place: `line 3`, or `segments, line 3`; empty for the whole manifest."""
        name, unit = self._files[place >> _FILE_SHIFT]
        line = place & ((1 << _FILE_SHIFT) - 1)
        return ", ".join(filter(None, [name, f"{unit} {line}" if line else ""]))

    def raise_first(self, why: str) -> None:
        """Raise a ManifestError of one line, with the first of several faults."""
        if self.count > 1:
            raise ManifestError(f"{why}: {self._shown()[0][-1]}")

    def _shown(self) -> list[tuple[int, int, str]]:
        shown = []
        for what, (times, places) in self._first.items():
            count, more = 1, ""
            if times > _ALIKE_SHOWN:
                count, more, places = times, f" and {times - 1:,} more", places[:1]
            for place in places:
                where = f"{self.where(place)}{more}".strip()
                shown.append((place, count, ": ".join(filter(None, [where, what]))))
        return sorted(shown, key=itemgetter(0))[:_FAULTS_SHOWN]

    def raise_if_any(self) -> None:
        """Raise a ManifestError that counts the faults, and lists the first by place."""
        if not self.count:
            return
        message, more = f"{self._source}: {counted(self.count, 'error')}", self.count
        for _, count, line in self._shown():
            message += f"\n  {line}"
            more -= count
        if more:
            message += f"\n  … and {more:,} more"
        raise ManifestError(message)


class Text(NamedTuple):
    """A file of text in a manifest."""

    stream: BinaryIO
    faults: Faults
    base: int = 0
    """The place of the file's line 0."""


@dataclass(eq=False)
class Source:
    """A manifest that is being read, opened by `open_source`, or in memory. Its options are
    those of `read_manifest`."""

    name: str
    """The manifest, for messages."""
    path: Path = Path()
    """The file or the folder; `-` for standard input."""
    audio: bool = True
    carry: bool = True
    allow_commands: bool = False
    allow_queries: bool = False
    given_root: str | Path | None = None
    values: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allow_queries |= not self.audio  # such paths are only compared, not stored
        self.faults = Faults(self.name)
        self.suffix = suffix_of(self.path)
        self.file: BinaryIO | None = None
        """The file's unpacked bytes, from its beginning; None for a folder."""
        self.head = b""
        self.root: str | Path | None = None
        """The manifest's root of relative paths."""
        self.notes: list[str] = []
        self.placeholders: set[str] = set()
        self.renamed: Callable[[Sequence[str]], Sequence[str]] = list
        """Gives new names for a table's names of columns."""
        self.has_types = False
        """True if the cells that are read now have types, and are no written text."""
        self.times: dict[str, Time] = {}
        """The columns of time that are read besides `start` and `duration`."""
        self.unread: dict[str, bool] = {}
        """The columns that may hold times, and are not read: True if they have numbers."""
        self.has_ids = True
        """False if paths stand for ids."""

    @property
    def sample_rate(self) -> int:
        """The files' rate in `--set`; a ManifestError without it."""
        self.placeholders.add("sample_rate")
        rate = self.values.get("sample_rate", "")
        if not (rate.isascii() and rate.isdecimal()) or int(rate) == 0:
            raise ManifestError(
                "start and stop are numbers of samples: say the files' rate, as --set "
                "sample_rate=16000"
            )
        return int(rate)

    def note(self, what: str) -> None:
        """Add a note for the user once."""
        if what not in self.notes:
            self.notes.append(what)

    @property
    def is_folder(self) -> bool:
        """True for a folder."""
        return self.file is None

    @property
    def folder(self) -> Path:
        """The folder that relative paths are relative to."""
        if self.is_folder:
            return self.path
        return self.path.parent

    @property
    def stream(self) -> BinaryIO:
        """The file; a ManifestError for a folder."""
        if self.file is None:
            raise ManifestError("is a folder, and this format is a file's")
        return self.file

    @property
    def text(self) -> Text:
        """The file, to be read as text."""
        return Text(self.stream, self.faults)

    @contextmanager
    def opened(self, name: str) -> Iterator[Text]:
        """Open a file of the folder."""
        base = self.faults.file(name)
        with opened(self.folder / name) as stream:
            yield Text(stream, self.faults, base)

    @property
    def folders(self) -> list[str]:
        """The names of folders in the folder, sorted."""
        return sorted(name for name, is_folder in self.names.items() if is_folder)

    @cached_property
    def names(self) -> Mapping[str, bool]:
        """The names in the folder, except hidden ones: True for a folder."""
        if not self.is_folder:
            return {}
        with os.scandir(self.path) as entries:
            return {entry.name: entry.is_dir() for entry in entries if entry.name[0] != "."}

    @property
    def is_parquet(self) -> bool:
        """True for a Parquet file, by its name or its beginning."""
        return not self.is_folder and (self.suffix == ".parquet" or self.head.startswith(b"PAR1"))

    @property
    def no_manifest(self) -> str | None:
        """The reason and the remedy if the file is plainly no table or list."""
        if self.is_folder or self.is_parquet or self.head.startswith(_UTF_16):
            return None
        for beginning, what in _NO_MANIFESTS.items():
            if re.match(beginning, self.head, re.DOTALL):
                return what
        if any(b"\0" in line for line in self.head.split(b"\n", 2)[:2]):
            return "is neither text nor Parquet: give a table, a list, or a folder of audio"
        return None

    @cached_property
    def first_lines(self) -> list[str]:
        """The first lines that are not blank, without their ends; none of UTF-16."""
        if self.is_parquet or self.head.startswith(_UTF_16):
            return []
        text = self.head.decode("utf-8-sig", errors="replace")
        lines = (line.rstrip("\r") for line in text.split("\n") if line.strip())
        return list(islice(lines, _HEAD_LINES))

    @property
    def first_fields(self) -> str:
        """The first line of a list or a table of fields; empty for JSON."""
        first = "".join(self.first_lines[:1])
        if self.suffix in (".json", ".jsonl") or first.lstrip().startswith(("{", "[")):
            return ""
        return first

    @cached_property
    def first_object(self) -> dict[str, Any]:
        """The JSON object on the first line, or an empty one."""
        with suppress(IndexError, ValueError, RecursionError):
            value = json.loads(self.first_lines[0])
            if isinstance(value, dict):
                return value
        return {}


@contextmanager
def open_source(source: str | Path, **options: Any) -> Iterator[Source]:
    """Open a file, a folder, a pipe, or `-` for standard input, with fields of a `Source`."""
    name, path = str(source), Path(source)
    is_stdin = name == "-"
    if is_stdin:
        name = "<stdin>"
        if sys.stdin is None:
            raise ManifestError("standard input is closed: give a manifest's path, or pipe one in")
    opening = Source(name, path=path, **options)
    if not is_stdin and path.is_dir():
        yield opening
        return
    with ExitStack() as stack:
        file = sys.stdin.buffer if is_stdin else stack.enter_context(opened(path, True))
        opening.file = file
        opening.head = file.read(HEAD_BYTES)
        # gzip is seekable over a pipe too
        if file.seekable() and (is_stdin or path.is_file()):
            file.seek(0)
        elif opening.no_manifest is None:  # a device without an end is none
            copied = stack.enter_context(SpooledTemporaryFile(_COPY_IN_MEMORY))
            opening.file = cast(BinaryIO, copied)
            copied.write(opening.head)
            copyfileobj(file, copied)
            copied.seek(0)
        yield opening


def suffix_of(path: Path) -> str:
    """Return the suffix that tells the format: `.csv` for `train.csv.gz` too."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


@contextmanager
def opened(path: Path, may_be_pipe: bool = False) -> Iterator[BinaryIO]:
    """Open a file, and unpack gzip. Raises ManifestError for a device, or a pipe, whose
    writer may never come."""
    if not (may_be_pipe or stat.S_ISREG(os.stat(path).st_mode)):
        raise ManifestError(f"{path.name} is not a regular file")
    with path.open("rb") as file:
        is_gzip = file.peek(2).startswith(b"\x1f\x8b")
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_gzip else file


def lines_of(file: Text) -> Iterator[str]:
    """Give the lines of a text. A fault is repaired, so that the rest is checked."""
    stream, faults, done = file
    blank_bytes = 0
    while data := stream.read(_BLOCK_BYTES):
        data += stream.readline(_LINE_BYTES + 1)
        if done == file.base:
            if data.startswith(_UTF_16):
                remedy = "iconv -f UTF-16 -t UTF-8 converts it"
                faults.add(done + 1, f"UTF-16, and UTF-8 is expected: {remedy}")
                return
            data = data.removeprefix(codecs.BOM_UTF8)
        blank_bytes += len(data)
        if data.strip():
            blank_bytes = 0
        if blank_bytes > _LINE_BYTES:
            faults.add(done + 1, f"more than {_LINE_BYTES:,} bytes of blank lines")
            return
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" not in text and len(data) <= _LINE_BYTES:
            yield from io.StringIO(text, newline="\n")
            done += text.count("\n")
            continue
        for raw in io.BytesIO(data):
            done += 1
            if len(raw) > _LINE_BYTES:  # perhaps a device without an end
                faults.add(done, f"longer than {_LINE_BYTES:,} bytes")
                return
            yield _line(raw, done, faults)


def _line(raw: bytes, place: int, faults: Faults) -> str:
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        faults.add(place, f"byte {error.start + 1} is not UTF-8: 0x{raw[error.start]:02x}")
        line = raw.decode("cp437")  # in which all bytes above ASCII are printable and differ
    if "\0" in line:
        faults.add(place, "there is a NUL byte")
        line = line.replace("\0", "\ufffd")
    return line


def in_batches(
    rows: Rows, at_once: int = ROWS_PER_BATCH
) -> Iterator[tuple[Sequence[int], Sequence[Any]]]:
    """Give the places of some rows, and their cells."""
    while batch := list(islice(rows, at_once)):
        places, cells = zip(*batch, strict=True)
        yield places, cells


def batched(
    rows: Rows, names: Iterable[str], parse: Callable[[Any], Sequence[Any]], faults: Faults
) -> Iterator[Batch]:
    """Parse rows into cells of these columns. A row with a ValueError is a fault."""
    for places, unparsed in in_batches(rows):
        cells = faults.parsed(places, "", parse, unparsed)
        if None in cells:
            places = tuple(compress(places, cells))
            cells = [*filter(None, cells)]
        if cells:
            yield places, dict(zip(names, zip(*cells, strict=True), strict=True))


def names_audio(text: str) -> bool:
    """Tell whether a cell ends as an audio file's name, perhaps with a bar."""
    return text.rstrip().removesuffix("|").rstrip().lower().endswith(AUDIO_SUFFIXES)
