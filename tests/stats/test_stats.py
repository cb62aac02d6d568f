"""Statistics of versions, held to sums of fractions; the same bits in any order; and the
command that prints them."""

import os
import zipfile
from fractions import Fraction

import numpy as np
import pytest
from damage import flip
from hypothesis import given, settings
from hypothesis import strategies as st
from make_cache import add_shard, codes_cache, made_cache, make_features, make_version
from manifests import manifest_of

import featcache
from featcache.errors import (
    ArgumentError,
    DamagedError,
    ManifestError,
    MissingItemError,
    StoreError,
)
from featcache.loader.cache import Cache
from featcache.spec import Frames, Track
from featcache.stats import Stats, moments, usage
from featcache.stats.mean_variance import LOWEST, ExactSums, in_units
from featcache.stats.pieces import PIECE_FRAMES
from featcache.version.corpus import Part, PartVersion, put_part, record_version
from featcache.version.indexing import open_index


def exact(frames):
    """Means and variances of frames `[N, ...]`, each rounded once, from sums of whole
    numbers."""
    columns = np.asarray(frames, np.float64).reshape(len(frames), -1).T
    mean, variance = [], []
    for column in columns.tolist():
        ratios = [value.as_integer_ratio() for value in column]
        # powers of two: a multiple of each
        unit = max(denominator for _, denominator in ratios)
        values = [numerator * (unit // denominator) for numerator, denominator in ratios]
        count, total = len(values), sum(values)
        mean.append(float(Fraction(total, count * unit)))
        variance.append(
            float(
                Fraction(sum((count * value - total) ** 2 for value in values), count**3 * unit**2)
            )
        )
    shape = np.shape(frames)[1:]
    return np.array(mean).reshape(shape), np.array(variance).reshape(shape)


def check(stats, utterances, rtol=1e-13):
    """Hold statistics, or those of a group, to the features of utterances."""
    mean, variance = exact(np.concatenate(list(utterances)))
    np.testing.assert_allclose(stats[0], mean, rtol=1e-15, atol=0)
    np.testing.assert_allclose(stats[1], variance, rtol=rtol, atol=0)


def bytes_of(stats, folder):
    stats.save(folder / "stats.npz", overwrite=True)
    return (folder / "stats.npz").read_bytes()


sizes = st.floats(allow_nan=False, allow_infinity=False).filter(
    lambda x: not x or 2.0**-900 <= abs(x) <= 2.0**900
)


@given(st.lists(st.tuples(st.integers(0, 2), sizes, sizes), min_size=1, max_size=30), st.randoms())
@settings(max_examples=200)
def test_sums_are_exact_in_any_order(rows, random):
    expected = [
        [sum(Fraction(row[at]) for row in rows if row[0] == group) for at in (1, 2)]
        for group in range(3)
    ]
    random.shuffle(rows)
    sums = ExactSums(3, 2)
    cut = random.randint(0, len(rows) - 1)
    for part in (rows[:cut], rows[cut:]):
        if part:
            sums.add(
                np.array([row[0] for row in part]), np.array([row[1:] for row in part], np.float64)
            )
    assert [
        [Fraction(total, 1 << LOWEST) for total in group] for group in sums.totals()
    ] == expected


@given(sizes)
def test_a_float_in_units(value):
    assert Fraction(in_units(value), 1 << LOWEST) == Fraction(value)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("item_shape", [(), (1,), (13,), (300,), (3, 4)])
def test_moments_are_those_of_fractions(tmp_path, dtype, item_shape):
    features = make_features(12, item_shape, dtype, max_frames=60)
    stats = moments(made_cache(tmp_path, features))
    check((stats.mean, stats.variance), features.values())
    assert (stats.utterances, stats.frames) == (12, sum(map(len, features.values())))
    np.testing.assert_array_equal(stats.std, np.sqrt(stats.variance))
    for found in (stats.mean, stats.variance):
        assert isinstance(found, np.ndarray)  # also of frames of one value
        assert found.shape == item_shape


@pytest.mark.parametrize(
    ("change", "step", "rtol"),
    [
        (lambda array: array + np.float32(1e3), 1, 1e-13),
        (lambda array: array - np.float32(1e6), 1, 1e-13),
        (lambda array: array + np.float32(3e7), 1, 1e-13),
        # unlike the others
        (lambda array: array * np.float32(1e-3) + np.float32(1e3), 2, 1e-12),
        (lambda array: np.where(array == array.max(), np.finfo(np.float32).max, array), 20, 1e-12),
    ],
)
def test_values_far_from_zero_or_from_each_other_cost_few_digits_or_none(
    tmp_path, change, step, rtol
):
    features = make_features(40, (4,), "float32")
    for name in list(features)[::step]:
        features[name] = change(features[name])
        assert features[name].dtype == np.float32
    stats = moments(made_cache(tmp_path, features))
    check((stats.mean, stats.variance), features.values(), rtol)


def test_means_of_float16_are_rounded_once(tmp_path):
    features = make_features(40, (30,), "float16", max_frames=900)
    frames = np.concatenate(list(features.values()))
    np.testing.assert_array_equal(moments(made_cache(tmp_path, features)).mean, exact(frames)[0])


def test_dimensions_that_do_not_vary_have_no_variance(tmp_path):
    features = make_features(20, (5,), "float16", max_frames=PIECE_FRAMES * 3)
    for array in features.values():
        array[:, 1], array[:, 3] = -15.94, 0
    stats = moments(made_cache(tmp_path, features))
    assert stats.still == [1, 3]
    assert (stats.variance[[1, 3]] == 0).all()
    assert stats.mean[1] == np.float16(-15.94)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_shards_their_order_and_threads_change_no_bit(tmp_path, dtype):
    features = make_features(40, (5,), dtype, max_frames=PIECE_FRAMES * 5 // 2)
    names = list(features)
    manifest = manifest_of(tmp_path, [(name, f"s{int(name[4:]) % 3}") for name in names])
    backwards = manifest_of(
        tmp_path, [(name, f"s{int(name[4:]) % 3}") for name in names[::-1]], name="backwards.csv"
    )
    shards = [
        {name: features[name] for name in part} for part in (names[30:], names[:7], names[7:30])
    ]
    spread = {"one": [features], "three": shards, "turned": [dict(reversed(features.items()))]}
    caches = [made_cache(tmp_path / folder, *given) for folder, given in spread.items()]
    found = {
        bytes_of(moments(cache, which, by="speaker", threads=threads), tmp_path)
        for cache in caches
        for which in (manifest, backwards)
        for threads in (1, 3)
    }
    assert len(found) == 1


def test_what_was_extracted_again_counts_once(tmp_path):
    old, new = make_features(10, (4,)), make_features(3, (4,), seed=5)
    version = make_version(tmp_path, old)
    add_shard(version, new, row=0, generation=2)
    stats = moments(Cache(version))
    check((stats.mean, stats.variance), {**old, **new}.values())


SLOW = Track("slow", (2,), "float32", "every third frame", Frames(100 / 3))


def test_a_track_counts_its_own_entries(tmp_path):
    """Also if its entries are smaller than those of the main track, and fewer or none."""
    features = make_features(9, (4,), "float32", max_frames=60)
    track = made_cache(tmp_path / "cache", features, side=(SLOW,)).track("slow")
    entries = np.concatenate([*track.values()]).astype(np.float64)
    stats = moments(track)
    assert stats.frames == len(entries)
    np.testing.assert_allclose(stats.mean, entries.mean(0), rtol=1e-12)
    np.testing.assert_allclose(stats.variance, entries.var(0), rtol=1e-12)
    rows = [(id_, "all" if len(entries) else "none") for id_, entries in track.items()]
    with pytest.raises(StoreError, match="no utterance of the group 'none' has frames"):
        moments(track, manifest_of(tmp_path, rows), by="speaker")


def test_a_track_of_a_corpus_counts_the_entries_of_all_parts(tmp_path):
    for seed, name in enumerate("ab"):
        features = make_features(9, (4,), "float32", seed=seed, prefix=name)
        version = make_version(tmp_path / name, features, side=(SLOW,))
        put_part(tmp_path, Part(name, f"/manifests/{name}.csv"))
        record_version(version, PartVersion.of(version, open_index(version)))
    track = featcache.open(tmp_path).track("slow")
    entries = np.concatenate([*track.values()]).astype(np.float64)
    np.testing.assert_allclose(moments(track).mean, entries.mean(0), rtol=1e-12)


@pytest.mark.parametrize(("utterances", "item_shape"), [(20, (6,)), (3, (300,)), (20, (2, 3))])
def test_quantised_features_count_as_they_are_read(tmp_path, utterances, item_shape):
    features = make_features(utterances, item_shape, "float32", max_frames=PIECE_FRAMES * 2)
    cache = made_cache(tmp_path, features, quantized=True)
    assert not all(map(np.array_equal, cache.values(), features.values()))
    stats = moments(cache, threads=2)
    check((stats.mean, stats.variance), cache.values())


@pytest.mark.parametrize(
    "where", [slice(5, None), slice(None, None, 2)], ids=["beside each other", "apart"]
)
def test_groups_are_those_of_the_column(tmp_path, where):
    features = make_features(30, (4,), max_frames=PIECE_FRAMES * 2)
    speakers = {name: ["änne", "bob", "7"][number % 3] for number, name in enumerate(features)}
    chosen, frames = list(features)[where], []
    manifest = manifest_of(tmp_path, [(name, speakers[name]) for name in chosen])
    cache = made_cache(tmp_path / "cache", features)
    stats = moments(cache, manifest, by="speaker", report=frames.append)
    assert (stats.by, stats.groups, stats.utterances) == (
        "speaker",
        ["7", "bob", "änne"],
        len(chosen),
    )
    check((stats.mean, stats.variance), [features[name] for name in chosen])
    for number, speaker in enumerate(stats.groups):
        of_speaker = [features[name] for name in chosen if speakers[name] == speaker]
        check((stats.group_mean[number], stats.group_variance[number]), of_speaker)
        assert stats.group_utterances[number] == len(of_speaker)
        assert stats.group_frames[number] == sum(map(len, of_speaker))
    assert sum(frames) == stats.frames == stats.group_frames.sum()
    assert np.array_equal(moments(cache, manifest).variance, stats.variance)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_whose_values_are_not_finite_is_named(tmp_path, value):
    features = make_features(20, (4,), "float32")
    features["utt-7"][-1, 2] = value
    with pytest.raises(StoreError, match=r"^utt-7: holds NaN or infinity"):
        moments(made_cache(tmp_path, features), threads=2)


def test_what_cannot_be_computed(tmp_path):
    cache = made_cache(tmp_path / "cache", make_features(20, (4,)))
    unknown = manifest_of(
        tmp_path, [(f"no-{number}", "x") for number in range(30)] + [("utt-1", "x")]
    )
    with pytest.raises(
        MissingItemError, match=r"manifest.csv: 30 of 31 utterances are not in .*no-9 … and 20 more"
    ):
        moments(cache, unknown)
    known = manifest_of(tmp_path, [("utt-1", "x")])
    with pytest.raises(ManifestError, match=r"has no column 'Speaker' .*it has 'speaker'"):
        moments(cache, known, by="Speaker")
    with pytest.raises(ManifestError, match="takes a manifest"):
        moments(cache, by="speaker")
    with pytest.raises(StoreError, match="holds codes, uint16: they have no mean"):
        moments(codes_cache(tmp_path / "codes"))
    with pytest.raises(StoreError, match="only codes are counted"):
        usage(cache)
    with pytest.raises(StoreError, match="holds no utterances"):
        moments(Cache(make_version(tmp_path / "empty")))


def test_a_cache_that_checks_what_is_read_checks_it_here_too(tmp_path):
    version = make_version(tmp_path, make_features(20, max_frames=600))
    (chunk,) = version.path.glob("shards/*/features/c/0/0")
    flip(chunk, chunk.stat().st_size - 20)  # in the last frame of the last utterance
    moments(featcache.open(tmp_path))
    with pytest.raises(DamagedError, match="utt-19: damaged"):
        moments(featcache.open(tmp_path, check=True))


def test_the_file_holds_all_there_is(tmp_path):
    features = make_features(20, (4,))
    manifest = manifest_of(tmp_path, [(name, f"ü{int(name[4:]) % 4}") for name in features])
    cache = made_cache(tmp_path / "cache", features)
    for by in (None, "speaker"):
        stats = moments(cache, manifest, by=by)
        stats.save(tmp_path / f"{by}.npz")
        read = Stats.load(tmp_path / f"{by}.npz")
        assert vars(read).keys() == vars(stats).keys()
        for name, value in vars(stats).items():
            np.testing.assert_array_equal(getattr(read, name), value)
            assert type(getattr(read, name)) is type(value)
        with np.load(tmp_path / f"{by}.npz", allow_pickle=False) as file:
            assert file["fingerprint"] == cache.version.info.fingerprint
            assert file["frames"] == cache.lengths.sum()
            assert ("group_mean" in file) == (by is not None)


def test_a_file_is_not_replaced_unasked_and_one_that_cannot_be_written_leaves_nothing(tmp_path):
    stats = moments(made_cache(tmp_path / "cache", make_features(20, (4,))))
    path = tmp_path / "stats.npz"
    stats.save(path)
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match=r"stats.npz: already exists: .* --force"):
        stats.save(path)
    stats.save(path, overwrite=True)
    assert path.read_bytes() == before
    (tmp_path / "taken").mkdir()
    for place in (tmp_path / "taken", tmp_path / "nowhere" / "stats.npz"):
        with pytest.raises(StoreError, match="cannot be written"):
            stats.save(place, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "stats.npz", "taken"]
    with pytest.raises(ArgumentError, match="path: '' is neither a path nor a URL"):
        stats.save("", overwrite=True)
    with pytest.raises(ArgumentError, match=r"path: s3://bucket/stats\.npz is a URL"):
        stats.save("s3://bucket/stats.npz")


NPY = (
    b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (), }".ljust(127)
    + b"\n"
    + bytes(8)
)
"""An array, in the format of `np.save`."""


def of_a_terabyte(path):
    """A file whose array has no more than its header, which promises that much."""
    header = NPY.replace(b"'shape': (), }", b"'shape': (130000000000,), }")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("mean.npy", header[: len(NPY) - 8])


def with_a_flipped_bit(path, arrays):
    np.savez(path, **arrays)
    with zipfile.ZipFile(path) as file:
        flip(path, file.getinfo("mean.npy").header_offset + 200)


NOT_WRITTEN = "not a file written by `featcache stats`"


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path, arrays: None, "cannot be read: No such file"),
        (lambda path, arrays: path.write_bytes(b""), NOT_WRITTEN),
        (lambda path, arrays: path.write_bytes(b"PK\x03\x04 and so on"), NOT_WRITTEN),
        (lambda path, arrays: path.write_bytes(NPY), NOT_WRITTEN),
        (lambda path, arrays: os.mkfifo(path), "not a regular file"),
        (lambda path, arrays: np.savez_compressed(path, mean=np.zeros(10**7)), NOT_WRITTEN),
        (lambda path, arrays: of_a_terabyte(path), NOT_WRITTEN),
        (with_a_flipped_bit, NOT_WRITTEN),
        (lambda path, arrays: np.savez(path, mean=[1.0]), NOT_WRITTEN),
        (lambda path, arrays: np.savez(path, **{**arrays, "format": np.array([{}])}), NOT_WRITTEN),
        (lambda path, arrays: np.savez(path, format=arrays["format"]), "an incomplete file"),
        (lambda path, arrays: np.savez(path, **arrays, more=1), "an incomplete file"),
        (
            lambda path, arrays: np.savez(path, **{**arrays, "mean": [1.0]}),
            r"variance is float64 \[4\], and must be",
        ),
        (
            lambda path, arrays: np.savez(path, **{**arrays, "variance": [np.nan] * 4}),
            "must be finite",
        ),
    ],
)
def test_another_file_is_refused(tmp_path, write, message):
    moments(made_cache(tmp_path / "cache", make_features(5, (4,)))).save(tmp_path / "sound.npz")
    with np.load(tmp_path / "sound.npz") as file:
        arrays = dict(file)
    path = tmp_path / "stats.npz"
    write(path, arrays)
    with pytest.raises(StoreError, match=message):
        Stats.load(path)


def test_the_command_says_what_there_is_and_keeps_it_or_why_not(cli, scratch):
    features = make_features(30, (4,))
    for array in features.values():
        array[:, 2] = 1.5
    make_version(scratch / "cache", features)
    manifest = manifest_of(
        scratch, [(name, "anna" if name < "utt-2" else "ben") for name in features]
    )
    plain = cli("stats", scratch / "cache").with_code(0, err="")
    assert (
        f"30 utterances, {sum(map(len, features.values())):,} frames: log mel energy" in plain.out
    )
    assert "1 of 4 dimensions hardly vary: 2" in plain.out
    assert "not saved; -o FILE saves them for featcache.Cmvn.load" in plain.out
    options = ("--manifest", manifest, "--by", "speaker", "-o", scratch / "s.npz")
    assert (
        "2 groups by speaker"
        in cli("stats", scratch / "cache", *options, "--threads", 2).with_code(0, err="").out
    )
    assert Stats.load(scratch / "s.npz").groups == ["anna", "ben"]
    document = cli("stats", scratch / "cache", *options, "--force", "--json").with_code(0).json()
    assert document["still"] == [2]
    assert [group["name"] for group in document["groups"]] == ["anna", "ben"]
    np.testing.assert_array_equal(document["mean"], Stats.load(scratch / "s.npz").mean)
    assert document["output"] == f"{scratch}/s.npz"

    one = manifest_of(scratch, [(next(iter(features)), "anna")])
    printed = cli("stats", scratch / "cache", "--manifest", one, "--by", "speaker").out
    assert f"1 group by speaker, each of {len(features['utt-0'])} frame" in printed

    strangers = manifest_of(scratch, [("nobody", "x")])
    for refused, code in (
        ([scratch / "nowhere"], 1),
        ([scratch / "cache", "--by", "speaker"], 2),
        ([scratch / "cache", "--manifest", scratch / "gone.csv"], 2),
        ([scratch / "cache", "--manifest", strangers], 1),
        ([scratch / "cache", "--manifest", strangers, "--by", "x"], 1),
        ([scratch / "cache", "--threads", 0], 2),
    ):
        assert "Traceback" not in cli.refused("stats", *refused, code=code)
    assert sorted(path.name for path in scratch.iterdir()) == ["cache", "manifest.csv", "s.npz"]
