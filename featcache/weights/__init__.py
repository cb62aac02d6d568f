"""A model's weights: where they are, the hash of their content, and the model loaded from
them. Nothing is unpickled, and code in a model's folder runs only if `featcache.trust`
allows it."""

from featcache.weights.hub import locate as locate
from featcache.weights.models import Located as Located
from featcache.weights.models import digest as digest
from featcache.weights.models import fold_weight_norm as fold_weight_norm
from featcache.weights.models import load as load
from featcache.weights.models import read_json as read_json
from featcache.weights.models import read_preprocessing as read_preprocessing
from featcache.weights.models import state_dict as state_dict
from featcache.weights.models import transformers_class as transformers_class
from featcache.weights.models import weights_error as weights_error
