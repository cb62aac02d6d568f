"""Lhotse's recordings, supervisions and cuts, as JSON lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from featcache.errors import ManifestError, listing
from featcache.manifest.columns import meaning_of
from featcache.manifest.formats.source import Batch, Faults, Source, batched, lines_of, opened
from featcache.manifest.formats.tables import Rows, json_rows

_SAID = ("text", "speaker", "language", "gender")
"""What supervisions say that becomes a column."""

_CUTS = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")

_COLUMNS = ("id", "path", "start", "duration", "channel", *_SAID, "custom")
"""The cells of a row."""

Audio = tuple[str, tuple[int, ...]]
"""The path of a recording's audio, and the numbers of its channels: tuples, which the garbage collector can forget."""


class _NotReadError(ValueError):
    """What is wrong with an object."""


# Lhotse's objects; what they have besides is skipped. Values of type Any become cells, which are checked as others are.


class _AudioSource(msgspec.Struct, gc=False):
    type: Any
    channels: tuple[int, ...]
    source: Any


class _Recording(msgspec.Struct, gc=False):
    id: Any
    duration: Any
    sources: tuple[_AudioSource, ...]
    transforms: Any = None


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
    start: Any = None
    duration: Any = None
    channel: Any = 0
    custom: Any = None
    type: Any = "a cut"
    recording: _Recording | None = None
    supervisions: tuple[_Said, ...] | None = None


def kind_of(found: dict[str, Any]) -> str | None:
    """Whether an object is a recording, a supervision or a cut of Lhotse's; None if it is none of them."""
    if found.get("type") in _CUTS or {"recording", "start", "duration"} <= found.keys():
        return "cut"
    if {"sources", "sampling_rate"} <= found.keys():
        return "recording"
    if {"recording_id", "start", "duration"} <= found.keys() and not any(meaning_of(key) == "path" for key in found):
        return "supervision"
    return None


def read_lhotse(source: Source) -> Iterator[Batch]:
    """Recordings, supervisions (with the recordings that lie beside them), or cuts.

    Raises:
        ManifestError: It is none of these, or supervisions whose recordings are not beside them.
    """
    lines = lines_of(source.stream, source.faults)
    lines = lines_of(source.stream, source.faults)
    kind = kind_of(source.first_object)
    if kind is None:
        raise ManifestError("the first line is no recording, supervision or cut of Lhotse's")
    of, row_of = _READ[kind]
    if kind == "supervision":
        row_of = partial(row_of, _audio_beside(source))
    rows = json_rows(lines, source.faults, of=of)
    for places, cells in batched(_converted(rows, row_of, source.faults), _COLUMNS):
        there = {name: values for name, values in cells.items() if name == "id" or values.count(None) < len(values)}
        yield places, {"path": cells["path"], **there}


def _converted(rows: Rows, convert: Callable[[Any], Any], faults: Faults) -> Rows:
    for place, row in rows:
        try:
            yield place, convert(row)
        except _NotReadError as error:
            faults.add(place, str(error))


def _audio_beside(source: Source) -> dict[str, Audio]:
    """The audio of the recordings beside supervisions, by id: Lhotse names the files alike.

    Raises:
        ManifestError: There is no such file.
    """
    beside = source.path.with_name(source.path.name.replace("supervisions", "recordings"))
    if beside == source.path or not beside.is_file():
        there = "" if beside == source.path else f", and there is no {beside.name} beside them"
        raise ManifestError(f"supervisions have no paths{there}: `lhotse cut simple` makes cuts of them and recordings")
    base = source.faults.file(beside.name)
    with opened(beside) as stream:
        rows = json_rows(lines_of(stream, source.faults, base), source.faults, base, _Recording)
        found = _converted(rows, lambda recording: (str(recording.id), _audio(recording)), source.faults)
        return dict(row for _, row in found)


def _of_recording(recording: _Recording) -> tuple[Any, ...]:
    path, _ = _audio(recording)
    return recording.id, path, None, recording.duration, *(None for _ in _COLUMNS[4:])


def _of_supervision(recordings: dict[str, Audio], one: _Supervision) -> tuple[Any, ...]:
    audio = recordings.get(str(one.recording_id))
    if audio is None:
        raise _NotReadError(f"recording {one.recording_id!r} is not among the recordings")
    said = one.text, one.speaker, one.language, one.gender
    return one.id, audio[0], one.start, one.duration, _channel(one.channel, audio[1]), *said, one.custom or None


def _of_cut(cut: _Cut) -> tuple[Any, ...]:
    if cut.type in ("MixedCut", "PaddingCut") or cut.recording is None:
        raise _NotReadError(f"{cut.type} without a recording is not read: save its audio first")
    if cut.start is None or cut.duration is None:
        raise _NotReadError("a cut without start or duration")
    path, channels = _audio(cut.recording)
    said = _all_said(cut.supervisions or ())
    return cut.id, path, cut.start, cut.duration, _channel(cut.channel, channels), *said, cut.custom or None


def _all_said(supervisions: Sequence[_Said]) -> tuple[Any, ...]:
    """The columns of what supervisions say: of several, the texts one after the other, and each speaker once."""
    if len(supervisions) == 1:
        (one,) = supervisions
        return one.text, one.speaker, one.language, one.gender
    said = []
    for name in _SAID:
        values = [value for one in supervisions if (value := getattr(one, name)) is not None]
        values = values if name == "text" else list(dict.fromkeys(values))
        said.append(" ".join(map(str, values)) if len(values) > 1 else values[0] if values else None)
    return tuple(said)


def _channel(wanted: Any, channels: tuple[int, ...]) -> int | None:
    """The number of a part's channel among those of its file; None if they are all there are."""
    if (wanted,) == channels or wanted == [*channels]:
        return None
    if isinstance(wanted, list):
        if len(wanted) != 1:
            raise _NotReadError(f"channels {wanted} of {[*channels]}: an utterance has one channel, or all")
        (wanted,) = wanted
    if wanted not in channels:
        raise _NotReadError(f"channel {wanted!r} is not among the recording's: {[*channels]}")
    return channels.index(wanted)


def _audio(recording: _Recording) -> Audio:
    if transforms := recording.transforms:
        names = listing(str(one.get("name") if isinstance(one, dict) else one) for one in transforms)
        raise _NotReadError(f"the recording has transforms, which are not applied: {names}: save its audio first")
    if len(recording.sources) != 1:
        count = len(recording.sources)
        raise _NotReadError(f"the recording has {count} sources, and one is read: make a recording of each")
    (one,) = recording.sources
    if one.type == "command":
        return f"{one.source} |", one.channels
    if one.type not in ("file", "url"):
        raise _NotReadError(f"a source of type {one.type!r} is not read, only 'file', 'url' and 'command'")
    return one.source, one.channels


_READ: dict[str, tuple[type, Callable[..., tuple[Any, ...]]]] = {
    "recording": (_Recording, _of_recording),
    "supervision": (_Supervision, _of_supervision),
    "cut": (_Cut, _of_cut),
}
"""The type of each kind of object, and what makes a row of it."""
