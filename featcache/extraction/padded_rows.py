"""Rows: pieces of clips that are computed in batches with pieces of other clips, and then put together again.

An extractor that takes rows gets batches of one padded length. `PendingRows` cuts the clips of a part of a batch into
rows, `RowQueue` collects rows until there are enough for a batch, `compute_rows` computes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.device import Device
from featcache.errors import AudioError, ExtractorError
from featcache.extraction.features import Extracted, cast, errors_of, in_halves, last_traceback, without_non_finite
from featcache.extraction.out_of_memory import DoesNotFitError, OutOfMemoryRetry
from featcache.extractors import Params
from featcache.extractors.rows import Piece, RowExtractor
from featcache.format.shard import Item
from featcache.quantize import quantize
from featcache.spec import QUANTIZATION, FeatureSpec
from featcache.version.ledger import Failure


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
    waveform: NDArray[np.float32]
    """`[piece.num_samples]`."""
    padded_length: int
    """The number of samples of the row with its padding."""

    @property
    def id(self) -> str:
        """The id of the utterance."""
        return self.pending.items[self.clip].id

    @property
    def frames(self) -> slice:
        """The row's frames that count."""
        return slice(self.piece.skip, self.piece.skip + self.piece.num_frames)


@dataclass(frozen=True)
class RowResult:
    """What one row gave."""

    features: NDArray[Any]
    """`[frames, *item_shape]` of the stored dtype; float32 if they are quantised once all of the clip's are there."""
    side: dict[str, NDArray[Any]]


class PendingRows:
    """What one version gets from a part of a batch, while its rows are computed.

    Not thread-safe: the caller sees to it that one thread at a time calls `finish`. Each item has a waveform,
    `[num_samples]`; other utterances of the part have failed before: `failures`, with the `traceback` of what the
    extractor has raised, if anything. `fail` makes the failure of an item by its number."""

    rows: list[Row]
    """The rows to be computed; empty once all are."""

    def __init__(
        self,
        extractor: RowExtractor[Params],
        spec: FeatureSpec,
        items: list[Item],
        waveforms: Sequence[NDArray[np.float32]],
        failures: list[Failure],
        fail: Callable[[int, AudioError], Failure],
        resampled: Mapping[str, int] | None = None,
        traceback: str = "",
    ) -> None:
        self.extractor = extractor
        self.spec = spec
        self.items = items
        self.rows = []
        self._failures = failures
        self._fail = fail
        self._resampled = resampled or {}
        self._traceback = traceback
        self._seconds = 0.0
        self._errors: dict[int, AudioError] = {}
        self._results: list[list[RowResult | None]] = []
        for clip, waveform in enumerate(waveforms):
            try:
                with errors_of(extractor, [items[clip].id]):
                    rows = list(self._cut(clip, waveform))
            except AudioError as error:
                self._errors[clip] = error
                rows = []
            self._results.append([None] * len(rows))
            self.rows += rows
        self._left = len(self.rows)

    def _cut(self, clip: int, waveform: NDArray[np.float32]) -> Iterator[Row]:
        """Cut a clip into rows."""
        pieces = self.extractor.pieces(len(waveform))
        for number, piece in enumerate(pieces):
            samples = waveform[piece.start : piece.start + piece.num_samples]
            length = self.extractor.padded_length(len(samples))
            yield Row(self, clip, number, piece, len(pieces) == 1, samples, length)

    @property
    def is_complete(self) -> bool:
        """Whether all rows are computed."""
        return not self._left

    def finish(self, row: Row, result: RowResult | AudioError, seconds: float) -> None:
        """Take a row's result, or why there is none, and the seconds that computing it took."""
        self._left -= 1
        self._seconds += seconds
        if isinstance(result, AudioError):
            self._errors.setdefault(row.clip, result)
        else:
            self._results[row.clip][row.number] = result
        if self.is_complete:
            self.rows = []  # and with them the waveforms

    def compute(self, device: Device) -> None:
        """Compute all rows now, without rows of others."""
        by_length: dict[int, list[Row]] = {}
        for row in self.rows:
            by_length.setdefault(row.padded_length, []).append(row)
        for rows in by_length.values():
            started = perf_counter()
            results = compute_rows(rows, device)
            seconds = (perf_counter() - started) / len(rows)
            for row, result in zip(rows, results, strict=True):
                self.finish(row, result, seconds)

    def extracted(self) -> Extracted:
        """The results of all rows, in the order of the clips, once they are complete."""
        spec = self.spec
        whole = [clip for clip in range(len(self.items)) if clip not in self._errors]
        results = {clip: [result for result in self._results[clip] if result is not None] for clip in whole}
        parameters = None
        if spec.is_quantized:
            results = {clip: [_quantized_clip(rows)] for clip, rows in results.items()}
            parameters = np.stack([rows[0].side[QUANTIZATION][0] for rows in results.values()]) if results else None
        rows = [result.features for clip in whole for result in results[clip]]
        features, non_finite = without_non_finite(
            np.concatenate(rows) if rows else np.empty((0, *spec.item_shape), spec.stored_dtype),
            [sum(len(result.features) for result in results[clip]) for clip in whole],
            spec.dtype,
            parameters,
        )
        errors = self._errors | {clip: error for clip, error in zip(whole, non_finite, strict=True) if error}
        kept = [clip for clip in whole if clip not in errors]
        side = {}
        for array in spec.side:
            entries = [result.side[array.name] for clip in kept for result in results[clip]]
            side[array.name] = (
                np.concatenate(entries) if entries else np.empty((0, *array.item_shape), array.dtype),
                [sum(len(result.side[array.name]) for result in results[clip]) for clip in kept],
            )
        return Extracted(
            items=[self.items[clip] for clip in kept],
            num_frames=[sum(len(result.features) for result in results[clip]) for clip in kept],
            features=features,
            failures=self._failures + [self._fail(clip, errors[clip]) for clip in sorted(errors)],
            side=side,
            seconds=self._seconds,
            resampled=self._resampled,
            traceback=last_traceback(errors.values()) or self._traceback,
        )


class RowQueue:
    """Rows of several batches that wait until there are enough of one padded length to compute them. Not thread-safe.

    The type of the device that will compute them decides how many rows make a batch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._filling: dict[tuple[RowExtractor[Params], int], list[Row]] = {}
        self._oldest: dict[tuple[RowExtractor[Params], int], int] = {}
        """The lowest number of a batch that has rows there."""
        self._full: deque[list[Row]] = deque()

    def __bool__(self) -> bool:
        """Whether any row waits."""
        return bool(self._full or self._filling)

    def add(self, batch: int, rows: Iterable[Row]) -> None:
        """Add the rows of the batch of that number."""
        for row in rows:
            extractor = row.pending.extractor
            key = extractor, row.padded_length
            waiting = self._filling.setdefault(key, [])
            waiting.append(row)
            self._oldest[key] = min(batch, self._oldest.get(key, batch))
            if len(waiting) >= extractor.rows(row.padded_length, self._device):
                self._full.append(self._pop(key))

    def take_full(self) -> list[Row] | None:
        """Take the rows of a full batch, if there is one."""
        return self._full.popleft() if self._full else None

    def take_oldest(self, batch: int | None = None) -> list[Row] | None:
        """Take the rows that wait with the oldest row, if that is of this batch, though they do not fill a batch."""
        key = min(self._oldest, key=self._oldest.__getitem__, default=None)
        if key is None or batch not in (None, self._oldest[key]):
            return None
        return self._pop(key)

    def _pop(self, key: tuple[RowExtractor[Params], int]) -> list[Row]:
        del self._oldest[key]
        return self._filling.pop(key)


def compute_rows(rows: Sequence[Row], device: Device) -> list[RowResult | AudioError]:
    """Compute rows of one version and one padded length, in batches of as many as the extractor wants.

    If a batch does not fit on the device, this and all later ones become smaller. A single row that does not fit is
    tried again with nothing beside it.

    Returns:
        What each row gave, in their order.
    """
    results: list[RowResult | AudioError] = []

    def compute_next(count: int, alone: bool) -> list[RowResult | AudioError]:
        batch = rows[len(results) : len(results) + count]
        return in_halves(lambda some: _compute_batch(some, count, device, alone), batch)

    retry = OutOfMemoryRetry(rows[0].pending.extractor, [rows[0].padded_length], device)
    while len(results) < len(rows):
        try:
            results += retry.run(compute_next)
        except DoesNotFitError as error:  # the next row
            results.append(error)
    return results


def _compute_batch(rows: Sequence[Row], count: int, device: Device, alone: bool) -> list[RowResult]:
    """Compute rows in a batch of `count` rows. Raises AudioError if one of their clips cannot be extracted."""
    extractor, spec = rows[0].pending.extractor, rows[0].pending.spec
    with errors_of(extractor, (row.id for row in rows), device, alone), device.slot(alone):
        waveforms = [row.waveform for row in rows]
        encoded = extractor.run(*device.upload_rows(waveforms, count, rows[0].padded_length))
        _check_frames(extractor, rows, encoded.features.shape[1])
        side = {name: array[: len(rows)] for name, array in encoded.side.items()}
        if not spec.is_quantized:
            stored = cast(encoded.features[: len(rows)], spec.dtype)
        elif all(row.is_whole for row in rows):
            stored, side[QUANTIZATION] = _quantized_rows(encoded.features, rows)
        else:  # quantised by `PendingRows`, once the clips' other pieces are there
            stored = encoded.features[: len(rows)].float()
        features = device.download(stored.contiguous())
        downloaded = {name: device.download(array.contiguous()) for name, array in side.items()}
    return [
        # Copies, because a view would keep the padding in memory.
        RowResult(features[i][row.frames].copy(), {name: array[i].copy() for name, array in downloaded.items()})
        for i, row in enumerate(rows)
    ]


def _check_frames(extractor: RowExtractor[Params], rows: Sequence[Row], num_frames: int) -> None:
    for row in rows:
        if num_frames < row.frames.stop:
            raise ExtractorError(
                f"{type(extractor).__name__} returned {num_frames} frames for a row of {len(row.waveform)} samples; "
                f"its num_frames says {row.frames.stop}"
            )


def _quantized_rows(features: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows `[R, F, *item_shape]`, each a whole clip: levels of that shape, parameters `[R, 1, 2, …]`."""
    parts = [features[i, row.frames] for i, row in enumerate(rows)]
    num_frames = [len(part) for part in parts]
    quantized, parameters = quantize(torch.cat(parts), num_frames)
    levels = torch.zeros_like(features[: len(rows)], dtype=torch.uint8)
    for i, (row, part) in enumerate(zip(rows, torch.split(quantized, num_frames), strict=True)):
        levels[i, row.frames] = part
    return levels, parameters[:, None]


def _quantized_clip(rows: Sequence[RowResult]) -> RowResult:
    """The results of a clip's rows as one, quantised if they are not yet."""
    if QUANTIZATION in rows[0].side:  # the clip is one row
        return rows[0]
    features = np.concatenate([row.features for row in rows])
    levels, parameters = quantize(torch.from_numpy(features), [len(features)])
    side = {name: np.concatenate([row.side[name] for row in rows]) for name in rows[0].side}
    return RowResult(levels.numpy(), side | {QUANTIZATION: parameters.numpy()})
