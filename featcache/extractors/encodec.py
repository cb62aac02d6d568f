"""EnCodec (Défossez et al., 2022, "High Fidelity Neural Audio Compression"), as in transformers.

The encoder is SEANet: convolutions that halve, quarter … the rate, residual blocks between them, an LSTM at the end.
Every convolution pads by reflection, up to a whole stride, so in a padded batch the last frames of short rows look into
padding; here each row is padded where it ends (see `ragged`).

The 48 kHz model takes stereo and computes each second by itself, with 1 % of overlap, normalised by its root mean
square, with group norms over all its time: a chunk is a row here, and its scale is kept beside its codes.
"""

from __future__ import annotations

import torch
from torch import nn

from featcache.errors import ConfigError
from featcache.extractors import ragged, seanet
from featcache.extractors.bandwidth import BandwidthParams, num_codebooks
from featcache.extractors.model import CodecExtractor, code_dtype, load_codec
from featcache.extractors.rows import Piece, Rows
from featcache.extractors.seanet import Convolution
from featcache.spec import FeatureSpec, SideSpec

_SCALES = SideSpec("scales", (), "float32", "what a chunk's samples were divided by")


class EncodecParams(BandwidthParams):
    """The parameters of `encodec`."""


class Encodec(CodecExtractor[EncodecParams]):
    """EnCodec's codes: those of `EncodecModel.encode` for the clip alone.

    Codes are `[T, Q]`. The 24 kHz model gives ceil(num_samples / 320) frames, from one sample on.

    Of the 48 kHz model, chunks of 48,000 samples begin every 47,520 samples, and the frames of one follow those of the
    other: 150 of each, which is 151.5 per second, and what the last gives. `scales` holds a number for each chunk. (Of
    some lengths, the chunk before the last gives 149 frames, and the reference cannot stack them.) Mono is given to
    both of its channels.

    Args:
        params: see `EncodecParams`.
        sample_rate: of the waveforms, in Hz: the model's.
        device: to compute on.

    Raises:
        ConfigError: the weights cannot be loaded, or the parameters do not go with the model.
        MissingDependencyError: transformers is not installed.
    """

    Params = EncodecParams
    revision = 1

    def __init__(self, params: EncodecParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        model = load_codec("encodec", "EncodecModel", params, sample_rate, device)
        config = model.config
        if config.chunk_length and params.chunk:
            raise ConfigError(f"params.chunk: {params.weights} has its own chunks, of {config.chunk_length_s:g} s")
        count = num_codebooks(params, model)
        if config.chunk_length:
            self.max_seconds = None
        self.causal = config.use_causal_conv
        self._channels = config.audio_channels
        self._normalize = config.normalize
        self._chunk_length = config.chunk_length
        self._chunk_stride = config.chunk_stride or config.chunk_length
        self._layers = seanet.layers(model.encoder.layers, _convolution)
        self._codebooks = model.quantizer.layers[:count]
        self.granularity = config.hop_length
        frame_rate = sample_rate / config.hop_length
        if self._chunk_length:
            frame_rate = -(-self._chunk_length // config.hop_length) * sample_rate / self._chunk_stride
        self.spec = FeatureSpec(
            item_shape=(count,),
            dtype=code_dtype(config.codebook_size),
            frame_rate=frame_rate,
            frame_length=0,
            sample_rate=sample_rate,
            units="EnCodec code",
            codebook_sizes=(config.codebook_size,) * count,
            side=(_SCALES,) if self._normalize else (),
        )

    def num_frames(self, num_samples: int) -> int:
        """How many frames `num_samples` samples give: in each chunk, one to every hop that has begun."""
        if not self._chunk_length:
            return -(-num_samples // self.granularity)
        return sum(piece.num_frames for piece in self.pieces(num_samples))

    def pieces(self, num_samples: int) -> list[Piece]:
        """The clip whole, or its chunks, as `EncodecModel.encode` cuts them."""
        if not self._chunk_length:
            return super().pieces(num_samples)
        pieces = []
        for start in range(0, num_samples, self._chunk_stride):
            size = min(self._chunk_length, num_samples - start)
            pieces.append(Piece(start, size, 0, -(-size // self.granularity)))
        return pieces

    def padded_length(self, num_samples: int) -> int:
        """Samples of the padded row of a piece; a whole chunk, which most are, is not padded."""
        length = super().padded_length(num_samples)
        return min(length, self._chunk_length) if self._chunk_length else length

    def encode(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """Codes `[R, F, Q]`, and scales `[R, 1]` where the model normalises."""
        rows = super().encode(waveforms, num_samples)
        return Rows(rows.features, {"scales": _scales(waveforms, num_samples)} if self._normalize else {})

    def latents(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
        """What the quantizer gets, float `[R, F, D]`."""
        if self._normalize:
            waveforms = waveforms / _scales(waveforms, num_samples)
        x = waveforms[:, None].expand(-1, self._channels, -1)
        return seanet.run(self._layers, x, num_samples)[0].mT

    def quantize(self, latents: torch.Tensor) -> torch.Tensor:
        """Codes, int64 `[R, F, Q]`, by the model's own codebooks."""
        residual = latents.mT
        codes = []
        for codebook in self._codebooks:
            codes.append(codebook.encode(residual))
            residual = residual - codebook.decode(codes[-1])
        return torch.stack(codes, dim=2)


def _scales(waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
    """The root mean square of each row's own samples, `[R, 1]`, and 1e-8, as in `EncodecModel._encode_frame`."""
    return (waveforms.square().sum(1, keepdim=True) / num_samples[:, None]).sqrt() + 1e-8


def _convolution(module: nn.Module) -> Convolution | None:
    """What an `EncodecConv1d` does; None for another module."""
    from transformers.models.encodec.modeling_encodec import EncodecConv1d

    if not isinstance(module, EncodecConv1d):
        return None
    total = int(module.padding_total)
    right = 0 if module.causal else total // 2
    padding = ragged.Padding(total - right, right, module.pad_mode, whole_strides=True)
    return Convolution(module.conv, padding, module.norm if module.norm_type == "time_group_norm" else None)
