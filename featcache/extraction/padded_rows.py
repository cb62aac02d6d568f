"""Rows: pieces of clips that are computed in batches with pieces of other clips.

`PendingRows` cuts clips into rows and joins the results, `RowQueue` collects rows of one
padded length until they fill a batch, `compute_rows` computes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from featcache.errors import AudioError
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import (
    ClipFeatures,
    DoesNotFitError,
    Extracted,
    Result,
    Waveform,
    download,
    errors_of,
    in_halves,
    until_it_fits,
)
from featcache.extractors import Extractor, Params
from featcache.extractors.base import Piece, Rows
from featcache.extractors.faults import fault, require_tensor
from featcache.extractors.rows import cut_clip
from featcache.format.shard import Item
from featcache.spec import QUANTIZATION
from featcache.spec.quantize import quantize


@dataclass(frozen=True, eq=False)
class Row:
    """A piece of a clip, to be computed in a batch of rows."""

    pending: PendingRows
    clip: int
    """The number of its clip in `pending`."""
    number: int
    piece: Piece
    """The row's frames that count."""
    is_whole: bool
    """True if the clip is this one piece."""
    waveform: Waveform
    padded_length: int
    """Samples of the row with its padding."""

    @property
    def id(self) -> str:
        """The id of the utterance."""
        return self.pending.items[self.clip].id

    @property
    def seconds(self) -> float:
        """Seconds of audio that its frames stand for."""
        return float(self.pending.extractor.spec.axis.seconds(self.piece.num_frames))


class PendingRows:
    """The results of one version for a part of a batch, while rows are computed. Not
    thread-safe.

    Args:
        leader: The results of a version that shares the model's pass: its rows are
            computed for both. It has the same clips, and its rows are not yet taken.
    """

    def __init__(
        self,
        built: BuiltConfig,
        part: Extracted,
        clips: list[tuple[Item, Waveform]],
        leader: PendingRows | None,
    ) -> None:
        self.built, self.extractor = built, built.extractor
        self.items = [item for item, _ in clips]
        self.spec = part.spec
        self._part = part
        self._rows: list[Row] = []
        self._results: list[list[Result | None]] = []
        """The results of each clip's rows, or the error of cutting it."""
        self.waiting_seconds = 0.0
        """See `Extracted`."""
        self.sharing = [self]
        """The results of all versions that share the rows; the leader's are first."""
        if leader is not None:
            self._results = [[*results] for results in leader._results]
            self._left: int = leader._left
            self.sharing = leader.sharing
            self.sharing.append(self)
            return
        for clip, (item, waveform) in enumerate(clips):
            try:
                with errors_of(built, [item.id]):
                    rows = self._cut(clip, waveform)
            except AudioError as error:
                self._results.append([error])
            else:
                self._results.append([None] * len(rows))
                self._rows += rows
        self._left = len(self._rows)

    def _cut(self, clip: int, waveform: Waveform) -> list[Row]:
        pieces = cut_clip(self.extractor, torch.from_numpy(waveform))
        is_whole = len(pieces) == 1
        rows = []
        for number, (piece, tensor) in enumerate(pieces):
            samples = tensor.numpy()
            if not is_whole:  # otherwise a waiting row would hold the whole clip
                samples = samples.copy()
            length = self.extractor.padded_length(len(samples))
            rows.append(Row(self, clip, number, piece, is_whole, samples, length))
        return rows

    def take_rows(self) -> list[Row]:
        """Take the rows to be computed. Only the caller holds them then."""
        rows, self._rows = self._rows, []
        return rows

    @property
    def is_complete(self) -> bool:
        """True once all rows are computed."""
        return not self._left

    def finish(self, row: Row, results: Sequence[Result], seconds: float) -> None:
        """Take a row's results for all versions that share it, and the seconds that
        computing them took."""
        for pending, result in zip(self.sharing, results, strict=True):
            pending._finish(row, result, seconds / len(results))

    def _finish(self, row: Row, result: Result, seconds: float) -> None:
        self._left -= 1
        self._part.seconds += seconds
        self._results[row.clip][row.number] = result
        if not isinstance(result, AudioError):
            self.waiting_seconds += row.seconds

    def extracted(self) -> Extracted:
        """Return the part, once it is complete."""
        return self._part.take(self.items, map(self._joined, self._results))

    def _joined(self, results: Sequence[Result | None]) -> Result:
        """Join the results of a clip's rows, and quantise them if that is still to be
        done."""
        rows = []
        for result in results:
            if isinstance(result, AudioError):
                return result
            assert result is not None  # all rows are computed
            rows.append(result)
        features, side = rows[0].features, rows[0].side
        if len(rows) > 1:
            features = np.concatenate([row.features for row in rows])
            side = {name: np.concatenate([row.side[name] for row in rows]) for name in side}
        if QUANTIZATION in side or not self.spec.is_quantized:
            return ClipFeatures(features, side)
        levels, parameters = quantize(torch.from_numpy(features), [len(features)])
        return ClipFeatures(levels.numpy(), {**side, QUANTIZATION: parameters.numpy()})


Part = list[Extracted | PendingRows]
"""The results of each version for a part of a batch."""


_Shape = tuple[tuple[Extractor[Params], ...], int]
"""The extractors that share rows, and their padded length."""


class RowQueue:
    """Rows of several batches that wait until enough of one padded length fill a batch. Not
    thread-safe."""

    def __init__(self) -> None:
        self._filling: dict[_Shape, tuple[int, list[Row]]] = {}
        """Rows of one shape, with the lowest number of their batches."""
        self._full: deque[list[Row]] = deque()

    def __bool__(self) -> bool:
        return bool(self._full or self._filling)

    @property
    def full_seconds(self) -> float:
        """Seconds of audio in the full batches, with padding."""
        return sum(
            len(rows) * rows[0].padded_length / rows[0].pending.spec.sample_rate
            for rows in self._full
        )

    def add(self, batch: int, rows: Iterable[Row]) -> None:
        """Add the rows of the batch of that number."""
        for row in rows:
            pending = row.pending
            takers = tuple(version.extractor for version in pending.sharing)
            key = takers, row.padded_length
            oldest, waiting = self._filling.get(key, (batch, []))
            waiting.append(row)
            self._filling[key] = min(batch, oldest), waiting
            on = pending.built.device.torch_device
            if len(waiting) >= pending.extractor.rows(row.padded_length, on):
                self._full.append(waiting)
                del self._filling[key]

    def take_full(self) -> list[Row] | None:
        """Take the rows of a full batch, if there is one."""
        return self._full.popleft() if self._full else None

    def take_oldest(self, batch: int | None = None) -> list[Row] | None:
        """Take the rows that wait with the oldest row, if that is of this batch."""
        key = min(self._filling, key=lambda key: self._filling[key][0], default=None)
        if key is None or batch not in (None, self._filling[key][0]):
            return None
        return self._filling.pop(key)[1]


def compute_now(part: Part) -> list[Extracted]:
    """Compute the rows of a part of a batch, if any are left, without others."""
    queue = RowQueue()
    for result in part:
        queue.add(0, result.take_rows())
    while batch := queue.take_full() or queue.take_oldest():
        started = perf_counter()
        computed = compute_rows(batch)
        seconds = (perf_counter() - started) / len(batch)
        for row, results in zip(batch, computed, strict=True):
            row.pending.finish(row, results, seconds)
    return [result.extracted() for result in part]


def compute_rows(rows: list[Row]) -> list[Sequence[Result]]:
    """Compute rows of one shape: of the same versions, and of one padded length. Returns
    each row's results, one for each version that shares it. If a batch does not fit on the
    device, this and all later ones become smaller."""
    results: list[Sequence[Result] | AudioError] = []

    def compute_next(count: int, alone: bool) -> list[Sequence[Result] | AudioError]:
        batch = rows[len(results) : len(results) + count]
        return in_halves(lambda part: _compute_batch(part, count, alone), batch)

    built, lengths = rows[0].pending.built, [rows[0].padded_length]
    while len(results) < len(rows):
        try:
            results += until_it_fits(compute_next, built.extractor, lengths, built.device)
        except DoesNotFitError as error:  # the next row
            results.append(error)
    num_versions = len(rows[0].pending.sharing)
    return [
        [result] * num_versions if isinstance(result, AudioError) else result for result in results
    ]


def _compute_batch(rows: Sequence[Row], count: int, alone: bool) -> list[Sequence[Result]]:
    """Compute rows in a batch of `count` rows."""
    pending = rows[0].pending
    device, versions = pending.built.device, pending.sharing
    with errors_of(pending.built, (row.id for row in rows), alone), device.slot(alone):
        waveforms = [row.waveform for row in rows]
        batch = device.upload_rows(waveforms, count, rows[0].padded_length)
        takers = [version.extractor for version in versions]
        encoded = pending.extractor.run_for(takers, *batch)
        of_versions = [
            _download_rows(version.built, version.extractor, rows, count, encoded_rows)
            for version, encoded_rows in zip(versions, encoded, strict=True)
        ]
    return [*zip(*of_versions, strict=True)]


def _download_rows(
    built: BuiltConfig, extractor: Extractor[Params], rows: Sequence[Row], count: int, encoded: Rows
) -> list[Result]:
    """Return the results of a batch of `count` rows for one version."""
    device = built.device
    _require_rows(extractor, encoded, rows, count)
    # `PendingRows` quantises pieces of clips, once all are computed.
    are_whole = all(row.is_whole for row in rows)
    features = [encoded.features[i, row.piece.frames] for i, row in enumerate(rows)]
    clips = download(built, features, built.computed_spec.is_quantized and are_whole)
    side_arrays = {
        side.name: device.download(encoded.side[side.name][: len(rows)].contiguous())
        for side in extractor.spec.side
    }
    for i, clip in enumerate(clips):
        if not isinstance(clip, AudioError):
            # Copies, because views would keep all of the batch in memory.
            entries = {
                name: array[i, encoded.entries(name, rows[i].piece.frames)].copy()
                for name, array in side_arrays.items()
            }
            clips[i] = ClipFeatures(clip.features.copy(), {**clip.side, **entries})
    return clips


def _require_rows(
    extractor: Extractor[Params], encoded: object, rows: Sequence[Row], count: int
) -> None:
    if not isinstance(encoded, Rows):
        raise fault(extractor, f"encode returned {type(encoded).__name__}, and not Rows")
    # Padding may have further frames.
    returned_frames = getattr(encoded.features, "shape", ())[1:2]
    frames = max([*returned_frames, *(row.piece.frames.stop for row in rows)])
    shape = count, frames, *extractor.spec.item_shape
    require_tensor(extractor, "encode", encoded.features, shape)
    for side in extractor.spec.side:
        if side.name not in encoded.side:
            raise fault(extractor, f"encode returned no side array {side.name}")
