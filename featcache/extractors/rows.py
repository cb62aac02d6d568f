"""Extractors that run a model over rows of padded waveforms, and give a clip the same
bits whatever its neighbours.

A model's kernels are chosen by shape, so the last bits of a row change with the number of
rows and with their length, and codes that are nearly tied flip. Here a clip is always
computed in a batch of the same shape: its padded length follows from its own length
(`padded_length`), and the number of rows from the padded length (`rows`); a batch that is
not full is filled up with copies of its first row. The extractor must do the rest:
compute a row as if nothing followed its last sample (see `ragged` for convolutions)."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from featcache.extractors.base import Batching, Clip, Extractor, P, Tracks
from featcache.spec import MAIN

ROW_SECONDS = {"cpu": 4.0, "cuda": 120.0}
"""Approximate seconds of audio in a batch. On one core EnCodec runs at 20 × real time on
4 rows of 1 s, at 18 × on one row of 4 s, at 16 × on one of 1 s, and no faster on larger
batches. A GPU needs many rows, and the last batch of each length is filled with unneeded
rows: on an H200, HuBERT and DAC have 0.83 and 0.91 of their highest speed with 80 s, 0.89
and 0.94 with 240 s. An H100 extracts with EnCodec at 3,062 × real time with 240 s, at
3,519 with 480."""

MAX_ROWS = {"cpu": 16, "cuda": 256}
"""The most rows of a batch, for very short clips."""

_EQUAL_ROWS = 8
"""The most rows of a batch of clips of equal length. If a corpus has fewer such clips,
the other rows are wasted."""

_STEPS = 8
"""Padded lengths per octave: padding is 4 % of a row on average, and at most 12 %."""

_shrinking = threading.Lock()


@dataclass(frozen=True)
class Piece:
    """A part of a clip that is one row for the model; most clips are a single piece."""

    start: int
    """The position of the piece's first sample in the clip."""
    num_samples: int
    """The number of samples."""
    skip: int
    """The number of frames at the beginning that are left out, since they belong to
    another piece."""
    num_frames: int
    """The number of frames that are kept after those."""


@dataclass(frozen=True)
class Rows:
    """The output of a batch of rows. After the last frame of shorter rows, values are
    meaningless."""

    features: torch.Tensor
    """The features, `[R, F, *item_shape]` of `spec.dtype`."""
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Each side array in `spec.side`, by name, `[R, n, *item_shape]`, of its item shape:
    n entries for each piece."""


class RowExtractor(Extractor[P]):
    """The base of extractors that run a model on padded rows.

    A subclass sets `spec` and `granularity` in its `__init__`, and defines the number of
    frames (`num_frames`) and the computation of rows (`encode`). None of its methods may
    store anything on `self`.

    Shapes wherever rows are used: `R` rows, `P` samples and `F` frames of a padded row,
    `C` channels of a layer, `T` its time steps, `D` dimensions of a vector, `Q`
    codebooks. Tensors' names may end in their shape: `hidden_RFD`."""

    batchings = ("padded", "equal_length", "single")
    batching: Batching = "padded"
    """The loosest batching that the extractor declares to be safe; see `chosen_batching`."""
    granularity: int
    """Padded lengths are multiples of this number of samples, usually the model's hop."""
    gpu_factor: ClassVar[int] = 1
    """How many times `ROW_SECONDS` a GPU's batches have: more than one if kernels are so
    small, or so many wait for one another, that few rows take nearly as long as many."""
    _shrunk: int = 1

    @abstractmethod
    def encode(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """Compute rows.

        Args:
            waveforms: The rows, float32 `[R, P]` on the device, zero after each row's
                end. Do not write to them.
            num_samples: The length of each row, int64 `[R]` on the device.
        """

    @property
    def chunks_are_exact(self) -> bool:
        """Whether a frame in a piece sees everything that it would see in the whole clip;
        False if nobody knows."""
        return False

    def pieces(self, num_samples: int) -> list[Piece]:
        """How a clip is cut into rows. The frames of the pieces, one after another, are
        the frames of the clip. Raises AudioError if it cannot be extracted, for example
        with the reason TOO_LONG."""
        return [Piece(0, num_samples, 0, self.num_frames(num_samples))]

    def padded_length(self, num_samples: int) -> int:
        """The number of samples in the padded row of a piece of `num_samples`."""
        if (self.chosen_batching or self.batching) != "padded":
            return num_samples
        units = -(-num_samples // self.granularity)
        step = 1 << max(0, (units - 1).bit_length() - _STEPS.bit_length())
        return -(-units // step) * step * self.granularity

    def rows(self, padded_length: int, device: torch.device) -> int:
        """The number of rows in a batch whose rows have `padded_length` samples."""
        batching = self.chosen_batching or self.batching
        if batching == "single":
            return 1
        seconds = ROW_SECONDS[device.type] * (self.gpu_factor if device.type == "cuda" else 1)
        fitting = int(seconds / self._shrunk * self.spec.sample_rate / padded_length)
        at_most = MAX_ROWS[device.type] if batching == "padded" else _EQUAL_ROWS
        return max(1, min(fitting, at_most // self._shrunk))

    def shrink(self, rows: int, padded_length: int, device: torch.device) -> bool:
        """Halve all batches from now on, after one of `rows` rows did not fit on the
        device; False if there was only one row. Values of later batches may differ from
        those of earlier ones by rounding."""
        with _shrinking:
            # else another thread has been here
            if rows > 1 and self.rows(padded_length, device) >= rows:
                self._shrunk *= 2
            return rows > 1

    def extract(self, clips: Sequence[Clip]) -> list[Tracks]:
        return [
            {MAIN: rows.features, **rows.side} if rows.side else rows.features
            for rows in self.extract_rows(clips)
        ]

    def extract_rows(self, clips: Sequence[Clip]) -> list[Rows]:
        """The features of each clip, `[frames, *item_shape]`, and its side arrays by
        name, `[n, …]`."""
        of_clips: list[dict[int, Rows]] = [{} for _ in clips]  # by the number of the piece
        by_length: dict[int, list[tuple[dict[int, Rows], int, Piece, torch.Tensor]]] = {}
        for clip, of_clip in zip(clips, of_clips, strict=True):
            for number, piece in enumerate(self.pieces(len(clip.waveform))):
                samples = clip.waveform[piece.start : piece.start + piece.num_samples]
                by_length.setdefault(self.padded_length(len(samples)), []).append(
                    (of_clip, number, piece, samples)
                )
        for length, members in by_length.items():
            count = self.rows(length, clips[0].waveform.device)
            for first in range(0, len(members), count):
                batch = members[first : first + count]
                encoded = self.run(*pad_rows([samples for *_, samples in batch], count, length))
                for row, (of_clip, number, piece, _) in enumerate(batch):
                    features = encoded.features[row, piece.skip : piece.skip + piece.num_frames]
                    of_clip[number] = Rows(
                        features, {name: side[row] for name, side in encoded.side.items()}
                    )
        return [
            _joined([of_clip[number] for number in range(len(of_clip))]) for of_clip in of_clips
        ]

    def run(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """`encode`, at the extractor's precision: float32 unless a subclass has another."""
        return self.encode(waveforms, num_samples)


def pad_rows(
    waveforms: Sequence[torch.Tensor], rows: int, padded_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Waveforms `[n]` as rows `[rows, padded_length]`, filled up with copies of the
    first; and their int64 lengths."""
    filled = [*waveforms, *[waveforms[0]] * (rows - len(waveforms))]
    padded_RP = waveforms[0].new_zeros(rows, padded_length)
    for row, waveform in zip(padded_RP, filled, strict=True):
        row[: len(waveform)] = waveform
    return padded_RP, torch.tensor([len(waveform) for waveform in filled], device=padded_RP.device)


def _joined(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    side = {name: torch.cat([piece.side[name] for piece in pieces]) for name in pieces[0].side}
    return Rows(torch.cat([piece.features for piece in pieces]), side)
