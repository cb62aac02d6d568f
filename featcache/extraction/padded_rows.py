"""Rows: pieces of clips that are computed in batches with pieces of other clips, and then
put together again.

An extractor that takes rows gets batches of one padded length. `PendingRows` cuts the
clips of a part of a batch into rows, `RowQueue` collects rows until there are enough for
a batch, `compute_rows` computes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from featcache.device import Device
from featcache.errors import AudioError, ConfigError, listing, percent
from featcache.extraction.features import (
    ClipFeatures,
    DoesNotFitError,
    Extracted,
    Waveform,
    WorkerTimes,
    download,
    errors_of,
    in_halves,
    until_it_fits,
)
from featcache.extractors import Extractor, Params
from featcache.extractors.base import Batching, fault, require_tensor
from featcache.extractors.rows import Piece, RowExtractor, Rows
from featcache.format.shard import Item
from featcache.quantize import quantize
from featcache.spec import QUANTIZATION


@dataclass(frozen=True, eq=False)
class Row:
    """A piece of a clip, to be computed in a batch of rows."""

    pending: PendingRows
    """The part of a batch that the row belongs to."""
    clip: int
    """The number of its clip in that part."""
    number: int
    """The number of the piece in its clip."""
    piece: Piece
    """Which of the row's frames count."""
    is_whole: bool
    """Whether the clip is this one piece."""
    waveform: Waveform
    """`[piece.num_samples]`."""
    padded_length: int
    """The number of samples of the row with its padding."""

    @property
    def id(self) -> str:
        """The id of the utterance."""
        return self.pending.items[self.clip].id

    @property
    def seconds(self) -> float:
        """How much audio its frames stand for."""
        seconds: float = self.pending.extractor.spec.axis.seconds(self.piece.num_frames)
        return seconds

    @property
    def frames(self) -> slice:
        """The row's frames that count."""
        return slice(self.piece.skip, self.piece.skip + self.piece.num_frames)


class PendingRows:
    """What one version gets from a part of a batch, while the rows of some items are
    computed, of which each has a waveform, `[num_samples]`. Not thread-safe: the caller
    sees to it that one thread at a time calls `finish`."""

    def __init__(
        self, extractor: RowExtractor[Params], part: Extracted, clips: list[tuple[Item, Waveform]]
    ) -> None:
        self.extractor = extractor
        self.items = [item for item, _ in clips]
        self.spec = part.spec
        self._part = part
        self._rows: list[Row] = []
        self._results: list[list[ClipFeatures | AudioError | None]] = []
        """What the rows of each clip gave, or why it cannot be cut into rows."""
        for clip, (item, waveform) in enumerate(clips):
            try:
                with errors_of(extractor, [item.id]):
                    rows = list(self._cut(clip, waveform))
            except AudioError as error:
                self._results.append([error])
            else:
                self._results.append([None] * len(rows))
                self._rows += rows
        self._left = len(self._rows)

    def _cut(self, clip: int, waveform: Waveform) -> Iterator[Row]:
        """Cut a clip into rows."""
        pieces = self.extractor.pieces(len(waveform))
        for number, piece in enumerate(pieces):
            samples = waveform[piece.start : piece.start + piece.num_samples]
            # or a row that waits would keep the whole clip
            samples = samples.copy() if len(pieces) > 1 else samples
            yield Row(
                self,
                clip,
                number,
                piece,
                len(pieces) == 1,
                samples,
                self.extractor.padded_length(len(samples)),
            )

    def take_rows(self) -> list[Row]:
        """The rows to be computed. Who takes them alone holds them, and their waveforms."""
        rows, self._rows = self._rows, []
        return rows

    @property
    def is_complete(self) -> bool:
        """Whether all rows are computed."""
        return not self._left

    def finish(self, row: Row, result: ClipFeatures | AudioError, seconds: float) -> None:
        """Take a row's result, or why there is none, and the seconds that computing it
        took."""
        self._left -= 1
        self._part.seconds += seconds
        self._results[row.clip][row.number] = result

    def extracted(self) -> Extracted:
        """The part with the results of all rows, once they are complete."""
        return self._part.take(self.items, map(self._joined, self._results))

    def _joined(
        self, results: Sequence[ClipFeatures | AudioError | None]
    ) -> ClipFeatures | AudioError:
        """The features of a clip, whose rows gave these; quantised, if they are to be and
        are not yet."""
        if error := next((result for result in results if isinstance(result, AudioError)), None):
            return error
        # all, since it is complete
        rows = [result for result in results if isinstance(result, ClipFeatures)]
        if len(rows) == 1 and (QUANTIZATION in rows[0].side or not self.spec.is_quantized):
            return rows[0]
        features = np.concatenate([row.features for row in rows])
        side = {name: np.concatenate([row.side[name] for row in rows]) for name in rows[0].side}
        if not self.spec.is_quantized:
            return ClipFeatures(features, side)
        levels, parameters = quantize(torch.from_numpy(features), [len(features)])
        return ClipFeatures(levels.numpy(), side | {QUANTIZATION: parameters.numpy()})


class RowQueue:
    """Rows of several batches that wait until there are enough of one padded length to
    compute them. Not thread-safe.

    The type of the device that will compute them decides how many rows make a batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._filling: dict[tuple[RowExtractor[Params], int], tuple[int, list[Row]]] = {}
        """The rows of an extractor and a padded length, and the lowest number of a batch
        that has some of them."""
        self._full: deque[list[Row]] = deque()

    def __bool__(self) -> bool:
        """Whether any row waits."""
        return bool(self._full or self._filling)

    @property
    def full_seconds(self) -> float:
        """How much audio the full batches hold, with padding."""
        return sum(
            len(rows) * rows[0].padded_length / rows[0].pending.spec.sample_rate
            for rows in self._full
        )

    def add(self, batch: int, rows: Iterable[Row]) -> None:
        """Add the rows of the batch of that number."""
        for row in rows:
            extractor = row.pending.extractor
            key = extractor, row.padded_length
            oldest, waiting = self._filling.get(key, (batch, []))
            waiting.append(row)
            self._filling[key] = min(batch, oldest), waiting
            if len(waiting) >= extractor.rows(row.padded_length, self._device):
                self._full.append(waiting)
                del self._filling[key]

    def take_full(self) -> list[Row] | None:
        """Take the rows of a full batch, if there is one."""
        return self._full.popleft() if self._full else None

    def take_oldest(self, batch: int | None = None) -> list[Row] | None:
        """Take the rows that wait with the oldest row, if that is of this batch, though
        they do not fill a batch."""
        key = min(self._filling, key=lambda key: self._filling[key][0], default=None)
        if key is None or batch not in (None, self._filling[key][0]):
            return None
        return self._filling.pop(key)[1]


def compute_now(given: Extracted | PendingRows, device: Device, times: WorkerTimes) -> Extracted:
    """What a version gets from a part of a batch, once its rows, if any are left, are
    computed without others."""
    if isinstance(given, Extracted):
        return given
    queue = RowQueue(device.torch_device)
    queue.add(0, given.take_rows())
    while rows := queue.take_full() or queue.take_oldest():
        started = perf_counter()
        results = compute_rows(rows, device)
        seconds = perf_counter() - started
        times["extract"] += seconds
        for row, result in zip(rows, results, strict=True):
            given.finish(row, result, seconds / len(rows))
    return given.extracted()


def compute_rows(rows: list[Row], device: Device) -> list[ClipFeatures | AudioError]:
    """What rows of one version and padded length give, in their order; computed in
    batches as the extractor wants.

    If a batch does not fit on the device, this and all later ones become smaller. A
    single row that does not fit is tried again with nothing beside it."""
    results: list[ClipFeatures | AudioError] = []

    def compute_next(count: int, alone: bool) -> list[ClipFeatures | AudioError]:
        batch = rows[len(results) : len(results) + count]
        return in_halves(lambda some: _compute_batch(some, count, device, alone), batch)

    while len(results) < len(rows):
        try:
            results += until_it_fits(
                compute_next, rows[0].pending.extractor, [rows[0].padded_length], device
            )
        except DoesNotFitError as error:  # the next row
            results.append(error)
    return results


def _compute_batch(
    rows: Sequence[Row], count: int, device: Device, alone: bool
) -> list[ClipFeatures | AudioError]:
    """Compute rows in a batch of `count` rows. Raises AudioError if one of their clips
    cannot be extracted."""
    extractor, spec = rows[0].pending.extractor, rows[0].pending.spec
    with errors_of(extractor, (row.id for row in rows), device, alone), device.slot(alone):
        encoded = extractor.run(
            *device.upload_rows([row.waveform for row in rows], count, rows[0].padded_length)
        )
        _require_rows(extractor, encoded, rows, count)
        # Pieces of clips are quantised by `PendingRows`, once all are there.
        quantizes = spec.is_quantized and all(row.is_whole for row in rows)
        features = [encoded.features[i, row.frames] for i, row in enumerate(rows)]
        clips = download(extractor, features, spec, device, quantizes)
        names = [side.name for side in extractor.spec.side]
        side = {
            name: device.download(encoded.side[name][: len(rows)].contiguous()) for name in names
        }
    # Copies, because views would keep all of the batch in memory.
    sides = [{name: array[i].copy() for name, array in side.items()} for i in range(len(clips))]
    return [
        clip
        if isinstance(clip, AudioError)
        else ClipFeatures(clip.features.copy(), {**clip.side, **own})
        for clip, own in zip(clips, sides, strict=True)
    ]


def _require_rows(
    extractor: RowExtractor[Params], encoded: object, rows: Sequence[Row], count: int
) -> None:
    """Raise ExtractorError unless `encode` has returned `count` rows, as long as these are."""
    if not isinstance(encoded, Rows):
        raise fault(extractor, f"encode returned {type(encoded).__name__}, and not Rows")
    made = getattr(encoded.features, "shape", ())[1:2]
    frames = max([*made, *(row.frames.stop for row in rows)])
    shape = count, frames, *extractor.spec.item_shape
    require_tensor(extractor, "encode", encoded.features, shape)
    for side in extractor.spec.side:
        if side.name not in encoded.side:
            raise fault(extractor, f"encode returned no side array {side.name}")


# How a run puts rows together: as the extractor declares, unless a probe of the device
# found a difference

BATCHINGS: tuple[Batching, ...] = ("single", "equal_length", "padded")
"""The ways to put rows together, from the strictest to the loosest."""


@dataclass(frozen=True)
class BatchingChoice:
    """How a run puts the rows of one version together."""

    batching: Batching
    """One of `BATCHINGS`; `frames` for extractors that take no rows."""
    mismatch: float | None = None
    """The share of codes (of frames, for float features) that differed, with this
    batching and by more than ties, from each clip alone in fp32, in a probe of this
    device; None if there was no such probe."""
    note: str | None = None
    """A line that a user should read."""


def declared_batchings(extractor: Extractor[Params]) -> tuple[Batching, ...]:
    """The batchings that an extractor of rows declares to be safe, from the strictest to
    the loosest."""
    return BATCHINGS[: BATCHINGS.index(extractor.batching) + 1]


def precision_of(params: Params | None) -> str:
    """The precision that an extractor's parameters ask for; `fp32` if they have none."""
    return str(getattr(params, "precision", "fp32"))


_Probes = Iterable[Mapping[str, Any]]
"""Documents that `featcache probe` has kept with a version."""


def choose_batching(
    extractor: Extractor[Params],
    probes: _Probes,
    device: str,
    request: str | None = None,
    allow_mismatch: bool = False,
) -> BatchingChoice:
    """Decide how a run puts rows together. Raises ConfigError if a request is unknown, or
    too loose and not allowed.

    If the user requests nothing, it is the loosest batching that the extractor declares
    and that the device's newest probe, if there is one, found to be clean: at the
    config's precision, it changed no frame by more than rounding. (What a lower precision
    changes by itself, the config has asked for.)

    Args:
        probes: Those of the version.
        device: The label of the device.
        request: What the user asks for, one of `BATCHINGS`.
        allow_mismatch: Accept the request even if it is looser than what is declared or
            was found to be clean.
    """
    kind = type(extractor).__name__
    if not isinstance(extractor, RowExtractor):
        only = extractor.batching
        if request not in (None, only):
            raise ConfigError(
                f"--batching {request}: {kind} has one batching policy, {only}: leave "
                "--batching out"
            )
        return BatchingChoice(only)
    measured = _measured(probes, device, precision_of(getattr(extractor, "params", None)))
    disturbed = {batching: float(trial["disturbed"]) for batching, trial in measured.items()}
    declared = declared_batchings(extractor)
    clean = [batching for batching in declared if not disturbed.get(batching)] or ["single"]
    asked, chosen = (declared[-1], clean[-1]) if request is None else (request, request)
    if chosen not in BATCHINGS:
        raise ConfigError(
            f"--batching {request}: there is no such policy; choose from {listing(BATCHINGS)}"
        )
    why = None
    if disturbed.get(asked):
        why = f"by the probe of {device}, {asked} changes {percent(disturbed[asked])} of the frames"
    elif asked not in declared:
        tested = "; a probe found no difference in its sample" if asked in measured else ""
        why = f"it is looser than {declared[-1]}, the loosest policy that {kind} declares{tested}"
    if request and why and not allow_mismatch:
        raise ConfigError(
            f"--batching {request}: {why}: use --batching {clean[-1]}, or add --allow-mismatch"
        )
    mismatch = float(measured[chosen]["mismatch"]) if chosen in measured else None
    return BatchingChoice(chosen, mismatch, why and f"batching {chosen}: {why}")


def _measured(probes: _Probes, device: str, precision: str) -> dict[str, Mapping[str, Any]]:
    """What the device's newest probe measured at a precision, by batching."""
    of_device = [probe for probe in probes if probe.get("device") == device]
    newest: Mapping[str, Any] = max(of_device, key=lambda probe: str(probe.get("date")), default={})
    measured = [trial for trial in newest.get("measured", ()) if trial["error"] is None]
    return {trial["policy"]: trial for trial in measured if trial["precision"] == precision}
