"""Each row of a batch has the same result as alone, whatever follows its end."""

import weakref
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import EncodecConfig
from transformers.models.encodec.modeling_encodec import EncodecConv1d

from featcache.extractors import ragged

GARBAGE = [0.0, 1e4, -3.0, float("inf"), float("nan")]

rows = st.lists(st.integers(1, 40), min_size=1, max_size=4)
seeds = st.integers(0, 2**31)


def batch(lengths, channels, seed, slack=0):
    """Rows `[R, C, T]`, their lengths, and the same rows each alone, `[1, C, n]`."""
    generator = torch.Generator().manual_seed(seed)
    alone = [torch.randn(1, channels, n, generator=generator) for n in lengths]
    x = torch.randn(len(lengths), channels, max(lengths) + slack, generator=generator)
    for row, samples in enumerate(alone):
        x[row, :, : samples.shape[-1]] = samples[0]
    return x, torch.tensor(lengths), alone


def assert_rows(layer, x, lengths, expected, garbage, tolerance=1e-5):
    """`layer(x, lengths)` gives the expected rows up to rounding, and no bit of them
    depends on garbage."""
    y, ends = layer(x.clone(), lengths)
    again, _ = layer(
        x.masked_fill(torch.arange(x.shape[2]) >= lengths[:, None, None], garbage), lengths
    )
    assert ends.tolist() == [alone.shape[-1] for alone in expected]
    for row, alone in enumerate(expected):
        ours = y[row, :, : alone.shape[-1]]
        torch.testing.assert_close(ours, alone[0], rtol=tolerance, atol=tolerance)
        assert torch.equal(ours, again[row, :, : alone.shape[-1]])


@settings(deadline=None, max_examples=200)
@given(
    rows,
    st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 4)),
    st.fixed_dictionaries(
        {
            "use_causal_conv": st.booleans(),
            "norm_type": st.sampled_from(["weight_norm", "time_group_norm"]),
            "pad_mode": st.sampled_from(["constant", "reflect", "replicate"]),
        }
    ),
    st.integers(0, 5),
    st.sampled_from(GARBAGE),
    seeds,
)
def test_convolution(lengths, shape, options, slack, garbage, seed):
    """The class itself is the reference, with its rule for rows shorter than the padding."""
    kernel_size, stride, dilation = shape
    layer = EncodecConv1d(
        EncodecConfig(**options), 2, 4, max(kernel_size, stride), stride, dilation
    ).eval()
    ours = partial(ragged.run, ragged.seanet_layers([layer.requires_grad_(False)]))
    x, ends, alone = batch(lengths, 2, seed, slack)
    # One step of four equal channels has no variance, and rounding is all that a norm
    # then magnifies.
    assert_rows(ours, x, ends, [layer(samples) for samples in alone], garbage)


def test_a_norm_does_not_keep_what_its_convolution_has_read(monkeypatch):
    """On a GPU, the longest rows that fit would be shorter."""
    config = EncodecConfig(norm_type="time_group_norm")
    modules = [EncodecConv1d(config, 4, 4, 3).eval().requires_grad_(False) for _ in range(3)]
    seen, norm = [], ragged.group_norm

    def watched(module, x, lengths):
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(x))
        return norm(module, x, lengths)

    monkeypatch.setattr(ragged, "group_norm", watched)
    ragged.run(ragged.seanet_layers(modules), torch.ones(2, 4, 9), torch.tensor([9, 5]))
    assert len(seen) == 3


@settings(deadline=None, max_examples=50)
@given(rows, *map(st.integers, [1, 1, 1, 0], [9, 5, 3, 12]), st.sampled_from(GARBAGE), seeds)
def test_convolution_that_pads_with_zeros_itself(
    lengths, kernel_size, stride, dilation, columns, garbage, seed
):
    conv = nn.Conv1d(2, 3, kernel_size, stride, columns, dilation).requires_grad_(False)
    lengths = [n for n in lengths if n + 2 * columns >= ragged.span(conv)]
    if lengths:
        x, ends, alone = batch(lengths, 2, seed)
        expected = [conv(samples) for samples in alone]
        assert_rows(lambda x, n: ragged.zero_padded_conv1d(conv, x, n), x, ends, expected, garbage)


@settings(deadline=None, max_examples=50)
@given(rows, st.sampled_from([1, 2, 4, 8]), st.sampled_from(GARBAGE), st.integers(-10, 10), seeds)
def test_group_norm(lengths, num_groups, garbage, offset, seed):
    norm = nn.GroupNorm(num_groups, 8).requires_grad_(False)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    # a step or two of one channel may have next to no variance
    lengths = [n + 3 for n in lengths]
    x, ends, alone = batch(lengths, 8, seed, slack=2)
    x, alone = x + offset, [samples + offset for samples in alone]
    expected = [norm(samples) for samples in alone]
    tolerance = 1e-5 * (1 + abs(offset))
    assert_rows(partial(ragged.group_norm, norm), x, ends, expected, garbage, tolerance)


@settings(deadline=None, max_examples=25)
@given(rows, st.integers(1, 2), st.booleans(), st.booleans(), seeds)
def test_lstm(lengths, num_layers, bidirectional, bias, seed):
    lstm = (
        nn.LSTM(5, 5, num_layers, bias=bias, bidirectional=bidirectional)
        .eval()
        .requires_grad_(False)
    )
    x, ends, alone = batch(lengths, 5, seed, slack=2)
    outputs = [lstm(samples.permute(2, 0, 1))[0].permute(1, 2, 0) for samples in alone]
    expected = [
        y + torch.cat([samples] * (1 + bidirectional), 1)
        for samples, y in zip(alone, outputs, strict=True)
    ]
    assert_rows(ragged.RaggedLSTM(lstm), x, ends, expected, 1e4)
