"""Units from audio, and from a version of the features to which the centroids were fitted."""

import numpy as np
import pytest
import torch
from damage import flip
from make_cache import make_features, make_version
from small_units import CPU, build, nearest, write_codebook

from featcache.config import config_from, load_config
from featcache.errors import AudioError, ConfigError, DamagedError, Reason
from featcache.extraction.from_version import StoredUtterance, open_source
from featcache.extractors import Clip
from featcache.extractors.rows import RowExtractor
from featcache.extractors.units import Codebook
from featcache.manifest.segments import Utterance
from featcache.testing import ExtractorSuite, extract
from featcache.version.ledger import Failure, put_failures

pytestmark = pytest.mark.usefixtures("trusted")


def clips(*lengths):
    """Clips of noise, each another, that swells."""
    noises = [np.random.default_rng(seed).standard_normal(n) for seed, n in enumerate(lengths)]
    waveforms = [np.geomspace(1e-3, 0.3, len(noise)) * noise for noise in noises]
    return [
        Clip(f"clip-{seed}", torch.from_numpy(one.astype(np.float32)))
        for seed, one in enumerate(waveforms)
    ]


LENGTHS = (400, 399 + 160, 8000, 16001, 640 * 160, 5000, 401)


def write_units(path, config, k=40):
    """Units of a config's features; the centroids are some frames of noise, spread out a
    little."""
    frames = np.concatenate(extract(config.build(CPU), clips(30_000, 20_000))).astype(config.dtype)
    rng = np.random.default_rng(k)
    centroids = rng.permutation(frames)[:k] + 1e-3 * rng.normal(size=(k, frames.shape[1]))
    return write_codebook(path, config, centroids.astype(np.float32))


SOURCES = {
    "fbank-float16": {"extractor": "fbank", "store": {"dtype": "float16"}},
    "mfcc-float32": {"extractor": "mfcc", "params": {"snip_edges": False}},
    "log_mel": {"extractor": "log_mel", "store": {"dtype": "float16"}},
    "rows": {"extractor": "row_extractors:Moments", "store": {"dtype": "float16"}},
    "rows-in-pieces": {"extractor": "row_extractors:Moments", "params": {"piece": 7}},
    "rows-at-a-level": {"extractor": "row_extractors:Leveled", "store": {"dtype": "float16"}},
}


# The same codes, whichever way


@pytest.mark.parametrize("name", SOURCES)
def test_both_routes_give_the_nearest_centroids_of_what_is_stored(name, tmp_path):
    source = config_from({"name": name, **SOURCES[name]})
    codebook = write_units(tmp_path / "units.safetensors", source)
    units, some = build(tmp_path / "units.safetensors"), clips(*LENGTHS)
    from_audio = extract(units, some)
    stored = [features.astype(source.dtype) for features in extract(source.build(CPU), some)]
    for codes, features in zip(from_audio, stored, strict=True):
        assert units.from_features(torch.from_numpy(features)).numpy().tobytes() == codes.tobytes()
        assert (codes == nearest(features, codebook)).mean() > 0.995
    assert len(np.unique(np.concatenate(from_audio))) > 20


def test_rounding_to_the_stored_dtype_matters(tmp_path):
    config = config_from({"name": "a", **SOURCES["fbank-float16"]})
    write_units(tmp_path / "units.safetensors", config)
    units, some = build(tmp_path / "units.safetensors"), clips(160_000)
    (exact,) = extract(config.build(CPU), some)
    (codes,) = extract(units, some)
    assert (units.from_features(torch.from_numpy(exact)).numpy() != codes).any()


class OfSource(ExtractorSuite):
    source: str

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, tmp_path_factory):
        path = tmp_path_factory.mktemp("units") / "units.safetensors"
        write_units(path, config_from({"name": "source", **SOURCES[cls.source]}))
        return config_from(
            {"name": "units", "extractor": "units", "params": {"weights": str(path)}}
        )


class TestUnitsOfFrames(OfSource):
    source = "mfcc-float32"


class TestUnitsOfRows(OfSource):
    source = "rows-in-pieces"


def test_rows_are_put_together_as_the_features_extractor_would(tmp_path):
    config = config_from({"name": "a", **SOURCES["rows-in-pieces"]})
    write_units(tmp_path / "units.safetensors", config)
    units, inner = build(tmp_path / "units.safetensors"), config.build(CPU)
    assert isinstance(inner, RowExtractor)
    for policy in (None, "single", "equal_length", "padded"):
        units.chosen_batching = inner.chosen_batching = policy
        assert units.chosen_batching == policy
        for length in (160, 1000, 5000, 33333):
            assert units.pieces(length) == inner.pieces(length)
            assert units.padded_length(length) == inner.padded_length(length)
            assert units.rows(length, CPU) == inner.rows(length, CPU)
    assert units.shrink(4, 4000, CPU)
    assert inner.rows(4000, CPU) > units.rows(4000, CPU)


# What it says of itself


@pytest.mark.parametrize(
    ("k", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16")]
)
def test_the_smallest_dtype_that_holds_the_codes(k, dtype, tmp_path):
    write_codebook(
        tmp_path / "units.safetensors",
        config_from({"name": "a", "extractor": "fbank"}),
        torch.zeros(k, 80),
    )
    units = config_from(
        {
            "name": "u",
            "extractor": "units",
            "params": {"weights": str(tmp_path / "units.safetensors")},
        }
    )
    assert units.dtype == dtype
    spec = units.build(CPU).spec
    assert (spec.item_shape, spec.codebook_sizes) == ((1,), (k,))
    assert (spec.frame_rate, spec.frame_length, spec.sample_rate) == (100.0, 400, 16000)
    assert spec.units == f"number of the nearest of {k} centroids of a"


def test_weights_that_are_elsewhere_now(tmp_path):
    (tmp_path / "old").write_text("3.0")
    config = config_from(
        {
            "name": "a",
            "extractor": "small_units:Scaled",
            "params": {"weights": str(tmp_path / "old")},
        }
    )
    write_units(tmp_path / "units.safetensors", config, 20)
    expected = extract(build(tmp_path / "units.safetensors"), clips(*LENGTHS))
    (tmp_path / "old").rename(tmp_path / "new")
    params = "{weights: units.safetensors, features: {weights: new}}"
    (tmp_path / "units.yaml").write_text(f"name: u\nextractor: units\nparams: {params}\n")
    moved = load_config(tmp_path / "units.yaml").build(CPU)
    assert moved.max_seconds == 30
    assert all(map(np.array_equal, expected, extract(moved, clips(*LENGTHS))))
    (tmp_path / "new").write_text("3.5")
    with pytest.raises(
        ConfigError, match=r"the extractor small_units:Scaled, or its weights, have changed"
    ):
        build(tmp_path / "units.safetensors", weights=str(tmp_path / "new"))


@pytest.mark.parametrize(
    ("extractor", "params", "features", "sample_rate", "message"),
    [
        ("fbank", {}, {}, 8000, "audio.sample_rate: 8000; these units are of a, whose .* is 16000"),
        (
            "fbank",
            {},
            {"num_mel_bins": "40"},
            16000,
            "params.features: num_mel_bins: nothing can be given here",
        ),
        ("fbank", {"dither": 1.0}, {}, 16000, "its features have dither"),
        (
            "small_units:Scaled",
            {},
            {"power": "2"},
            16000,
            "features: power: only weights can be given here; the rest",
        ),
    ],
)
def test_what_does_not_go_together(extractor, params, features, sample_rate, message, tmp_path):
    if extractor == "small_units:Scaled":
        (tmp_path / "factor").write_text("1.0")
        params = {"weights": str(tmp_path / "factor")}
    source = config_from({"name": "a", "extractor": extractor, "params": params})
    write_units(tmp_path / "units.safetensors", source, 20)
    with pytest.raises(ConfigError, match=message):
        build(tmp_path / "units.safetensors", sample_rate, **features)


@pytest.mark.parametrize(
    ("dimensions", "sections"),
    [(8, {"extractor": "audio_stats"}), (80, {"extractor": "fbank", "store": {"pool": "mean"}})],
    ids=["vectors", "pooled"],
)
def test_centroids_of_whole_utterances(dimensions, sections, tmp_path):
    source = config_from({"name": "a", **sections})
    write_codebook(tmp_path / "units.safetensors", source, torch.zeros(3, dimensions))
    with pytest.raises(ConfigError, match="its centroids are of whole utterances"):
        build(tmp_path / "units.safetensors")


def test_features_with_parameters_that_are_no_more(tmp_path):
    config = config_from({"name": "a", "extractor": "fbank"})
    resolved = {**config.resolved(), "params": {"bins": 80}}
    codebook = Codebook(torch.zeros(3, 80), resolved, config.fingerprint(), "float32", {})
    (tmp_path / "units.safetensors").write_bytes(codebook.to_bytes())
    with pytest.raises(
        ConfigError, match="fbank does not accept the config of its features: bins: Extra inputs"
    ):
        build(tmp_path / "units.safetensors")


def test_audio_is_that_of_the_features(tmp_path):
    config = config_from(
        {"name": "a", "extractor": "fbank", "audio": {"channel": "first", "max_seconds": 20}}
    )
    write_units(tmp_path / "units.safetensors", config, 20)
    units = build(tmp_path / "units.safetensors")
    units.check_audio({**config.resolved()["audio"], "max_seconds": 5})
    with pytest.raises(
        ConfigError, match=r"audio.channel: mix; these units are of a, whose audio.channel is first"
    ):
        units.check_audio(config_from({"name": "b", "extractor": "fbank"}).resolved()["audio"])


def test_features_that_the_version_could_not_hold_are_a_failure(tmp_path):
    config = config_from(
        {"name": "a", **SOURCES["fbank-float16"], "params": {"use_log_fbank": False}}
    )
    write_codebook(tmp_path / "units.safetensors", config, torch.zeros(3, 80))
    with pytest.raises(AudioError, match=r"NaN or infinite as torch.float16") as caught:
        extract(build(tmp_path / "units.safetensors"), clips(16000))
    assert caught.value.reason == Reason.NON_FINITE_FEATURES


# From a version


def rows_of(names):
    return [Utterance(id=name, path=f"audio/{name}.wav") for name in names]


def test_a_versions_items_for_rows_of_a_manifest(tmp_path):
    features = make_features(50, (4,), "float16")
    names = list(features)
    version = make_version(tmp_path, dict([*features.items()][:20]), dict([*features.items()][20:]))
    source = open_source(tmp_path, version.info.fingerprint)
    some = [names[number] for number in (49, 3, 20, 3)]
    for name, given in zip(some, source.read(rows_of(some)), strict=True):
        assert isinstance(given, StoredUtterance)
        np.testing.assert_array_equal(given.features, features[name])
        item = given.item
        assert (item.id, item.path, item.num_samples) == (
            name,
            f"audio/{name}.wav",
            len(features[name]) * 160 + 240,
        )
        assert (item.size, item.mtime_ns, item.sample_rate) == (1000, 5, 16000)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *(
            (changed, "whose features of this id are of another row or file: ")
            for changed in (
                {"path": "audio/utt-2.wav"},
                {"start": 0.5},
                {"duration": 0.5},
                {"channel": 0},
            )
        ),
        ({"id": "utt-9", "path": "audio/utt-9.wav"}, r"not in fbank80-[0-9a-f]{12}$"),
    ],
)
def test_a_row_that_the_version_has_not(tmp_path, changed, message):
    version = make_version(tmp_path, make_features(5, (4,), "float16"))
    row = Utterance(**{"id": "utt-1", "path": "audio/utt-1.wav", **changed})
    there, missing = open_source(version.path, version.info.fingerprint).read(
        [*rows_of(["utt-0"]), row]
    )
    assert isinstance(there, StoredUtterance)
    assert isinstance(missing, AudioError)
    assert missing.reason == Reason.NOT_IN_SOURCE
    with pytest.raises(AudioError, match=message):
        raise missing


def test_why_the_version_has_not_a_row(tmp_path):
    version = make_version(tmp_path, make_features(5, (4,), "float16"))
    row = {"id": "utt-9", "path": "audio/utt-9.wav"}
    put_failures(version, "run.000000", [Failure(**row, reason="empty", message="no samples")])
    (missing,) = open_source(version.path, version.info.fingerprint).read([Utterance(**row)])
    assert str(missing).endswith(", where it failed: empty: no samples")


def test_a_flipped_bit_is_not_made_into_units(tmp_path):
    version = make_version(tmp_path, make_features(5, (4,), "float16"))
    flip(version.shard(version.shard_names()[0]).folder / "features" / "c" / "0" / "0", 0)
    with pytest.raises(DamagedError, match=r"utt-0: damaged: .* `featcache repair"):
        open_source(tmp_path, version.info.fingerprint).read(rows_of(["utt-0"]))


def test_the_version_is_found_by_its_fingerprint(tmp_path):
    one, two = (
        make_version(tmp_path, make_features(5, (4,), "float16"), name=name)
        for name in ("one", "two")
    )
    assert open_source(tmp_path, two.info.fingerprint).version.path == two.path
    with pytest.raises(
        ConfigError,
        match=r"no version has .*, augment and .*fingerprint 000000000000.*; it holds one-.*two-",
    ):
        open_source(tmp_path, "0" * 64)
    with pytest.raises(ConfigError, match="it holds one-"):
        open_source(one.path, two.info.fingerprint)
