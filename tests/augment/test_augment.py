"""Augmentation: what is masked, how loud noise is, who is mixed with whom; that it is
repeatable, and never waits."""

import math

import numpy as np
import pytest
import torch
from devices import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from featcache.augment import (
    Draws,
    GaussianNoise,
    MixEnergies,
    Mixup,
    SpecAugment,
    VaeNoise,
    warp_time,
)
from featcache.errors import ArgumentError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
LENGTHS = [60, 41, 17, 1, 0]

KINDS = {
    "noise": lambda **given: GaussianNoise(0.3, **given),
    "noise at a ratio": lambda **given: GaussianNoise(snr_db=(5.0, 20.0), **given),
    "latents": lambda **given: VaeNoise(**given),
    "masks": lambda **given: SpecAugment(max_time_fraction=0.5, freq_width=4, **given),
    "masks of the mean, warped": lambda **given: SpecAugment(value="mean", time_warp=4, **given),
    "mixup": lambda **given: Mixup(1.0, **given),
    "energies": lambda **given: MixEnergies((0.0, 10.0), **given),
}
of_every_kind = pytest.mark.parametrize("kind", KINDS)

rows_of_lengths = st.lists(st.integers(0, 50), min_size=1, max_size=6)
of_many = settings(max_examples=50)


def batch(lengths=LENGTHS, dims=8, *, dtype=torch.float32, device="cpu", padding=-7.0, seed=0):
    """Features `[batch, max(lengths) + 3, dims]` with a padding that is none of their
    values, and lengths."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(lengths), max(lengths) + 3, dims, generator=generator) + 1
    for row, length in enumerate(lengths):
        features[row, length:] = padding
    return features.to(device, dtype), torch.tensor(lengths, device=device)


def features_of(result):
    return result if isinstance(result, torch.Tensor) else result.features


# What holds for all


@of_every_kind
@pytest.mark.parametrize("device", DEVICES)
def test_it_follows_from_seed_step_and_shapes_alone(kind, device):
    features, lengths = batch(device=device)
    one = features_of(KINDS[kind](seed=3)(features, lengths, step=5))
    torch.manual_seed(99)
    other = KINDS[kind](seed=3)
    other(features, lengths, step=4)
    torch.rand(100, device=device)
    assert torch.equal(features_of(other(features, lengths, step=5)), one)
    assert not torch.equal(features_of(other(features, lengths, step=6)), one)
    assert not torch.equal(features_of(KINDS[kind](seed=4)(features, lengths, step=5)), one)
    assert not torch.equal(one, features)


@of_every_kind
def test_the_global_generator_is_left_as_it_is(kind):
    before = torch.get_rng_state()
    KINDS[kind](probability=0.5)(*batch(), step=1)
    assert torch.equal(torch.get_rng_state(), before)


@of_every_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding", [-7.0, math.inf])
def test_padding_stays_and_so_does_the_dtype(kind, dtype, padding):
    features, lengths = batch(dtype=dtype, padding=padding)
    given = features.clone()
    for step in range(5):
        result = features_of(KINDS[kind]()(features, lengths, step=step))
        assert (result.dtype, result.shape) == (dtype, features.shape)
        assert torch.equal(features, given), "what was given is not changed"
        for row, length in enumerate(LENGTHS):
            assert (result[row, length:] == padding).all()
            assert result[row, :length].isfinite().all()


@of_every_kind
def test_in_eval_mode_nothing_happens(kind):
    features, lengths = batch()
    result = KINDS[kind]().eval()(features, lengths, step=0)
    assert features_of(result) is features
    if result is not features:
        assert result.partner.tolist() == [0, 1, 2, 3, 4]
        assert result.weight.tolist() == [1.0] * 5


@of_every_kind
@pytest.mark.parametrize(("probability", "share"), [(0.0, 0.0), (0.25, 0.25), (1.0, 1.0)])
def test_so_many_rows_are_augmented(kind, probability, share):
    features, lengths = batch([40] * 200)
    result = KINDS[kind](probability=probability)(features, lengths, step=0)
    changed = (features_of(result) != features).flatten(1).any(1)
    assert changed.double().mean().item() == pytest.approx(share, abs=0.1)
    if not isinstance(result, torch.Tensor):
        assert (result.weight[~changed] == 1).all()


@of_every_kind
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1)])
def test_small_batches(kind, shape):
    features = torch.ones(*shape, 4)
    for lengths in (
        None,
        torch.full(shape[:1], shape[1]),
        torch.zeros(shape[0], dtype=torch.int32),
    ):
        assert features_of(KINDS[kind]()(features, lengths, step=0)).shape == features.shape


class NeverWaits(TorchDispatchMode):
    """Refuses whatever makes a GPU's results known to Python, or makes shapes of them."""

    WAITING = (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "masked_select",
        "unique",
        "is_nonzero",
        "equal",
        "_to_copy",
    )

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        to_cpu = name == "_to_copy" and (kwargs or {}).get("device") is not None
        assert name not in self.WAITING or (name == "_to_copy" and not to_cpu), (
            f"{name} waits for the device"
        )
        if name in ("index", "index_put"):
            assert not any(one is not None and one.dtype == torch.bool for one in args[1]), (
                "a mask as index waits"
            )
        return function(*args, **(kwargs or {}))


@of_every_kind
@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_nothing_waits_for_the_device(kind, probability):
    features, lengths = batch()
    module = KINDS[kind](probability=probability)
    with NeverWaits():
        module(features, lengths, step=0)
        module(features, step=0)
    with pytest.raises(AssertionError, match="waits"), NeverWaits():
        features.sum().item()


@pytest.mark.gpu
@of_every_kind
def test_cuda_says_that_nothing_waits(kind):
    features, lengths = batch(device="cuda")
    module = KINDS[kind](probability=0.5)
    expected = features_of(module(features, lengths, step=1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = features_of(module(features, lengths, step=1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@of_every_kind
def test_gradients_go_through(kind):
    features, lengths = batch()
    features.requires_grad_()
    features_of(KINDS[kind]()(features, lengths, step=0)).sum().backward()
    assert features.grad.isfinite().all()
    assert features.grad.any()


def test_two_kinds_draw_differently_and_printing_shows_the_settings():
    assert not torch.equal(
        *(Draws(kind, 0, 0, torch.device("cpu")).uniform(8) for kind in ("A", "B"))
    )
    assert not torch.equal(
        *(Draws("A", seed, 1 - seed, torch.device("cpu")).uniform(8) for seed in (0, 1))
    )
    assert (
        repr(GaussianNoise(0.5, seed=7)) == "GaussianNoise(seed=7, probability=1.0, std=(0.5, 0.5))"
    )


# Noise


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_has_the_size_that_was_asked_for(dtype):
    features = torch.zeros(4, 2000, 16, dtype=dtype)
    noise = GaussianNoise(0.5)(features, step=0).double()
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)
    assert noise.mean().item() == pytest.approx(0, abs=0.01)
    kurtosis = (noise / 0.5).pow(4).mean().item()
    assert kurtosis == pytest.approx(3, abs=0.1)


def test_each_row_draws_its_size_from_the_range():
    sizes = GaussianNoise((0.2, 0.8))(torch.zeros(400, 500, 4), step=0).flatten(1).std(1)
    assert sizes.min() > 0.19
    assert sizes.max() < 0.82
    assert sizes.mean().item() == pytest.approx(0.5, abs=0.03)
    assert sizes.std().item() == pytest.approx(0.6 / 12**0.5, abs=0.02)


@given(rows_of_lengths, st.floats(-20, 40))
@of_many
def test_the_ratio_is_what_was_asked_for_of_every_row(lengths, snr_db):
    features, given_lengths = batch(lengths, dtype=torch.float64)
    noisy = GaussianNoise(snr_db=snr_db)(features, given_lengths, step=0)
    for clean, dirty, length in zip(features, noisy, lengths, strict=True):
        if length:
            powers = [row[:length].square().mean() for row in (clean, dirty - clean)]
            found = 10 * (powers[0] / powers[1]).log10()
            assert found.item() == pytest.approx(snr_db, abs=1e-3)


def test_ratios_are_drawn_from_the_range_and_silence_stays_silent():
    features, lengths = batch([50] * 300, dtype=torch.float64)
    features[7] = 0
    noisy = GaussianNoise(snr_db=(0.0, 30.0))(features, lengths, step=0)
    assert not noisy[7].any()
    power = [values[:, :50].square().sum((1, 2)) for values in (features, noisy - features)]
    found = (10 * (power[0] / power[1]).log10())[torch.arange(300) != 7]
    assert found.min() >= -1e-3
    assert found.max() <= 30 + 1e-3
    assert found.mean().item() == pytest.approx(15, abs=1.5)


@pytest.mark.parametrize("shape", [(6,), (6, 512), (6, 30, 512), (6, 30, 4, 8)])
def test_noise_is_for_hidden_activations_of_any_shape(shape):
    hidden = torch.ones(shape)
    assert (GaussianNoise(0.1)(hidden, step=0) != hidden).all()
    found = GaussianNoise(snr_db=10.0)(hidden, step=0) - hidden
    ratio = (
        10 * (hidden.reshape(6, -1).square().sum(1) / found.reshape(6, -1).square().sum(1)).log10()
    )
    torch.testing.assert_close(ratio, torch.full((6,), 10.0), atol=0.01, rtol=0)


# SpecAugment


def masked_stretches(lengths, step=0, **options):
    """Masks of a batch of ones, which were set to zero: bool `[batch, frames, dims]`."""
    features = torch.ones(len(lengths), max(lengths) + 3, 100)
    return SpecAugment(**options)(features, torch.tensor(lengths), step=step) == 0


@given(rows_of_lengths, st.floats(0, 1), *map(st.integers, [0] * 5, [3, 30, 3, 30, 1000]))
@settings(max_examples=150)
def test_masks_are_within_their_limits(
    lengths, fraction, time_masks, time_width, freq_masks, freq_width, step
):
    options = {"time_masks": time_masks, "time_width": time_width, "max_time_fraction": fraction}
    masked = masked_stretches(
        lengths, step, **options, freq_masks=freq_masks, freq_width=freq_width
    )
    for row, length in zip(masked, lengths, strict=True):
        assert not row[length:].any()
        row = row[:length]
        in_time = row.all(1)  # for not all dimensions can be masked by masks of frequency
        in_freq = row[~in_time].any(0)
        assert torch.equal(row, in_time[:, None] | in_freq), "whole frames and whole dimensions"
        assert in_time.sum() <= time_masks * min(time_width, int(fraction * length + 1e-6))
        assert in_freq.sum() <= freq_masks * freq_width


def test_widths_and_places_are_uniform():
    masked = masked_stretches(
        [101] * 5000, time_masks=1, time_width=9, max_time_fraction=1.0, freq_masks=0
    ).all(2)
    widths = masked.sum(1)
    counts = torch.bincount(widths, minlength=10)
    assert len(counts) == 10
    assert (counts - 500).abs().max() < 5 * 500**0.5
    of_four = masked[widths == 4].int().argmax(1)  # where they begin: 0 to 97
    assert of_four.min() < 3
    assert 94 < of_four.max() <= 97
    assert of_four.double().mean().item() == pytest.approx(48.5, abs=6)


def test_rows_are_masked_differently_and_both_axes_are():
    masked = masked_stretches([50] * 40, max_time_fraction=0.5, freq_width=10)
    assert len({row.numpy().tobytes() for row in masked}) == 40
    assert masked[:, :50].all(1).any(), "a mask of frequency goes through all frames"
    assert masked.all(2).any(), "and one of time through all dimensions"


def test_masked_values_are_what_was_asked_for():
    features, lengths = batch()
    for value in (2.5, "mean"):
        masked = SpecAugment(value=value, max_time_fraction=0.5, freq_width=4)(
            features, lengths, step=0
        )
        changed = masked != features
        for row, length in enumerate(LENGTHS[:3]):
            fill = value if value == 2.5 else features[row, :length].mean()
            found = masked[row][changed[row]]
            torch.testing.assert_close(found, torch.full_like(found, fill), atol=1e-6, rtol=1e-6)
        assert changed[:3].flatten(1).any(1).all()


# Time warping


def draws(step=0):
    return Draws("test", 0, step, torch.device("cpu"))


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(1, 12), st.integers(0, 100)
)
@of_many
def test_warped_time_goes_forward_and_keeps_its_ends(lengths, window, step):
    frames = max(lengths) + 2
    clock = (
        torch.arange(frames, dtype=torch.float32)[None, :, None]
        .expand(len(lengths), -1, 2)
        .contiguous()
    )
    warped = warp_time(clock, torch.tensor(lengths), window, draws(step))
    for row, length in zip(warped, lengths, strict=True):
        assert torch.equal(row[length:], clock[0, length:])
        assert torch.equal(row[:, 0], row[:, 1])
        moved = row[:length, 0] - clock[0, :length, 0]
        if length < 2 * window + 3:
            assert not moved.any()
        else:
            assert (row[:length, 0].diff() > 0).all()
            assert not moved[[0, -1]].any()
            assert moved.abs().max() <= window + 1e-4


def test_warping_is_the_interpolation_that_numpy_does():
    features, lengths = batch([50, 40])
    clock = (
        torch.arange(features.shape[1], dtype=torch.float32)[None, :, None]
        .expand(2, -1, 1)
        .contiguous()
    )
    at = warp_time(clock, lengths, 5, draws())[..., 0].numpy()
    warped = warp_time(features, lengths, 5, draws())
    for row, length in enumerate([50, 40]):
        assert np.abs(at[row, :length] - np.arange(length)).max() > 0.5
        for dim in range(features.shape[2]):
            expected = np.interp(at[row, :length], np.arange(length), features[row, :length, dim])
            np.testing.assert_allclose(warped[row, :length, dim], expected, atol=1e-4)


def test_the_point_moves_to_both_sides():
    clock = torch.arange(100, dtype=torch.float32)[None, :, None].expand(3000, -1, 1).contiguous()
    moved = (warp_time(clock, torch.full((3000,), 100), 10, draws()) - clock)[..., 0]
    largest = moved.gather(1, moved.abs().argmax(1, keepdim=True))[:, 0]
    assert largest.min().item() == pytest.approx(-10, abs=0.6)
    assert largest.max().item() == pytest.approx(10, abs=0.6)
    assert largest.mean().item() == pytest.approx(0, abs=0.5)


# Mixing


def pairs(mixed, lengths):
    """Of each row: its number, its partner, its weight, and how many frames both have."""
    rows, partners = len(lengths), mixed.partner.tolist()
    assert sorted(partners) == list(range(rows)), "every row is a partner once"
    assert rows == 1 or (mixed.partner != torch.arange(rows)).all()
    both = [
        min(length, lengths[partner]) for length, partner in zip(lengths, partners, strict=True)
    ]
    return zip(range(rows), partners, mixed.weight.tolist(), both, strict=True)


@given(rows_of_lengths, st.floats(0.05, 3), st.integers(0, 100))
@of_many
def test_mixup_is_the_weighted_mean_where_both_have_frames(lengths, alpha, step):
    features, given_lengths = batch(lengths, dtype=torch.float64)
    mixed = Mixup(alpha)(features, given_lengths, step=step)
    for row, partner, weight, both in pairs(mixed, lengths):
        expected = features[row].clone()
        expected[:both] = weight * features[row, :both] + (1 - weight) * features[partner, :both]
        torch.testing.assert_close(mixed.features[row], expected)


@pytest.mark.parametrize("alpha", [0.02, 0.2, 1.0, 4.0])
def test_weights_are_of_the_beta_distribution(alpha):
    weights = Mixup(alpha)(torch.zeros(20000, 1, 1), step=0).weight.double()
    assert weights.min() >= 0
    assert weights.max() <= 1
    assert weights.mean().item() == pytest.approx(0.5, abs=0.02)
    assert weights.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.05)


SCALES = {"power": 1.0, "magnitude": 2.0, "power10": math.log(10), "db": math.log(10) / 10}


@pytest.mark.parametrize("log", SCALES)
@given(rows_of_lengths, st.floats(-10, 30), st.integers(0, 100))
@settings(max_examples=20)
def test_energies_are_added_at_the_ratio_that_was_asked_for(log, lengths, snr_db, step):
    features, given_lengths = batch(lengths, dtype=torch.float64)
    mixed = MixEnergies(snr_db, log=log)(features, given_lengths, step=step)
    power = (features * SCALES[log]).exp()
    for row, partner, weight, both in pairs(mixed, lengths):
        torch.testing.assert_close(mixed.features[row, both:], features[row, both:])
        if not both:
            continue
        means = [power[at, : lengths[at]].mean() for at in (row, partner)]
        other = power[partner, :both] * means[0] / means[1] / 10 ** (snr_db / 10)
        expected = (power[row, :both] + other).log() / SCALES[log]
        torch.testing.assert_close(mixed.features[row, :both], expected, atol=1e-4, rtol=1e-4)
        assert weight == pytest.approx(1 / (1 + 10 ** (-snr_db / 10)), rel=1e-4)


def test_silence_mixes_with_anything():
    features, lengths = batch([30, 30])
    features[0] = -100.0  # where a logarithm has its floor
    assert MixEnergies()(features, lengths, step=0).features.isfinite().all()


# Mistakes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GaussianNoise(), "give the noise's std, or its snr_db, and not both"),
        (lambda: GaussianNoise(0.1, snr_db=3.0), "and not both"),
        (lambda: GaussianNoise(-0.1), "std is -0.1: it must be a number, 0 or more"),
        (lambda: GaussianNoise((0.3, 0.1)), "give a number, or a range"),
        (lambda: GaussianNoise("loud"), "std is 'loud': give a number, or a range"),
        (lambda: GaussianNoise(0.1, seed="a"), "seed is 'a': it must be a whole number"),
        (lambda: Mixup("a"), "alpha is 'a': it must be a number"),
        (
            lambda: GaussianNoise(0.1, probability=1.5),
            "probability is 1.5: it must be a number from 0 to 1",
        ),
        (
            lambda: SpecAugment(time_masks=-1),
            "time_masks is -1: it must be a whole number, 0 or more",
        ),
        (
            lambda: SpecAugment(time_masks=1.5),
            "time_masks is 1.5: it must be a whole number, 0 or more",
        ),
        (
            lambda: SpecAugment(probability=True),
            "probability is True: it must be a number from 0 to 1",
        ),
        (
            lambda: SpecAugment(max_time_fraction=1.1),
            "max_time_fraction is 1.1: it must be a number from 0 to 1",
        ),
        (lambda: SpecAugment(value="zero"), "value is 'zero': give a number, or 'mean'"),
        (lambda: Mixup(0), "alpha is 0: it must be a number, 0.01 or more"),
        (
            lambda: MixEnergies(log="ln"),
            "log is 'ln': it must be one of power, magnitude, power10, db",
        ),
        (
            lambda: SpecAugment()(torch.ones(2, 3), step=0),
            r"\[2, 3\]: give floats \[batch, frames, dims\]",
        ),
        (lambda: Mixup()(torch.ones(2), step=0), r"\[2\]: give floats \[batch, frames, \.\.\.\]"),
        (
            lambda: GaussianNoise(0.1)(torch.ones(2, 3).long(), step=0),
            r"features is torch.int64 \[2, 3\]: give floats",
        ),
        (lambda: Mixup()(np.ones((2, 3)), step=0), "features is a ndarray: give a tensor"),
        (lambda: Mixup()(torch.ones(2, 3), [3, 3], step=0), "lengths is a list: give a tensor"),
        (
            lambda: Mixup()(torch.ones(2, 3), torch.tensor([3]), step=0),
            "give one length for each row",
        ),
        (
            lambda: Mixup()(torch.ones(2, 3), torch.ones(2).long().to("meta"), step=0),
            "on the features' device",
        ),
        (lambda: Mixup()(torch.ones(2, 3), torch.ones(2), step=0), "lengths is torch.float32"),
        (
            lambda: Mixup()(torch.ones(2, 3), step=torch.tensor(3)),
            "give the step of the training, an int",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
