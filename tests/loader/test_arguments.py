"""What the loader's functions take: every argument has its name."""

import inspect
from functools import partial

import pytest

import featcache
from featcache import FeatureDataset


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (featcache.open, "path name config tag check strict ram copy_to copy_limit"),
        (featcache.Cmvn, "mean std norm_means norm_vars unknown dtype groups group_mean group_std"),
        (featcache.Cache.batch, "self keys start duration codebooks padding_value out raw check"),
        (
            FeatureDataset,
            "cache manifest padding_value crop codebooks where skip_missing on_changed "
            "copies columns classes shared_in",
        ),
        (
            featcache.BucketBatchSampler,
            "lengths shards max_frames batch_size shuffle seed rank world_size "
            "drop_last shards_in_memory",
        ),
    ],
)
def test_help_and_completion_name_every_argument(function, named):
    signature = inspect.signature(function)
    assert list(signature.parameters) == named.split()
    assert not [each for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD]


def test_an_unknown_argument_is_named(cache):
    calls = (
        partial(featcache.open, "x"),
        partial(cache.batch, [0]),
        partial(FeatureDataset, cache),
    )
    for call in (*calls, partial(featcache.BucketBatchSampler, [1], batch_size=1)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
            call(typo=1)
