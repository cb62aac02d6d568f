"""Labels with their times, of label files: Praat's TextGrids, and CTM and RTTM of NIST."""

from __future__ import annotations

import codecs
import io
import re
import string
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from featcache.errors import (
    AudioError,
    ExtractorError,
    MissingDependencyError,
    Reason,
    first_line,
    listing,
)
from featcache.extractors.base import Clip, Extractor, Params
from featcache.manifest.utterances import MOST_SECONDS, float_of
from featcache.spec import LABELS, MAIN, Events, FeatureSpec, Track

if TYPE_CHECKING:
    import torch


class LabelsParams(Params):
    """The parameters of `labels`."""

    label_files: Annotated[str, Field(min_length=1)]
    """The label file of each row, instead of its audio: `align/{id}.TextGrid`, or
    `{folder}/{stem}.TextGrid` for files next to the audio. `{textgrid}` takes paths from
    the manifest's column `textgrid`; `train.ctm/{stem}` takes one of many recordings in a
    CTM or RTTM. A relative path is relative to the manifest's root."""
    tier: Annotated[str, Field(min_length=1)] | None = None
    """The tier of a TextGrid. Default: its only tier. In an RTTM, the type of lines.
    Default: `SPEAKER`. A CTM has no tiers."""
    empty: Literal["drop", "keep"] = "drop"
    """Drop or keep empty labels, which mostly are silence."""


class LabelFile(NamedTuple):
    """The labels of a file, or of a recording in it."""

    times: NDArray[np.float64]
    """Start and end of each, in seconds from the file's beginning, `[labels, 2]`, sorted."""
    labels: list[str]
    end: float | None
    """The end of the tier in seconds; None if the format does not say it."""


class Labels(Extractor[LabelsParams]):
    """The labels of label files: their times, float64 `[labels, 2]`, and the track `labels`,
    their text as UTF-8."""

    Params = LabelsParams
    revision = 1
    batching = "frames"  # no clip is ever padded

    def __init__(self, params: LabelsParams, sample_rate: int, device: torch.device) -> None:
        self.params = params
        self.spec = FeatureSpec.of(
            sample_rate,
            Track(MAIN, (2,), Events.dtype, "start and end of a label, seconds", Events()),
            Track(LABELS, (), "uint8", "UTF-8 of the labels, with a zero byte after each"),
        )

    @classmethod
    def stored_dtype(cls, params: LabelsParams) -> str:
        return Events.dtype

    def num_frames(self, num_samples: int) -> int:
        return 1

    def extract(self, clips: Sequence[Clip]) -> Any:
        raise ExtractorError("labels are read from label files, and not made of waveforms")

    def read(self, data: bytes, path: str, channel: int | None) -> LabelFile:
        """Read a label file, or the lines of one recording; the last known suffix of `path`
        tells the format. `channel` is the row's, from 0; None for all. Raises AudioError if
        it is damaged, of another format, or has no such tier; MissingDependencyError
        without praatio."""
        suffixes = _SUFFIX.findall(path.lower())
        if not suffixes:
            raise _damaged(f"its name does not end in {listing(_READERS)}")
        encoding = "utf-8-sig"
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "utf-16"
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError as error:
            raise _damaged(f"it is not {encoding.removesuffix('-sig')}: {error.reason}") from None
        read, end = _READERS[suffixes[-1]](text, self.params.tier, channel)
        chosen = sorted(label for label in read if label[2] or self.params.empty == "keep")
        for first, last, label in chosen:
            if "\0" in label:
                raise _damaged(f"the label {label!r} has a zero byte")
            if not 0 <= first <= last <= MOST_SECONDS:
                raise _damaged(f"the label {label!r} goes from {first} s to {last} s")
        if end is not None and not 0 <= end <= MOST_SECONDS:
            raise _damaged(f"the tier ends at {end} s")
        times = np.array([label[:2] for label in chosen], np.float64).reshape(-1, 2)
        return LabelFile(times, [label for _, _, label in chosen], end)


def packed(labels: Sequence[str]) -> NDArray[np.uint8]:
    """Return labels as a version stores them."""
    return np.frombuffer("".join(f"{label}\0" for label in labels).encode(), np.uint8)


def _damaged(what: str) -> AudioError:
    return AudioError(Reason.NOT_LABELS, what)


_Found = tuple[list[tuple[float, float, str]], float | None]
"""The start, the end and the text of each label, and `LabelFile.end`."""

_SIZES = re.compile(
    r'(?:intervals|points) ?: ?size ?= ?(\d+)\s|"(?:IntervalTier|TextTier)"\s*"(?:[^"]|"")*"'
    r"\s*[^\s\"]+\s+[^\s\"]+\s+(\d+)\s"
)
"""The number of its labels that a tier tells, in the long or the short format."""

_NUM_TIERS = re.compile(r"<exists>\s*(?:size ?= ?)?(\d+)\s")
_EXPONENT = re.compile(r"^(\s*(?:xmin|xmax|number) = )([\d.]+e[-+]?\d+)(?=\s*$)", re.MULTILINE)
_NEGATIVE = re.compile(r"(?:xmin|xmax|number) ?= ?-[\d.]*[1-9]")


def _read_textgrid(text: str, tier: str | None, channel: int | None) -> _Found:
    """Read a tier of a TextGrid. praatio 6.2 says nothing about labels that were cut off,
    ignores the sign of a time, knows no exponents, and leaves the quotes of long points
    doubled."""
    try:
        from praatio.utilities.textgrid_io import parseTextgridStr
    except ImportError as error:
        raise MissingDependencyError("praatio", "reading TextGrids", "labels") from error
    text = _EXPONENT.sub(_in_decimals, text.replace("\r\n", "\n")) + "\n"
    try:
        tiers = parseTextgridStr(text, includeEmptyIntervals=True)["tiers"]
        sizes = [len(parsed["entries"]) for parsed in tiers]
    except Exception as error:  # noqa: BLE001 - whatever damage makes praatio raise
        raise _damaged(f"it is no TextGrid, or is damaged: {first_line(error)}") from None
    stated = [int(long or short) for long, short in _SIZES.findall(text)]
    if stated != sizes or _NUM_TIERS.findall(text)[:1] != [str(len(tiers))]:
        raise _damaged(f"its tiers have {sizes} labels, and it says {stated}: was it cut short?")
    if _NEGATIVE.search(text):
        raise _damaged("it has times below 0")
    chosen = _only_tier(tiers, tier)
    labels = []
    for *times, label in chosen["entries"]:
        if len(times) == 1 and "item [" in text:
            label = label.replace('""', '"')
        try:
            labels.append((float_of(times[0]), float_of(times[-1]), label))
        except ValueError as error:
            raise _damaged(f"the label {label!r} has a damaged time: {error}") from None
    return labels, float(chosen["xmax"])


def _only_tier(tiers: Sequence[dict[str, Any]], name: str | None) -> dict[str, Any]:
    chosen = [tier for tier in tiers if name in (None, tier["name"])]
    if len(chosen) == 1:
        return chosen[0]
    names = listing(repr(tier["name"]) for tier in tiers) or "none"
    wanted = "one tier" if name is None else f"one tier {name!r}"
    raise AudioError(Reason.EXTRACTOR_REFUSED, f"it has not {wanted}, but {names}: set params.tier")


def _in_decimals(time: re.Match[str]) -> str:
    """Return a time such as `2.5e-05`, which Praat writes, without its exponent."""
    return f"{time[1]}{Decimal(time[2]):f}"


def _read_ctm(text: str, tier: str | None, channel: int | None) -> _Found:
    """Read lines of `file channel start duration word [confidence]`."""
    if tier is not None:
        raise AudioError(Reason.EXTRACTOR_REFUSED, "a CTM has no tiers: leave out params.tier")
    return _read_lines(text, None, (0, 1, 2, 3, 4), channel)


def _read_rttm(text: str, tier: str | None, channel: int | None) -> _Found:
    """Read lines of `type file channel start duration orthography subtype name …`. The label
    of a `SPEAKER` is the name, of another type the orthography."""
    kind = tier or "SPEAKER"
    return _read_lines(text, kind, (1, 2, 3, 4, {"SPEAKER": 7}.get(kind, 5)), channel)


def _read_lines(
    text: str, kind: str | None, places: tuple[int, ...], channel: int | None
) -> _Found:
    """Read lines whose fields at `places` are the recording, the channel, the start, the
    duration and the label. Only ASCII's white space parts fields: a word may have another
    blank in it. If lines name several channels, only the row's count."""
    of_channels: dict[str, list[tuple[float, float, str]]] = {}
    recordings = set()
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        fields = [field.decode() for field in line.encode().split()]
        if not fields or line.startswith(";;") or (kind is not None and fields[0] != kind):
            continue
        try:
            recording, name, start, seconds, label = (fields[place] for place in places)
            first, last = float_of(start), float_of(start) + float_of(seconds)
        except (IndexError, ValueError):
            raise _damaged(f"line {number} is damaged: {line.strip()[:80]!r}") from None
        if kind is not None and label == "<NA>":
            label = ""
        recordings.add(recording)
        of_channels.setdefault(name.upper(), []).append((first, last, label))
    if len(recordings) > 1:
        raise AudioError(
            Reason.EXTRACTOR_REFUSED,
            f"it has the recordings {listing(sorted(recordings), 3)}: params.label_files names "
            "one of them, as in all.ctm/{stem}",
        )
    chosen = [*of_channels]
    if channel is not None and len(of_channels) > 1:
        chosen = [str(channel + 1), *string.ascii_uppercase[channel : channel + 1]]
    return [label for name in chosen for label in of_channels.get(name, [])], None


_SUFFIX = re.compile(r"(\.textgrid|\.ctm|\.rttm)(?:/|\Z)")
_READERS: dict[str, Callable[[str, str | None, int | None], _Found]] = {
    ".textgrid": _read_textgrid,
    ".ctm": _read_ctm,
    ".rttm": _read_rttm,
}
