"""What a manifest is read from: a file, a folder or standard input, opened once; its
beginning; and its faults."""

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
from itertools import chain, compress, islice
from operator import itemgetter
from pathlib import Path
from shutil import copyfileobj
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, cast

import numpy as np

from featcache.errors import ManifestError, counted
from featcache.manifest.times import Time
from featcache.strings import Strings

_KINDS = (
    "wav wave bwf rf64 w64 flac caf aif aiff aifc au snd sph nist voc avr paf pvf sds sf ircam svx "
    "8svx wve mp1 mp2 mp3 mpa mpga ogg oga opus aac adts amr awb ac3 ec3 eac3 m4a m4b m4r mp4 m4v "
    "mov qt 3ga 3gp 3gpp 3g2 f4a f4v mka mkv webm weba wma wmv asf avi ts"
)
AUDIO_SUFFIXES = tuple(f".{kind}" for kind in _KINDS.split())
"""How the names of audio files end: a folder's files with these are its utterances."""

ROWS_PER_BATCH = 256
"""So few that they stay in the caches of a core: rows of JSON take a quarter less time
than with 1,024."""

HEAD_BYTES = 1 << 20  # the most bytes of a file by which its format is recognised
_HEAD_LINES = 200  # the most lines

_TO_SEGMENTS = (
    "write its times as `segments` (utterance, recording, start, end) beside a `wav.scp`, "
    "and give their folder"
)
_AUDIO = "is an audio file, not a manifest: give its folder, or a list of paths"
_NO_MANIFESTS = {
    rb".{257}ustar": "is a tar, not a manifest: list its members (`tar tf FILE.tar > "
    "list.txt`), for --root FILE.tar",
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
"""What begins like this is plainly no table or list."""

_FAULTS_SHOWN = 20
# of more faults that are the same but for their place, the first is shown, with their
# number
_ALIKE_SHOWN = 3
_LINE_BYTES = 4 << 20
_COPY_IN_MEMORY = 16 << 20  # the most bytes of a copy that needs no disk
_BLOCK_BYTES = 256 << 10
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# the bits of a place that tell the line: more than there are lines in a file
_FILE_SHIFT = 40

Cells = dict[str, Sequence[Any]]
"""The cells of some rows, by column."""

Batch = tuple[Sequence[int], Cells]
"""The place of each of some rows; their cells."""

Rows = Iterator[tuple[int, Any]]
"""The place of each row; its cells, as a list or by key."""


class Faults:
    """Counts the faults of a manifest, and keeps those that are shown: the first by
    place, like ones together.

    A place is a line of a file, as one number: the line's, and what `file` gave for the
    file. Line 0 is all of it."""

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = source
        # what is wrong -> how often, and the first places
        self._first: dict[str, tuple[int, list[int]]] = {}
        self._files = [("", "line")]

    def file(self, name: str, unit: str = "line") -> int:
        """Begin one of several files that a manifest is in, or the only one, without a
        name, if other units than lines are counted in it; gives the place of its line
        0."""
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
        """What a function makes of the cells at each place. A ValueError of it is a
        fault, whose message `what` begins, and leaves the default."""
        with suppress(ValueError):  # all at once, which takes half the time
            return [*map(parse, *cells)]
        values = []
        for place, *given in zip(places, *cells, strict=True):
            try:
                values.append(parse(*given))
            except ValueError as error:
                self.add(place, f"{what}{error}")
                values.append(default)
        return values

    def add_repeated(self, ids: Strings, places: Sequence[int], remedy: str = "") -> None:
        """Add the ids that are there twice, at the places that come after the first."""
        hashes = ids.hashes()
        ordered = np.sort(hashes)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        first_rows: dict[str, int] = {}
        for row in np.flatnonzero(np.isin(hashes, repeated)).tolist():
            name = ids[row]
            first = first_rows.setdefault(name, row)
            if name and first != row:
                self.add(
                    places[row], f"id {name!r} is already on {self.where(places[first])}{remedy}"
                )

    def where(self, place: int) -> str:
        """A place in words: `line 3`, or `segments, line 3`; empty for the whole manifest."""
        (name, unit), line = self._files[place >> _FILE_SHIFT], place & ((1 << _FILE_SHIFT) - 1)
        return ", ".join([*([name] if name else []), *([f"{unit} {line}"] if line else [])])

    def raise_first(self, why: str) -> None:
        """Raise a ManifestError of one line if there are several faults: all have one
        reason, and one is an example."""
        if self.count > 1:
            ((_, _, first), *_) = self._shown()
            raise ManifestError(f"{why}: {first}")

    def _shown(self) -> list[tuple[int, int, str]]:
        """The first place of each line of a message, how many faults it stands for, and
        what it says."""
        shown = []
        for what, (times, places) in self._first.items():
            lines = [(place, 1, "") for place in places]
            if times > _ALIKE_SHOWN:
                lines = [(places[0], times, f" and {times - 1:,} more")]
            for place, stands_for, more in lines:
                where = f"{self.where(place)}{more}".strip()
                shown.append((place, stands_for, f"{where}: {what}" if where else what))
        return sorted(shown, key=itemgetter(0))[:_FAULTS_SHOWN]

    def raise_if_any(self) -> None:
        """Raise a ManifestError that says how many faults there are, and lists the first
        by place."""
        if not self.count:
            return
        shown = self._shown()
        message = [
            f"{self._source}: {counted(self.count, 'error')}",
            *(f"  {line}" for _, _, line in shown),
        ]
        if left := self.count - sum(stands_for for _, stands_for, _ in shown):
            message.append(f"  … and {left:,} more")
        raise ManifestError("\n".join(message))


@dataclass(eq=False)
class Source:
    """A manifest that is being read: from a file, a folder or standard input, as
    `open_source` has opened it; or from memory, where it has neither a file nor a
    path."""

    name: str
    """The manifest, for messages."""
    path: Path = Path()
    """The file or the folder; `-` for standard input."""
    audio: bool = True
    """Whether paths are required."""
    carry: bool = True
    """Whether columns that an `Utterance` does not have are wanted; they may be there
    even if not."""
    allow_commands: bool = False
    """Whether a path may be a command whose output is the audio."""
    allow_queries: bool = False
    """Whether URLs may have a query or a fragment, which then are stored."""
    given_root: str | Path | None = None
    """What relative paths are relative to if the user says so: a folder, a container or a
    URL."""
    values: Mapping[str, str] = field(default_factory=dict)
    """What stands for placeholders in paths, by name."""
    root: str | Path | None = field(default=None, init=False)
    """What relative paths are relative to if the manifest says so; set by the format's
    reader."""
    notes: list[str] = field(default_factory=list, init=False)
    """What the user is to be told about what was read, in the order it was found; added
    to by the format's reader."""
    placeholders: set[str] = field(default_factory=set, init=False)
    """The names of the placeholders that were found; added to by the format's reader."""
    renamed: Callable[[Sequence[str]], Sequence[str]] = field(default=list, init=False)
    """Gives the names that columns are to have, for those that they have; set by the
    format's reader."""
    has_types: bool = field(default=False, init=False)
    """Whether the cells that are read now have types, as JSON's; set by the format's
    reader. Otherwise they are written text."""
    times: dict[str, Time] = field(default_factory=dict, init=False)
    """The columns of time that are read besides `start` and `duration`; added to by the
    format's reader."""
    unread: dict[str, bool] = field(default_factory=dict, init=False)
    """The columns that may say where rows begin and end, and are not read; whether there
    are numbers in them."""
    has_ids: bool = field(default=True, init=False)
    """Whether rows have ids of their own, or their paths stand for them."""
    file: BinaryIO | None = field(default=None, init=False)
    """The file's bytes, from its beginning, unpacked if gzip has compressed it; None if
    it is a folder."""
    head: bytes = field(default=b"", init=False)
    """The beginning of the file, by which its format is recognised."""

    def __post_init__(self) -> None:
        self.allow_queries |= not self.audio  # what is only compared is not stored
        self.faults = Faults(self.name)
        self.suffix = suffix_of(self.path)
        """The suffix that tells the format: `.csv` for `train.csv.gz` too."""

    @property
    def sample_rate(self) -> int:
        """The rate of the files as `--set` gives it; a ManifestError if it does not."""
        self.placeholders.add("sample_rate")
        rate = self.values.get("sample_rate", "")
        if not rate.isdecimal() or int(rate) == 0:
            raise ManifestError(
                "start and stop are numbers of samples: say the files' rate, as --set "
                "sample_rate=16000"
            )
        return int(rate)

    def note(self, what: str) -> None:
        """Add to what the user is to be told, if it is not there yet."""
        if what not in self.notes:
            self.notes.append(what)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.file is None

    @property
    def folder(self) -> Path:
        """The folder that relative paths are relative to: the manifest's, or the manifest
        itself if it is one."""
        return self.path if self.is_folder else self.path.parent

    @property
    def stream(self) -> BinaryIO:
        """The file; a ManifestError if it is a folder."""
        if self.file is None:
            raise ManifestError("is a folder, and this format is a file's")
        return self.file

    @property
    def folders(self) -> list[str]:
        """The names of the folders in the folder, sorted."""
        return sorted(name for name, is_folder in self.names.items() if is_folder)

    @cached_property
    def names(self) -> Mapping[str, bool]:
        """The names in the folder, without hidden files, and whether each is a folder;
        none if it is a file."""
        if not self.is_folder:
            return {}
        with os.scandir(self.path) as entries:
            return {entry.name: entry.is_dir() for entry in entries if entry.name[0] != "."}

    @property
    def is_parquet(self) -> bool:
        """Whether it is a Parquet file, by its name or its beginning."""
        return not self.is_folder and (self.suffix == ".parquet" or self.head.startswith(b"PAR1"))

    @property
    def no_manifest(self) -> str | None:
        """What the file is if it is plainly no table or list, as the end of a message
        with what to do."""
        head = self.head
        if self.is_folder or self.is_parquet or head.startswith(_UTF_16):
            return None
        found = next(
            (
                what
                for beginning, what in _NO_MANIFESTS.items()
                if re.match(beginning, head, re.DOTALL)
            ),
            None,
        )
        is_binary = any(b"\0" in line for line in head.split(b"\n", 2)[:2])
        other = (
            "is neither text nor Parquet: give a table, a list, or a folder of audio"
            if is_binary
            else None
        )
        return found or other

    @cached_property
    def first_lines(self) -> list[str]:
        """The first 200 lines that are not blank, of at most 1 MiB, without their ends;
        none if it is not UTF-8."""
        if self.is_parquet or self.head.startswith(_UTF_16):
            return []
        text = self.head.decode("utf-8-sig", errors="replace")
        return [
            *islice((line.rstrip("\r") for line in text.split("\n") if line.strip()), _HEAD_LINES)
        ]

    @property
    def first_fields(self) -> str:
        """The first line of what may be a list or a table of fields; empty if it is JSON."""
        first = self.first_lines[0] if self.first_lines else ""
        return (
            ""
            if self.suffix in (".json", ".jsonl") or first.lstrip().startswith(("{", "["))
            else first
        )

    @cached_property
    def first_object(self) -> dict[str, Any]:
        """The JSON object on the first line; empty if there is none."""
        # there is no line, or no JSON on it
        with suppress(IndexError, ValueError, RecursionError):
            if isinstance(found := json.loads(self.first_lines[0]), dict):
                return found
        return {}


@contextmanager
def open_source(source: str | Path, **options: Any) -> Iterator[Source]:
    """Open a file, a folder, or `-` for standard input; a file once, since it may be a
    pipe, of which a copy is read. `options` are other fields of a `Source`."""
    is_stdin, path = str(source) == "-", Path(source)
    if is_stdin and sys.stdin is None:
        raise ManifestError(
            "standard input is closed: give a manifest's path, or pipe a manifest in"
        )
    reading = Source("<stdin>" if is_stdin else str(source), path=path, **options)
    with ExitStack() as stack:
        if is_stdin or not path.is_dir():
            reading.file = file = (
                sys.stdin.buffer if is_stdin else stack.enter_context(opened(path, True))
            )
            reading.head = file.read(HEAD_BYTES)
            # of a pipe, gzip says that it is, too
            if file.seekable() and (is_stdin or path.is_file()):
                file.seek(0)
            elif reading.no_manifest is None:  # which a device without an end is not
                reading.file = copied = cast(
                    BinaryIO, stack.enter_context(SpooledTemporaryFile(_COPY_IN_MEMORY))
                )
                copied.write(reading.head)
                copyfileobj(file, copied)
                copied.seek(0)
        yield reading


def suffix_of(path: Path) -> str:
    """The suffix that tells the format: `.csv` for `train.csv.gz` too."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


@contextmanager
def opened(path: Path, may_be_pipe: bool = False) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked if gzip has compressed it. A pipe, whose writer would
    be waited for, or a device is a ManifestError: only what the user names may be one."""
    if not (may_be_pipe or stat.S_ISREG(os.stat(path).st_mode)):
        raise ManifestError(f"{path.name} is not a regular file")
    with path.open("rb") as file:
        yield (
            cast(BinaryIO, gzip.GzipFile(fileobj=file))
            if file.peek(2).startswith(b"\x1f\x8b")
            else file
        )


def lines_of(stream: BinaryIO, faults: Faults, base: int = 0) -> Iterator[str]:
    """The lines of `texts_of`, one at a time."""
    return chain.from_iterable(
        io.StringIO(text, newline="\n") for text in texts_of(stream, faults, base)
    )


def texts_of(stream: BinaryIO, faults: Faults, base: int = 0) -> Iterator[str]:
    """Some whole lines at a time as text; a faulty line as some other text, so that the
    rest is checked too. `base` is the place of the file's line 0."""
    done = base
    blank_bytes = 0
    while data := stream.read(_BLOCK_BYTES):
        data += stream.readline(_LINE_BYTES + 1)
        if done == base:
            if data.startswith(_UTF_16):
                faults.add(
                    base + 1, "UTF-16, and UTF-8 is expected: iconv -f UTF-16 -t UTF-8 converts it"
                )
                return
            data = data.removeprefix(codecs.BOM_UTF8)
        blank_bytes = 0 if data.strip() else blank_bytes + len(data)
        if blank_bytes > _LINE_BYTES:
            faults.add(done + 1, f"more than {_LINE_BYTES:,} bytes of blank lines")
            return
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" not in text and len(data) <= _LINE_BYTES:
            yield text
            done += text.count("\n")
            continue
        for raw in io.BytesIO(data):
            done += 1
            # a device, or no table: the rest of it may have no end
            if len(raw) > _LINE_BYTES:
                faults.add(done, f"longer than {_LINE_BYTES:,} bytes")
                return
            yield _line(raw, done, faults)


def _line(raw: bytes, place: int, faults: Faults) -> str:
    """A line as text, in spite of its faults."""
    try:
        line = raw.decode()
    except UnicodeDecodeError as error:
        faults.add(place, f"byte {error.start + 1} is not UTF-8: 0x{raw[error.start]:02x}")
        line = raw.decode("cp437")  # in which all bytes above ASCII are printable and differ
    if "\0" in line:
        faults.add(place, "there is a NUL byte")
        line = line.replace("\0", "\ufffd")
    return line


def batched(
    rows: Rows, names: Sequence[str], parse: Callable[[Any], Sequence[Any]], faults: Faults
) -> Iterator[Batch]:
    """Batches of these columns: the cells that a function makes of rows, each with its
    place; a ValueError of it is a fault, and leaves the row out."""
    while batch := list(islice(rows, ROWS_PER_BATCH)):
        places, given = zip(*batch, strict=True)
        cells = faults.parsed(places, "", parse, given)
        if None in cells:
            places, cells = tuple(compress(places, cells)), [*filter(None, cells)]
        if cells:
            yield places, dict(zip(names, zip(*cells, strict=True), strict=True))


def names_audio(text: str) -> bool:
    """Whether a cell ends as the name of an audio file does, or as that and a bar."""
    return text.rstrip().removesuffix("|").rstrip().lower().endswith(AUDIO_SUFFIXES)
