"""Extractors that work frame by frame, and give a frame the same bits with any neighbours.

Kernels are chosen by shape, so the frames of a call go into blocks with a constant number
of rows, the last filled up with zeros. A call with few frames uses shorter blocks, if a
trial shows that this processor computes the same bits in them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from featcache.extractors.base import Clip, Extractor, P
from featcache.extractors.faults import require_tensor

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = {"cpu": 640, "cuda": 8192}
"""Rows of a block, by the type of the device. On a CPU, the intermediate results of 640
rows stay in the cache, and two or four of torch's threads, on which values depend, share
the rows evenly."""

SHORT_BLOCK_ROWS = 128

_MOST_SHORT_BLOCKS = 3
"""The most short blocks of a call; more take longer than a whole block."""

COLUMN_MULTIPLE = 16
"""A product's number of columns is a multiple of this, so that all rows of the result are
aligned alike. Otherwise MKL computes rows differently."""


def aligned_rows(like: Tensor, rows: int, length: int) -> Tensor:
    """Allocate `[rows, length]` in `like`'s dtype on its device. Rows begin at multiples
    of `COLUMN_MULTIPLE` elements: a GPU's sums add other rows in another order."""
    return like.new_empty(rows, -(-length // COLUMN_MULTIPLE) * COLUMN_MULTIPLE)[:, :length]


def with_whole_columns(matrix: Tensor) -> Tensor:
    """Add columns of zeros to a matrix `[K, n]`, up to a multiple of `COLUMN_MULTIPLE`."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % COLUMN_MULTIPLE))


class FrameExtractor(Extractor[P]):
    """The base of extractors that compute each frame by itself.

    A subclass sets `spec` in its `__init__`, and defines `num_frames`, `frames`,
    `compute`, and optionally `finish`. None of these may store anything on `self`.

    Shapes: `B` rows of a block, `L` samples of a frame, `N` samples of its Fourier
    transform, `F = N // 2 + 1` frequencies, `M` mel bins, `T` frames of a clip."""

    batching = "frames"
    needs_aligned_waveforms = False  # frames are copied into a block

    @abstractmethod
    def frames(self, clip: Clip) -> Tensor:
        """Return the clip's frames, float32 `[T, L]`, with `T` as in `num_frames` and `L
        = spec.frame_length`. It may be a strided view of the waveform, and is only read."""

    @abstractmethod
    def compute(self, block: Tensor) -> Tensor:
        """Return the features, float32 `[B, *item_shape]`, of frames `[B, L]`, which may
        be overwritten. Rows lie a multiple of `COLUMN_MULTIPLE` apart."""

    def finish(self, features: Tensor) -> None:
        """Complete a clip's features `[T, *item_shape]` in place, by a step that needs
        all frames."""

    def extract(self, clips: Sequence[Clip]) -> list[Tensor]:
        if not clips:
            return []
        num_frames = [self.num_frames(len(clip.waveform)) for clip in clips]
        total = sum(num_frames)
        device = clips[0].waveform.device
        rows = BLOCK_ROWS[device.type]
        is_short = total <= _MOST_SHORT_BLOCKS * SHORT_BLOCK_ROWS and device.type == "cpu"
        if is_short and self._short_blocks_are_exact:
            rows = SHORT_BLOCK_ROWS
        features = clips[0].waveform.new_empty((total, *self.spec.item_shape))
        done = 0
        for block, used in self._blocks(clips, num_frames, rows):
            features[done : done + used] = self._computed(block)[:used]
            done += used
        items = list(features.split_with_sizes(num_frames))
        for item in items:
            self.finish(item)
        return items

    def _computed(self, block: Tensor) -> Tensor:
        features = self.compute(block)  # of another shape, it would be broadcast
        require_tensor(self, "compute", features, (len(block), *self.spec.item_shape))
        return features

    @cached_property
    def _short_blocks_are_exact(self) -> bool:
        """True if this processor gives noise the same bits in short blocks as in a whole
        one."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(BLOCK_ROWS["cpu"], self.spec.frame_length, generator=generator)
        whole, *parts = (
            self._computed(aligned_rows(frames, *frames.shape).copy_(frames))
            for frames in (noise * 0.1, *torch.split(noise * 0.1, SHORT_BLOCK_ROWS))
        )
        return torch.equal(torch.cat(parts), whole)

    def _blocks(
        self, clips: Sequence[Clip], num_frames: Sequence[int], rows: int
    ) -> Iterator[tuple[Tensor, int]]:
        """Yield the frames of all clips in blocks `[rows, L]`, and how many rows of each
        are used. The buffer is reused."""
        length = self.spec.frame_length
        block = aligned_rows(clips[0].waveform, rows, length)
        used = 0
        for clip, count in zip(clips, num_frames, strict=True):
            frames = self.frames(clip)
            require_tensor(self, "frames", frames, (count, length))
            taken = 0
            while taken < count:
                fitting = min(count - taken, rows - used)
                block[used : used + fitting] = frames[taken : taken + fitting]
                taken += fitting
                used += fitting
                if used == rows:
                    yield block, used
                    used = 0
        if used:
            block[used:] = 0
            yield block, used
