"""Extractors for tests that take rows. Configs name them `row_extractors:Moments`."""

import time

import torch
from pausing import SlowParams

from featcache.extractors.rows import Piece, RowExtractor, Rows
from featcache.spec import FeatureSpec, Track

HOP = 160


class MomentsParams(SlowParams):
    piece: int = 0
    """Frames of a piece; 0 does not cut clips."""


class Moments(RowExtractor[MomentsParams]):
    """Mean and mean of squares of every whole 10 ms; beside them, the number of frames of
    each piece."""

    Params = MomentsParams
    revision = 1
    batching = "padded"
    granularity = HOP

    def __init__(self, params, sample_rate, device):
        self._params = params
        self.calls: list[tuple[int, int]] = []
        counts = Track("counts", (), "int64", "frames")
        self.spec = FeatureSpec(
            (2,), "float32", sample_rate / HOP, HOP, sample_rate, "moments", side=(counts,)
        )

    def num_frames(self, num_samples):
        return num_samples // HOP

    def pieces(self, num_samples):
        size = self._params.piece * HOP
        if not size or num_samples < 2 * size:
            return super().pieces(num_samples)
        # which sees a frame that it leaves to the second one
        first = Piece(0, size + HOP, 0, size // HOP)
        return [first, Piece(size - HOP, num_samples - size + HOP, 1, (num_samples - size) // HOP)]

    def encode(self, waveforms, num_samples):
        self.calls.append(tuple(waveforms.shape))
        self._params.pause()
        frames = waveforms[:, : waveforms.shape[1] // HOP * HOP].unflatten(1, (-1, HOP))
        features = torch.stack([frames.mean(2), frames.square().mean(2)], dim=2)
        return Rows(features, {"counts": (num_samples // HOP)[:, None]})


class Leveled(Moments):
    """Every clip has its peak at 1 before it is cut."""

    def prepare(self, waveform):
        return waveform / waveform.abs().max().clamp(min=1e-6)


class Shapes(Moments):
    """Every value is the shape of the batch that it was computed in."""

    def encode(self, waveforms, num_samples):
        rows = super().encode(waveforms, num_samples)
        rows.features[..., 0], rows.features[..., 1] = waveforms.shape
        return rows


class Small(Moments):
    """A device that holds two rows at once, or one second of them."""

    limit = 2

    def encode(self, waveforms, num_samples):
        if len(waveforms) > self.limit:
            self.calls.append(tuple(waveforms.shape))
            words = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            raise (
                torch.OutOfMemoryError(f"{len(waveforms)} rows")
                if len(self.calls) % 2
                else RuntimeError(words)
            )
        return super().encode(waveforms, num_samples)


class Tiny(Small):
    """A device that holds no clip of more than half a second."""

    limit = 10**6

    def encode(self, waveforms, num_samples):
        if waveforms.shape[1] > self.spec.sample_rate // 2:
            raise torch.OutOfMemoryError(f"{waveforms.shape[1]} samples")
        return super().encode(waveforms, num_samples)


class Crowded(Small):
    """A device that holds two rows at once, or a long one by itself; `calls` are those
    that fit."""

    def __init__(self, params, sample_rate, device):
        super().__init__(params, sample_rate, device)
        self.inside: list[int] = []

    def encode(self, waveforms, num_samples):
        self.inside.append(len(waveforms))
        try:
            time.sleep(0.005)
            if len(self.inside) > 1 and waveforms.shape[1] > self.spec.sample_rate:
                raise torch.OutOfMemoryError("two at once")
            return super().encode(waveforms, num_samples)
        finally:
            self.inside.pop()
