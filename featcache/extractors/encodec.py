"""EnCodec (Défossez et al., 2022, "High Fidelity Neural Audio Compression"), as in
transformers: a SEANet that pads by reflection. The 48 kHz model divides each chunk, here a
row, by its root mean square, which is kept with its codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from featcache.errors import ConfigError
from featcache.extractors import ragged
from featcache.extractors.codec import BandwidthParams, CodecExtractor, num_codebooks_at_bandwidth
from featcache.extractors.rows import Piece, Rows
from featcache.spec import Frames, Track

_SCALES = "what a chunk's samples were divided by"


class Encodec(CodecExtractor[BandwidthParams]):
    """EnCodec's codes: those of `EncodecModel.encode` for the clip alone; or its latents.

    Codes are `[T, Q]`. The 24 kHz model gives ceil(num_samples / 320) frames. In the 48 kHz
    model, chunks of 48,000 samples begin every 47,520 samples, and give 150 frames each;
    `scales` has a number for each chunk. (At some lengths, the second last has 149 frames,
    and the reference fails to stack them.) Mono is given to both channels."""

    Params = BandwidthParams
    revision = 1
    _model_name = "EncodecModel"
    gpu_factor = 4

    def _prepare(self) -> None:
        model = self._load_model()
        self._config = config = model.config
        # properties that the config would compute for each piece
        self._chunk_length = config.chunk_length
        self._chunk_stride = config.chunk_stride or config.chunk_length
        if self._chunk_length and self.params.chunk:
            raise ConfigError(
                f"params.chunk: {self.params.weights} has its own chunks, of "
                f"{config.chunk_length_s:g} s"
            )
        count = num_codebooks_at_bandwidth(self.params, model)
        self.causal = config.use_causal_conv
        self._layers = ragged.seanet_layers(model.encoder.layers)
        self._codebooks = model.quantizer.layers[:count]
        self.granularity = config.hop_length
        self._set_spec("EnCodec", count, config.codebook_size, latent_size=config.hidden_size)
        if self._chunk_length:
            self.max_seconds = None
            frame_rate = (
                super().num_frames(self._chunk_length) * self.sample_rate / self._chunk_stride
            )
            self.spec = replace(self.spec, frame_rate=frame_rate)
        if config.normalize:
            axis = Frames(self.sample_rate / self._chunk_stride, self._chunk_length)
            scales = Track("scales", (), "float32", _SCALES, axis)
            self.spec = replace(self.spec, side=(scales,))

    def num_frames(self, num_samples: int) -> int:
        if not self._chunk_length:
            return super().num_frames(num_samples)
        return sum(piece.num_frames for piece in self.pieces(num_samples))

    def pieces(self, num_samples: int) -> list[Piece]:
        if not self._chunk_length:
            return super().pieces(num_samples)
        pieces = []
        for start in range(0, num_samples, self._chunk_stride):
            size = min(self._chunk_length, num_samples - start)
            pieces.append(Piece(start, size, 0, super().num_frames(size)))
        return pieces

    def padded_length(self, num_samples: int) -> int:
        length = super().padded_length(num_samples)
        if self._chunk_length:  # most pieces are full chunks, which are not padded
            length = min(length, self._chunk_length)
        return length

    def run_for(self, takers: Sequence[Any], waveforms: Tensor, num_samples: Tensor) -> list[Rows]:
        encoded = super().run_for(takers, waveforms, num_samples)
        if self._config.normalize:
            side = {"scales": _scales(waveforms, num_samples)}
            encoded = [replace(rows, side=side) for rows in encoded]
        return encoded

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        if self._config.normalize:
            waveforms = waveforms / _scales(waveforms, num_samples)
        x_RCT = waveforms[:, None].expand(-1, self._config.audio_channels, -1)
        return ragged.run(self._layers, x_RCT, num_samples)[0].mT

    def decode(self, codes_1QF: Tensor, tracks: Mapping[str, Tensor]) -> Tensor:
        size = codes_1QF.shape[-1]
        if self._chunk_length:
            size = super().num_frames(self._chunk_length)
        chunks = torch.split(codes_1QF, size, dim=-1)
        scales = tracks.get("scales", [None] * len(chunks))
        decoded: Tensor = self._load_model().decode(chunks, scales).audio_values
        return decoded


def _scales(waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
    """Compute the root mean square of each row's own samples plus 1e-8, `[R, 1]`, as
    `EncodecModel._encode_frame` does."""
    return (waveforms_RP.square().sum(1, keepdim=True) / num_samples[:, None]).sqrt() + 1e-8
