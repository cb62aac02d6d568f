"""A model's weights: where they are, the hash of their content, and the model loaded from
them. Nothing is unpickled, and code in a model's folder runs only if `featcache.trust`
allows it."""

from featcache.weights.files import file_digest, find_file
from featcache.weights.hub import locate
from featcache.weights.models import (
    WHOLE,
    Located,
    Part,
    digest,
    fold_weight_norm,
    load,
    load_module,
    read_json,
    read_pickle,
    read_preprocessing,
    state_dict,
    transformers_class,
    weights_error,
)

__all__ = [
    "WHOLE",
    "Located",
    "Part",
    "digest",
    "file_digest",
    "find_file",
    "fold_weight_norm",
    "load",
    "load_module",
    "locate",
    "read_json",
    "read_pickle",
    "read_preprocessing",
    "state_dict",
    "transformers_class",
    "weights_error",
]
