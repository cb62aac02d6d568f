"""Versions of several tracks, of vectors, and of vectors pooled from frames: extracted, resumed,
verified, repaired and recomputed."""

import json

import numpy as np
import pytest
import soundfile
from corpora import Corpus, speech
from damage import flip
from extractions import ONE_EACH, failures_of, write_config

import featcache
from featcache.testing import ExtractorSuite

pytestmark = pytest.mark.usefixtures("trusted")


class TestThreeRates(ExtractorSuite):
    config = {"name": "rates", "extractor": "track_extractors:ThreeRates"}  # noqa: RUF012


class TestRatesOfSnac(ExtractorSuite):
    """11.7, 23.4 and 46.9 codes in a second."""

    config = {  # noqa: RUF012
        "name": "snac",
        "extractor": "track_extractors:ThreeRates",
        "audio": {"sample_rate": 24000},
    }


class TestLoud(ExtractorSuite):
    config = {"name": "loud", "extractor": "track_extractors:Loud"}  # noqa: RUF012


class TestPeak(ExtractorSuite):
    config = {"name": "peak", "extractor": "track_extractors:Peak"}  # noqa: RUF012

    def reference(self, waveform):
        return np.abs(waveform).max()


def extract(manifest, config, cache, **options):
    chosen = featcache.Options(device="cpu", threads=2, shard_megabytes=ONE_EACH, **options)
    return featcache.extract(manifest, config, cache, chosen)


def write(folder, name, text):
    path = folder / f"{name}.yaml"
    path.write_text(f"name: {name}\nextractor: fbank\nstore: {text}\n")
    return path


def shard_names(cache, name):
    return {*featcache.open(cache, name).index.shards}


def test_codes_of_three_rates_are_three_tracks(plain, tmp_path):
    config = write_config(tmp_path, "ThreeRates", module="track_extractors")
    extract(plain.manifest(), config, tmp_path / "cache")
    cache = featcache.open(tmp_path / "cache")
    assert [(track.name, track.axis.rate) for track in cache.spec.tracks] == [
        ("features", 16000 / 2048),
        ("codes_1", 16000 / 1024),
        ("codes_2", 16000 / 512),
    ]
    fine = cache.track("codes_2")
    np.testing.assert_array_equal(cache.track("codes_1").lengths, 2 * cache.lengths)
    np.testing.assert_array_equal(fine.lengths, 4 * cache.lengths)
    names = {"slow": cache, "fine": fine}
    for batch in featcache.DataLoader(featcache.FeatureDataset(names), batch_size=5):
        slow, fast = batch["features"]["slow"].float(), batch["features"]["fine"].float()
        pooled = fast.unflatten(1, (-1, 4)).mean(2)
        assert (pooled - slow).abs().max() < 1  # rounded down each
    verified = featcache.open(tmp_path / "cache", strict=True)
    assert len(verified) == len(plain.ids)


def test_tracks_that_the_spec_lacks_are_one_line(plain, tmp_path, cli):
    config = write_config(tmp_path, "WrongTracks", module="track_extractors")
    refused = cli("extract", plain.manifest(), "-c", config, "-o", tmp_path / "cache")
    (line,) = refused.with_code(1).err.strip().splitlines()[-1:]
    assert "WrongTracks" in line
    assert "extract returned the tracks features, codes_1, codes_3" in line
    assert "its spec has features, codes_1, codes_2" in line


def test_vectors_live_as_frames_do(corpus, tmp_path, cli):
    """Extracted beside frames, short clips in the ledger, damaged, repaired, recomputed, and
    the same from one clip alone."""
    config = write_config(tmp_path, "Peak", module="track_extractors")
    cache, manifest = tmp_path / "cache", corpus.manifest()
    both = ("-c", config, "-c", "fbank80", "--shard-size", ONE_EACH)
    cli("extract", manifest, *both, "-o", cache).with_code(3)
    place = next(cache.glob("peak-*"))
    peaks = featcache.open(place)
    assert {failure["id"] for failure in failures_of(cli, place)} == {"plain-00", "plain-04"}
    assert len(peaks) == len(corpus.ids) - 2
    live = featcache.extractor(peaks)
    assert live.file(corpus.folder / "stereo.flac", channel=1) == peaks["stereo-right"]
    assert peaks["stereo-right"].shape == ()
    before = {id_: float(value) for id_, value in peaks.items()}
    victim = place / "shards" / peaks.index.shards[0] / "features/c/0"
    flip(victim, 1)
    cli("verify", place, "--manifest", manifest).with_code(1)
    cli("repair", place, "--manifest", manifest, "--trust-remote-code").with_code(0)
    ends = ("--manifest", manifest, "--recompute", "5", "--trust-remote-code")
    assert "5 bit-identical" in cli("verify", place, *ends).with_code(3).out
    assert {id_: float(value) for id_, value in featcache.open(place).items()} == before
    assert "float32 [], one for each utterance: peak" in cli("info", place).out


def test_events_of_waveforms_are_stored_and_read(plain, tmp_path, cli):
    """Also of clips that have none."""
    config = write_config(tmp_path, "Loud", module="track_extractors")
    cache = tmp_path / "cache"
    cli("extract", plain.manifest(), "-c", config, "-o", cache).with_code(0)
    loud = featcache.open(cache)
    for row in plain.rows:
        waveform, rate = soundfile.read(plain.folder / row["path"], dtype="float32")
        is_loud = np.concatenate([[False], np.abs(waveform) > 0.25, [False]])
        starts, ends = np.flatnonzero(np.diff(is_loud.astype(int))).reshape(-1, 2).T
        expected = [
            (start / rate, end / rate, f"{np.abs(waveform[start:end]).max():.2f}")
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ]
        assert loud[row["id"]] == expected
    ends = ("--manifest", plain.manifest(), "--recompute", "12", "--trust-remote-code")
    assert "12 bit-identical" in cli("verify", cache, *ends).with_code(0).out


@pytest.mark.parametrize("dtype", ["float16", "uint8"])
@pytest.mark.parametrize("pool", ["mean", "mean+std"])
def test_a_vector_of_frames_is_that_of_the_stored_frames(plain, tmp_path, dtype, pool):
    """From audio and from the version, the shards have the same names, which are their
    content."""
    frames = write(tmp_path, "frames", f"{{dtype: {dtype}}}")
    pooled = write(tmp_path, "pooled", f"{{dtype: {dtype}, pool: {pool}}}")
    manifest = plain.manifest()
    for config in (frames, pooled):
        extract(manifest, config, tmp_path / "audio")
    extract(manifest, pooled, tmp_path / "version", source=tmp_path / "audio")
    assert shard_names(tmp_path / "audio", "pooled") == shard_names(tmp_path / "version", "pooled")
    vectors = featcache.open(tmp_path / "version")
    for id_, values in featcache.open(tmp_path / "audio", "frames").items():
        exact = values.astype(np.float64)
        expected = [exact.mean(0), exact.std(0)][: pool.count("+") + 1]
        np.testing.assert_allclose(vectors[id_], np.concatenate(expected), rtol=1e-6)
        assert vectors[id_].dtype == np.float32


def test_check_sources_compares_vectors_with_the_version_that_they_are_made_from(tmp_path):
    """An older version gives the same vectors however often it is asked, and a newer one
    gives new ones also where no audio is left."""
    frames = write(tmp_path, "frames", "{}")
    pooled = write(tmp_path, "pooled", "{pool: mean}")
    corpus = Corpus(tmp_path)
    corpus.record("a", "a.wav", speech(0.4))
    corpus.record("b", "b.wav", speech(0.5))
    manifest, cache = corpus.manifest(), tmp_path / "cache"
    from_version = {"source": cache, "check_sources": True}
    extract(manifest, frames, cache)
    extract(manifest, pooled, cache, **from_version)
    soundfile.write(tmp_path / "b.wav", speech(0.6), 16000)
    assert extract(manifest, pooled, cache, **from_version).versions[0].extracted == 0
    extract(manifest, frames, cache, check_sources=True)
    for path in ("a.wav", "b.wav"):
        (tmp_path / path).unlink()
    assert extract(manifest, pooled, cache, **from_version).versions[0].extracted == 1
    assert extract(manifest, pooled, cache, **from_version).versions[0].extracted == 0
    mean = featcache.open(cache, "frames")["b"].mean(0, dtype=np.float64)
    np.testing.assert_allclose(featcache.open(cache, "pooled")["b"], mean, rtol=1e-6)


def test_pieces_of_a_clip_are_pooled_together(corpus, tmp_path):
    """A clip that is computed in two pieces has the mean of all of its frames."""
    made = {}
    for name, store in (("frames", {}), ("pooled", {"pool": "mean"})):
        params = {"extractor": "row_extractors:Moments", "params": {"piece": 20}}
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps({"name": name, **params, "store": store}))
        extract(corpus.manifest(), path, tmp_path / "cache")
        made[name] = featcache.open(tmp_path / "cache", name)
    for id_, frames in made["frames"].items():
        expected = frames.astype(np.float64).mean(0)
        np.testing.assert_allclose(made["pooled"][id_], expected, rtol=1e-6)


def test_a_pool_without_meaning_is_refused(plain, tmp_path, cli):
    codes = tmp_path / "codes.yaml"
    codes.write_text(
        "name: x\nextractor: track_extractors:ThreeRates\nstore: {dtype: uint16, pool: mean}\n"
    )
    refused = cli("extract", plain.manifest(), "-c", codes, "-o", tmp_path / "cache")
    assert "only frames of floats have a mean" in refused.with_code(2).err
    wrong = write(tmp_path, "wrong", "{pool: median}")
    refused = cli("extract", plain.manifest(), "-c", wrong, "-o", tmp_path / "cache")
    assert "store.pool" in refused.with_code(2).err


def test_where_selects_by_a_scalar_vector(corpus, tmp_path):
    """A score of another version decides which utterances a dataset has."""
    config = write_config(tmp_path, "Peak", module="track_extractors")
    extract(corpus.manifest(), config, tmp_path / "cache")
    peaks = featcache.open(tmp_path / "cache")
    loud = {id_ for id_, peak in peaks.items() if peak > 0.4}
    rows = [{"id": id_, "peak": float(peak)} for id_, peak in peaks.items()]
    dataset = featcache.FeatureDataset(peaks, rows, where=lambda row: row["peak"] > 0.4)
    assert {*dataset.ids} == loud
