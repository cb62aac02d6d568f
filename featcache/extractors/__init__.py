"""Extractors: the contract in `base`; the bases `frames`, `rows`, `model`, `codec` and `hidden_states`; one file per
family of extractors."""

from featcache.extractors.base import Clip, Extractor, Params, find, fingerprint, registered, require_registered
from featcache.spec import FeatureSpec

__all__ = ["Clip", "Extractor", "FeatureSpec", "Params", "find", "fingerprint", "registered", "require_registered"]
