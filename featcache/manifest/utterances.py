"""A manifest: utterances as flat columns; the spellings of these, and how cells are read."""

from __future__ import annotations

import math
import re
import reprlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from featcache.errors import ManifestError, may_have_secret, secret_in, without_secrets
from featcache.manifest.audio_locations import (
    AudioLocation,
    AudioSource,
    Url,
    is_audio_url,
    is_command,
    locate,
    url_of,
)
from featcache.manifest.columns import TypedColumn, Types, Values, booleans, numbers
from featcache.manifest.segments import SegmentColumns, Utterance, repeated_rows
from featcache.manifest.strings import GrowingStrings, Strings
from featcache.manifest.times import times_of


def nearest_sample(seconds: float, rate: float) -> int:
    """Return the number of samples nearest to some seconds, as Lhotse's
    `compute_num_samples`: half a sample counts as one, within 1e-8 samples."""
    return math.floor(round(seconds * rate, 8) + 0.5)


class Whole(NamedTuple):
    """A manifest of which some rows are kept. All its ids have different hashes."""

    hashes: NDArray[np.uint64]
    """uint64 `[3, rows]`: the hash of each row's id, of its segment, and zeros."""
    first_row: int
    """The number of the first row that is kept."""
    read: Callable[[], Manifest]
    """Reads all rows."""


@dataclass(frozen=True, eq=False)
class Manifest(SegmentColumns):
    """A table of utterances, by column; `manifest[row]` is an `Utterance`."""

    source: str
    """The file as it was named, or `<stdin>`, for messages."""
    root: AudioLocation
    """The root of relative paths: an absolute folder, or the beginning of URLs."""
    ids: Strings
    """The ids `[rows]`. Rows with the same id have the same segment: they are rows of one
    clip, such as its texts in two languages."""
    values: dict[str, Values]
    """The values of other columns `[rows]`, by name."""
    format: str = "csv"
    """The format that it was read in: a name of `FORMATS`."""
    notes: tuple[str, ...] = ()
    """Notes for the user about what was read."""
    placeholders: frozenset[str] = frozenset()
    """The names of the placeholders in its columns, with a value or without."""
    has_repeats: bool = False
    """True if several rows may have the same id."""
    whole: Whole | None = None
    """The whole manifest, if these are some of its rows."""

    @classmethod
    def of_ids(cls, ids: Strings, source: str) -> Manifest:
        """Return a table of ids alone."""
        not_given = np.full(len(ids), np.nan)
        paths = Strings(np.empty(0, np.uint8), np.zeros(len(ids) + 1, np.int64))
        channel = np.full(len(ids), -1, np.int32)
        root = Path.cwd()
        return cls(paths, not_given, not_given, channel, source, root, ids, {})

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Utterance:
        flat = (self.start, self.duration, self.channel)
        values = (column[row].item() for column in flat)
        return Utterance.of_columns(self.ids[row], self.paths[row], *values)

    def utterances(self, rows: NDArray[np.int64]) -> list[Utterance]:
        """Return the utterances of some rows, a third of the time of one by one."""
        flat = (self.start, self.duration, self.channel)
        columns = (column[rows].tolist() for column in flat)
        texts = self.ids.texts(rows), self.paths.texts(rows)
        return [*map(Utterance.of_columns, *texts, *columns)]

    def take(self, rows: NDArray[np.int64]) -> Manifest:
        """Return the manifest of some of the rows, in that order."""
        values = {name: column.take(rows) for name, column in self.values.items()}
        segments = vars(self.segments(rows))
        return replace(self, **segments, ids=self.ids.take(rows), values=values, whole=None)

    def complete(self) -> Manifest:
        """Return the whole manifest; it may have to be read again."""
        return self if self.whole is None else self.whole.read()

    def clips(self) -> Manifest:
        """Return the manifest of the first row of each clip."""
        if not self.has_repeats:
            return self
        first_rows: dict[str, int] = {}
        rows = repeated_rows(self.ids.hashes()).tolist()
        others = [row for row in rows if first_rows.setdefault(self.ids[row], row) != row]
        kept_rows = np.delete(np.arange(len(self)), others)
        return replace(self.take(kept_rows), has_repeats=False)

    @property
    def columns(self) -> dict[str, Strings]:
        """Every other column `[rows]` as text."""
        return {name: values.texts for name, values in self.values.items()}

    def available(self) -> dict[str, Strings | NDArray[Any]]:
        """Return all columns but the ids, as they are written. Columns of an `Utterance`
        are left out if they are empty."""
        available: dict[str, Strings | NDArray[Any]] = {}
        if len(self.paths.blob):
            available["path"] = self.paths
        for name, seconds in (("start", self.start), ("duration", self.duration)):
            if not np.isnan(seconds).all():
                available[name] = seconds
        if (self.channel >= 0).any():
            available["channel"] = self.channel.astype(np.int64)
        return available | self.columns

    def column(self, name: str, types: Types) -> TypedColumn:
        """Return the ids, or one of the available columns, of its type in `types`; by
        default of the types that its cells have. Raises ManifestError if not all values are
        of its type."""
        if name == "id":
            return self.ids
        column: TypedColumn = self.available()[name]
        wanted, what = types.get(name), f"{self.source}: the column {name!r}"
        if wanted is None:
            return self.values[name].typed() if name in self.values else column
        if wanted is str and isinstance(column, Strings):
            return column
        if wanted not in (bool, int, float):
            kind = getattr(wanted, "__name__", wanted)
            raise ManifestError(
                f"{what} cannot be {kind}: choose str for text columns, bool, int or float"
            )
        values: TypedColumn | None = column
        if isinstance(column, Strings):
            values = booleans(column) if wanted is bool else numbers(column)
        dtypes = {bool: "b", int: "i", float: "if"}[wanted]
        if not isinstance(values, np.ndarray) or values.dtype.kind not in dtypes:
            raise ManifestError(f"{what} should be {wanted.__name__}, but not all its values are")
        return values.astype(np.float64) if wanted is float else values

    def cells(self, name: str) -> Sequence[Any]:
        """Return the cells of another column as JSON has them, None if missing."""
        return self.values[name].as_json()

    def resolve(self, path: str) -> AudioSource:
        """Locate the audio of one of the `paths`."""
        return locate(self.root, path)

    @property
    def has_urls(self) -> bool:
        """True if files have to be fetched."""
        if isinstance(self.root, Url):
            return True
        may_have_urls = re.search(b"://", self.paths.blob.data) is not None
        return may_have_urls and any(map(is_audio_url, self.paths))

    @property
    def urls(self) -> frozenset[Url]:
        """The URLs of files. A path in a stranger's cache must not make this machine send a
        request, perhaps to a service that trusts it: a manifest must name the URL too."""
        if not self.has_urls:
            return frozenset()
        return frozenset(filter(None, map(url_of, map(self.resolve, self.paths))))


def rows_at_even_steps(count: int, at_most: int) -> NDArray[np.int64]:
    """Return at most that many of `count` rows, rising; int64."""
    return np.linspace(0, count - 1, min(count, at_most)).astype(np.int64)


LONGEST = 4000
"""The most bytes of an id or a path: Linux opens 4,095, and a shard holds 4,096."""

MOST_SECONDS = 1e9
"""The latest second that a cell may name: larger numbers are samples, for example."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NUL = re.compile(r"\x00")


def shown(cell: Any) -> str:
    """Shorten a cell for a message, without URLs that may give access."""
    text = str(cell)
    is_secret = may_have_secret(text) and (len(text) > LONGEST or secret_in(text))
    # a list of URLs looks like none, once it is shortened
    if is_secret or without_secrets(text) != text:
        return "a URL"
    return reprlib.repr(cell)


def refused_command(path: str) -> str:
    """Describe a command without its arguments, which may give access."""
    return f"is a command, which runs only with --allow-commands: {shown(path.split()[0])}"


def refuse_secrets(cell: Any, allow_queries: bool) -> None:
    """Raise a ValueError, which does not quote it, for a cell with a URL that may give access."""
    fault = isinstance(cell, str) and secret_in(cell, allow_query=allow_queries)
    if fault:
        raise ValueError(
            f"{fault}, and would be stored in the cache: give the URL without it, and "
            "credentials by the environment; --allow-queries takes a harmless query"
        )


def _id(cell: Any) -> str:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return str(cell)
    return _text(cell, _CONTROL, "control")


def _path(cell: Any) -> str:
    if isinstance(cell, str) and is_command(cell):
        raise ValueError(refused_command(cell))
    return path_or_command(cell)


def path_or_command(cell: Any) -> str:
    """Check a cell of the column `path` where commands are allowed."""
    return _text(cell, _NUL, "NUL")


def _text(cell: Any, refused: re.Pattern[str], kind: str) -> str:
    if not isinstance(cell, str):
        raise ValueError(f"is not text: {shown(cell)}")
    if not cell.isprintable() and refused.search(cell):
        raise ValueError(f"has a {kind} character: {shown(cell)}")
    try:
        num_bytes = len(cell.encode())
    except UnicodeEncodeError:
        raise ValueError(f"is not UTF-8: {shown(cell)}") from None
    if num_bytes > LONGEST:
        raise ValueError(f"has {num_bytes:,} bytes, and may have {LONGEST:,}: {shown(cell)}")
    return cell


def float_of(cell: Any) -> float:
    """Read a number as `float` does, which would also take `1_0` and digits of other scripts.
    Raises ValueError, or TypeError or OverflowError for values that are no text."""
    if isinstance(cell, str) and ("_" in cell or not cell.strip().isascii()):
        raise ValueError(f"could not convert string to float: {cell!r}")
    if isinstance(cell, bool):
        raise TypeError(f"not a number: {cell}")
    return float(cell)


def _number(cell: Any) -> float:
    try:
        value = float_of(cell)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"is not a number: {shown(cell)}") from None
    if not math.isfinite(value):
        raise ValueError(f"is not finite: {value}")
    return value


def seconds_of(cell: Any) -> float:
    """Read a start or an end."""
    seconds = _number(cell)
    if seconds < 0:
        raise ValueError(f"is negative: {seconds}")
    if seconds > MOST_SECONDS:
        raise ValueError(f"is more seconds than a recording has: {shown(cell)}")
    return seconds


def _duration(cell: Any) -> float:
    seconds = seconds_of(cell)
    if seconds == 0:
        raise ValueError("is zero: leave it empty to read to the end of the file")
    return seconds


def _channel(cell: Any) -> int:
    value = _number(cell)
    if not (value.is_integer() and 0 <= value < 2**31):
        raise ValueError(f"is not a whole number from 0 up: {shown(cell)}")
    return int(value)


def _plain_texts(cells: Sequence[Any]) -> Sequence[Any] | None:
    is_ascii = False
    if isinstance(cells, Strings):
        lengths, data = cells.byte_lengths(), cells.utf8()
        # takes a tenth of the time of `isprintable`
        is_ascii = not ((data < 32) | (data > 126)).any()
        text = data.tobytes().decode()
        are_short = bool(lengths.min() > 0 and lengths.max() <= LONGEST)
    elif set(map(type, cells)) == {str}:
        text = "".join(cells)
        are_short = all(cells) and max(map(len, cells)) * 4 <= LONGEST
    else:
        return None
    is_plain = are_short and (is_ascii or text.isprintable())
    if is_plain and "|" not in text and not may_have_secret(text):
        return cells
    return None


def _plain_numbers(of: Any, cells: Sequence[Any]) -> Sequence[Any] | None:
    if isinstance(cells, array) and cells and of is not _CHANNELS:
        flat = np.frombuffer(cells)
        extremes = [flat.min().item(), flat.max().item()]
        return None if _plain_numbers(of, extremes) is None else cells
    try:
        numbers: list[Any] = msgspec.convert(cells, of, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return None
    return numbers


_SPELLINGS = {
    "id": "id utt_id uttid utt utterance_id utterance audio_id segment_id key",
    "path": "path wav wav_path audio audio_path audio_file audio_filepath file file_path "
    "filepath file_name filename",
    # a `length` is as often in samples or frames
    "start": "start start_time begin begin_time offset",
    "duration": "duration dur",
    "channel": "channel",
}
SPELLINGS = {column: tuple(names.split()) for column, names in _SPELLINGS.items()}
"""The spellings of an `Utterance`'s columns, in any case. Two spellings of one column are
refused, unless one is the exact key: then the others are carried."""

_COLUMN_OF = {spelling: column for column, spellings in SPELLINGS.items() for spelling in spellings}


class Column(NamedTuple):
    """A column that an `Utterance` has."""

    name: str
    parse: Callable[[Any], Any]
    """Reads a cell that is not empty. Raises ValueError."""
    not_given: Any
    """The value of an empty cell."""
    growing: Callable[..., Any]
    """Makes a flat buffer for values, with `extend`; of numbers, an array of given ones."""
    plain: Callable[[Sequence[Any]], Sequence[Any] | None] = lambda _: None
    """Reads some cells at once; None if each has to be parsed."""


_STARTS = list[Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]]
_DURATIONS = list[Annotated[float, msgspec.Meta(gt=0, le=MOST_SECONDS)]]
_CHANNELS = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]
_floats = partial(array, "d")

COLUMNS = (
    Column("id", _id, "", GrowingStrings, _plain_texts),
    Column("path", _path, "", GrowingStrings, _plain_texts),
    Column("start", seconds_of, math.nan, _floats, partial(_plain_numbers, _STARTS)),
    Column("duration", _duration, math.nan, _floats, partial(_plain_numbers, _DURATIONS)),
    Column("channel", _channel, -1, partial(array, "i"), partial(_plain_numbers, _CHANNELS)),
)


def meaning_of(name: str) -> str:
    """Return the column that a name means; the name itself if it means none."""
    return _COLUMN_OF.get(name.strip().lower(), name)


def names_of_whole_files(path: str, names: Sequence[str]) -> list[str]:
    """Rename columns where each row is a whole file, named by the column `path`: a start,
    a duration or a channel is where the clip came from."""
    original = {name for name, time in times_of(names).items() if time.role != "duration"}
    original |= {name for name in names if meaning_of(name) in ("start", "duration", "channel")}
    new_names = {name: f"original_{name}" for name in {*original, "path"}}
    new_names[path] = "path"
    return [new_names.get(name, name) for name in names]


def default_id(path: str, start: float, duration: float, channel: int) -> str:
    """Make the id of a row without one: its path, then start and duration in hundredths
    of seconds, as in NeMo. NaN and -1 mean not given. Raises ValueError if it is no id."""
    if not path:
        return ""
    name = path
    if not math.isnan(start):
        name += f"-{round(start * 100):06d}"
        if not math.isnan(duration):
            name += f"-{round(duration * 100):06d}"
    return _id(name if channel < 0 else f"{name}-c{channel}")


def exact_id(path: str, start: float, duration: float, channel: int) -> str:
    """Make such an id with exact seconds, which no other segment has."""
    times = ["" if math.isnan(seconds) else repr(seconds) for seconds in (start, duration)]
    name = "-".join([path, *times])
    return name if channel < 0 else f"{name}-c{channel}"
