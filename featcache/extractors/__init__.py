"""Extractors: the contract, `base`; bases: `frames`, `rows`, `model`, `codec`,
`hidden_states`; a file per family."""

from featcache.extractors.base import (
    Clip,
    Extractor,
    Params,
    build,
    find,
    fingerprint,
    registered,
    require_registered,
)
from featcache.spec import FeatureSpec, Track

__all__ = [
    "Clip",
    "Extractor",
    "FeatureSpec",
    "Params",
    "Track",
    "build",
    "find",
    "fingerprint",
    "registered",
    "require_registered",
]
