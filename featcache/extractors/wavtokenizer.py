"""WavTokenizer (Ji et al., 2024, "WavTokenizer: an Efficient Acoustic Discrete Codec
Tokenizer for Audio Language Modeling"), as in transformers.

A SEANet that pads by reflection at both ends, with an LSTM that runs forward only, and one
codebook. The convolutions before the LSTM compute long rows in blocks. The LSTM takes a
whole row at once, so long recordings have the codes of the whole clip."""

from __future__ import annotations

from itertools import takewhile

import torch
from torch import Tensor

from featcache.errors import ConfigError
from featcache.extractors import ragged
from featcache.extractors.codec import CodecExtractor, CodecParams, num_codebooks

_BLOCK_SECONDS = 30


class WavTokenizer(CodecExtractor[CodecParams]):
    """WavTokenizer's codes: those of `WavTokenizerModel.encode` for the clip alone; or its
    latents.

    Codes are `[T, 1]`, ceil(num_samples / hop) frames, with a hop of 600 or 320 samples. A
    frame depends on the whole clip before it. Clips of any length are exact, without
    `chunk`."""

    Params = CodecParams
    revision = 1
    _model_name = "WavTokenizerModel"
    gpu_factor = 4

    def _prepare(self) -> None:
        model = self._load_model()
        if self.params.chunk:
            raise ConfigError("params.chunk: wavtokenizer needs none, for clips of any length")
        self.max_seconds = None
        encoder = model.encoder_model.encoder
        layers = ragged.seanet_layers(encoder.layers)
        self._before_lstm = [*takewhile(lambda it: not isinstance(it, ragged.RaggedLSTM), layers)]
        self._from_lstm = layers[len(self._before_lstm) :]
        self._codebooks = [model.encoder_model.quantizer]
        field, self.granularity = ragged.receptive_field(ragged.convolutions(encoder))
        self._margin = -(-field // self.granularity)
        self._block = _BLOCK_SECONDS * self.sample_rate // self.granularity
        num_codebooks(self.params, 1)
        config = model.config
        self._set_spec("WavTokenizer", 1, config.codebook_size, latent_size=config.hidden_size)

    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        x_RCF = self._convolved(waveforms, num_samples)
        lengths = -(-num_samples // self.granularity)
        return ragged.run(self._from_lstm, x_RCF, lengths)[0].mT

    def _convolved(self, waveforms_RP: Tensor, num_samples: Tensor) -> Tensor:
        """Compute the LSTM's input `[R, C, F]` in blocks, without the frames at both ends
        of a block, which see its padding."""
        hop, num_frames = self.granularity, -(-waveforms_RP.shape[1] // self.granularity)
        blocks = []
        for first in range(0, num_frames, self._block):
            count = min(self._block, num_frames - first)
            skip = min(first, self._margin)
            start, end = first - skip, first + count + self._margin
            samples_RP = waveforms_RP[:, start * hop : end * hop]
            inside = (num_samples - start * hop).clamp(1, samples_RP.shape[1])
            x_RCF, _ = ragged.run(self._before_lstm, samples_RP[:, None], inside)
            blocks.append(x_RCF[..., skip : skip + count])
        return torch.cat(blocks, dim=2)
