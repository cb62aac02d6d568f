"""Rows: pieces of clips, computed together with pieces of other clips, and then reassembled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, listing
from featcache.extract.features import cast, exits, without_non_finite
from featcache.extract.fitting import DoesNotFitError, Fitting
from featcache.extract.target import Extracted, Target
from featcache.extractors import Params
from featcache.extractors.rows import Piece, RowExtractor
from featcache.quantize import is_quantized, quantize
from featcache.spec import QUANTIZATION
from featcache.store.runs import Failure
from featcache.store.shard import Item


def row_extractor(target: Target) -> RowExtractor[Params] | None:
    """The target's extractor, if it takes rows."""
    return target.extractor if isinstance(target.extractor, RowExtractor) else None


@dataclass(frozen=True, eq=False)
class Row:
    """A piece of a clip, to be computed in a batch of rows.

    Attributes:
        pending: whose it is.
        clip: the number of its clip there.
        number: of the piece in its clip.
        piece: what of the row's frames counts.
        is_whole: whether the clip is this one piece.
        waveform: float32 `[piece.num_samples]`.
        padded_length: samples of the row.
    """

    pending: Pending
    clip: int
    number: int
    piece: Piece
    is_whole: bool
    waveform: NDArray[np.float32]
    padded_length: int

    @property
    def frames(self) -> slice:
        """Which of the row's frames count."""
        return slice(self.piece.skip, self.piece.skip + self.piece.num_frames)


@dataclass(frozen=True)
class RowResult:
    """What one row gave: features `[frames, *item_shape]` of the stored dtype, and the entries of side arrays.

    Features that are to be quantised are float32 until all of their clip's are there.
    """

    features: NDArray[Any]
    side: dict[str, NDArray[Any]]


class Pending:
    """What one target gets from a part of a batch, while its rows are being computed.

    Not thread-safe: whoever computes rows has to see to it that `done` is called by one thread at a time.

    Attributes:
        target: whose extractor takes rows.
        rows: to be computed.
    """

    def __init__(
        self,
        target: Target,
        items: list[Item],
        clips: Sequence[NDArray[np.float32]],
        failures: list[Failure],
        fail: Callable[[int, AudioError], Failure],
    ) -> None:
        extractor = row_extractor(target)
        assert extractor is not None
        self.target = target
        self.rows: list[Row] = []
        self._items = items
        self._failures = failures
        self._fail = fail
        self._errors: dict[int, AudioError] = {}
        self._results: list[list[RowResult | None]] = []
        for clip, waveform in enumerate(clips):
            try:
                pieces = extractor.pieces(len(waveform))
            except AudioError as error:
                self._errors[clip] = error
                pieces = []
            self._results.append([None] * len(pieces))
            for number, piece in enumerate(pieces):
                part = waveform[piece.start : piece.start + piece.num_samples]
                length = extractor.padded_length(len(part))
                self.rows.append(Row(self, clip, number, piece, len(pieces) == 1, part, length))
        self._left = len(self.rows)

    @property
    def is_complete(self) -> bool:
        """Whether all rows are computed."""
        return not self._left

    def id_of(self, row: Row) -> str:
        """The utterance's id."""
        return self._items[row.clip].id

    def done(self, row: Row, result: RowResult | AudioError) -> None:
        """Take what a row gave, or why it gave nothing."""
        self._left -= 1
        if isinstance(result, AudioError):
            self._errors.setdefault(row.clip, result)
        else:
            self._results[row.clip][row.number] = result
        if self.is_complete:
            self.rows = []  # and with them the waveforms

    def extracted(self) -> Extracted:
        """All of it, in the order of the clips, once it is complete."""
        spec, dtype = self.target.version.info.spec, self.target.config.dtype
        whole = [clip for clip in range(len(self._items)) if clip not in self._errors]
        found = {clip: [result for result in self._results[clip] if result is not None] for clip in whole}
        parameters = None
        if spec.is_quantized:
            found = {clip: [_quantized_clip(results)] for clip, results in found.items()}
            parameters = np.stack([clip[0].side[QUANTIZATION][0] for clip in found.values()]) if found else None
        rows = [result.features for clip in whole for result in found[clip]]
        features, non_finite = without_non_finite(
            np.concatenate(rows) if rows else np.empty((0, *spec.item_shape), dtype),
            [sum(len(result.features) for result in found[clip]) for clip in whole],
            dtype,
            parameters,
        )
        errors = self._errors | {clip: error for clip, error in zip(whole, non_finite, strict=True) if error}
        kept = [clip for clip in whole if clip not in errors]
        side = {}
        for array in spec.side:
            entries = [result.side[array.name] for clip in kept for result in found[clip]]
            side[array.name] = (
                np.concatenate(entries) if entries else np.empty((0, *array.item_shape), array.dtype),
                [sum(len(result.side[array.name]) for result in found[clip]) for clip in kept],
            )
        return Extracted(
            items=[self._items[clip] for clip in kept],
            num_frames=[sum(len(result.features) for result in found[clip]) for clip in kept],
            features=features,
            failures=self._failures + [self._fail(clip, errors[clip]) for clip in sorted(errors)],
            side=side,
        )


def compute_rows(rows: Sequence[Row], device: Device) -> list[RowResult | AudioError]:
    """Compute rows of one target and one padded length; what each gave, in their order.

    Where a batch does not fit on the device, this and all later ones become smaller; a single row is tried again with
    nothing beside it.
    """
    target, length = rows[0].pending.target, rows[0].padded_length
    extractor = row_extractor(target)
    assert extractor is not None
    results: list[RowResult | AudioError] = []

    def compute_next(count: int, alone: bool) -> list[RowResult | AudioError]:
        batch = rows[len(results) : len(results) + count]
        return _compute_batch(batch, count, extractor, target.config.dtype, device, alone)

    fitting = Fitting(extractor, length, device)
    while len(results) < len(rows):
        try:
            results += fitting.run(compute_next)
        except DoesNotFitError as error:  # the next row
            results.append(error)
    return results


def compute_alone(pending: Pending, device: Device) -> None:
    """Compute all rows of a part by themselves."""
    extractor = row_extractor(pending.target)
    assert extractor is not None
    by_length: dict[int, list[Row]] = {}
    for row in pending.rows:
        by_length.setdefault(row.padded_length, []).append(row)
    for length, rows in by_length.items():
        while rows:
            count = extractor.rows(length, device.torch_device)
            batch, rows = rows[:count], rows[count:]
            for row, result in zip(batch, compute_rows(batch, device), strict=True):
                pending.done(row, result)


def _compute_batch(
    rows: Sequence[Row], count: int, extractor: RowExtractor[Params], dtype: str, device: Device, alone: bool
) -> list[RowResult | AudioError]:
    """Compute rows of one padded length in a batch of `count`; one by one where a clip cannot be extracted."""
    try:
        with device.slot(alone):
            waveforms = [row.waveform for row in rows]
            encoded = extractor.run(*device.upload_rows(waveforms, count, rows[0].padded_length))
            _check_frames(extractor, rows, encoded.features.shape[1])
            made = {name: array[: len(rows)] for name, array in encoded.side.items()}
            if not is_quantized(extractor.spec.dtype, dtype):
                stored = cast(encoded.features[: len(rows)], dtype)
            elif all(row.is_whole for row in rows):
                stored, made[QUANTIZATION] = _quantized_rows(encoded.features, rows)
            else:  # by `Pending`, when the clips' other pieces are there
                stored = encoded.features[: len(rows)].float()
            features = device.download(stored.contiguous())
            side = {name: device.download(array.contiguous()) for name, array in made.items()}
    except AudioError as error:
        if len(rows) == 1:
            return [error]
        return [one for row in rows for one in _compute_batch([row], count, extractor, dtype, device, alone)]
    except SystemExit as error:
        raise ExtractorError(exits(extractor, error, (row.pending.id_of(row) for row in rows))) from error
    except Exception as error:
        ids = listing(row.pending.id_of(row) for row in rows)
        error.add_note(f"featcache: while {type(extractor).__name__} extracted {ids}")
        raise
    return [_cut(row, features[i], {name: array[i] for name, array in side.items()}) for i, row in enumerate(rows)]


def _check_frames(extractor: RowExtractor[Params], rows: Sequence[Row], num_frames: int) -> None:
    for row in rows:
        if num_frames < row.frames.stop:
            raise ExtractorError(
                f"{type(extractor).__name__} returned {num_frames} frames for a row of {len(row.waveform)} samples; "
                f"its num_frames says {row.frames.stop}"
            )


def _quantized_rows(features: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise what counts of rows `[R, F, *item_shape]`, each of which is a clip: levels, of the rows' shape, and
    parameters `[R, 1, 2, *item_shape]`.
    """
    parts = [features[i, row.frames] for i, row in enumerate(rows)]
    num_frames = [len(part) for part in parts]
    found, parameters = quantize(torch.cat(parts), num_frames)
    levels = torch.zeros_like(features[: len(rows)], dtype=torch.uint8)
    for i, (row, part) in enumerate(zip(rows, torch.split(found, num_frames), strict=True)):
        levels[i, row.frames] = part
    return levels, parameters[:, None]


def _quantized_clip(results: Sequence[RowResult]) -> RowResult:
    """What all rows of a clip gave as one, quantised, if they are not yet."""
    if QUANTIZATION in results[0].side:  # it was the one row
        return results[0]
    features = np.concatenate([result.features for result in results])
    levels, parameters = quantize(torch.from_numpy(features), [len(features)])
    side = {name: np.concatenate([result.side[name] for result in results]) for name in results[0].side}
    return RowResult(levels.numpy(), side | {QUANTIZATION: parameters.numpy()})


def _cut(row: Row, features: NDArray[Any], side: dict[str, NDArray[Any]]) -> RowResult:
    """What counts of a padded row's features `[F, …]`, as a copy where the rest would be held for it."""
    return RowResult(features[row.frames].copy(), {name: array.copy() for name, array in side.items()})
