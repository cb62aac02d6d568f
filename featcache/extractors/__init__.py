"""Extractors: the contract in `base`, then one file per family."""

from featcache.extractors.base import Clip, Extractor, FeatureSpec, Params, find

__all__ = ["Clip", "Extractor", "FeatureSpec", "Params", "find"]
