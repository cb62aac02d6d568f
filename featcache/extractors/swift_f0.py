"""SwiftF0's pitch and confidence (Nieradzik, 2025), by the model in the package `swift-f0`.

The formulas are those of the package's `core.py`, release 0.3.0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from featcache.extractors.base import Batching, Clip, Extractor, require_rate
from featcache.extractors.onnx_model import Array, OnnxModel
from featcache.extractors.weight_file import PitchParams
from featcache.spec import FeatureSpec

_SAMPLE_RATE = 16_000

_HOP = 256

_LOWEST, _HIGHEST = 46.875, 2093.75
"""The band of the model, in Hz."""

_WINDOW, _BEFORE, _AFTER = 1875, 11, 10
"""Frames of a window, and those around it on which its frames depend."""

_SILENT = 1e-3
"""The magnitude below which all samples of a silent frame lie. For digital silence, the
model itself gives pitches of 2,000 Hz, and is sure of them."""


class SwiftF0Params(PitchParams):
    """The parameters of `swift_f0`."""

    fmin: float = Field(default=_LOWEST, ge=_LOWEST)
    """The lowest pitch, in Hz. The band changes the confidence too."""
    fmax: float = Field(default=_HIGHEST, le=_HIGHEST)
    """The highest pitch, in Hz."""


class SwiftF0(Extractor[SwiftF0Params]):
    """Pitch in Hz, and the confidence that the frame is voiced, from 0.5 on: float32 `[T,
    2]`.

    Every frame has a pitch. Frame `t` lies at `t * 0.016` seconds. A clip has one frame for
    each whole hop of 256 samples, but at least one. Long clips are computed in windows,
    with the values of the whole clip."""

    Params = SwiftF0Params
    revision = 1
    batching: Batching = "single"

    def __init__(self, params: SwiftF0Params, sample_rate: int, device: torch.device) -> None:
        require_rate(sample_rate, _SAMPLE_RATE, "SwiftF0")
        self._model = OnnxModel(params.file, device)
        self._model.require("input", {"weights": ["audio", "fmin", "fmax"]})
        self._model.require("output", {"weights": ["pitch", "confidence"]})
        self._band = {
            "fmin": self._model.filled("fmin", params.fmin),
            "fmax": self._model.filled("fmax", params.fmax),
        }
        units = "pitch (Hz), confidence that it is voiced (0 to 1)"
        self.spec = FeatureSpec((2,), "float32", _SAMPLE_RATE / _HOP, 0, _SAMPLE_RATE, units)

    @classmethod
    def weights_digest(cls, params: SwiftF0Params) -> str:
        return params.digest

    def num_frames(self, num_samples: int) -> int:
        return max(1, num_samples // _HOP) if num_samples else 0

    def extract(self, clips: Sequence[Clip]) -> list[Tensor]:
        return [self._computed(clip.waveform) for clip in clips]

    def _computed(self, waveform: Tensor) -> Tensor:
        samples = waveform.cpu().numpy()
        num_frames = self.num_frames(len(samples))
        frames = np.empty((num_frames, 2), np.float32)
        for start in range(0, num_frames, _WINDOW):
            end = min(start + _WINDOW, num_frames)
            first = max(0, start - _BEFORE)
            piece = samples[first * _HOP :]
            if end < num_frames:
                piece = samples[first * _HOP : (end + _AFTER) * _HOP]
            inputs = {"audio": np.ascontiguousarray(piece[None]), **self._band}
            pitch, confidence = self._model.run(inputs, ["pitch", "confidence"])
            inside = slice(start - first, end - first)
            frames[start:end, 0] = pitch[0, inside]
            frames[start:end, 1] = confidence[0, inside]
        frames[_are_silent(samples, num_frames), 1] = 0
        return torch.from_numpy(frames).to(waveform.device)


def _are_silent(samples: Array, num_frames: int) -> Array:
    whole = samples[: num_frames * _HOP].reshape(num_frames, -1)
    return np.abs(whole).max(axis=1) < _SILENT
