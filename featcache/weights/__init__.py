"""A model's weights: where they are, the hash of their content, and the model loaded from them.

Nothing is unpickled, and no code that comes with weights is run unless `allow_remote_code` was called."""

from featcache.trust import allow_remote_code
from featcache.weights.hub import locate
from featcache.weights.models import (
    Located,
    digest,
    fold_weight_norm,
    load,
    read_json,
    read_preprocessing,
    state_dict,
    transformers_class,
)

__all__ = [
    "Located",
    "allow_remote_code",
    "digest",
    "fold_weight_norm",
    "load",
    "locate",
    "read_json",
    "read_preprocessing",
    "state_dict",
    "transformers_class",
]
