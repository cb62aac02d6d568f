"""Lhotse's recordings, supervisions and cuts, as JSON lines; and Lhotse Shar.

Shar is a folder of cuts, `cuts.000000.jsonl.gz`, each beside a tar with their audio,
`recording.000000.tar`. A member is named by its cut's id and one suffix for all. See
https://github.com/lhotse-speech/lhotse/tree/master/lhotse/shar."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any

import msgspec

from featcache.errors import ManifestError, listing
from featcache.manifest.formats.source import Batch, Source, Text, batched
from featcache.manifest.formats.tables import json_rows
from featcache.manifest.formats.tar import DamagedTarError, members_of
from featcache.manifest.numbered import Files, absent
from featcache.manifest.utterances import SPELLINGS, meaning_of

SAID = ("text", "speaker", "language", "gender")
"""The columns that are fields of supervisions. Other columns are their `custom`."""

_CUTS_OF_SHAR = re.compile(r"cuts\.\d+\.jsonl(?:\.gz)?")
_FIELD_OF_SHAR = re.compile(r"(\w+)\.(?P<number>\d+)\.(?:jsonl|tar)(?:\.gz)?")
_WITHOUT_AUDIO = (".json", ".nodata", ".nometa")
"""The suffixes of members of Shar that are no audio."""

_CUTS = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")
_COLUMNS = (*SPELLINGS, *SAID, "custom")

_INSTEAD = {
    "Speed": "augment.speed in the config makes copies",
    "Resample": "audio is resampled to the config's rate",
}
"""The ways to do without a transform."""

Audio = tuple[Any, tuple[int, ...]]
"""A recording's path, None in Shar, and its channels: what no garbage collector visits."""


# Lhotse's objects; msgspec skips other fields. Values of type Any are checked as cells.


class _AudioSource(msgspec.Struct, gc=False):
    type: Any
    channels: tuple[int, ...]
    source: Any


class _Recording(msgspec.Struct, gc=False):
    id: Any
    duration: Any
    sources: tuple[_AudioSource, ...]
    transforms: list[Any] | None = None


class _Said(msgspec.Struct, kw_only=True, gc=False):
    text: Any = None
    speaker: Any = None
    language: Any = None
    gender: Any = None


class _Supervision(_Said, kw_only=True, gc=False):
    id: Any
    recording_id: Any
    start: Any
    duration: Any
    channel: Any = 0
    custom: Any = None


class _Cut(msgspec.Struct, gc=False):
    id: Any
    start: Any = msgspec.UNSET
    duration: Any = msgspec.UNSET
    channel: Any = 0
    custom: Any = None
    type: Any = "a cut"
    recording: _Recording | None = None
    supervisions: tuple[_Said, ...] | None = None


def kind_of(row: dict[str, Any]) -> str | None:
    """Tell whether an object is a cut, a recording or a supervision of Lhotse."""
    if row.get("type") in _CUTS or {"recording", "start", "duration"} <= row.keys():
        return "cut"
    if {"sources", "sampling_rate"} <= row.keys():
        return "recording"
    if {"recording_id", "start", "duration"} <= row.keys() and "path" not in map(meaning_of, row):
        return "supervision"
    return None


def is_shar(source: Source) -> bool:
    """Tell whether a source is a folder of Lhotse Shar."""
    return any(map(_CUTS_OF_SHAR.fullmatch, source.names))


def is_lhotse(source: Source) -> bool:
    """Tell whether a source is a folder of Lhotse Shar, or a file of Lhotse's objects."""
    return is_shar(source) or kind_of(source.first_object) is not None


def read_lhotse(source: Source) -> Iterator[Batch]:
    """Read cuts, recordings, or supervisions beside their recordings."""
    source.has_types = True
    read = _cuts_of_folder if is_shar(source) else _rows_of_file
    for places, cells in read(source):
        for name in _COLUMNS[2:]:
            if cells[name].count(None) == len(places):
                del cells[name]
        yield places, cells


def _rows_of_file(source: Source) -> Iterator[Batch]:
    file, kind = source.text, kind_of(source.first_object)
    if kind == "cut":
        return _batches(file, _Cut, partial(_of_cut, _paths_in_tar(source, source.path.name)))
    if kind == "recording":
        return _batches(file, _Recording, _of_recording)
    if kind == "supervision":
        return _batches(file, _Supervision, partial(_of_supervision, _audio_beside(source)))
    raise ManifestError("the first line is no recording, supervision or cut of Lhotse's")


def _batches(
    file: Text, of: type, cells_of: Callable[[Any], Sequence[Any]], names: Sequence[str] = _COLUMNS
) -> Iterator[Batch]:
    return batched(json_rows(file, of), names, cells_of, file.faults)


def _cuts_of_folder(source: Source) -> Iterator[Batch]:
    others = {name.partition(".")[0] for name in source.names} - {"cuts", "recording"}
    if others:
        left_out = listing(sorted(others))
        source.note(f"of Lhotse Shar, cuts and recording are read, and nothing else: {left_out}")
    _refuse_holes(source)
    for name in sorted(filter(_CUTS_OF_SHAR.fullmatch, source.names)):
        with source.opened(name) as file:
            yield from _batches(file, _Cut, partial(_of_cut, _paths_in_tar(source, name)))


def _refuse_holes(source: Source) -> None:
    """Raise a ManifestError if cuts or recordings of Lhotse Shar lack a number of any
    field."""
    fields: dict[str, Files] = defaultdict(dict)
    for match in filter(None, map(_FIELD_OF_SHAR.fullmatch, source.names)):
        fields[match[1]][int(match["number"])] = match
    numbers = set().union(*fields.values())
    first, last = min(numbers), max(numbers)
    if first > 0:
        source.note(f"the first number of Lhotse Shar is 0, and the first that is here {first}")
    for files in filter(None, (fields["cuts"], fields["recording"])):
        missing = absent(files, first, last + 1 - first)
        if missing:
            raise ManifestError(f"{missing[0]}: put all there, or give the paths of some cuts")


def _paths_in_tar(source: Source, cuts: str) -> Callable[[str], str]:
    """Return a function that gives a cut's path in the tar beside a file of cuts."""
    stem = cuts.removesuffix(".gz").removesuffix(".jsonl")
    name = f"{stem.replace('cuts', 'recording', 1)}.tar"

    @cache
    def suffix() -> str:
        """The suffix of the first audio; to look at all would be slow."""
        try:
            with source.opened(name) as file:
                names = (member.name for member in members_of(file.stream))
                suffixes = (os.path.splitext(member)[1] for member in names)
                return next(suffix for suffix in suffixes if suffix not in _WITHOUT_AUDIO)
        except (OSError, DamagedTarError, StopIteration):
            # it may be below --root; reading it tells what else is wrong
            what = "it is taken to hold FLAC, as Lhotse writes it"
            source.note(f"not each tar can be read beside its cuts: {what}")
            return ".flac"

    return lambda cut: f"{name}/{cut}{suffix()}"


def _audio_beside(source: Source) -> dict[str, Audio]:
    name = source.path.name.replace("supervisions", "recordings")
    what = "supervisions have no paths"
    if name != source.path.name:
        what += f", and there is no {name} beside them"
    if name == source.path.name or not (source.folder / name).is_file():
        raise ManifestError(f"{what}: `lhotse cut simple` makes cuts of them and recordings")
    audio: dict[str, Audio] = {}
    with source.opened(name) as file:
        for _, cells in _batches(file, _Recording, _id_and_audio, ("id", "audio")):
            audio.update(zip(cells["id"], cells["audio"], strict=True))
    return audio


def _id_and_audio(recording: _Recording) -> tuple[str, Audio]:
    return str(recording.id), _audio(recording)


def _of_recording(recording: _Recording) -> tuple[Any, ...]:
    path, _ = _audio(recording)
    return recording.id, path, None, recording.duration, *[None] * len(_COLUMNS[4:])


def _of_supervision(recordings: dict[str, Audio], row: _Supervision) -> tuple[Any, ...]:
    if str(row.recording_id) not in recordings:
        raise ValueError(f"recording {row.recording_id!r} is not among the recordings")
    path, channels = recordings[str(row.recording_id)]
    channel = _channel(row.channel, channels)
    return row.id, path, row.start, row.duration, channel, *_said_by(row), row.custom or None


def _of_cut(path_in_tar: Callable[[str], str], cut: _Cut) -> tuple[Any, ...]:
    if cut.type in ("MixedCut", "PaddingCut") or cut.recording is None:
        raise ValueError(f"{cut.type} without a recording is not read: save its audio first")
    if cut.start is msgspec.UNSET or cut.duration is msgspec.UNSET:
        raise ValueError("a cut without start or duration")
    path, channels = _audio(cut.recording, is_shar=True)
    if path is None:
        path = path_in_tar(cut.id)
    channel, said = _channel(cut.channel, channels), _all_said(cut.supervisions or ())
    return cut.id, path, cut.start, cut.duration, channel, *said, cut.custom or None


_said_by: Callable[[_Said], tuple[Any, ...]] = attrgetter(*SAID)


def _all_said(supervisions: Sequence[_Said]) -> tuple[Any, ...]:
    if len(supervisions) == 1:
        return _said_by(supervisions[0])
    joined = []
    for name in SAID:
        cells = [getattr(supervision, name) for supervision in supervisions]
        texts = [str(cell) for cell in cells if cell is not None]
        joined.append(" ".join(texts if name == "text" else dict.fromkeys(texts)) or None)
    return tuple(joined)


def _channel(wanted: Any, channels: tuple[int, ...]) -> int | None:
    if (wanted,) == channels or wanted == [*channels]:
        return None
    if isinstance(wanted, list):
        if len(wanted) != 1:
            what = "an utterance has one channel, or all"
            raise ValueError(f"channels {wanted} of {[*channels]}: {what}")
        (wanted,) = wanted
    if wanted not in channels:
        raise ValueError(f"channel {wanted!r} is not among the recording's: {[*channels]}")
    return channels.index(wanted)


def _audio(recording: _Recording, is_shar: bool = False) -> Audio:
    if recording.transforms:
        raise ValueError(_why_not_transformed(recording.transforms))
    count = len(recording.sources)
    if count != 1:
        what = f"the recording has {count} sources, and one is read"
        raise ValueError(f"{what}: make a recording of each")
    (source,) = recording.sources
    if source.type == "command":
        return f"{source.source} |", source.channels
    if source.type == "shar" and is_shar:
        return None, source.channels
    if source.type in ("file", "url"):
        return source.source, source.channels
    what = "is not read, only 'file', 'url' and 'command'"
    raise ValueError(f"a source of type {source.type!r} {what}")


def _why_not_transformed(transforms: Sequence[Any]) -> str:
    names = dict.fromkeys(
        str(transform.get("name") if isinstance(transform, dict) else transform)
        for transform in transforms
    )
    remedy = "save its audio first"
    if names.keys() <= _INSTEAD.keys():
        remedy = f"give the cuts without: {'; '.join(map(_INSTEAD.__getitem__, names))}"
    return f"the recording has transforms, which are not applied: {listing(names)}: {remedy}"
