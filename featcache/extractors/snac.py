"""SNAC (Siuzdak et al., 2024, "SNAC: Multi-Scale Neural Audio Codec"), as in its own
package: DAC's encoder with convolutions by channel, and a residual quantizer whose first
codebooks take the mean of several frames. Models for music also attend within windows of 32
frames."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from featcache import weights
from featcache.errors import ConfigError, ExtractorError, MissingDependencyError
from featcache.extractors import dac, ragged
from featcache.extractors.codec import CodecExtractor, CodecParams, num_codebooks
from featcache.extractors.rows import Rows
from featcache.spec import MAIN, Frames


class SnacParams(CodecParams):
    """The parameters of `snac`."""

    output: Literal["codes"] = "codes"
    """SNAC has codes only: its codebooks quantise latents of several rates."""
    codebooks: int | None = Field(default=None, ge=1)
    """Number of codebooks, each with its track. The first one has the fewest frames.
    Default: all."""


class Snac(CodecExtractor[SnacParams]):
    """SNAC's codes: those of `SNAC.encode` for the clip alone.

    Each codebook is a track `[T, 1]`: the first is `features`, the others are `codes_2`,
    `codes_3` … The clip is padded with zeros to whole frames of the first: at 24 kHz, to
    2,048 samples, for which `codes_2` has 2 codes and `codes_3` has 4."""

    Params = SnacParams
    revision = 1

    def _prepare(self) -> None:
        model = self._load()
        self.require_sample_rate(model.sampling_rate)
        count = num_codebooks(self.params, model.n_codebooks)
        self._encoder: nn.Sequential = model.encoder.block
        self._quantizers = model.quantizer.quantizers[:count]
        strides: list[int] = [quantizer.stride for quantizer in self._quantizers]
        self._steps = strides[0]
        self._repeats = [self._steps // stride for stride in strides]
        field, hop = ragged.receptive_field(ragged.convolutions(self._encoder))
        window: int | None = model.attn_window_size
        if window and self.params.chunk:
            raise ConfigError(f"params.chunk: {self.params.weights} attends within its own windows")
        self.granularity = hop * math.lcm(self._steps, window or 1)
        self.granule_frames = self.granularity // (hop * self._steps)
        frame_length = 0 if window else field + hop * (self._steps - 1)
        self._set_spec("SNAC", 1, model.codebook_size, frame_length)
        main, rate = self.spec.main, self.spec.frame_rate
        others = tuple(
            replace(main, name=f"codes_{number}", axis=Frames(rate * repeats, frame_length))
            for number, repeats in enumerate(self._repeats[1:], start=2)
        )
        self.spec = replace(self.spec, side=others)

    def _load(self) -> Any:
        return weights.load_module(_make, self.params.locate(), self.device, "SNAC")

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        padded_RP, lengths = dac.in_whole_hops(waveforms, num_samples, self.granularity)
        x_RDT = dac.run(self._encoder, padded_RP[:, None], lengths)[0]
        return x_RDT.mT.reshape(len(x_RDT), -1, self._steps * x_RDT.shape[1])

    def quantize(self, latents: Tensor) -> Tensor:
        """Look up the codes of each frame, beginning with the first codebook, as
        `ResidualVectorQuantize.forward`, to the same rounding."""
        rows, frames, size = latents.shape
        residual_RDT = latents.reshape(rows, frames * self._steps, size // self._steps).mT
        codes = []
        for quantizer, repeats in zip(self._quantizers, self._repeats, strict=True):
            pooled_RDT = residual_RDT
            if quantizer.stride > 1:
                pooled_RDT = F.avg_pool1d(residual_RDT, quantizer.stride, quantizer.stride)
            codes_RT, decoded_RDT = dac.look_up(quantizer, pooled_RDT)
            if quantizer.stride > 1:
                decoded_RDT = decoded_RDT.repeat_interleave(quantizer.stride, dim=2)
            residual_RDT = residual_RDT - decoded_RDT
            codes.append(codes_RT.view(rows, frames, repeats))
        return torch.cat(codes, dim=2)

    def take(self, latents_RFD: Tensor) -> Rows:
        codes_RFQ = self.codes_of(latents_RFD)
        first, *others = torch.split(codes_RFQ, self._repeats, dim=2)
        names = [track.name for track in self.spec.side]
        side = dict(zip(names, (codes.flatten(1)[..., None] for codes in others), strict=True))
        return Rows(first, side, dict(zip(names, self._repeats[1:], strict=True)))

    def synthesize(self, tracks: Mapping[str, Tensor]) -> Tensor:
        """Decode by SNAC's own decoder, whose noise differs from call to call."""
        model = self._load()
        if model.attn_window_size or len(tracks) < model.n_codebooks:
            raise ExtractorError("only codes of all codebooks, without windows, can be heard")
        names = [MAIN, *(track.name for track in self.spec.side)]
        codes = [tracks[name][None, :, 0].long() for name in names]
        decoded: Tensor = model.decode(codes)
        return decoded.flatten()


def _make(config: dict[str, Any]) -> Any:
    try:
        from snac import SNAC
    except ImportError as error:
        raise MissingDependencyError("snac", "the extractor snac", extra="snac") from error
    return SNAC(**config)
