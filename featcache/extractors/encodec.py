"""EnCodec (Défossez et al., 2022, "High Fidelity Neural Audio Compression"), as in
transformers.

The encoder is SEANet: convolutions that divide the rate, residual blocks between them, an
LSTM at the end. Every convolution pads by reflection, up to a whole stride. So in a
padded batch the last frames of short rows would see padding; here each row is padded
where it ends (see `ragged`).

The 48 kHz model takes stereo and computes each second apart, with 1 % of overlap: a chunk
is divided by its root mean square, and group norms are taken over all its time. Here a
chunk is a row, and its scale is kept with its codes."""

from __future__ import annotations

from dataclasses import replace

import torch

from featcache.errors import ConfigError
from featcache.extractors import ragged
from featcache.extractors.codec import BandwidthParams, CodecExtractor, num_codebooks_at_bandwidth
from featcache.extractors.rows import Piece, Rows
from featcache.spec import Frames, Track

_SCALES = "what a chunk's samples were divided by"


class Encodec(CodecExtractor[BandwidthParams]):
    """EnCodec's codes: those of `EncodecModel.encode` for the clip alone.

    Codes are `[T, Q]`. The 24 kHz model gives ceil(num_samples / 320) frames, from one
    sample on.

    In the 48 kHz model, chunks of 48,000 samples begin every 47,520 samples, and their
    frames follow each other: 150 for a chunk, or 151.5 per second, and those of the last
    chunk. `scales` has a number for each chunk. (At some lengths, the second last has 149
    frames, and the reference fails to stack them.) Mono is given to both channels."""

    Params = BandwidthParams
    revision = 1
    gpu_factor = 4

    def __init__(self, params: BandwidthParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        model = self._load_model("EncodecModel")
        self._config = config = model.config
        if config.chunk_length and params.chunk:
            raise ConfigError(
                f"params.chunk: {params.weights} has its own chunks, of {config.chunk_length_s:g} s"
            )
        count = num_codebooks_at_bandwidth(params, model)
        self.causal = config.use_causal_conv
        # which the config computes, for each piece if it were asked
        self._chunk_length = config.chunk_length
        self._chunk_stride = config.chunk_stride or config.chunk_length
        self._layers = ragged.seanet_layers(model.encoder.layers)
        self._codebooks = model.quantizer.layers[:count]
        self.granularity = config.hop_length
        self._set_spec("EnCodec", count, config.codebook_size)
        if config.chunk_length:
            self.max_seconds = None
            frame_rate = super().num_frames(config.chunk_length) * sample_rate / self._chunk_stride
            self.spec = replace(self.spec, frame_rate=frame_rate)
        if config.normalize:
            per_second = sample_rate / self._chunk_stride
            axis = Frames(per_second, config.chunk_length)
            self.spec = replace(self.spec, side=(Track("scales", (), "float32", _SCALES, axis),))

    def num_frames(self, num_samples: int) -> int:
        if not self._chunk_length:
            return super().num_frames(num_samples)
        return sum(piece.num_frames for piece in self.pieces(num_samples))

    def pieces(self, num_samples: int) -> list[Piece]:
        """The whole clip, or its chunks as `EncodecModel.encode` cuts them."""
        if not self._chunk_length:
            return super().pieces(num_samples)
        starts = range(0, num_samples, self._chunk_stride)
        sizes = [(start, min(self._chunk_length, num_samples - start)) for start in starts]
        return [Piece(start, size, 0, -(-size // self.granularity)) for start, size in sizes]

    def padded_length(self, num_samples: int) -> int:
        """The samples of a piece's padded row. Most pieces are full chunks, which are not
        padded."""
        length = super().padded_length(num_samples)
        return min(length, self._chunk_length) if self._chunk_length else length

    def encode(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        rows = super().encode(waveforms, num_samples)
        return Rows(
            rows.features,
            {"scales": _scales(waveforms, num_samples)} if self._config.normalize else {},
        )

    def latents(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        if self._config.normalize:
            waveforms = waveforms / _scales(waveforms, num_samples)
        x_RCT = waveforms[:, None].expand(-1, self._config.audio_channels, -1)
        return ragged.run(self._layers, x_RCT, num_samples)[0].mT


def _scales(waveforms_RP: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
    """The root mean square of each row's own samples plus 1e-8, `[R, 1]`, as in
    `EncodecModel._encode_frame`."""
    return (waveforms_RP.square().sum(1, keepdim=True) / num_samples[:, None]).sqrt() + 1e-8
