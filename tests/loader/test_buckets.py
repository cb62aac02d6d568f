"""How an epoch's batches are computed: in chunks, which nothing depends on, and in little memory."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from featcache.loader import sampler
from featcache.loader.sampler import Rules, make_batches


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=60),
    st.integers(60, 300),
    st.none() | st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 11),
    st.data(),
)
def test_chunks_decide_nothing(lengths, max_frames, batch_size, shuffle, drop_last, world_size, chunk, data):
    lengths = np.array(lengths)
    rules = Rules(max_frames, batch_size, shuffle, 3, world_size, drop_last)
    if batch_size is not None and data.draw(st.booleans()):
        rules = replace(rules, max_frames=None)
    some = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    for positions in (None, some):
        whole = make_batches(lengths, positions, rules, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "_CHUNK", chunk)
            chunked = make_batches(lengths, positions, rules, 2)
        for name in ("order", "starts", "ends"):
            assert np.array_equal(getattr(chunked, name), getattr(whole, name))


@pytest.mark.slow
@pytest.mark.parametrize("rules", [Rules(20_000, None, True, 0, 8, False), Rules(None, 64, True, 0, 8, True)])
def test_a_million_utterances_take_some_twenty_megabytes(rules, traced):
    lengths = np.random.default_rng(0).integers(80, 3000, 10**6)
    batches = make_batches(lengths, None, rules, 0)
    left = batches.after(len(batches) // 2)
    for positions in (None, left):
        assert traced(lambda: make_batches(lengths, positions, rules, 0)).peak < 25e6  # noqa: B023
