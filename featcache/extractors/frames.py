"""Extractors that work frame by frame, and give a frame the same bits whatever surrounds it.

Matrix products and Fourier transforms choose their kernels by shape, so the last bits of
a row change with the number of rows. Here every computation has the same shape. Each clip
is cut into frames by itself, and never padded to its neighbours' length. The frames of a
call are put one after another into blocks with a constant number of rows, and the last
block is filled up with zeros. Then the features are split again. A call with few frames
uses shorter blocks, if this processor computes the same bits in them, which is tried
once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from featcache.extractors.base import Clip, Extractor, P, require_tensor

BLOCK_ROWS = {"cpu": 640, "cuda": 8192}
"""Rows of a block, by the type of the device. On a CPU, 640 rows keep a block's
intermediate results in the cache, waste little of the last block, and can be shared
evenly by two or four of torch's threads, on which values depend; a GPU needs more work in
each kernel."""

SHORT_BLOCK_ROWS = 128
"""Rows of a short block, on a CPU: a clip of one second has only 98 frames."""

_MOST_SHORT_BLOCKS = 3
"""Short blocks of a call; more of them would take longer than a whole block (fbank: 0.18
and 0.64 ms)."""

COLUMN_MULTIPLE = 16
"""A block's products with a matrix have a multiple of this many columns
(`with_whole_columns`), so that all rows of the result have the same alignment. If they do
not, MKL computes rows differently: seen with 5, 6, 7, 9, 10, 11."""


def aligned_rows(like: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Uninitialised `[rows, length]` in `like`'s dtype and device, whose rows begin at
    multiples of `COLUMN_MULTIPLE` elements: a GPU's sums load four elements at once, and
    add rows that begin in between in another order."""
    return like.new_empty(rows, -(-length // COLUMN_MULTIPLE) * COLUMN_MULTIPLE)[:, :length]


def with_whole_columns(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix `[K, n]` with columns of zeros added up to a multiple of `COLUMN_MULTIPLE`."""
    return torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % COLUMN_MULTIPLE))


class FrameExtractor(Extractor[P]):
    """The base of extractors that compute each frame by itself.

    A subclass sets `spec` in its `__init__`. It defines the number of frames
    (`num_frames`), their samples (`frames`), what is computed from them (`compute`), and
    optionally a last step that needs all frames of a clip (`finish`). None of these
    methods may store anything on `self`.

    Shapes here and in the subclasses: `B` rows of a block, `L` samples of a frame, `N`
    samples of its Fourier transform, `F = N // 2 + 1` frequencies, `M` mel bins, `T`
    frames of a clip."""

    batching = "frames"
    needs_aligned_waveforms = False  # frames are copied into a block

    @abstractmethod
    def frames(self, clip: Clip) -> torch.Tensor:
        """The clip's frames, float32 `[T, L]`, with `T` as in `num_frames` and `L =
        spec.frame_length`. It may be a strided view of the waveform: it is copied, and
        not written to."""

    @abstractmethod
    def compute(self, block: torch.Tensor) -> torch.Tensor:
        """The features, float32 `[B, *item_shape]`, of frames `[B, L]`, which may be
        overwritten. A block's rows lie a multiple of `COLUMN_MULTIPLE` apart, so it is
        contiguous only if `L` is one."""

    def finish(self, features: torch.Tensor) -> None:
        """Complete, in place, one item's features `[T, *item_shape]`."""

    def extract(self, clips: Sequence[Clip]) -> list[torch.Tensor]:
        """The clips' features, in their order: views `[T, *item_shape]`, side by side, of
        one tensor."""
        if not clips:
            return []
        num_frames = [self.num_frames(len(clip.waveform)) for clip in clips]
        total, device = sum(num_frames), clips[0].waveform.device
        is_short = total <= _MOST_SHORT_BLOCKS * SHORT_BLOCK_ROWS and device.type == "cpu"
        rows = (
            SHORT_BLOCK_ROWS
            if is_short and self._short_blocks_are_exact
            else BLOCK_ROWS[device.type]
        )
        features = clips[0].waveform.new_empty((total, *self.spec.item_shape))
        done = 0
        for block, used in self._blocks(clips, rows):
            features[done : done + used] = self._computed(block)[:used]
            done += used
        items = list(features.split_with_sizes(num_frames))
        for item in items:
            self.finish(item)
        return items

    def _computed(self, block: torch.Tensor) -> torch.Tensor:
        """What `compute` returns, which must be of the right shape: it would be broadcast."""
        rows = len(block)
        features = self.compute(block)
        require_tensor(self, "compute", features, (rows, *self.spec.item_shape))
        return features

    @cached_property
    def _short_blocks_are_exact(self) -> bool:
        """Whether this processor gives a row of noise the same bits in a short block as
        in a whole one. Another choice of kernels, or another order of sums, shows in some
        of so many values."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(BLOCK_ROWS["cpu"], self.spec.frame_length, generator=generator).mul_(
            0.1
        )

        def computed(frames: torch.Tensor) -> torch.Tensor:
            return self._computed(aligned_rows(noise, *frames.shape).copy_(frames))

        parts = [computed(part) for part in torch.split(noise, SHORT_BLOCK_ROWS)]
        return torch.equal(torch.cat(parts), computed(noise))

    def _blocks(self, clips: Sequence[Clip], rows: int) -> Iterator[tuple[torch.Tensor, int]]:
        """The frames of all clips in blocks `[rows, L]`, and how many rows of each are
        used. The buffer is reused."""
        block = aligned_rows(clips[0].waveform, rows, self.spec.frame_length)
        used = 0
        for clip in clips:
            frames = self.frames(clip)
            num_frames, done = self.num_frames(len(clip.waveform)), 0
            require_tensor(self, "frames", frames, (num_frames, self.spec.frame_length))
            while done < num_frames:
                more = min(num_frames - done, rows - used)
                block[used : used + more] = frames[done : done + more]
                used, done = used + more, done + more
                if used == rows:
                    yield block, used
                    used = 0
        if used:
            block[used:] = 0
            yield block, used
