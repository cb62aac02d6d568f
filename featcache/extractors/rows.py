"""Extractors that run a model over padded rows, and give a clip the same bits with any
neighbours.

Kernels are chosen by shape, so the last bits of a row change with the number and the length
of rows. Here the shape of a clip's batch follows from its length, and a batch that is not
full is filled up with copies of its first row. The extractor must compute a row as if
nothing followed its last sample (see `ragged`)."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from featcache.device import fill_rows
from featcache.extractors.base import Batching, Clip, Extractor, P, Piece, Rows, Tracks
from featcache.spec import MAIN

if TYPE_CHECKING:
    from torch import Tensor

ROW_SECONDS = {"cpu": 4.0, "cuda": 120.0}
"""Approximate seconds of audio in a batch. On one core, larger batches are no faster; a
GPU needs many rows, but the last batch of each length is filled up."""

MAX_ROWS = {"cpu": 16, "cuda": 256}

_EQUAL_ROWS = 8
"""The most rows of a batch of clips of equal length. With fewer clips, rows are wasted."""

_STEPS = 8
"""Padded lengths per octave: padding is 4 % of a row on average, and at most 12 %."""

_shrinking = threading.Lock()

__all__ = ["MAX_ROWS", "ROW_SECONDS", "Piece", "RowExtractor", "Rows", "cut_clip", "pad_rows"]


@dataclass
class _Row:
    piece: Piece
    samples: Tensor
    output: Rows = field(init=False)


class RowExtractor(Extractor[P]):
    """The base of extractors that run a model on padded rows.

    A subclass sets `spec` and `granularity` in its `__init__`, and defines `num_frames` and
    `encode`. None of its methods may store anything on `self`.

    Shapes, which may end a tensor's name, as `hidden_RFD`: `R` rows, `P` samples and `F`
    frames of a padded row, `C` channels of a layer, `T` its time steps, `D` dimensions, `Q`
    codebooks."""

    takes_rows = True
    batchings = ("padded", "equal_length", "single")
    batching: Batching = "padded"
    granularity: int
    """Padded lengths are multiples of this number of samples, usually the hop."""
    gpu_factor: ClassVar[int] = 1
    """The factor of `ROW_SECONDS` on a GPU, if few rows take nearly as long as many."""
    _shrunk: int = 1

    @abstractmethod
    def encode(self, waveforms: Tensor, num_samples: Tensor) -> Rows:
        """Compute rows, float32 `[R, P]` on the device, zero after each row's end, of
        lengths `num_samples`, int64 `[R]`. Do not write to them."""

    def padded_length(self, num_samples: int) -> int:
        if (self.chosen_batching or self.batching) != "padded":
            return num_samples
        units = -(-num_samples // self.granularity)
        step = 1 << max(0, (units - 1).bit_length() - _STEPS.bit_length())
        return -(-units // step) * step * self.granularity

    def rows(self, padded_length: int, device: torch.device) -> int:
        batching = self.chosen_batching or self.batching
        if batching == "single":
            return 1
        seconds = ROW_SECONDS[device.type]
        if device.type == "cuda":
            seconds *= self.gpu_factor
        fitting = int(seconds / self._shrunk * self.spec.sample_rate / padded_length)
        at_most = MAX_ROWS[device.type] if batching == "padded" else _EQUAL_ROWS
        return max(1, min(fitting, at_most // self._shrunk))

    def shrink(self, rows: int, padded_length: int, device: torch.device) -> bool:
        with _shrinking:
            # another thread may have shrunk them since
            if rows > 1 and self.rows(padded_length, device) >= rows:
                self._shrunk *= 2
            return rows > 1

    def extract(self, clips: Sequence[Clip]) -> list[Tracks]:
        return [
            {MAIN: rows.features, **rows.side} if rows.side else rows.features
            for rows in self.extract_rows(clips)
        ]

    def extract_rows(
        self, clips: Sequence[Clip], run: Callable[[Tensor, Tensor], Rows] | None = None
    ) -> list[Rows]:
        """Compute each clip's features, `[frames, *item_shape]`, and side arrays, by `run`."""
        run = run or self.run
        rows_of_clips: list[list[_Row]] = []
        by_length: dict[int, list[_Row]] = defaultdict(list)
        for clip in clips:
            rows = [_Row(*cut) for cut in cut_clip(self, clip.waveform)]
            rows_of_clips.append(rows)
            for row in rows:
                by_length[self.padded_length(len(row.samples))].append(row)
        for length, rows in by_length.items():
            count = self.rows(length, clips[0].waveform.device)
            for first in range(0, len(rows), count):
                batch = rows[first : first + count]
                encoded = run(*pad_rows([row.samples for row in batch], count, length))
                for number, row in enumerate(batch):
                    frames = row.piece.frames
                    side = {
                        name: array[number, encoded.entries(name, frames)]
                        for name, array in encoded.side.items()
                    }
                    row.output = Rows(encoded.features[number, frames], side)
        return [_joined([row.output for row in rows]) for rows in rows_of_clips]

    def run_for(self, takers: Sequence[Any], waveforms: Tensor, num_samples: Tensor) -> list[Rows]:
        return [taker.encode(waveforms, num_samples) for taker in takers]


def cut_clip(extractor: Extractor[Any], waveform: Tensor) -> list[tuple[Piece, Tensor]]:
    """Cut a waveform into an extractor's pieces, each with its samples."""
    waveform = extractor.prepare(waveform)
    return [
        (piece, waveform[piece.start : piece.start + piece.num_samples])
        for piece in extractor.pieces(len(waveform))
    ]


def pad_rows(waveforms: Sequence[Tensor], rows: int, padded_length: int) -> tuple[Tensor, Tensor]:
    """Copy waveforms `[n]` into rows `[rows, padded_length]`, filled up with copies of the
    first. Returns also their lengths, int64 `[rows]`."""
    padded_RP = waveforms[0].new_empty(rows, padded_length)
    lengths = fill_rows(padded_RP, waveforms)
    return padded_RP, torch.tensor(lengths, device=padded_RP.device)


def _joined(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    side = {name: torch.cat([piece.side[name] for piece in pieces]) for name in pieces[0].side}
    return Rows(torch.cat([piece.features for piece in pieces]), side)
