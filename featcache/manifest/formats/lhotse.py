"""Lhotse's recordings, supervisions and cuts, as JSON lines; and Lhotse Shar.

Shar is a folder of cuts, `cuts.000000.jsonl.gz`, each beside a tar with their audio,
`recording.000000.tar`: of each cut in a member called by its id, with a suffix that is
the same for all, and a JSON file that says nothing else than the cut. See
https://github.com/lhotse-speech/lhotse/tree/master/lhotse/shar."""

from __future__ import annotations

import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import msgspec

from featcache.errors import ManifestError, listing
from featcache.manifest.formats.source import Batch, Source, batched, opened
from featcache.manifest.formats.tables import json_rows
from featcache.manifest.numbered import Files, absent
from featcache.manifest.utterances import meaning_of

# what supervisions have fields for; other columns are their `custom`
SAID = ("text", "speaker", "language", "gender")

_CUTS_OF_SHAR = re.compile(r"cuts\.\d+\.jsonl(?:\.gz)?")
_FIELD_OF_SHAR = re.compile(r"(\w+)\.(?P<number>\d+)\.(?:jsonl|tar)(?:\.gz)?")
_WITHOUT_AUDIO = (".json", ".nodata", ".nometa")
"""The suffixes of what lies beside audio in Shar, or stands for what a cut has not."""

_CUTS = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")

# the cells of a row
_COLUMNS = ("id", "path", "start", "duration", "channel", *SAID, "custom")

_INSTEAD = {
    "Speed": "augment.speed in the config makes copies",
    "Resample": "audio is resampled to the config's rate",
}
"""What there is in place of a transform."""

Audio = tuple[Any, tuple[int, ...]]
"""A recording's path, None if Shar's, and its channels' numbers: tuples, which the
garbage collector can forget."""


# Lhotse's objects; what they have besides is skipped. Values of type Any become cells,
# which are checked as others are.


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
    """A supervision in a cut."""

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


def kind_of(found: dict[str, Any]) -> str | None:
    """Whether an object is a recording, a supervision or a cut of Lhotse's; None if it is
    none of them."""
    if found.get("type") in _CUTS or {"recording", "start", "duration"} <= found.keys():
        return "cut"
    if {"sources", "sampling_rate"} <= found.keys():
        return "recording"
    if {"recording_id", "start", "duration"} <= found.keys() and not any(
        meaning_of(key) == "path" for key in found
    ):
        return "supervision"
    return None


def is_shar(source: Source) -> bool:
    """Whether a source is a folder of Lhotse Shar."""
    return any(map(_CUTS_OF_SHAR.fullmatch, source.names))


def is_lhotse(source: Source) -> bool:
    """Whether a source is a folder of Lhotse Shar, or a file of recordings, supervisions
    or cuts."""
    return is_shar(source) or kind_of(source.first_object) is not None


def read_lhotse(source: Source) -> Iterator[Batch]:
    """Recordings, supervisions (a ManifestError if their recordings are not beside them),
    or cuts, also a folder's."""
    source.has_types = True
    for places, cells in _cuts_of_folder(source) if is_shar(source) else _rows_of_file(source):
        there = {
            name: values
            for name, values in cells.items()
            if name == "id" or values.count(None) < len(values)
        }
        yield places, {"path": cells["path"], **there}


def _rows_of_file(source: Source) -> Iterator[Batch]:
    stream, kind = source.stream, kind_of(source.first_object)
    reader: tuple[type, Callable[[Any], Sequence[Any]]] = (
        _Cut,
        partial(_of_cut, _SharTar(source, source.path.name)),
    )
    if kind == "recording":
        reader = _Recording, _of_recording
    elif kind == "supervision":
        reader = _Supervision, partial(_of_supervision, _audio_beside(source))
    elif kind is None:
        raise ManifestError("the first line is no recording, supervision or cut of Lhotse's")
    of, cells_of = reader
    return batched(json_rows(stream, source.faults, of=of), _COLUMNS, cells_of, source.faults)


def _cuts_of_folder(source: Source) -> Iterator[Batch]:
    if others := {name.partition(".")[0] for name in source.names} - {"cuts", "recording"}:
        source.notes.append(
            "of Lhotse Shar, cuts and recording are read, and nothing else: "
            f"{listing(sorted(others))}"
        )
    _refuse_holes(source)
    for name in sorted(filter(_CUTS_OF_SHAR.fullmatch, source.names)):
        base, cells_of = source.faults.file(name), partial(_of_cut, _SharTar(source, name))
        with opened(source.path / name) as stream:
            yield from batched(
                json_rows(stream, source.faults, base, _Cut), _COLUMNS, cells_of, source.faults
            )


def _refuse_holes(source: Source) -> None:
    """Raise a ManifestError if Lhotse Shar lacks cuts or recordings of a number from the
    first to the last that any field has."""
    fields: dict[str, Files] = defaultdict(dict)
    for match in filter(None, map(_FIELD_OF_SHAR.fullmatch, source.names)):
        fields[match[1]][int(match["number"])] = match
    numbers = {number for files in fields.values() for number in files}
    first, last = min(numbers), max(numbers)
    if first > 0:
        source.note(f"the first number of Lhotse Shar is 0, and the first that is here {first}")
    for files in (fields["cuts"], fields["recording"]):
        if files and (wrong := absent(files, first, last + 1 - first)):
            raise ManifestError(f"{wrong[0]}: put all there, or give the paths of some cuts")


class _SharTar:
    """The tar with the audio of a file of cuts of Lhotse Shar."""

    def __init__(self, source: Source, cuts: str) -> None:
        self._source = source
        self._name = (
            f"{cuts.removesuffix('.gz').removesuffix('.jsonl').replace('cuts', 'recording', 1)}.tar"
        )

    def path_of(self, cut: str) -> str:
        return f"{self._name}/{cut}{self._suffix}"

    @cached_property
    def _suffix(self) -> str:
        """How the names of audio end in it; the suffix of the first, for looking at all
        takes as long as a tar does."""
        try:
            with (
                opened(self._source.folder / self._name) as file,
                tarfile.open(fileobj=file, mode="r:") as tar,
            ):
                suffixes = (os.path.splitext(member.name)[1] for member in tar)
                return next(suffix for suffix in suffixes if suffix not in _WITHOUT_AUDIO)
        except (OSError, tarfile.TarError, StopIteration):
            # It may be elsewhere, below --root, and whatever else is wrong with it is
            # said when it is read.
            self._source.note(
                "not each tar can be read beside its cuts: it is taken to hold FLAC, as "
                "Lhotse writes it"
            )
            return ".flac"


def _audio_beside(source: Source) -> dict[str, Audio]:
    """The recordings' audio beside supervisions, in a file of a like name, by id; a
    ManifestError if there is none."""
    beside = source.path.with_name(source.path.name.replace("supervisions", "recordings"))
    if beside == source.path or not beside.is_file():
        there = "" if beside == source.path else f", and there is no {beside.name} beside them"
        raise ManifestError(
            f"supervisions have no paths{there}: `lhotse cut simple` makes cuts of them and "
            "recordings"
        )
    with opened(beside) as stream:
        objects = json_rows(stream, source.faults, source.faults.file(beside.name), _Recording)
        batches = batched(
            objects, ("id", "audio"), lambda one: (str(one.id), _audio(one)), source.faults
        )
        return {
            id_: audio
            for _, cells in batches
            for id_, audio in zip(cells["id"], cells["audio"], strict=True)
        }


def _of_recording(recording: _Recording) -> tuple[Any, ...]:
    path, _ = _audio(recording)
    return recording.id, path, None, recording.duration, *(None for _ in _COLUMNS[4:])


def _of_supervision(recordings: dict[str, Audio], one: _Supervision) -> tuple[Any, ...]:
    if (audio := recordings.get(str(one.recording_id))) is None:
        raise ValueError(f"recording {one.recording_id!r} is not among the recordings")
    path, channels = audio
    return (
        one.id,
        path,
        one.start,
        one.duration,
        _channel(one.channel, channels),
        *_said_by(one),
        one.custom or None,
    )


def _of_cut(tar: _SharTar, cut: _Cut) -> tuple[Any, ...]:
    if cut.type in ("MixedCut", "PaddingCut") or cut.recording is None:
        raise ValueError(f"{cut.type} without a recording is not read: save its audio first")
    if cut.start is msgspec.UNSET or cut.duration is msgspec.UNSET:
        raise ValueError("a cut without start or duration")
    path, channels = _audio(cut.recording, is_shar=True)
    path = tar.path_of(cut.id) if path is None else path
    said = _all_said(cut.supervisions or ())
    return (
        cut.id,
        path,
        cut.start,
        cut.duration,
        _channel(cut.channel, channels),
        *said,
        cut.custom or None,
    )


_said_by: Callable[[_Said], tuple[Any, ...]] = attrgetter(*SAID)
"""The columns of what a supervision says."""


def _all_said(supervisions: Sequence[_Said]) -> tuple[Any, ...]:
    """The columns of what supervisions say: of several, the texts one after the other,
    and each speaker once."""
    if len(supervisions) == 1:
        return _said_by(supervisions[0])
    said = []
    for name in SAID:
        values = [str(value) for one in supervisions if (value := getattr(one, name)) is not None]
        said.append(" ".join(values if name == "text" else dict.fromkeys(values)) or None)
    return tuple(said)


def _channel(wanted: Any, channels: tuple[int, ...]) -> int | None:
    """The number of a part's channel among those of its file; None if they are all there
    are."""
    if (wanted,) == channels or wanted == [*channels]:
        return None
    if isinstance(wanted, list):
        if len(wanted) != 1:
            raise ValueError(
                f"channels {wanted} of {[*channels]}: an utterance has one channel, or all"
            )
        (wanted,) = wanted
    if wanted not in channels:
        raise ValueError(f"channel {wanted!r} is not among the recording's: {[*channels]}")
    return channels.index(wanted)


def _audio(recording: _Recording, is_shar: bool = False) -> Audio:
    """The audio of a recording; only that of a cut may be Shar's."""
    if transforms := recording.transforms:
        names = dict.fromkeys(
            str(one.get("name") if isinstance(one, dict) else one) for one in transforms
        )
        instead = "; ".join(_INSTEAD[name] for name in names if name in _INSTEAD)
        way_out = (
            f"give the cuts without: {instead}"
            if names.keys() <= _INSTEAD.keys()
            else "save its audio first"
        )
        raise ValueError(
            f"the recording has transforms, which are not applied: {listing(names)}: {way_out}"
        )
    if (count := len(recording.sources)) != 1:
        raise ValueError(
            f"the recording has {count} sources, and one is read: make a recording of each"
        )
    (one,) = recording.sources
    if one.type == "command":
        return f"{one.source} |", one.channels
    if one.type == "shar" and is_shar:
        return None, one.channels
    if one.type not in ("file", "url"):
        raise ValueError(
            f"a source of type {one.type!r} is not read, only 'file', 'url' and 'command'"
        )
    return one.source, one.channels
