"""Lhotse's recordings, supervisions and cuts, as JSON lines; and Lhotse Shar.

Shar is a folder of cuts, `cuts.000000.jsonl.gz`, each beside a tar with their audio, `recording.000000.tar`: of each
cut in a member called by its id, with a suffix that is the same for all, and a JSON file that says nothing else than
the cut. See https://github.com/lhotse-speech/lhotse/tree/master/lhotse/shar.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

from featcache.errors import ManifestError, listing
from featcache.manifest.columns import meaning_of
from featcache.manifest.formats.source import Batch, Faults, Source, lines_of, opened
from featcache.manifest.formats.tables import Rows, json_batches, json_rows

_SAID = ("text", "speaker", "language", "gender")
"""What supervisions say that becomes a column."""

_CUTS_OF_SHAR = re.compile(r"cuts\.\d+\.jsonl(?:\.gz)?")
_WITHOUT_AUDIO = (".json", ".nodata", ".nometa")
"""The suffixes of what lies beside audio in Shar, or stands for what a cut has not."""

_CUTS = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")


_Audio = tuple[str, tuple[int, ...]]
"""The path of a recording's audio, and the numbers of its channels: tuples, which the garbage collector can forget."""


class _NotReadError(ValueError):
    """What is wrong with an object."""


def kind_of(found: dict[str, Any]) -> str | None:
    """Whether an object is a recording, a supervision or a cut of Lhotse's; None if it is none of them."""
    if found.get("type") in _CUTS or {"recording", "start", "duration"} <= found.keys():
        return "cut"
    if {"sources", "sampling_rate"} <= found.keys():
        return "recording"
    if {"recording_id", "start", "duration"} <= found.keys() and not any(meaning_of(key) == "path" for key in found):
        return "supervision"
    return None


def is_shar(source: Source) -> bool:
    """Whether a source is a folder of Lhotse Shar."""
    return any(map(_CUTS_OF_SHAR.fullmatch, source.names))


def read_lhotse(source: Source) -> Iterator[Batch]:
    """Recordings, supervisions (with the recordings that lie beside them), or cuts, also those of a folder.

    Raises:
        ManifestError: It is none of these, or supervisions whose recordings are not beside them.
    """
    if is_shar(source):
        yield from json_batches(_cuts_of_folder(source), source.required, source.faults)
        return
    rows = json_rows(lines_of(source.stream, source.faults), source.faults)
    kind = kind_of(source.first_object)
    if kind is None:
        raise ManifestError("the first line is no recording, supervision or cut of Lhotse's")
    convert: Callable[[dict[str, Any]], dict[str, Any]] = _of_recording
    if kind == "cut":
        convert = partial(_of_cut, _SharTar(source, source.path.name))
    elif kind == "supervision":
        convert = partial(_of_supervision, _audio_beside(source))
    yield from json_batches(_converted(rows, convert, source.faults), source.required, source.faults)


def _cuts_of_folder(source: Source) -> Rows:
    names = sorted(filter(_CUTS_OF_SHAR.fullmatch, source.names))
    if others := {name.partition(".")[0] for name in source.names} - {"cuts", "recording"}:
        source.notes.append(f"of Lhotse Shar, cuts and recording are read, and nothing else: {listing(sorted(others))}")
    for name in names:
        base = source.faults.file(name)
        with opened(source.path / name) as stream:
            rows = json_rows(lines_of(stream, source.faults, base), source.faults, base)
            yield from _converted(rows, partial(_of_cut, _SharTar(source, name)), source.faults)


class _SharTar:
    """The tar with the audio of some cuts of Lhotse Shar.

    Args:
        source: What is read.
        cuts: The name of the file of cuts.
    """

    def __init__(self, source: Source, cuts: str) -> None:
        self._source = source
        self._name = f"{cuts.removesuffix('.gz').removesuffix('.jsonl').replace('cuts', 'recording', 1)}.tar"

    def path_of(self, cut: str) -> str:
        """The path of a cut's audio."""
        return f"{self._name}/{cut}{self._suffix}"

    @cached_property
    def _suffix(self) -> str:
        """How the names of audio end in it; the suffix of the first, for looking at all takes as long as a tar does."""
        try:
            with opened(self._source.folder / self._name) as file, tarfile.open(fileobj=file, mode="r:") as tar:
                suffixes = (os.path.splitext(member.name)[1] for member in tar)
                return next(suffix for suffix in suffixes if suffix not in _WITHOUT_AUDIO)
        except (OSError, tarfile.TarError, StopIteration):
            # It may be elsewhere, below --root, and whatever else is wrong with it is said when it is read.
            note = "not each tar of audio can be read beside its cuts: it is taken to hold FLAC, as Lhotse writes it"
            if note not in self._source.notes:
                self._source.notes.append(note)
            return ".flac"


def _converted(rows: Rows, convert: Callable[[dict[str, Any]], dict[str, Any]], faults: Faults) -> Rows:
    for place, row in rows:
        try:
            yield place, convert(row)
        except _NotReadError as error:
            faults.add(place, str(error))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            what = f"there is no {error}" if isinstance(error, KeyError) else str(error)
            faults.add(place, f"not as Lhotse writes it: {what}")


def _audio_beside(source: Source) -> dict[str, _Audio]:
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
        rows = json_rows(lines_of(stream, source.faults, base), source.faults, base)
        found = _converted(rows, lambda row: {"id": str(row["id"]), "audio": _audio(row)}, source.faults)
        return {row["id"]: row["audio"] for _, row in found}


def _of_recording(recording: dict[str, Any]) -> dict[str, Any]:
    path, _ = _audio(recording)
    return {"id": recording["id"], "path": path, "duration": recording["duration"]}


def _of_supervision(recordings: dict[str, _Audio], supervision: dict[str, Any]) -> dict[str, Any]:
    audio = recordings.get(str(supervision["recording_id"]))
    if audio is None:
        raise _NotReadError(f"recording {supervision['recording_id']!r} is not among the recordings")
    row = _with_said(_segment(supervision, audio), supervision)
    return row | custom if (custom := _custom(supervision)) else row


def _of_cut(tar: _SharTar, cut: dict[str, Any]) -> dict[str, Any]:
    if cut.get("type") in ("MixedCut", "PaddingCut") or "recording" not in cut:
        raise _NotReadError(f"{cut.get('type', 'a cut')} without a recording is not read: save its audio first")
    supervisions: Sequence[dict[str, Any]] = cut.get("supervisions") or ()
    path, channels = _audio(cut["recording"], is_shar=True)
    row = _segment(cut, (path or tar.path_of(cut["id"]), channels))
    row = _with_said(row, supervisions[0]) if len(supervisions) == 1 else row | _all_said(supervisions)
    return row | custom if (custom := _custom(cut)) else row


def _with_said(row: dict[str, Any], supervision: dict[str, Any]) -> dict[str, Any]:
    """The row, which now has what a supervision says that becomes a column."""
    for name in _SAID:
        if (value := supervision.get(name)) is not None:
            row[name] = value
    return row


def _all_said(supervisions: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The same of several: their texts one after the other, and each speaker once."""
    said: dict[str, list[Any]] = {}
    for supervision in supervisions:
        for name, value in _with_said({}, supervision).items():
            if name == "text" or value not in said.get(name, ()):
                said.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else " ".join(values) for name, values in said.items()}


def _segment(found: dict[str, Any], audio: _Audio) -> dict[str, Any]:
    """The row of a part of a recording."""
    path, channels = audio
    row = {"id": found["id"], "path": path, "start": found["start"], "duration": found["duration"]}
    wanted = found.get("channel", 0)
    if (wanted,) == channels or wanted == [*channels]:  # all there are, so it tells nothing
        return row
    if isinstance(wanted, list):
        if len(wanted) != 1:
            raise _NotReadError(f"channels {wanted} of {[*channels]}: an utterance has one channel, or all")
        (wanted,) = wanted
    if wanted not in channels:
        raise _NotReadError(f"channel {wanted!r} is not among the recording's: {[*channels]}")
    return {**row, "channel": channels.index(wanted)}


def _audio(recording: dict[str, Any], is_shar: bool = False) -> _Audio:
    """The audio of a recording; without a path, if it is Shar's, which a cut's may be."""
    if transforms := recording.get("transforms"):
        names = listing(str(one.get("name") if isinstance(one, dict) else one) for one in transforms)
        raise _NotReadError(f"the recording has transforms, which are not applied: {names}: save its audio first")
    sources: Sequence[dict[str, Any]] = recording["sources"]
    if len(sources) != 1:
        raise _NotReadError(f"the recording has {len(sources)} sources, and one is read: make a recording of each")
    (one,) = sources
    if one["type"] == "command":
        return f"{one['source']} |", tuple(one["channels"])
    if one["type"] == "shar" and is_shar:
        return "", tuple(one["channels"])
    if one["type"] not in ("file", "url"):
        raise _NotReadError(f"a source of type {one['type']!r} is not read, only 'file', 'url' and 'command'")
    return one["source"], tuple(one["channels"])


def _custom(found: dict[str, Any]) -> dict[str, Any]:
    return {"custom": found["custom"]} if found.get("custom") else {}
