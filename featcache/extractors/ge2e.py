"""Speaker vectors by GE2E (Wan et al., 2018, "Generalized end-to-end loss for speaker
verification"), by the weights in the package `Resemblyzer`.

The formulas are those of the package's `voice_encoder.py` and `audio.py`, release 0.1.4."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from featcache import weights
from featcache.errors import AudioError, Reason, first_line
from featcache.extractors import mel
from featcache.extractors.base import Clip, require_rate
from featcache.extractors.model import computing
from featcache.extractors.vectors import VectorExtractor
from featcache.extractors.weight_file import WeightFileParams
from featcache.spec import MAIN, FeatureSpec, Track
from featcache.spec import Clip as ClipAxis

_SAMPLE_RATE = 16_000
_N_FFT, _HOP, _BINS = 400, 160, 40
_VALUES, _LAYERS = 256, 3

_PARTIAL = 160
"""Frames of a partial utterance. The network gives a vector for each partial utterance."""

_STEP = 77
"""Frames from one partial's start to the next one's: 1.3 a second."""

_COVERAGE = 0.75
"""The least share of the last partial that the clip covers."""

_AT_ONCE = 32
"""The most partials in a batch of the network."""


class GE2EParams(WeightFileParams):
    """The parameters of `ge2e`: `weights` are `pretrained.pt`, read as weights only."""

    level: float | None = -30.0
    """Quieter clips are first raised to this root mean square, in dB of full scale. Louder
    clips stay. With null, all clips stay, and the vector depends on the level."""


class GE2E(VectorExtractor[GE2EParams]):
    """A speaker vector, float32 `[256]`, of length 1, with no negative values: what the
    package's `embed_utterance` gives for `normalize_volume` of the clip.

    Pauses are not cut out: extract from a manifest of speech segments, which `featcache
    vad` writes. Digital silence is refused, as it has no speaker."""

    Params = GE2EParams
    revision = 1

    def __init__(self, params: GE2EParams, sample_rate: int, device: torch.device) -> None:
        require_rate(sample_rate, _SAMPLE_RATE, "GE2E")
        self._level = params.level
        lstm = nn.LSTM(_BINS, _VALUES, _LAYERS, batch_first=True)
        self._network = nn.ModuleDict({"lstm": lstm, "linear": nn.Linear(_VALUES, _VALUES)})
        document = weights.read_pickle(params.file)
        try:
            # besides, it has the similarity's two numbers, which are for training
            loaded = self._network.load_state_dict(document["model_state"], strict=False)
            if loaded.missing_keys:
                raise KeyError(*loaded.missing_keys)
        except (KeyError, TypeError, RuntimeError) as error:
            what = f"not the weights of Resemblyzer's encoder: {first_line(error)}"
            raise weights.weights_error(params.file, what) from error
        self._network.eval().requires_grad_(False).to(device)
        filters = mel.hertz_filters(_BINS, _N_FFT, _SAMPLE_RATE)
        self._filters = filters.to(device, torch.float32)
        self._taper = torch.hann_window(_N_FFT, dtype=torch.float64).to(device, torch.float32)
        track = Track(MAIN, (_VALUES,), "float32", "speaker vector (GE2E)", ClipAxis())
        self.spec = FeatureSpec.of(_SAMPLE_RATE, track)

    @classmethod
    def weights_digest(cls, params: GE2EParams) -> str:
        return params.digest

    def vector(self, clip: Clip) -> Tensor:
        with computing("fp32", clip.waveform.device):
            return self._embedded(self._at_level(clip.waveform))

    def _embedded(self, waveform: Tensor) -> Tensor:
        starts = partial_starts(len(waveform))
        end = (starts[-1] + _PARTIAL) * _HOP
        before = _N_FFT // 2
        padded = torch.nn.functional.pad(waveform, (before, before + max(0, end - len(waveform))))
        frames = padded.unfold(0, _N_FFT, _HOP)
        partials_PTM = torch.stack(
            [self._mel(frames[start : start + _PARTIAL]) for start in starts]
        )
        vectors = [self._encoded(batch) for batch in torch.split(partials_PTM, _AT_ONCE)]
        return _normalised(torch.cat(vectors).mean(dim=0, keepdim=True))[0]

    def _at_level(self, waveform: Tensor) -> Tensor:
        power = waveform.double().square().mean()
        if not power > 0:
            raise AudioError(Reason.EXTRACTOR_REFUSED, "digital silence has no speaker")
        if self._level is None:
            return waveform
        gain = 10 ** (self._level / 20) / power.sqrt()
        return waveform * gain.clamp(min=1).to(waveform.dtype)

    def _mel(self, frames: Tensor) -> Tensor:
        return mel.power_spectrum(frames * self._taper, _N_FFT) @ self._filters

    def _encoded(self, partials_PTM: Tensor) -> Tensor:
        _, (hidden, _) = self._network["lstm"](partials_PTM)
        vectors: Tensor = self._network["linear"](hidden[-1]).relu()
        return _normalised(vectors)


def partial_starts(num_samples: int) -> list[int]:
    """Return the first frame of each partial utterance: `compute_partial_slices` in
    `voice_encoder.py`."""
    num_frames = -(-(num_samples + 1) // _HOP)
    starts = [*range(0, max(1, num_frames - _PARTIAL + _STEP + 1), _STEP)]
    covered = num_samples / _HOP - starts[-1]
    if len(starts) > 1 and covered / _PARTIAL < _COVERAGE:
        starts.pop()
    return starts


def _normalised(vectors: Tensor) -> Tensor:
    norms: Tensor = vectors.norm(dim=1, keepdim=True)
    return vectors / norms
