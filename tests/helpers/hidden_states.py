"""Compares hidden states with those of a reference."""

import numpy as np
import torch

from featcache import testing
from featcache.extractors import Clip
from featcache.extractors.hidden_states import HiddenStates, HiddenStatesParams


def noise(num_samples: int) -> torch.Tensor:
    """Noise that swells, with an offset that normalisation takes away."""
    rng = np.random.default_rng(num_samples)
    swelling = np.geomspace(1e-3, 0.3, num_samples) * rng.standard_normal(num_samples) + 0.02
    return torch.from_numpy(swelling.astype(np.float32))


def extract(
    extractor: HiddenStates[HiddenStatesParams], waveforms: list[torch.Tensor]
) -> list[np.ndarray]:
    """The features of waveforms, in one call."""
    return testing.extract(extractor, [Clip("", waveform) for waveform in waveforms])


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """In parts of the largest value."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def assert_blind_behind_the_end(
    extractor: HiddenStates[HiddenStatesParams], lengths: list[int]
) -> None:
    """In a padded batch of clips of these lengths, no bit of their frames depends on what
    is behind their ends."""
    num_samples = torch.tensor(lengths)
    padded = torch.zeros(len(lengths), extractor.padded_length(max(lengths)))
    for row, n in zip(padded, lengths, strict=True):
        row[:n] = noise(n)
    behind = torch.arange(padded.shape[1]) >= num_samples[:, None]
    with torch.inference_mode():
        expected = extractor.encode(padded, num_samples).features
        strangers = torch.randn(padded.shape, generator=torch.Generator().manual_seed(0))
        for garbage in (torch.ones_like(padded), 100 * strangers):
            found = extractor.encode(torch.where(behind, garbage, padded), num_samples).features
            for row, n in enumerate(lengths):
                frames = extractor.num_frames(n)
                assert torch.equal(found[row, :frames], expected[row, :frames])
