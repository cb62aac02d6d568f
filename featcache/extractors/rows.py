"""Extractors that run a model over rows of padded waveforms, and give a clip the same bits whatever its neighbours.

A model's kernels are chosen by shape, so the last bits of a row change with the number of rows and with their length,
and a code that is nearly tied flips. Here a clip is always computed in a batch of the same shape: its padded length is
a function of its own length (`padded_length`), and so is the number of rows (`rows`); a batch that is not full is
filled up with copies of its first row. The extractor must do the rest: compute a row as if nothing followed its last
sample (see `ragged` for convolutions).
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from featcache.extractors.base import Batching, Clip, Extractor, P

ROW_SECONDS = {"cpu": 4.0, "cuda": 240.0}
"""Seconds of audio in a batch of rows, about. On one core EnCodec runs at 20 × real time on 4 rows of 1 s, at 18 × on
one of 4 s, at 16 × on one of 1 s, and no faster on more; a GPU wants enough rows to fill it."""

MAX_ROWS = {"cpu": 16, "cuda": 256}
"""Rows of a batch of very short clips."""

_EQUAL_ROWS = 8
"""Rows of a batch of clips of one length, at most: what a corpus lacks of them is computed for nothing."""

_STEPS = 8
"""Padded lengths in an octave: a row is 4 % padding in the mean, and 12 % at most."""


_shrinking = threading.Lock()


@dataclass(frozen=True)
class Piece:
    """A part of a clip that is one row for the model; most clips are a single piece.

    Attributes:
        start: the position of its first sample in the clip.
        num_samples: of it.
        skip: frames at the row's beginning that are left out, since they belong to another piece.
        num_frames: number of frames that count, after those.
    """

    start: int
    num_samples: int
    skip: int
    num_frames: int


@dataclass(frozen=True)
class Rows:
    """The output of a batch of rows. Behind the last frame of shorter rows, values are meaningless.

    Attributes:
        features: `[R, F, *item_shape]` of `spec.dtype`.
        side: for each of `spec.side`, by name, `[R, n, *its item_shape]`: n entries for each piece.
    """

    features: torch.Tensor
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)


class RowExtractor(Extractor[P]):
    """The base of extractors that run a model on padded rows.

    A subclass sets `spec` and `granularity` in its `__init__`, and defines the number of frames (`num_frames`) and the
    computation of rows (`encode`). None of its methods may store anything on `self`.

    Shapes in this and the following files: `R` rows, `P` samples of a padded row, `F` frames of a padded row, `C`
    channels of a layer, `T` its time steps, `D` dimensions of a vector, `Q` codebooks.

    Attributes:
        batching: the loosest batching that the extractor declares to be safe: see `chosen_batching`.
        granularity: in samples; padded lengths are multiples of it. Usually the model's hop.
        chosen_batching: how rows are put together: `padded`, `equal_length` (the padded length is the row's own), or
            `single` (one row alone, at its own length: a model run by hand). May be set after construction, before
            first use; None means `batching`.
    """

    batching = "padded"
    granularity: int
    chosen_batching: Batching | None = None
    _shrunk: int = 1

    @abstractmethod
    def encode(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """Compute rows.

        Args:
            waveforms: float32 `[R, P]` on the device, zero behind each row's end. Not to be written to.
            num_samples: int64 `[R]` on the device, of each row.
        """

    def use_batching(self, batching: Batching) -> None:
        """Put rows together in this way from now on."""
        self.chosen_batching = batching

    def as_row_extractor(self) -> RowExtractor[P]:
        """The extractor itself."""
        return self

    def pieces(self, num_samples: int) -> list[Piece]:
        """How a clip is cut into rows; the frames of the pieces, one after another, are those of the clip.

        Raises:
            AudioError: the clip cannot be extracted: TOO_LONG, say.
        """
        return [Piece(0, num_samples, 0, self.num_frames(num_samples))]

    def padded_length(self, num_samples: int) -> int:
        """Samples of the padded row of a piece of `num_samples`."""
        if (self.chosen_batching or self.batching) != "padded":
            return num_samples
        units = -(-num_samples // self.granularity)
        step = 1 << max(0, (units - 1).bit_length() - _STEPS.bit_length())
        return -(-units // step) * step * self.granularity

    def rows(self, padded_length: int, device: torch.device) -> int:
        """Rows of a batch whose rows have `padded_length` samples."""
        batching = self.chosen_batching or self.batching
        if batching == "single":
            return 1
        seconds = ROW_SECONDS[device.type] / self._shrunk
        fitting = int(seconds * self.spec.sample_rate / padded_length)
        at_most = MAX_ROWS[device.type] if batching == "padded" else _EQUAL_ROWS
        return max(1, min(fitting, at_most // self._shrunk))

    def shrink(self, rows: int, padded_length: int, device: torch.device) -> bool:
        """Halve all batches from now on, after one of `rows` rows did not fit on the device.

        Values of later batches differ from those of earlier ones by rounding. Returns False where there was one row.
        """
        with _shrinking:
            if rows > 1 and self.rows(padded_length, device) >= rows:  # else another thread has been here
                self._shrunk *= 2
            return rows > 1

    def extract(self, clips: Sequence[Clip]) -> list[torch.Tensor]:
        """The clips' features, in their order: each `[frames, *item_shape]` of `spec.dtype`, on the device."""
        return [rows.features for rows in self.extract_rows(clips)]

    def extract_rows(self, clips: Sequence[Clip]) -> list[Rows]:
        """The clips' features, and what is beside them: for each, `[frames, *item_shape]`, and `[n, …]` by name."""
        found: list[list[Rows | None]] = []
        groups: dict[int, list[tuple[int, int, torch.Tensor, Piece]]] = {}
        for number, clip in enumerate(clips):
            pieces = self.pieces(len(clip.waveform))
            found.append([None] * len(pieces))
            for position, piece in enumerate(pieces):
                samples = clip.waveform[piece.start : piece.start + piece.num_samples]
                groups.setdefault(self.padded_length(len(samples)), []).append((number, position, samples, piece))
        for length, members in groups.items():
            count = self.rows(length, clips[0].waveform.device)
            for first in range(0, len(members), count):
                batch = members[first : first + count]
                encoded = self.run(*pad_rows([samples for _, _, samples, _ in batch], count, length))
                for row, (number, position, _, piece) in enumerate(batch):
                    found[number][position] = Rows(
                        encoded.features[row, piece.skip : piece.skip + piece.num_frames],
                        {name: side[row] for name, side in encoded.side.items()},
                    )
        return [_joined([rows for rows in clip if rows is not None]) for clip in found]

    def run(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """`encode`, at the extractor's precision: float32, unless a subclass has another."""
        return self.encode(waveforms, num_samples)


def pad_rows(waveforms: Sequence[torch.Tensor], rows: int, padded_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Waveforms `[n]` as `[rows, padded_length]`, filled up with copies of the first; and int64 `[rows]` lengths."""
    padded = waveforms[0].new_zeros(rows, padded_length)
    for row in range(rows):
        waveform = waveforms[row] if row < len(waveforms) else waveforms[0]
        padded[row, : len(waveform)] = waveform
    lengths = [len(waveform) for waveform in waveforms] + [len(waveforms[0])] * (rows - len(waveforms))
    return padded, torch.tensor(lengths, device=padded.device)


def _joined(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    side = {name: torch.cat([piece.side[name] for piece in pieces]) for name in pieces[0].side}
    return Rows(torch.cat([piece.features for piece in pieces]), side)
