"""A manifest: utterances as flat columns; how these are spelled, and what their cells
mean."""

from __future__ import annotations

import math
import re
import reprlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from featcache.errors import may_have_secret, secret_in
from featcache.manifest.audio_locations import (
    AudioLocation,
    AudioSource,
    Url,
    is_audio_url,
    is_command,
    locate,
    url_of,
)
from featcache.manifest.columns import TypedColumn, cells_of, typed
from featcache.manifest.segments import SegmentColumns, Utterance
from featcache.manifest.times import times_of
from featcache.strings import GrowingStrings, Strings


def nearest_sample(seconds: float, rate: float) -> int:
    """The number of samples nearest to some seconds; half a sample counts as one, as
    Lhotse and Kaldi count it. It is Lhotse's `compute_num_samples`: what is off by less
    than 1e-8 samples, as binary fractions are, is a half too."""
    return math.floor(round(seconds * rate, 8) + 0.5)


@dataclass(frozen=True, eq=False)
class Manifest(SegmentColumns):
    """A table of utterances, by column; `manifest[row]` is an `Utterance`."""

    source: str
    """What was read, for messages: the file as it was named, or `<stdin>`."""
    root: AudioLocation
    """What relative paths are relative to: a folder, absolute, or the beginning of URLs."""
    ids: Strings
    """The ids `[rows]`, all different."""
    columns: dict[str, Strings]
    """Every other column `[rows]`, as text, by its own name; `typed` has the values."""
    format: str = "csv"
    """The format that it was read in: a name of `featcache.manifest.formats.FORMATS`."""
    notes: tuple[str, ...] = ()
    """What to tell the user about what was read."""
    placeholders: frozenset[str] = frozenset()
    """The names of the placeholders in its paths and other columns, with a value or
    without."""
    kinds: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    """The kind of each cell of the other columns; of written text without it."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Utterance:
        start, duration, channel = (
            float(self.start[row]),
            float(self.duration[row]),
            int(self.channel[row]),
        )
        return Utterance.of_columns(self.ids[row], self.paths[row], start, duration, channel)

    def take(self, rows: NDArray[np.int64]) -> Manifest:
        """The manifest of some of the rows, in that order."""
        taken: dict[str, Any] = {
            name: getattr(self, name)[rows] for name in ("start", "duration", "channel")
        }
        taken["columns"] = {name: column.take(rows) for name, column in self.columns.items()}
        taken["kinds"] = {name: kinds[rows] for name, kinds in self.kinds.items()}
        return replace(self, ids=self.ids.take(rows), paths=self.paths.take(rows), **taken)

    def typed(self, name: str) -> TypedColumn:
        """Another column, with values of the types that its cells have."""
        return typed(self.columns[name], self.kinds.get(name))

    def cells(self, name: str) -> Sequence[Any]:
        """The cells of another column, as they are written in JSON; None if not given."""
        return cells_of(self.columns[name], self.kinds.get(name))

    def resolve(self, path: str) -> AudioSource:
        """Where the audio of one of the `paths` is: under `root`, unless the path is
        absolute or a URL."""
        return locate(self.root, path)

    @property
    def has_urls(self) -> bool:
        """Whether files have to be fetched."""
        if isinstance(self.root, Url):
            return True
        return re.search(rb"://", self.paths.blob.data) is not None and any(
            map(is_audio_url, self.paths)
        )


class CallersUrls(frozenset[Url]):
    """The URLs that a user's own manifest names, if he has given one, and no others.

    Paths in a cache are a stranger's, if the cache is: they alone must not make this
    machine send a request, since that may be to a service that trusts this machine. A
    file at a URL is fetched if a manifest names it, too."""

    def __new__(cls, manifest: Manifest | None) -> CallersUrls:  # noqa: D102
        if manifest is None or not manifest.has_urls:
            return super().__new__(cls)
        return super().__new__(
            cls, filter(None, map(url_of, map(manifest.resolve, manifest.paths)))
        )


def rows_at_even_steps(count: int, at_most: int) -> NDArray[np.int64]:
    """A sample of the rows 0 to `count` - 1 from the first to the last, rising; int64,
    all rows if they are few."""
    return np.unique(np.linspace(0, count - 1, min(count, at_most)).astype(np.int64))


LONGEST = 4000
"""The most bytes of an id or a path, less than Linux opens (4,095) and than a shard has
place for (4,096)."""

MOST_SECONDS = 1e9
"""The latest second of a recording that a cell may name: a later one is a slip, such as a
number of samples."""

_CONTROL, _NUL = re.compile(r"[\x00-\x1f\x7f-\x9f]"), re.compile(r"\x00")


def shown(cell: Any) -> str:
    """A cell for a message: short, and none that may give access, also inside a list."""
    text = cell if isinstance(cell, str) else repr(cell)
    may_give_access = may_have_secret(text) if len(text) > LONGEST else secret_in(text)
    return "a URL" if may_give_access else reprlib.repr(cell)


def refused_command(path: str) -> str:
    """What is wrong with a path that is a command. Of its arguments, which may give
    access, nothing is said."""
    return f"is a command, which runs only with --allow-commands: {shown(path.split()[0])}"


def refuse_secrets(cell: Any, allow_queries: bool) -> None:
    """Raise a ValueError, which does not quote it, if a cell of any column has a URL that
    gives access to something."""
    if isinstance(cell, str) and (fault := secret_in(cell, allow_query=allow_queries)):
        remedy = (
            "give the URL without it, and credentials by the environment; --allow-queries "
            "takes a harmless query"
        )
        raise ValueError(f"{fault}, and would be stored in the cache: {remedy}")


def _id(cell: Any) -> str:
    return (
        str(cell)
        if isinstance(cell, int) and not isinstance(cell, bool)
        else _text(cell, _CONTROL, "control")
    )


def _path(cell: Any) -> str:
    if isinstance(cell, str) and is_command(cell):
        raise ValueError(refused_command(cell))
    return path_or_command(cell)


def path_or_command(cell: Any) -> str:
    """A cell of the column `path` where commands are allowed; a ValueError says what is
    wrong with it."""
    return _text(cell, _NUL, "NUL")


def _text(cell: Any, refused: re.Pattern[str], kind: str) -> str:
    """A cell that is text, and can be stored. Some characters of a kind are refused."""
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


def _number(cell: Any) -> float:
    try:
        if isinstance(cell, bool):
            raise TypeError
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"is not a number: {shown(cell)}") from None
    if not math.isfinite(value):
        raise ValueError(f"is not finite: {value}")
    return value


def seconds_of(cell: Any) -> float:
    """A cell of the column `start`, or of an end; a ValueError says what is wrong with it."""
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
    """Cells that are ids or paths as they are, whatever is allowed; None if one of them
    needs a look by itself."""
    if set(map(type, cells)) != {str} or not all(cells) or max(map(len, cells)) * 4 > LONGEST:
        return None
    text = "".join(cells)
    return cells if text.isprintable() and "|" not in text and not may_have_secret(text) else None


def _plain_numbers(of: type[list[float]], cells: Sequence[Any]) -> Sequence[Any] | None:
    """Numbers that are all of a type, in msgspec's terms, or written so; None if one
    needs a look by itself."""
    try:
        return msgspec.convert(cells, of, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return None


# Names that do not say seconds are left out on purpose: a `length` is as often in samples
# or frames.
SPELLINGS = {
    "id": (
        "id",
        "utt_id",
        "uttid",
        "utt",
        "utterance_id",
        "utterance",
        "audio_id",
        "segment_id",
        "key",
    ),
    "path": (
        *("path", "wav", "wav_path", "audio", "audio_path", "audio_file", "audio_filepath"),
        *("file", "file_path", "filepath", "file_name", "filename"),
    ),
    "start": ("start", "start_time", "begin", "begin_time", "offset"),
    "duration": ("duration", "dur"),
    "channel": ("channel",),
}
"""How manifests may spell each column that an `Utterance` has, in any case. A table with
two spellings of one column is refused, unless one of them is exactly the column's own
name, the key here: then the others are carried."""

_COLUMN_OF = {spelling: column for column, spellings in SPELLINGS.items() for spelling in spellings}


class Column(NamedTuple):
    """A column that an `Utterance` has: what its cells mean."""

    name: str
    """The name of the column, and of the utterance's attribute."""
    parse: Callable[[Any], Any]
    """Gives the value of a cell that is not empty. Raises a ValueError that says what is
    wrong with it."""
    not_given: Any
    """The value of an empty cell."""
    growing: Callable[[], Any]
    """Makes what values are gathered in, flat: it has `extend`."""
    plain: Callable[[Sequence[Any]], Sequence[Any] | None] = lambda _: None
    """Gives the values of some cells at once; None if `parse` has to look at each."""


_SECONDS_FROM_0 = list[Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)]]
_SECONDS_ABOVE_0 = list[Annotated[float, msgspec.Meta(gt=0, le=MOST_SECONDS)]]

START = Column(
    "start", seconds_of, math.nan, partial(array, "d"), partial(_plain_numbers, _SECONDS_FROM_0)
)

COLUMNS = (
    Column("id", _id, "", GrowingStrings, _plain_texts),
    Column("path", _path, "", GrowingStrings, _plain_texts),
    START,
    Column(
        "duration",
        _duration,
        math.nan,
        partial(array, "d"),
        partial(_plain_numbers, _SECONDS_ABOVE_0),
    ),
    Column("channel", _channel, -1, partial(array, "i")),
)


def meaning_of(name: str) -> str:
    """The column that a name means; the name itself if it means none."""
    return _COLUMN_OF.get(name.strip().lower(), name)


def names_of_whole_files(path: str, names: Sequence[str]) -> list[str]:
    """The names by which columns are carried where rows are whole files, named by the
    column `path`: what a start, a duration or a channel tells is where a clip came from,
    and what it says of the file."""
    of_clips = {
        name
        for name in names
        if meaning_of(name) in ("start", "duration", "channel") or name == "path"
    }
    of_clips |= {name for name, time in times_of(names).items() if time.role != "duration"}
    return [
        "path" if name == path else f"original_{name}" if name in of_clips else name
        for name in names
    ]


def default_id(path: str, start: float, duration: float, channel: int) -> str:
    """The id of a row that has none: its path, and what it cuts of the file in hundredths
    of seconds, as NeMo names its cuts of rows. NaN and -1 mean not given. A ValueError
    says why a path is no id; without a path, the id is empty."""
    if not path:
        return ""
    name = path if math.isnan(start) else f"{path}-{round(start * 100):06d}"
    if not (math.isnan(start) or math.isnan(duration)):
        name += f"-{round(duration * 100):06d}"
    return _id(name if channel < 0 else f"{name}-c{channel}")
