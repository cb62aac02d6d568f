"""DNSMOS, scores of speech quality without a reference (Reddy et al., 2022, "DNSMOS
P.835"), by the models in the package `speechmos`.

The formulas are those of the package's `dnsmos.py`, release 0.0.1.1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from featcache.extractors import mel
from featcache.extractors.base import Clip, LocalPath, require_rate
from featcache.extractors.onnx_model import Array, OnnxModel
from featcache.extractors.vectors import VectorExtractor
from featcache.extractors.weight_file import WeightFileParams
from featcache.spec import MAIN, FeatureSpec, Track
from featcache.spec import Clip as ClipAxis

SCORES = ("ovrl", "sig", "bak", "p808")
"""The scores of a vector, in its order, each from 1 to 5: overall, speech and background
quality by ITU-T P.835, overall quality by ITU-T P.808."""

_SAMPLE_RATE = 16_000
_WINDOW_SECONDS = 9.01
_WINDOW = int(_WINDOW_SECONDS * _SAMPLE_RATE)

_POLYNOMIALS = (
    (-0.06766283, 1.11546468, 0.04602535),
    (-0.08397278, 1.22083953, 0.0052439),
    (-0.13166888, 1.60915514, -0.39604546),
)
"""Coefficients, the highest power first, that map the raw `ovrl`, `sig` and `bak`."""

_N_FFT, _HOP, _BINS = 321, 160, 120
_CUT = 160
"""Samples at the end of a window that the P.808 model does not see."""


class DnsmosParams(WeightFileParams):
    """The parameters of `dnsmos`: `weights` are the P.835 model, `sig_bak_ovr.onnx`."""

    locations: ClassVar[frozenset[str]] = frozenset(
        {"weights", "sha256", "p808_weights", "p808_sha256"}
    )

    p808_weights: LocalPath
    """The P.808 model, `model_v8.onnx`, in the same forms as `weights`."""
    p808_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 of that file, in hex. Default: any file."""
    windows: Literal["all", "speechmos"] = "all"
    """Scores are averaged over windows of 9.01 s, one second apart. `speechmos` leaves out
    the windows that the package skips because of rounding: of 30 s, 14 of 21."""

    @property
    def p808(self) -> WeightFileParams:
        """The P.808 model's file."""
        return WeightFileParams(weights=self.p808_weights, sha256=self.p808_sha256)


class Dnsmos(VectorExtractor[DnsmosParams]):
    """The scores of a clip, float32 `[4]`: `ovrl`, `sig`, `bak`, `p808`, from 1 to 5.

    A clip shorter than 9.01 s is doubled until it is as long, as in the package."""

    Params = DnsmosParams
    revision = 1

    def __init__(self, params: DnsmosParams, sample_rate: int, device: torch.device) -> None:
        require_rate(sample_rate, _SAMPLE_RATE, "DNSMOS")
        self._params = params
        self._p835, self._p808 = OnnxModel(params.file, device), OnnxModel(params.p808.file, device)
        for model in (self._p835, self._p808):
            model.require("input", {"weights": ["input_1"]})
            model.require("output", {"weights": ["Identity:0"]})
        self._filters = mel.hertz_filters(_BINS, _N_FFT, _SAMPLE_RATE).float()
        self._taper = torch.hann_window(_N_FFT, dtype=torch.float64).float()
        units = ", ".join(f"{name} (of 5)" for name in SCORES)
        track = Track(MAIN, (len(SCORES),), "float32", units, ClipAxis())
        self.spec = FeatureSpec.of(_SAMPLE_RATE, track)

    @classmethod
    def weights_digest(cls, params: DnsmosParams) -> str:
        return f"{params.digest} {params.p808.digest}"

    def vector(self, clip: Clip) -> Tensor:
        scores = [self._scores(window) for window in self._windows(clip.waveform.cpu())]
        mean = np.mean(scores, axis=0)
        return torch.from_numpy(mean.astype(np.float32)).to(clip.waveform.device)

    def _windows(self, waveform: Tensor) -> Iterator[Tensor]:
        """Yield the windows `[144160]` of a clip."""
        while len(waveform) < _WINDOW:
            waveform = torch.cat([waveform, waveform])
        count = int(len(waveform) // _SAMPLE_RATE - _WINDOW_SECONDS) + 1
        for second in range(count):
            start = second * _SAMPLE_RATE
            # the package's sum of seconds may fall a hair short of the window's end
            end = int((second + _WINDOW_SECONDS) * _SAMPLE_RATE)
            if self._params.windows == "all" or end - start == _WINDOW:
                yield waveform[start : start + _WINDOW].contiguous()

    def _scores(self, window: Tensor) -> list[float]:
        inputs = {"input_1": window.numpy()[None]}
        (p835,) = self._p835.run(inputs, ["Identity:0"])
        (p808,) = self._p808.run({"input_1": self._log_mel(window)[None]}, ["Identity:0"])
        signal, background, overall = p835[0].astype(np.float64)
        raw = (overall, signal, background)
        scores = [
            float(np.polyval(powers, value))
            for powers, value in zip(_POLYNOMIALS, raw, strict=True)
        ]
        return [*scores, float(p808[0, 0])]

    def _log_mel(self, window: Tensor) -> Array:
        """Compute the P.808 model's input, float32 `[900, 120]`: librosa's mel spectrogram
        and `power_to_db`."""
        padded = torch.nn.functional.pad(window[:-_CUT], (_N_FFT // 2, _N_FFT // 2))
        frames = padded.unfold(0, _N_FFT, _HOP) * self._taper
        energies = mel.power_spectrum(frames, _N_FFT) @ self._filters
        decibels = 10 * energies.clamp(min=1e-10).log10()
        largest = decibels.amax()
        below_largest = (decibels - largest).clamp(min=-80)
        return ((below_largest + 40) / 40).numpy()
