"""Waveforms for tests: some like speech, some as unlike speech as real files can be."""

from __future__ import annotations

import numpy as np
import torch

from featcache.extractors.base import Clip

UNUSUAL = ("silence", "full scale", "constant", "impulse", "quiet")
"""The kinds of `unusual` sound."""


def clip(seed: int, num_samples: int, device: str = "cpu") -> Clip:
    """A tone that waxes and wanes in noise; another one, and as loud as it may be, for every seed."""
    generator = np.random.default_rng(seed)
    at = np.arange(num_samples) / 16000
    tone = np.sin(2 * np.pi * (100 + 40 * (seed % 7)) * at) * np.sin(2 * np.pi * (3 + seed % 3) * at + 1)
    waveform = 10.0 ** -(seed % 3) * (0.5 * tone + 0.1 * generator.normal(size=num_samples))
    return Clip(f"clip-{seed}", torch.from_numpy(waveform.clip(-1, 1).astype(np.float32)).to(device))


def unusual(kind: str, num_samples: int, device: str = "cpu") -> Clip:
    """One of the `UNUSUAL`."""
    waveform = torch.zeros(num_samples)
    if kind == "full scale":
        waveform[0::2], waveform[1::2] = 1.0, -1.0
    elif kind == "constant":
        waveform += 0.5
    elif kind == "impulse":
        waveform[num_samples // 2] = 1.0
    elif kind == "quiet":
        waveform += 1e-7 * torch.sin(torch.arange(num_samples) / 10)
    return Clip(kind.replace(" ", "-"), waveform.to(device))


def what(clip: Clip) -> str:
    """A clip, for a message."""
    return f"{clip.id} ({len(clip.waveform)} samples)"
