"""Extractors: the contract in `base`, then one file per family."""

from featcache.extractors.base import Clip, Extractor, Params, find, require_registered
from featcache.extractors.fingerprint import fingerprint
from featcache.spec import FeatureSpec

__all__ = ["Clip", "Extractor", "FeatureSpec", "Params", "find", "fingerprint", "require_registered"]
