"""Cepstral mean and variance normalisation, on the device where the features are: of all, by speaker, by utterance.

    cmvn = featcache.Cmvn.load("speakers.cmvn.npz", cache=cache)   # which `featcache stats -o` wrote of this version
    normalised = cmvn(features, lengths, groups=batch["speaker"])  # float32 [batch, frames, dims]
    normalised = normalize_utterances(features, lengths)           # each by its own frames

Frames beyond an utterance's length stay as they are.
"""

from featcache.cmvn.of_utterances import normalize_utterances
from featcache.cmvn.of_version import Cmvn

__all__ = ["Cmvn", "normalize_utterances"]
