"""Cepstral mean and variance normalisation on the features' device: global, by speaker, or by utterance.

    cmvn = featcache.Cmvn.load("speakers.cmvn.npz", cache=cache)   # written by `featcache stats -o`
    normalised = cmvn(features, lengths, groups=batch["speaker"])  # float32 [batch, frames, dims]
    normalised = normalize_utterances(features, lengths)           # each by its own frames

Frames beyond an utterance's length are not changed.
"""

from featcache.cmvn.of_utterances import normalize_utterances
from featcache.cmvn.of_version import Cmvn

__all__ = ["Cmvn", "normalize_utterances"]
