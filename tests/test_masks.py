"""Masks, held to triple loops, and to attention that sees one row's own frames and
nothing else."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from devices import DEVICES
from forking import fork, join
from hypothesis import given, settings
from hypothesis import strategies as st

from featcache import masks
from featcache.errors import ArgumentError
from featcache.masks import (
    attention_mask,
    causal_mask,
    chunk_mask,
    for_multihead_attention,
    padding_mask,
)

lengths_of_rows = st.lists(st.integers(0, 12), min_size=1, max_size=4)
chunk_sizes = st.integers(1, 14)
left_chunks = st.none() | st.integers(0, 6)
of_many = settings(max_examples=60, deadline=None)


@pytest.fixture(autouse=True)
def nothing_kept():
    """Every test begins with an empty cache."""
    masks._shared_mask.cache_clear()


def may_attend(query, key, chunk_size, num_left_chunks):
    """Whether frame `query` sees frame `key`."""
    chunks_back = query // chunk_size - key // chunk_size
    return chunks_back >= 0 and (num_left_chunks is None or chunks_back <= num_left_chunks)


def slow_chunk_mask(num_frames, chunk_size, num_left_chunks):
    frames = range(num_frames)
    rows = [
        [may_attend(query, key, chunk_size, num_left_chunks) for key in frames] for query in frames
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(num_frames, num_frames)


# Values


@given(lengths_of_rows, st.none() | st.integers(0, 15))
@of_many
def test_a_padding_mask_is_true_where_there_are_frames(lengths, num_frames):
    mask = padding_mask(torch.tensor(lengths), num_frames)
    padded_to = max(lengths) if num_frames is None else num_frames
    assert mask.tolist() == [[frame < length for frame in range(padded_to)] for length in lengths]
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("device", DEVICES)
@given(st.integers(0, 64), chunk_sizes, left_chunks)
@settings(max_examples=200, deadline=None)
def test_a_chunk_mask_is_that_of_the_loop(device, num_frames, chunk_size, num_left_chunks):
    mask = chunk_mask(num_frames, chunk_size, num_left_chunks, device=device)
    assert mask.dtype == torch.bool
    assert mask.is_contiguous()
    assert torch.equal(mask.cpu(), slow_chunk_mask(num_frames, chunk_size, num_left_chunks))


def test_large_numbers_cost_nothing_and_there_may_be_no_rows_or_frames():
    assert chunk_mask(5, 10**12).all()
    assert torch.equal(chunk_mask(5, 2, 10**12), chunk_mask(5, 2))
    assert padding_mask(torch.tensor([], dtype=torch.int64)).shape == (0, 0)
    assert attention_mask(padding_mask(torch.tensor([0, 0])), chunk_mask(0, 4)).shape == (
        2,
        1,
        0,
        0,
    )


@given(lengths_of_rows, chunk_sizes, left_chunks, st.integers(0, 3))
@of_many
def test_an_attention_mask_joins_the_two_and_leaves_no_query_without_a_key(
    lengths, chunk_size, left, slack
):
    num_frames = max(lengths) + slack
    padding = padding_mask(torch.tensor(lengths), num_frames)
    mask = attention_mask(padding, chunk_mask(num_frames, chunk_size, left))
    assert mask.shape == (len(lengths), 1, num_frames, num_frames)
    for row, length in enumerate(lengths):
        for query in range(num_frames):
            for key in range(num_frames):
                expected = key < length and may_attend(query, key, chunk_size, left)
                alone = query >= length and query == key
                assert mask[row, 0, query, key] == (expected or alone)
    assert mask.any(-1).all()


@given(lengths_of_rows.filter(any))
@of_many
def test_without_a_mask_of_frames_a_row_of_no_frames_sees_its_padding(lengths):
    padding = padding_mask(torch.tensor(lengths))
    mask = attention_mask(padding)
    assert mask.shape == (len(lengths), 1, 1, max(lengths))
    for row, length in enumerate(lengths):
        assert torch.equal(
            mask[row, 0, 0], padding[row] if length else torch.ones(max(lengths), dtype=torch.bool)
        )


# Attention


def attend_alone(x, chunk_size, left):
    """One row `[heads, frames, dims]`, frame by frame, each over the frames that it sees
    and no others."""
    rows = []
    for query in range(x.shape[1]):
        seen = [
            key
            for key in range(x.shape[1])
            if chunk_size is None or may_attend(query, key, chunk_size, left)
        ]
        weights = (x[:, query, None] @ x[:, seen].mT / x.shape[-1] ** 0.5).softmax(-1)
        rows.append(weights @ x[:, seen])
    return torch.cat(rows, 1) if rows else x


@given(lengths_of_rows, st.none() | chunk_sizes, left_chunks, st.integers(1, 2))
@of_many
def test_attention_with_the_mask_is_that_of_each_row_alone(lengths, chunk_size, left, slack):
    num_frames = max(lengths) + slack
    torch.manual_seed(0)
    x = torch.randn(len(lengths), 2, num_frames, 4, dtype=torch.float64, requires_grad=True)
    frames = None if chunk_size is None else chunk_mask(num_frames, chunk_size, left)
    mask = attention_mask(padding_mask(torch.tensor(lengths), num_frames), frames)
    y = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            y[row, :, :length], attend_alone(x[row, :, :length], chunk_size, left)
        )
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


def run(layers, x, **given):
    for layer in layers:
        x, _ = layer(x, x, x, **given)
    return x


def test_multihead_attention_gives_each_row_what_it_gives_it_alone():
    torch.manual_seed(0)
    layers = [torch.nn.MultiheadAttention(8, 2, batch_first=True).eval() for _ in range(2)]
    lengths, num_frames = [9, 4, 1, 0], 11
    x = torch.randn(4, num_frames, 8, generator=torch.Generator().manual_seed(1))
    padding, frames = padding_mask(torch.tensor(lengths), num_frames), chunk_mask(num_frames, 3, 1)
    mask = for_multihead_attention(attention_mask(padding, frames), num_heads=2)
    assert mask.shape == (8, num_frames, num_frames)
    y = run(layers, x, attn_mask=mask)
    assert y.isfinite().all()
    for row, length in enumerate(lengths[:3]):
        alone = run(
            layers,
            x[row : row + 1, :length],
            attn_mask=for_multihead_attention(chunk_mask(length, 3, 1)),
        )
        torch.testing.assert_close(y[row, :length], alone[0])


@pytest.mark.parametrize("frames", [None, chunk_mask(5, 2)])
def test_the_opposite_mask_is_one_for_each_head(frames):
    mask = attention_mask(padding_mask(torch.tensor([5, 0, 3])), frames)
    opposite = for_multihead_attention(mask, num_heads=4).unflatten(0, (3, 4))
    assert torch.equal(opposite, ~mask.expand(3, 4, 5, 5))


# Shared masks


def test_the_same_mask_is_the_same_tensor():
    assert chunk_mask(20, 4, 2) is chunk_mask(20, 4, 2)
    assert causal_mask(20) is chunk_mask(20, 1)
    assert chunk_mask(20, 4, 5) is chunk_mask(20, 4)  # there are five chunks
    assert chunk_mask(20, 20, 0) is chunk_mask(20, 99)
    assert (
        len(
            {
                id(chunk_mask(20, *given))
                for given in [(4, 2), (4, 1), (4, 0), (4, None), (5, 2), (21, None)]
            }
        )
        == 6
    )
    assert chunk_mask(20, 4, 2, device="cpu") is chunk_mask(20, 4, 2, device=torch.device("cpu"))


def test_what_is_kept_is_bounded_and_what_was_not_used_for_longest_goes_first():
    first, second, *others = [chunk_mask(10, size) for size in range(1, masks._NUM_SHARED + 1)]
    assert causal_mask(10) is first
    chunk_mask(10, 9)
    assert causal_mask(10) is first
    assert chunk_mask(10, masks._NUM_SHARED) is others[-1]
    assert chunk_mask(10, 2) is not second
    longest = masks._MOST_SHARED_FRAMES
    assert causal_mask(longest + 1) is not causal_mask(longest + 1)
    assert masks._NUM_SHARED * causal_mask(longest).untyped_storage().nbytes() <= 64 << 20


def test_combined_masks_are_ones_own():
    padding, frames = padding_mask(torch.tensor([3, 0])), chunk_mask(3, 1)
    for mask in (
        attention_mask(padding),
        attention_mask(padding, frames),
        for_multihead_attention(frames),
    ):
        mask.fill_(False)
    assert padding.tolist() == [[True] * 3, [False] * 3]
    assert torch.equal(chunk_mask(3, 1), slow_chunk_mask(3, 1, None))


def test_a_mask_made_in_inference_mode_does_for_training():
    with torch.inference_mode():
        mask = chunk_mask(6, 2)
    scores = torch.randn(6, 6, requires_grad=True)
    scores.masked_fill(~chunk_mask(6, 2), 0).sum().backward()
    assert chunk_mask(6, 2) is mask
    assert not mask.is_inference()


def test_threads_get_the_right_mask():
    """Of more than are kept."""
    wanted = [
        (num_frames, size, left)
        for num_frames in (17, 30)
        for size in (1, 4)
        for left in (0, 2, None)
    ]
    expected = {which: slow_chunk_mask(*which) for which in wanted}
    start = threading.Barrier(8)

    def ask(turn):
        start.wait()
        return all(
            torch.equal(chunk_mask(*which), expected[which])
            for which in (wanted[turn:] + wanted[:turn]) * 40
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(8)))


def test_a_process_that_is_forked_while_a_mask_is_made_has_masks(monkeypatch):
    """As a loader's worker is, while another thread trains."""
    make, children = masks._chunk_mask, []

    def fork_and_make(*arguments):
        monkeypatch.setattr(masks, "_chunk_mask", make)
        children.append(fork(lambda: chunk_mask(9, 3)))
        return make(*arguments)

    monkeypatch.setattr(masks, "_chunk_mask", fork_and_make)
    chunk_mask(8, 2)
    assert list(map(join, children)) == [0]


# Devices


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
def test_masks_are_on_the_device_that_is_asked_for_or_the_default_one(device):
    frames, padding = (
        chunk_mask(6, 2, device=device),
        padding_mask(torch.tensor([6, 2], device=device), 6),
    )
    made = [
        frames,
        causal_mask(6, device=device),
        padding,
        attention_mask(padding),
        attention_mask(padding, frames),
    ]
    assert {mask.device.type for mask in made} == {device}
    assert {mask.dtype for mask in made} == {torch.bool}
    assert chunk_mask(6, 2, device=device) is frames
    assert chunk_mask(6, 2, device=device) is not chunk_mask(6, 2, device="cpu") or device == "cpu"
    with torch.device("meta"):
        assert chunk_mask(6, 2).device.type == "meta"
    assert chunk_mask(6, 2).device.type == "cpu"


def test_compiled_models_may_make_masks():
    compiled = torch.compile(
        lambda x: x.masked_fill(~chunk_mask(x.shape[0], 4, 1), 0), backend="eager", fullgraph=True
    )
    for num_frames in (9, 12, 30):
        assert torch.equal(
            compiled(torch.ones(num_frames, num_frames)).bool(), slow_chunk_mask(num_frames, 4, 1)
        )
    assert not masks._shared_mask.cache_info().currsize


# Mistakes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chunk_mask(-1, 2), "num_frames is -1: it must be 0 or more"),
        (lambda: chunk_mask(5, 0), "chunk_size is 0: it must be 1 or more"),
        (
            lambda: chunk_mask(5, 2, -1),
            "num_left_chunks is -1: it must be 0 or more; None is for all",
        ),
        (lambda: causal_mask(-1), "num_frames is -1"),
        (lambda: causal_mask(2.5), "num_frames is 2.5: it must be a whole number"),
        (lambda: chunk_mask(5, "2"), "chunk_size is '2': it must be a whole number"),
        (
            lambda: chunk_mask(5, 2, "all"),
            "num_left_chunks is 'all': it must be a whole number; None is for all",
        ),
        (lambda: padding_mask([3, 1]), "lengths is a list: give a tensor"),
        (lambda: attention_mask(None), "padding is a NoneType: give a tensor"),
        (lambda: for_multihead_attention(5), "mask is a int: give a tensor"),
        (lambda: padding_mask(torch.tensor([0.5, 1.0])), "lengths is torch.float32"),
        (lambda: padding_mask(torch.tensor(3)), "give a tensor of integers"),
        (lambda: padding_mask(torch.tensor([3]), -2), "num_frames is -2"),
        (lambda: attention_mask(torch.ones(2, 3)), "padding is torch.float32"),
        (lambda: attention_mask(torch.ones(2, 3) > 0, torch.ones(3, 3)), "frames is torch.float32"),
        (
            lambda: attention_mask(torch.ones(2, 3) > 0, causal_mask(4)),
            r"frames is \[4, 4\], and padding is \[2, 3\]",
        ),
        (lambda: for_multihead_attention(torch.ones(2, 3)), "mask is torch.float32"),
        (lambda: for_multihead_attention(attention_mask(torch.ones(2, 3) > 0)), "num_heads None"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
