"""k-means against a slow and obvious k-means, and the sample that it is fitted to."""

import json

import numpy as np
import pytest
import safetensors
import torch
from make_cache import make_features, make_version
from numpy.random import default_rng

from featcache.errors import ConfigError
from featcache.extractors.units import Nearest, read_codebook
from featcache.format.shard import Frames
from featcache.spec import Clip, Events
from featcache.stats import kmeans
from featcache.stats.kmeans import cluster, draw_frames, first_centroids, fit_version
from featcache.version.indexing import open_index

CPU = torch.device("cpu")


def squared_distances(features, centroids):
    """Float64 `[N, k]`, one difference after the other."""
    return np.stack(
        [
            np.square(features.astype(np.float64) - one).sum(1)
            for one in centroids.astype(np.float64)
        ],
        1,
    )


def lloyd(features, centroids):
    """Float64, until nothing changes: the centroids and the inertia per frame."""
    while True:
        distances = squared_distances(features, centroids)
        codes = distances.argmin(1)
        means = np.stack(
            [features[codes == code].mean(0, dtype=np.float64) for code in range(len(centroids))]
        )
        if np.array_equal(means, centroids):
            return means, distances.min(1).mean()
        centroids = means


def blobs(k, frames_in_each, dimensions=8, *, apart=20.0, seed=0):
    """Frames `[N, D]` around `k` centres, which are far from zero and from each other;
    and which centre each is of."""
    rng = default_rng(seed)
    axes = rng.permutation(np.eye(max(k, dimensions)))[:k, :dimensions]
    centres = 100 + apart * axes + rng.normal(size=(k, dimensions))
    of = rng.permutation(np.repeat(np.arange(k), frames_in_each))
    return (centres[of] + 0.3 * rng.normal(size=(len(of), dimensions))).astype(np.float32), of


@pytest.mark.parametrize("k", [1, 2, 100, 257])
@pytest.mark.parametrize("dimensions", [1, 13, 80])
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_the_nearest_centroid(k, dimensions, offset):
    rng = default_rng(k)
    centroids = (offset + rng.normal(size=(k, dimensions))).astype(np.float32)
    features = (offset + rng.normal(size=(1500, dimensions))).astype(np.float32)
    expected = squared_distances(features, centroids)
    codes, distances = Nearest(torch.from_numpy(centroids), CPU)(torch.from_numpy(features))
    chosen = expected[np.arange(len(features)), codes.numpy()]
    # it, or one that is as near
    np.testing.assert_allclose(chosen, expected.min(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(distances, expected.min(1), rtol=1e-4, atol=1e-4)
    assert (codes.numpy() == expected.argmin(1)).mean() > 0.99


def test_of_equally_near_centroids_the_lowest():
    centroids = torch.tensor([[4.0, 0], [1, 0], [-1, 0], [1, 0], [4, 0], [-9, 0]])
    codes, _ = Nearest(centroids, CPU)(
        torch.tensor([[0.0, 0], [9, 0], [2, 5], [-3, 1], [-5, 0], [-8, 0]])
    )
    assert codes.tolist() == [1, 0, 1, 2, 2, 5]


@pytest.mark.parametrize("dimensions", [1, 13, 39, 80])
def test_a_frame_has_the_same_bits_among_any_others(dimensions):
    rng = default_rng(dimensions)
    nearest = Nearest(torch.from_numpy(rng.normal(size=(97, dimensions)).astype(np.float32)), CPU)
    features = torch.from_numpy(rng.normal(size=(2000, dimensions)).astype(np.float32))
    codes, distances = nearest(features)
    for number in (0, 1, 2, 3, 639, 640, 1003, 1999):
        alone = nearest(features[number : number + 1])
        assert (alone[0].item(), alone[1].item()) == (
            codes[number].item(),
            distances[number].item(),
        )
    for first in (1, 7, 333):
        assert torch.equal(nearest(features[first:])[1], distances[first:])


def test_well_separated_blobs_are_found():
    features, of = blobs(12, 300, 12)
    fit = cluster(torch.from_numpy(features), 12, default_rng(0))
    means = np.stack([features[of == number].mean(0, dtype=np.float64) for number in range(12)])
    nearest = squared_distances(means, fit.centroids.numpy())
    assert sorted(nearest.argmin(1)) == list(range(12))
    assert nearest.min(1).max() < 1e-6
    assert fit.sizes.tolist() == [300] * 12
    assert fit.inertia == pytest.approx(squared_distances(features, means).min(1).mean(), rel=1e-4)


def test_it_ends_where_a_slow_and_obvious_lloyd_does(monkeypatch):
    monkeypatch.setattr(kmeans, "TOLERANCE", 0.0)
    features = torch.from_numpy(default_rng(1).normal(size=(3000, 5)).astype(np.float32))
    first = first_centroids(features, 20, default_rng(2))
    monkeypatch.setattr(kmeans, "first_centroids", lambda *_: first)
    fit = cluster(features, 20, default_rng(0))
    expected, inertia = lloyd(features.numpy(), first.numpy())
    assert fit.inertia == pytest.approx(inertia, rel=1e-3)
    # rounding may end it a step earlier
    assert squared_distances(expected, fit.centroids.numpy()).min(1).max() < 0.05


def test_threads_and_blocks_change_no_bit_and_little(monkeypatch):
    features = torch.from_numpy(blobs(7, 500, apart=3)[0])
    fit = cluster(features, 30, default_rng(0))
    assert torch.equal(cluster(features, 30, default_rng(0), threads=3).centroids, fit.centroids)
    monkeypatch.setattr(kmeans, "_BLOCK_FRAMES", 100)
    assert cluster(features, 30, default_rng(0), threads=2).inertia == pytest.approx(
        fit.inertia, rel=1e-3
    )


def test_fewer_different_frames_than_clusters():
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).repeat(50, 1)
    fit = cluster(features, 5, default_rng(0))
    assert fit.inertia == 0
    assert sorted(fit.sizes.tolist()) == [0, 0, 50, 50, 50]
    assert fit.centroids.isfinite().all()


def test_a_centroid_that_no_frame_is_nearest_to_moves(monkeypatch):
    features = torch.from_numpy(blobs(4, 100)[0])
    lost = torch.cat([features[:1].repeat(3, 1), torch.full((1, 8), 1e4)])
    monkeypatch.setattr(kmeans, "first_centroids", lambda *_: lost)
    assert cluster(features, 4, default_rng(0)).sizes.min() > 0


def test_first_centroids_are_frames_far_apart():
    features, _ = blobs(10, 200, 10)
    first = first_centroids(torch.from_numpy(features), 10, default_rng(0)).numpy()
    assert {row.tobytes() for row in first} <= {row.tobytes() for row in features}
    assert squared_distances(first, first)[~np.eye(10, dtype=bool)].min() > 100, "one of each blob"


def test_the_sample_is_of_the_versions_frames(tmp_path):
    features = make_features(40, (3,), "float32")
    version = make_version(tmp_path, features)
    there = {row.tobytes() for array in features.values() for row in array}
    total = sum(map(len, features.values()))
    index = open_index(version)
    for count in (1, 100, total):
        sample = draw_frames(version, index, count, default_rng(0))
        assert {row.tobytes() for row in sample} <= there
        assert len({row.tobytes() for row in sample}) == len(sample) == count, "all different"


def test_every_frame_is_as_likely(tmp_path):
    frames = np.split(np.arange(50, dtype=np.float32)[:, None], [1, 3, 43])
    version = make_version(
        tmp_path, {f"utt-{number}": array for number, array in enumerate(frames)}
    )
    index, rng = open_index(version), default_rng(0)
    drawn = (
        np.concatenate([draw_frames(version, index, 25, rng) for _ in range(800)])
        .astype(int)
        .ravel()
    )
    counts = np.bincount(drawn, minlength=50)
    assert np.abs(counts - 400).max() < 5 * np.sqrt(400 * 0.5)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_shard_is_read_by_stretches(tmp_path, monkeypatch, quantized):
    """So that the sample alone determines the memory; and what nothing is drawn of is not
    read."""
    version = make_version(
        tmp_path, make_features(60, (4,)), make_features(60, (4,)), quantized=quantized
    )
    index, read, sizes = open_index(version), Frames.read_ranges, []

    def watched(self, firsts, counts):
        sizes.append(sum(counts))
        return read(self, firsts, counts)

    monkeypatch.setattr(Frames, "read_ranges", watched)
    samples = []
    for stretch in (kmeans._STRETCH_BYTES, 64, 1):
        monkeypatch.setattr(kmeans, "_STRETCH_BYTES", stretch)
        sizes.clear()
        samples.append(draw_frames(version, index, 50, default_rng(0)))
        assert max(sizes) <= max(1, stretch // (version.dtype.itemsize * 4))
    assert sizes == [1] * 50
    assert samples[0].tobytes() == samples[1].tobytes() == samples[2].tobytes()


def test_shards_and_their_order_change_nothing(tmp_path):
    features = make_features(30, (4,), "float16")
    names = list(features)
    shards = [
        {name: features[name] for name in part} for part in (names[20:], names[:7], names[7:20])
    ]
    codebook = fit_version(make_version(tmp_path / "a", features), 8)[0]
    other = fit_version(make_version(tmp_path / "b", *shards), 8, threads=2)[0]
    assert codebook.to_bytes() == other.to_bytes()
    assert (
        fit_version(make_version(tmp_path / "a", features), 8, seed=1)[0].digest()
        != codebook.digest()
    )


def test_what_it_says_of_its_centroids_is_so_of_all_frames(tmp_path):
    features = make_features(150, (4,), "float16")
    version = make_version(tmp_path, features)
    frames = np.concatenate([array.astype(np.float32) for array in features.values()])
    _, fit = fit_version(version, 30, frames=len(frames) + 1)
    distances = squared_distances(frames, fit.centroids.numpy())
    assert fit.inertia == pytest.approx(distances.min(1).mean(), rel=1e-5)
    assert fit.sizes.tolist() == np.bincount(distances.argmin(1), minlength=30).tolist()
    assert fit.iterations > 3
    assert fit_version(version, 6, frames=50)[1].sizes.sum() == 50


def test_the_file_holds_all_that_units_need(tmp_path):
    version = make_version(
        tmp_path / "cache", make_features(20, (4,), "float16"), params={"name": "ünï"}
    )
    codebook, fit = fit_version(version, 6, seed=3)
    (tmp_path / "units.safetensors").write_bytes(codebook.to_bytes())
    read = read_codebook(tmp_path / "units.safetensors")
    assert torch.equal(read.centroids, fit.centroids)
    assert (read.config, read.fingerprint, read.dtype) == (
        version.info.config,
        version.info.fingerprint,
        "float16",
    )
    assert read.digest() == codebook.digest()
    with safetensors.safe_open(tmp_path / "units.safetensors", "np") as file:
        metadata = file.metadata()
        assert list(file.keys()) == ["centroids"]
        assert file.get_tensor("centroids").tobytes() == fit.centroids.numpy().tobytes()
    assert (metadata["seed"], metadata["k"], metadata["dimensions"], metadata["name"]) == (
        "3",
        "6",
        "4",
        "fbank80",
    )
    assert float(metadata["inertia"]) == fit.inertia
    assert int(metadata["frames"]) == fit.sizes.sum()
    assert json.loads(metadata["spec"])["frame_rate"] == 100


def test_the_digest_is_of_the_centroids_and_of_what_they_are_of(tmp_path):
    features = make_features(20, (4,), "float16")
    digests = [
        fit_version(make_version(tmp_path / name, features, name=name, fingerprint=fingerprint), 6)[
            0
        ].digest()
        for name, fingerprint in (("a", "0" * 64), ("b", "0" * 64), ("c", "1" * 64))
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: None, "cannot be read: No such file"),
        (lambda data: b"", "an incomplete file"),
        (lambda data: data[:-1], "an incomplete file"),
        (
            lambda data: data.replace(b"featcache units 1", b"featcache units 9"),
            "not a file written by",
        ),
        (
            lambda data: data.replace(b'"config"', b'"gifnoc"'),
            "an incomplete file of `featcache fit-kmeans`: 'config'",
        ),
        (
            lambda data: data.replace(b'"F32"', b'"I32"'),
            "centroids are torch.int32 .*, not finite float32",
        ),
        (lambda data: data[:-4] + b"\xff\xff\xff\xff", "not finite float32"),
    ],
)
def test_another_file_is_refused(tmp_path, spoil, message):
    codebook, _ = fit_version(
        make_version(tmp_path / "cache", make_features(20, (4,), "float32")), 6
    )
    path = tmp_path / "units.safetensors"
    if (data := spoil(codebook.to_bytes())) is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_codebook(path)


WITH_NAN = make_features(20, (4,), "float16")
WITH_NAN["utt-7"][0, 2] = np.nan


@pytest.mark.parametrize(
    ("features", "options", "message"),
    [
        (make_features(20, (8,), "uint16"), {"k": 5}, "holds uint16, codes; k-means takes floats"),
        (
            make_features(20, (4, 8), "float32"),
            {"k": 5},
            r"holds \[frames, 4, 8\], not .*: extract one layer",
        ),
        (
            make_features(2, (4,), "float32", max_frames=3),
            {"k": 50},
            "50 units need at least as many frames; it holds",
        ),
        (
            make_features(20, (4,), "float32"),
            {"k": 50, "frames": 49},
            "as many frames; --frames is 49",
        ),
        (WITH_NAN, {"k": 5}, "holds NaN or infinity: `featcache verify` says where"),
    ],
    ids=["codes", "stacked", "few", "few-asked", "nan"],
)
def test_what_cannot_be_clustered(tmp_path, features, options, message):
    with pytest.raises(ConfigError, match=message):
        fit_version(make_version(tmp_path, features), **options)


@pytest.mark.parametrize(
    ("axis", "shape", "message"),
    [
        (Clip(), (8,), r"holds \[8\], one for each utterance; k-means takes frames"),
        (Events(), (2,), r"holds \[events, 2\], any number of events .*; k-means takes frames"),
    ],
    ids=["vectors", "events"],
)
def test_what_has_no_frames(tmp_path, axis, shape, message):
    entries = make_features(20, shape, "float64", max_frames=1)
    with pytest.raises(ConfigError, match=message):
        fit_version(make_version(tmp_path, entries, axis=axis), 5)
