"""Parts of utterances: spans of seconds, the first codebooks, the same moment in several
versions, and windows."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from damage import flip
from hypothesis import given
from make_cache import made_cache, make_version

import featcache
from featcache import Crop
from featcache.errors import ArgumentError, DamagedError, MissingItemError
from featcache.loader.windows import Windows
from featcache.spec import Frames


def timed(rate, seconds, columns=1, dtype="float32"):
    """Features whose frames hold their own number, of utterances that last so many
    seconds."""
    return {
        f"utt-{number}": np.repeat(np.arange(int(length * rate), dtype=dtype)[:, None], columns, 1)
        for number, length in enumerate(seconds)
    }


SECONDS = (3.0, 1.5, 0.3, 7.21)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    make_version(folder, timed(100.0, SECONDS, 80, "float16"), name="fbank80")
    codes = timed(75.0, SECONDS, 8, "uint16")
    make_version(folder, dict(reversed(codes.items())), name="encodec24k", frame_rate=75.0)
    make_version(folder, timed(11025 / 128, SECONDS), name="odd", frame_rate=11025 / 128)
    return folder


@pytest.fixture
def fbank(folder):
    return featcache.open(folder, "fbank80")


@pytest.fixture
def codes(folder):
    return featcache.open(folder, "encodec24k")


class TestSeconds:
    def test_of_a_batch_are_each_ones_own_or_the_same_for_all(self, fbank):
        features, lengths = fbank.batch(
            ["utt-0", "utt-3", "utt-2"], start=[1.0, 7.0, 0.0], duration=0.25
        )
        assert lengths.tolist() == [25, 21, 25]
        assert features[0, :, 0].tolist() == list(range(100, 125))
        assert features[1, :, 0].tolist() == [*range(700, 721), 0, 0, 0, 0]
        features, lengths = fbank.batch([0, 1], start=1.0)
        assert lengths.tolist() == [200, 50]
        assert features.shape == (2, 200, 80)

    def test_of_any_duration_end_where_the_utterance_does(self, fbank):
        for duration in (1e18, 1e300, 1e308):
            assert len(fbank.item("utt-1", duration=duration)) == 150
            assert fbank.batch(["utt-1", "utt-2"], start=0.1, duration=duration)[1].tolist() == [
                140,
                20,
            ]
            with pytest.raises(
                ArgumentError, match=r"start lies beyond the end of 1 of 1 utterances"
            ):
                fbank.item("utt-1", start=duration)

    @given(st.floats(0, 7.2), st.none() | st.floats(0, 10))
    def test_of_versions_of_different_rates_begin_within_half_a_frame_of_each_other(
        self, folder, start, duration
    ):
        for name, rate in (("fbank80", 100.0), ("encodec24k", 75.0), ("odd", 11025 / 128)):
            cache = featcache.open(folder, name)
            there = len(cache["utt-3"])
            if start * rate >= there:
                with pytest.raises(ArgumentError):
                    cache.item("utt-3", start=start, duration=duration)
                continue
            first = min(round(start * rate), there - 1)
            part = cache.item("utt-3", start=start, duration=duration)
            count = there if duration is None else max(round(duration * rate), duration > 0)
            assert part[:, 0].tolist() == [*range(first, min(first + count, there))]
            if len(part):
                # there is no frame behind the last one
                most = 0.5 if start * rate <= there - 0.5 else 1.0
                assert abs(float(part[0, 0]) / rate - start) <= most / rate + 1e-9

    @pytest.mark.parametrize(
        ("span", "what"),
        [
            (
                {"start": 3.0},
                r"start lies beyond the end of 2 of 2 utterances: 3 s of 3 s \(utt-0\), 3 s of 0.3 s",
            ),
            (
                {"start": [0.0, 0.5]},
                r"start lies beyond the end of 1 of 2 utterances: 0.5 s of 0.3 s \(utt-2\)",
            ),
            ({"start": -1}, r"start is -1: it must be seconds, 0 or more"),
            ({"duration": float("nan")}, "duration is nan"),
            (
                {"start": [1.0, 2.0, 3.0]},
                r"start has shape \[3\]: give one number, or one for each of 2 keys",
            ),
        ],
    )
    def test_that_are_not_there_are_an_error(self, fbank, span, what):
        with pytest.raises(ArgumentError, match=what):
            fbank.batch(["utt-0", "utt-2"], **span)

    def test_are_checked_with_the_whole_utterance(self, tmp_path):
        version = make_version(tmp_path / "features", timed(100.0, SECONDS))
        (chunk,) = version.path.glob("shards/*/features/c/0/0")
        flip(chunk, 4 * 299)  # in the last frame of the first utterance
        cache = featcache.open(tmp_path / "features")
        assert len(cache.batch([0], duration=0.1)[0][0]) == 10
        with pytest.raises(DamagedError, match="utt-0: damaged"):
            cache.batch([0], duration=0.1, check=True)


class TestCodebooks:
    def test_are_the_first_ones(self, codes):
        assert np.array_equal(codes.item("utt-1", codebooks=3), codes["utt-1"][:, :3])
        features, _ = codes.batch(["utt-1", "utt-2"], codebooks=2, padding_value=9)
        whole, lengths = codes.batch(["utt-1", "utt-2"], padding_value=9)
        assert torch.equal(features, whole[..., :2])
        assert (features[1, lengths[1] :] == 9).all()
        room = torch.empty(1000, dtype=torch.uint16)
        assert torch.equal(codes.batch(["utt-1"], codebooks=1, out=room)[0], whole[:1, :, :1])

    @pytest.mark.parametrize("codebooks", [0, 9, -1, "2"])
    def test_that_are_not_there_are_an_error(self, codes, codebooks):
        with pytest.raises(
            ArgumentError, match=rf"codebooks is {codebooks!r}: there are 8, so it must be 1 to 8"
        ):
            codes.batch([0], codebooks=codebooks)

    def test_are_for_codes_only(self, fbank):
        with pytest.raises(
            ArgumentError, match="codebooks is 2, but these features are log mel energy, not codes"
        ):
            fbank.item(0, codebooks=2)
        with pytest.raises(ArgumentError, match="not codes"):
            featcache.FeatureDataset(fbank, codebooks=2)


class TestSeveralVersions:
    def test_pad_each_with_its_own_value(self, fbank, codes):
        dataset = featcache.FeatureDataset(
            {"fbank": fbank, "codes": codes}, padding_value={"codes": 1024}
        )
        batch = dataset.batch([0, 2])
        assert (batch["features"]["codes"][1, 22:] == 1024).all()
        assert not batch["features"]["fbank"][1, 30:].any()

    def test_need_all_to_hold_an_utterance(self, fbank, codes, tmp_path):
        few = made_cache(tmp_path / "few", timed(50.0, SECONDS[:3]), frame_rate=50.0)
        with pytest.raises(MissingItemError, match="utt-3"):
            featcache.FeatureDataset({"fbank": fbank, "few": few})
        dataset = featcache.FeatureDataset(
            {"fbank": fbank, "codes": codes, "few": few}, skip_missing=True
        )
        assert list(dataset.ids) == ["utt-0", "utt-1", "utt-2"]
        assert dataset.skipped == ["utt-3"]
        assert dataset.batch([2])["features"]["codes"].shape == (1, 22, 8)

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            (
                {"padding_value": {"code": 1}},
                r"padding_value names 'code'; the dataset's versions are fbank, codes",
            ),
            ({"codebooks": {"fbank": 2}}, r"not codes"),
            ({"codebooks": 2}, r"not codes"),
        ],
    )
    def test_are_named_in_arguments(self, fbank, codes, options, what):
        with pytest.raises(ArgumentError, match=what):
            featcache.FeatureDataset({"fbank": fbank, "codes": codes}, **options)

    def test_there_is_one_at_least_and_one_has_no_name(self, fbank):
        with pytest.raises(ArgumentError, match="cache is empty"):
            featcache.FeatureDataset({})
        with pytest.raises(
            ArgumentError, match="padding_value is given by name, but the dataset has one version"
        ):
            featcache.FeatureDataset(fbank, padding_value={"features": 1})
        assert set(featcache.FeatureDataset({"fbank": fbank})[0]["features"]) == {"fbank"}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, "either frames or seconds"),
        ({"frames": 3, "seconds": 1.0}, "either frames or seconds"),
        *[
            ({"frames": it}, f"frames is {it!r}: it must be a whole number, 1 or more")
            for it in (0, 2.5, "20", True)
        ],
        (
            {"frames": 2**63},
            f"frames is {2**63}: it must be a whole number, 1 or more, at most {2**62}",
        ),
        *[
            ({"seconds": it}, f"seconds is {it!r}: it must be a number above 0")
            for it in (0.0, float("nan"), "2")
        ],
        ({"seconds": 1e30}, "seconds is 1e[+]30: it must be a number above 0, and less than 1e9"),
        (
            {"frames": 3, "where": "middle"},
            "where is 'middle': it must be one of random, start, center",
        ),
        ({"frames": 3, "short": "skip"}, "short is 'skip': it must be one of pad, drop, error"),
        ({"frames": 3, "seed": -1}, "seed is -1"),
    ],
)
def test_what_does_not_hold_together_is_refused(arguments, what):
    with pytest.raises(ArgumentError, match=what):
        Crop(**arguments)


def firsts_of(crop, lengths, epoch):
    """The first frames of windows of a single version."""
    windows = Windows(crop, [Frames(100.0)], [int(lengths.max())])
    (firsts,), _ = windows.ranges([lengths], np.arange(len(lengths)), epoch)
    return firsts


def test_random_windows_lie_anywhere_with_the_same_chance():
    firsts = firsts_of(Crop(frames=10), np.full(20_000, 19), 0)
    counts = np.bincount(firsts, minlength=10)
    assert len(counts) == 10
    # chi-square with 9 degrees of freedom: 1 in 1,000
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9
    again = firsts_of(Crop(frames=10), np.full(20_000, 19), 1)
    assert 0.08 < (firsts == again).mean() < 0.12
    assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 0.03


def test_windows_are_what_they_were_in_every_release():
    """Training that is resumed after an update sees the same crops."""
    firsts = firsts_of(Crop(frames=5, seed=7), np.full(6, 1000), 2)
    assert firsts.tolist() == [37, 432, 330, 186, 136, 626]


class TestCrops:
    def test_seconds_are_frames_of_the_version(self, fbank):
        assert featcache.FeatureDataset(fbank, crop=Crop(seconds=0.052)).lengths.max() == 5
        assert featcache.FeatureDataset(fbank, crop=Crop(seconds=0.0001)).lengths.max() == 1

    def test_short_ones_are_dropped_where_that_is_asked_for(self, fbank):
        manifest = [{"id": f"utt-{number}", "digit": number} for number in range(4)]
        for source in (None, manifest):
            dataset = featcache.FeatureDataset(fbank, source, crop=Crop(frames=200, short="drop"))
            assert list(dataset.ids) == ["utt-0", "utt-3"]
            assert dataset.dropped == ["utt-1", "utt-2"]
            assert not dataset.skipped
            assert dataset.lengths.tolist() == [200, 200]
            batch = dataset.batch([0, 1])
            assert batch["features"].shape == (2, 200, 80)
        assert batch["digit"].tolist() == [0, 3]

    def test_short_ones_are_named_where_they_are_refused(self, fbank):
        what = "2 of 4 utterances are shorter than the crop of 200 frames: utt-1, utt-2"
        with pytest.raises(ArgumentError, match=what):
            featcache.FeatureDataset(fbank, crop=Crop(frames=200, short="error"))
        with pytest.raises(
            ArgumentError, match="4 of 4 utterances are shorter than the crop of 1000 frames"
        ):
            featcache.FeatureDataset(fbank, crop=Crop(frames=1000, short="drop"))


@pytest.fixture(scope="module")
def of_whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    make_version(folder, timed(100.0, SECONDS), name="fbank")
    make_version(folder, timed(75.0, SECONDS), name="codes", frame_rate=75.0)
    for name, count, rate in (
        ("one", 1, 100.0),
        ("slow", 1, 1.0),
        ("odd", 1, 0.37),
        ("few", 3, 50.0),
    ):
        whole = {id_: np.ones((count, 4), np.float32) for id_ in timed(100.0, SECONDS)}
        make_version(folder, whole, name=name, frame_rate=rate)
    return folder


class TestAVersionOfWholeUtterances:
    """One vector, or a few, for each utterance; at whatever rate its extractor gave."""

    @pytest.mark.parametrize("name", ["one", "slow", "odd", "few"])
    @pytest.mark.parametrize("is_first", [False, True])
    @pytest.mark.parametrize("others", [["fbank"], ["fbank", "codes"]])
    def test_is_read_whole_and_limits_no_crop(self, of_whole, name, is_first, others):
        order = [name, *others] if is_first else [*others, name]
        caches = {each: featcache.open(of_whole, each) for each in order}
        crop = Crop(seconds=0.2, short="drop")
        dataset = featcache.FeatureDataset(caches, crop=crop)
        plain = featcache.FeatureDataset({each: caches[each] for each in others}, crop=crop)
        assert [*dataset.ids] == ["utt-0", "utt-1", "utt-2", "utt-3"]
        for epoch in range(5):
            dataset.set_epoch(epoch)
            plain.set_epoch(epoch)
            batch, expected = dataset.batch([3, 0, 1]), plain.batch([3, 0, 1])
            for each in others:
                assert torch.equal(batch["features"][each], expected["features"][each])
            assert batch["features"][name].eq(1).all()
            assert batch["lengths"][name].tolist() == [len(caches[name][0])] * 3

    def test_is_told_from_one_that_lacks_the_ends(self, tmp_path):
        """Only the first second of each: windows lie within it, as they did."""
        make_version(tmp_path, timed(100.0, SECONDS), name="fbank")
        cut = {id_: array[:100] for id_, array in timed(100.0, SECONDS).items()}
        make_version(tmp_path, cut, name="cut")
        caches = {name: featcache.open(tmp_path, name) for name in ("fbank", "cut")}
        features = featcache.FeatureDataset(caches, crop=20).batch([0, 1, 3])["features"]
        assert torch.equal(features["fbank"], features["cut"])

    def test_alone_is_as_any_other(self, of_whole):
        one = featcache.open(of_whole, "one")
        assert (
            featcache.FeatureDataset({"a": one, "b": one}, crop=20).batch([0])["lengths"]["b"] == 1
        )
