"""Normalisation, held to numpy on one utterance at a time; the same bits in any batch."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_cache import made_cache, make_features

import featcache
from featcache import Cmvn
from featcache.cmvn import normalize_utterances
from featcache.errors import ArgumentError, StoreError
from featcache.spec import Frames, Track
from featcache.stats import moments

GROUPS = ["ben", "anna", "zoë"]

rng = np.random.default_rng(0)
MEAN, STD = rng.normal(size=5) * 10, rng.random(5) + 0.5
GROUP_MEAN, GROUP_STD = rng.normal(size=(3, 5)) * 10, rng.random((3, 5)) + 0.5


def grouped(groups=GROUPS, **options):
    return Cmvn(MEAN, STD, groups=groups, group_mean=GROUP_MEAN, group_std=GROUP_STD, **options)


def batch(lengths=(9, 4, 0, 7), *, dtype=torch.float32, device="cpu", padding=-100.0):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(len(lengths), max(lengths) + 2, 5, generator=generator) * 3 - 8
    for row, length in enumerate(lengths):
        features[row, length:] = padding
    return features.to(device, dtype), torch.tensor(lengths, device=device)


def assert_normalised(found, features, lengths, means, stds, rtol=1e-5):
    """Each row's own frames are `(x - mean) / std` by numpy, and its padding is what it
    was."""
    for row, length in enumerate(lengths.tolist()):
        expected = (features[row, :length].double().numpy() - means[row]) / stds[row]
        np.testing.assert_allclose(
            found[row, :length].double().numpy(), expected, rtol=rtol, atol=rtol
        )
        assert torch.equal(found[row, length:], features[row, length:].to(found.dtype))


by_means_and_variances = pytest.mark.parametrize(
    "norms",
    [
        {"norm_means": means, "norm_vars": variances}
        for means in (True, False)
        for variances in (True, False)
    ],
    ids=["both", "means", "variances", "none"],
)


# By statistics of a version


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@by_means_and_variances
def test_all_frames_by_one_mean(dtype, norms):
    features, lengths = batch(dtype=dtype)
    cmvn = Cmvn(MEAN, STD, **norms)
    means, stds = [MEAN * norms["norm_means"]] * 4, [STD if norms["norm_vars"] else np.ones(5)] * 4
    found = cmvn(features, lengths)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_normalised(found, features, lengths, means, stds)
    assert_normalised(cmvn(features), features, torch.full((4,), features.shape[1]), means, stds)
    torch.testing.assert_close(cmvn.unnormalize(found, lengths), features.to(found.dtype))
    asked_for = Cmvn(MEAN, STD, dtype=dtype, **norms)(features, lengths)
    assert asked_for.dtype == dtype
    assert torch.equal(asked_for, found.to(dtype))


@pytest.mark.parametrize("groups", [GROUPS, ["1089", "61", "121"]])
def test_each_row_by_its_group(groups):
    features, lengths = batch()
    cmvn = grouped(groups)
    of_rows = [2, 0, 0, 1]
    means, stds = GROUP_MEAN[of_rows], GROUP_STD[of_rows]
    names = [groups[at] for at in of_rows]
    found = cmvn(features, lengths, names)
    assert_normalised(found, features, lengths, means, stds)
    for numbers in (cmvn.find(names), cmvn.find(names).int()):
        assert torch.equal(cmvn(features, lengths, numbers), found)
    torch.testing.assert_close(
        cmvn.unnormalize(found, lengths, names), features, rtol=1e-5, atol=1e-4
    )
    assert sorted(cmvn.groups) == sorted(groups)


def test_names_that_are_numbers_are_taken_as_a_dataset_has_them():
    cmvn = grouped(["1089", "61", "121"])
    assert cmvn.find(["61", "1089", "121", "61"]).tolist() == [61, 1089, 121, 61]
    assert grouped(["7", "07", "1"]).find(["7", "07", "1"]).tolist() == [0, 1, 2]


def test_a_group_that_is_not_known_is_an_error_or_takes_the_mean_of_all():
    features, lengths = batch()
    said = "no statistics for 'carl', 'dora': there are some for 'ben', 'anna', 'zoë'"
    with pytest.raises(ArgumentError, match=said):
        grouped()(features, lengths, ["dora", "carl", "ben", "dora"])
    with pytest.raises(ArgumentError, match="no statistics for groups -1, 5"):
        grouped()(features, lengths, torch.tensor([5, -1, 0, 5]))
    cmvn = grouped(unknown="global")
    means, stds = (
        np.stack([MEAN, GROUP_MEAN[1], MEAN, MEAN]),
        np.stack([STD, GROUP_STD[1], STD, STD]),
    )
    for groups in (["carl", "anna", "", "Anna"], torch.tensor([-1, 1, 3, 99])):
        assert_normalised(cmvn(features, lengths, groups), features, lengths, means, stds)
    found = Cmvn(MEAN, STD, unknown="global")(features, lengths, ["a"] * 4)
    assert_normalised(found, features, lengths, [MEAN] * 4, [STD] * 4)
    assert cmvn.find(["zoë", "carl"]).tolist() == [2, -1]


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_waited_for():
    features, lengths = batch(device="cuda")
    cmvn = grouped().cuda()
    numbers = torch.tensor([0, 7, 1, 2], device="cuda")
    cmvn(features, lengths, numbers)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = cmvn(features, lengths, numbers)
        normalize_utterances(features, lengths)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found[1, :4].isnan().all()
    assert not found[[0, 2, 3]].isnan().any()


def test_dimensions_that_do_not_vary_are_only_centred():
    std = STD.copy()
    std[1], std[3] = 0, 1e-9
    features, lengths = batch()
    expected = np.where(std > 1e-6, std, 1)
    assert_normalised(
        Cmvn(MEAN, std)(features, lengths), features, lengths, [MEAN] * 4, [expected] * 4
    )


def test_any_shape_of_a_frame():
    mean, std = rng.normal(size=(3, 5)), rng.random((3, 5)) + 1
    features = torch.randn(2, 7, 3, 5)
    found = Cmvn(mean, std)(features, torch.tensor([7, 2]))
    assert_normalised(found, features, torch.tensor([7, 2]), [mean] * 2, [std] * 2)


def test_gradients_go_through():
    features, lengths = batch()
    features.requires_grad_()
    Cmvn(MEAN, STD)(features, lengths).sum().backward()
    torch.testing.assert_close(features.grad[0, 0], torch.tensor(1 / STD, dtype=torch.float32))


@by_means_and_variances
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_frames_of_one_value_are_computed_in_float32_too(dtype, norms):
    features, cmvn = batch(dtype=dtype)[0][..., 0], Cmvn(-80_000.0, 3.0, **norms)
    expected = Cmvn([-80_000.0], [3.0], **norms)
    for one, other in ((cmvn, expected), (cmvn.unnormalize, expected.unnormalize)):
        found = one(features)
        assert found.dtype == torch.float32
        assert torch.equal(found, other(features[..., None])[..., 0])


# As a module


@pytest.mark.parametrize(
    "cast", [lambda module: module.half(), lambda module: module.to(torch.bfloat16)]
)
def test_a_model_in_half_precision_keeps_the_statistics(cast):
    features, lengths = batch(dtype=torch.float16)
    model = torch.nn.Sequential(grouped(), torch.nn.Linear(5, 5))
    before = model[0](features, lengths, ["anna"] * 4)
    cast(model)
    assert model[1].weight.dtype != torch.float32
    assert torch.equal(model[0](features, lengths, ["anna"] * 4), before)
    assert model[0].to("meta").mean.device.type == "meta"


def test_a_state_dict_brings_the_groups_too():
    features, lengths = batch()
    file = io.BytesIO()
    torch.save(grouped().state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    one = Cmvn(MEAN, STD, groups=["eva"], group_mean=MEAN[None], group_std=STD[None])
    for other in (Cmvn(np.zeros(5), np.ones(5)), one):
        model = torch.nn.Sequential(other)
        model.load_state_dict({f"0.{name}": value for name, value in state.items()})
        assert other.groups == GROUPS
        assert torch.equal(
            other(features, lengths, ["zoë"] * 4), grouped()(features, lengths, ["zoë"] * 4)
        )
    with pytest.raises(RuntimeError, match="size mismatch"):
        Cmvn(np.zeros(4), np.ones(4)).load_state_dict(state)


def test_copies_are_the_same():
    features, lengths = batch()
    expected = grouped()(features, lengths, ["zoë"] * 4)
    for one in (copy.deepcopy(grouped()), pickle.loads(pickle.dumps(grouped()))):
        assert torch.equal(one(features, lengths, ["zoë"] * 4), expected)
        one.load_state_dict(grouped().state_dict())
    assert repr(grouped()) == "Cmvn([5], 3 groups)"
    one = Cmvn(MEAN, STD, groups=["zoë"], group_mean=GROUP_MEAN[:1], group_std=GROUP_STD[:1])
    assert repr(one) == "Cmvn([5], 1 group)"


# From a file


def test_the_whole_way_from_a_cache(tmp_path, written):
    features = make_features(20, (5,))
    cache = made_cache(tmp_path / "cache", features)
    manifest = written(
        "id,speaker\n" + "".join(f"{name},s{int(name[4:]) % 3}\n" for name in features)
    )
    moments(cache, manifest, by="speaker").save(tmp_path / "s.npz")
    cmvn = Cmvn.load(tmp_path / "s.npz", cache=cache)
    dataset = featcache.FeatureDataset(cache, manifest)
    made = dataset.collate([dataset[row] for row in range(len(dataset))])
    found = cmvn(made["features"], made["lengths"], made["speaker"])
    of_speakers = [
        [row for row, name in enumerate(made["speaker"]) if name == speaker]
        for speaker in cmvn.groups
    ]
    for features, rows in [
        *((found, rows) for rows in of_speakers),
        (cmvn(made["features"]), range(20)),
    ]:
        frames = torch.cat([features[row, : made["lengths"][row]] for row in rows]).double()
        torch.testing.assert_close(frames.mean(0), torch.zeros(5).double(), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            frames.std(0, correction=0), torch.ones(5).double(), atol=1e-6, rtol=0
        )


def test_statistics_of_another_version_are_refused(tmp_path):
    caches = [
        made_cache(tmp_path / digit, make_features(5, (5,)), fingerprint=digit * 64)
        for digit in "01"
    ]
    moments(caches[0]).save(tmp_path / "s.npz")
    Cmvn.load(tmp_path / "s.npz", cache=caches[0])
    with pytest.raises(
        StoreError, match=r"s.npz: is of fbank80-0{12}, but the cache is fbank80-1{12}"
    ):
        Cmvn.load(tmp_path / "s.npz", cache=caches[1])


def test_statistics_of_another_track_are_refused(tmp_path):
    slow = Track("slow", (5,), "float32", "every third frame", Frames(100 / 3))
    cache = made_cache(tmp_path / "cache", make_features(9, (5,)), side=(slow,))
    for track in (cache, cache.track("slow")):
        moments(track).save(tmp_path / f"{track.track_name}.npz")
    Cmvn.load(tmp_path / "features.npz", cache=cache)
    Cmvn.load(tmp_path / "slow.npz", cache=cache.track("slow"))
    with pytest.raises(StoreError, match="is of the track 'slow', but the cache is 'features': "):
        Cmvn.load(tmp_path / "slow.npz", cache=cache)
    with pytest.raises(StoreError, match="is of the track 'features', but the cache is 'slow': "):
        Cmvn.load(tmp_path / "features.npz", cache=cache.track("slow"))


def test_an_empty_path_is_refused_as_by_other_loaders(tmp_path, monkeypatch):
    """An unset variable would mean the current folder."""
    monkeypatch.chdir(tmp_path)
    for load in (Cmvn.load, featcache.open):
        with pytest.raises(ArgumentError, match="path: '' is neither a path nor a URL"):
            load("")


def test_an_older_file_does_not_name_its_track_and_loads(tmp_path):
    cache = made_cache(tmp_path / "cache", make_features(9, (5,)))
    moments(cache).save(tmp_path / "new.npz")
    with np.load(tmp_path / "new.npz") as file:
        arrays = dict(file)
    assert arrays.pop("track") == "features"
    np.savez(tmp_path / "old.npz", **arrays)
    old = Cmvn.load(tmp_path / "old.npz", cache=cache)
    assert torch.equal(old.mean, Cmvn.load(tmp_path / "new.npz", cache=cache).mean)


# By an utterance's own frames


@by_means_and_variances
def test_an_utterance_by_its_own_frames(norms):
    features, lengths = batch()
    found = normalize_utterances(features, lengths, **norms)
    own = [features[row, :length].double().numpy() for row, length in enumerate(lengths.tolist())]
    means = [one.mean(0) if len(one) and norms["norm_means"] else np.zeros(5) for one in own]
    stds = [one.std(0) if len(one) and norms["norm_vars"] else np.ones(5) for one in own]
    assert found.dtype == torch.float32
    assert_normalised(found, features, lengths, means, stds, rtol=1e-6)


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=5),
    st.integers(0, 40),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    st.sampled_from([0.0, 40.0, -3e4]),
    st.integers(0, 100),
)
@settings(max_examples=60)
def test_in_any_batch_it_has_the_bits_that_it_has_alone(lengths, slack, dtype, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    frames = max(lengths) + slack
    features = (torch.randn(len(lengths), frames, 3, generator=generator) * 4 + offset).to(dtype)
    found = normalize_utterances(features, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        alone = normalize_utterances(features[row : row + 1, :length])
        assert torch.equal(found[row, :length], alone[0])
        assert torch.equal(found[row, length:], features[row, length:].to(found.dtype))


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits():
    features, lengths = batch((300, 41, 0, 7))
    found = normalize_utterances(features.cuda(), lengths.cuda())
    assert torch.equal(found.cpu(), normalize_utterances(features, lengths))


def test_what_does_not_vary_and_what_is_padding_does_no_harm():
    features, lengths = batch(padding=float("nan"))
    features[:, :, 2] = torch.where(features[:, :, 2].isnan(), torch.nan, 5.3)
    features[1, :4] = 0
    found = normalize_utterances(features, lengths)
    for row, length in enumerate(lengths.tolist()):
        assert found[row, :length].isfinite().all()
        assert not found[row, :length, 2].any()
        assert found[row, length:].isnan().all()
    # one frame is its own mean, and of none there is none
    assert not normalize_utterances(torch.randn(3, 1, 5)).any()
    assert normalize_utterances(torch.randn(3, 0, 5)).shape == (3, 0, 5)
    assert normalize_utterances(torch.randn(0, 4, 5)).shape == (0, 4, 5)


# Mistakes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: Cmvn(MEAN, STD)(x[..., :4]), r"\[4, 11, 4\]: give floats \[batch, frames, 5\]"),
        (lambda x: Cmvn(MEAN, STD)(x.long()), "features is torch.int64"),
        (lambda x: normalize_utterances(x.long()), "features is torch.int64"),
        (
            lambda x: Cmvn(MEAN, STD)(x, torch.tensor([1, 2])),
            r"lengths is \[2\] on cpu, for 4 rows on",
        ),
        (lambda x: Cmvn(MEAN, STD)(x, torch.ones(4)), "lengths is torch.float32"),
        (
            lambda x: normalize_utterances(x, torch.tensor([1, 2])),
            r"lengths is \[2\] on cpu, for 4 rows on",
        ),
        (lambda x: grouped()(x, None, ["anna"]), "give 4 names or integers, one per row"),
        (lambda x: grouped()(x, None, torch.ones(4)), "groups is torch.float32"),
        (lambda x: Cmvn(MEAN, STD[:4]), r"mean is \[5\] and std \[4\]"),
        (lambda x: Cmvn(MEAN, -STD), "std must not be negative"),
        (lambda x: Cmvn(MEAN * np.nan, STD), "finite"),
        (lambda x: Cmvn(MEAN, STD, groups=["a"]), "together, or none of them"),
        (
            lambda x: Cmvn(MEAN, STD, group_mean=GROUP_MEAN, group_std=GROUP_STD),
            "together, or none of them",
        ),
        (lambda x: grouped(["a", "b"]), r"statistics of 2 groups are \[3, 5\]"),
        (lambda x: grouped(["a", "b", "a"]), "two groups have the same name"),
        (lambda x: Cmvn(MEAN, STD, unknown="ignore"), "unknown is 'ignore'"),
        (lambda x: Cmvn(MEAN, STD, dtype=torch.int32), "dtype is torch.int32: give a float dtype"),
        (lambda x: Cmvn(MEAN, STD, dtype="float16"), "dtype is 'float16': give a float dtype"),
        (lambda x: grouped()(x, None, "anna"), "names is one name, 'anna': give a list"),
        (lambda x: Cmvn(MEAN, STD)(x.numpy()), "features is a ndarray: give a tensor"),
        (lambda x: Cmvn(MEAN, STD)(x, [1, 2, 3, 4]), "lengths is a list: give a tensor"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(batch()[0])
