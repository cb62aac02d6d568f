"""One version as a dataset sees it: which of its utterances, and which of their frames."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.loader.buffers import Buffers
from featcache.loader.cache import Cache
from featcache.loader.crop import Crop
from featcache.loader.spans import check_codebooks, check_padding
from featcache.quantize import dequantize

__all__ = ["Part", "View", "Views"]


@dataclass(frozen=True)
class View:
    """A version's part in a dataset.

    Attributes:
        name: by which the dataset knows it.
        cache: the version.
        positions: of the dataset's utterances in it, int64 `[utterances]`; None where they are all of the cache's.
        codebooks: how many of them to read; None is all.
        padding_value: what a batch's frames beyond an utterance's end are filled with.
    """

    name: str
    cache: Cache
    positions: NDArray[np.int64] | None
    codebooks: int | None
    padding_value: float

    def __post_init__(self) -> None:
        check_codebooks(self.cache.spec, self.codebooks)
        check_padding(self.cache.spec, self.padding_value)

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions of some of the dataset's rows."""
        return rows if self.positions is None else self.positions[rows]

    def only(self, rows: NDArray[np.int64]) -> View:
        """The view of a dataset that has only these rows."""
        return replace(self, positions=self.at(rows))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Of the dataset's utterances, in frames; int64 `[utterances]`."""
        return self.cache.lengths if self.positions is None else self.cache.lengths[self.positions]


@dataclass(frozen=True)
class Part:
    """What a batch needs of one version: `counts` frames of the utterances at `positions`, from `firsts` on."""

    view: View
    positions: NDArray[np.int64]
    firsts: NDArray[np.int64] | None
    counts: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the padded frames: `[batch, frames, *item_shape]`."""
        view = self.view
        item_shape = view.cache.spec.item_shape if view.codebooks is None else (view.codebooks,)
        return (len(self.positions), int(self.counts.max(initial=0)), *item_shape)

    @property
    def is_quantized(self) -> bool:
        """Whether the frames are stored as levels, of which `dequantize` makes values."""
        return self.view.cache.spec.is_quantized

    def dtype(self, raw: bool = False) -> np.dtype[Any]:
        """Of the frames; of quantised ones as levels, if `raw`."""
        return self.view.cache.version.dtype if raw else np.dtype(self.view.cache.spec.dtype)

    def gather(self, out: torch.Tensor | Buffers | None = None, raw: bool = False) -> torch.Tensor:
        """The padded frames, `[batch, frames, *item_shape]`; quantised ones as levels, padded with 0, if `raw`."""
        view = self.view
        return view.cache.gather(
            self.positions,
            self.firsts,
            self.counts,
            codebooks=view.codebooks,
            padding_value=0 if raw else view.padding_value,
            out=out,
            raw=raw,
        )

    def dequantize(
        self, levels: torch.Tensor, parameters: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """What `gather` gives, made of what it gives if `raw`, on the device where that is.

        Args:
            levels: uint8 `[batch, frames, *item_shape]`.
            parameters: as the method of that name has them; on the same device.
            lengths: the counts; on the same device.
            dtype: of the values; float32 by default.
        """
        values = torch.float32 if dtype is None else dtype
        return dequantize(levels, parameters, values, lengths=lengths, padding_value=self.view.padding_value)

    def parameters(self) -> torch.Tensor:
        """Scale and offset of each utterance, float32 `[batch, 2, *item_shape]`."""
        return self.view.cache.quantization(self.positions)


class Views:
    """All versions of a dataset, cropped to the same moments.

    A crop's window is counted in frames of the first version. In the others it begins at the same time, and has as many
    frames as last as long: exactly, where the versions' frames begin together at least once a second, and windows then
    begin there; else within half a frame.

    Args:
        views: of the versions; at least one.
        crop: of every utterance; None reads them whole.
    """

    def __init__(self, views: Sequence[View], crop: Crop | None) -> None:
        self.views = list(views)
        self.crop = crop
        rates = [Fraction(view.cache.spec.frame_rate).limit_denominator(1 << 20) for view in self.views]
        self._ratios = [rate / rates[0] for rate in rates]
        self.window = 0 if crop is None else crop.frames_at(float(rates[0]))
        step = math.lcm(*(ratio.denominator for ratio in self._ratios))
        self._step = step if step <= rates[0] else 1

    def only(self, rows: NDArray[np.int64]) -> Views:
        """The views of a dataset that has only these rows."""
        return Views([view.only(rows) for view in self.views], self.crop)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Of what a batch holds of each utterance, in frames of the first version; int64 `[utterances]`."""
        lengths = self.views[0].lengths
        return lengths if self.crop is None else np.minimum(lengths, self.window)

    def short(self) -> NDArray[np.int64]:
        """The rows of utterances that are shorter than the crop, in any version."""
        return np.flatnonzero(self._common([view.lengths for view in self.views]) < self.window)

    def parts(self, rows: NDArray[np.int64], epoch: int) -> list[Part]:
        """What a batch of these rows needs of each version."""
        positions = [view.at(rows) for view in self.views]
        lengths = [view.cache.lengths[at] for view, at in zip(self.views, positions, strict=True)]
        if self.crop is None:
            return [Part(view, at, None, n) for view, at, n in zip(self.views, positions, lengths, strict=True)]
        firsts = self.crop.firsts(self._common(lengths), self.window, positions[0], epoch, self._step)
        parts = []
        for view, at, available, ratio in zip(self.views, positions, lengths, self._ratios, strict=True):
            begins = np.rint(firsts * float(ratio)).astype(np.int64)
            counts = np.clip(available - begins, 0, max(1, round(self.window * ratio)))
            parts.append(Part(view, at, begins, counts))
        return parts

    def _common(self, lengths: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """How long the utterances are in every version, in whole frames of the first; int64 `[n]`."""
        shortest = lengths[0]
        for length, ratio in zip(lengths[1:], self._ratios[1:], strict=True):
            shortest = np.minimum(shortest, length * ratio.denominator // ratio.numerator)
        return shortest
