"""Versions that differ only in what they take from a model share its passes, and get the
bits, and the shards, of separate runs."""

import json
from collections import Counter

import pytest
import small_models
import small_ssl
from damage import flip
from extractions import reasons_of

import featcache
from featcache.config import load_configs
from featcache.extraction import from_audio
from featcache.extractors.encodec import Encodec
from featcache.extractors.wav2vec2 import Wav2Vec2

LAYERS = (1, 3, 2)


@pytest.fixture(scope="module")
def hubert(tmp_path_factory):
    return small_ssl.save("hubert", tmp_path_factory.mktemp("hubert"))


@pytest.fixture(scope="module")
def config(hubert, tmp_path_factory):
    """One file that is three configs."""
    path = tmp_path_factory.mktemp("configs") / "hubert.yaml"
    params = {"weights": str(hubert), "layer": [*LAYERS]}
    path.write_text(json.dumps({"name": "hubert", "extractor": "ssl", "params": params}))
    return path


@pytest.fixture(scope="module")
def apart(plain, config, tmp_path_factory):
    """A cache of separate runs, one for each layer."""
    cache = tmp_path_factory.mktemp("apart")
    for layer in LAYERS:
        only = {"params.layer": layer, "name": f"hubert-layer{layer}"}
        featcache.extract(plain.manifest(), config, cache, options(), set=only)
    return cache


@pytest.fixture
def passes(monkeypatch):
    """Counts the passes of HuBERT and of EnCodec's encoder."""
    counts = Counter()

    def count(kind, name):
        original = getattr(kind, name)

        def counted(self, *args):
            counts[kind] += 1
            return original(self, *args)

        monkeypatch.setattr(kind, name, counted)

    count(Wav2Vec2, "hidden_states")
    count(Encodec, "latents")
    return counts


def options(**given):
    return featcache.Options(**{"device": "cpu", "threads": 1, "shard_megabytes": 0.05, **given})


def shards(cache):
    return {
        version.name: {*(path.name for path in (version / "shards").iterdir() if path.is_dir())}
        for version in cache.iterdir()
    }


def assert_equal(cache, expected):
    """The same features, in whatever shards."""
    for name in shards(expected):
        features = dict(featcache.open(expected / name).items())
        found = dict(featcache.open(cache / name).items())
        assert {id_: array.tobytes() for id_, array in found.items()} == {
            id_: array.tobytes() for id_, array in features.items()
        }


def test_values_are_those_of_separate_runs(plain, config, apart, tmp_path, passes):
    featcache.extract(
        plain.manifest(),
        config,
        tmp_path / "one",
        options(),
        set={"params.layer": 3, "name": "hubert-layer3"},
    )
    of_one = passes[Wav2Vec2]
    passes.clear()
    summary = featcache.extract(plain.manifest(), config, tmp_path / "all", options())
    assert passes[Wav2Vec2] == of_one > 1
    assert [version.extracted for version in summary.versions] == [len(plain.ids)] * 3
    assert shards(tmp_path / "all") == shards(apart)
    assert len({*map(frozenset, shards(apart).values())}) == 3


def test_started_workers_share_passes_too(plain, config, apart, tmp_path):
    featcache.extract(plain.manifest(), config, tmp_path / "all", options(device="cpu,cpu"))
    assert shards(tmp_path / "all") == shards(apart)


def test_large_recordings_share_passes(plain, config, apart, tmp_path, passes, monkeypatch):
    """Their rows are computed by the worker that has decoded them."""
    monkeypatch.setattr(from_audio, "SMALL_BYTES", 1)
    featcache.extract(plain.manifest(), config, tmp_path / "all", options())
    assert passes[Wav2Vec2] <= len(plain.ids)
    assert shards(tmp_path / "all") == shards(apart)


def test_a_run_goes_on_where_versions_lack_other_rows(plain, config, apart, tmp_path):
    """One version was extracted before, one in part, and one loses a shard."""
    cache, manifest = tmp_path / "all", plain.manifest()
    half = tmp_path / "half.csv"
    half.write_text("".join(manifest.read_text().splitlines(keepends=True)[:7]))
    root = {"root": manifest.parent}
    one = {"params.layer": [1], "name": "hubert"}
    featcache.extract(manifest, config, cache, options(), set=one)
    some = {"params.layer": [1, 2], "name": "hubert"}
    featcache.extract(half, config, cache, options(), set=some, reading=root)
    featcache.extract(manifest, config, cache, options())
    assert {name: len(featcache.open(cache / name)) for name in shards(cache)} == dict.fromkeys(
        shards(apart), len(plain.ids)
    )
    assert_equal(cache, apart)


def test_damage_of_one_version_is_repaired(plain, config, apart, tmp_path, cli):
    cache, manifest = tmp_path / "all", plain.manifest()
    featcache.extract(manifest, config, cache, options())
    version = next(cache.glob("hubert-layer2-*"))
    flip(version / "shards" / min(shards(cache)[version.name]) / "features/c/0/0", 100)
    cli("verify", cache, "--manifest", manifest).with_code(1)
    cli("repair", cache, "--manifest", manifest, "--device", "cpu").with_code(0)
    assert_equal(cache, apart)


def test_what_fails_fails_in_each_version(plain, config, tmp_path, cli):
    cache = tmp_path / "all"
    long = ("--set", "audio.max_seconds=0.5", "--max-failures", "100%", "--device", "cpu")
    cli("extract", plain.manifest(), "-c", config, "-o", cache, *long).with_code(3)
    reasons = [reasons_of(cli, version) for version in sorted(cache.iterdir())]
    assert {*reasons[0].values()} == {"too_long"}
    assert reasons == [reasons[0]] * 3


def test_codes_and_latents_are_stored_each_in_its_way(
    plain, tmp_path, tmp_path_factory, passes, monkeypatch
):
    """Of EnCodec at 48 kHz, whose chunks have scales beside them; also at two precisions,
    quantised, and as a vector. Passes over silence are not counted."""
    monkeypatch.setattr(Encodec, "silence", lambda _: None)
    weights = small_models.encodec_48khz(tmp_path_factory.mktemp("encodec"))
    params = {"weights": str(weights), "output": "latents"}
    stores = {
        "full": {},
        "half": {"dtype": "float16"},
        "bytes": {"dtype": "uint8"},
        "mean": {"pool": "mean"},
    }
    documents = [{"name": name, "params": params, "store": store} for name, store in stores.items()]
    documents.append({"name": "codes", "params": {"weights": str(weights), "codebooks": 2}})
    configs = []
    for document in documents:
        path = tmp_path / f"{document['name']}.yaml"
        path.write_text(
            json.dumps({"extractor": "encodec", "audio": {"sample_rate": 48000}, **document})
        )
        configs.append(path)
    manifest = plain.manifest()
    featcache.extract(manifest, configs[0], tmp_path / "one", options(shard_megabytes=50))
    of_one = passes[Encodec]
    passes.clear()
    featcache.extract(manifest, configs, tmp_path / "all", options(shard_megabytes=50))
    assert passes[Encodec] == of_one
    for path in configs:
        featcache.extract(manifest, path, tmp_path / "apart", options(shard_megabytes=50))
    assert shards(tmp_path / "all") == shards(tmp_path / "apart")
    assert len(shards(tmp_path / "all")) == 5


@pytest.mark.parametrize("other", [{"params.precision": "bf16"}, {"audio.channel": "first"}])
def test_configs_of_another_pass_do_not_share(plain, config, tmp_path, passes, other):
    manifest = plain.manifest()
    configs = [
        *load_configs(config, {"params.layer": [1]}),
        *load_configs(config, {"params.layer": [2], **other}),
    ]
    featcache.extract(manifest, configs[:1], tmp_path / "one", options(shard_megabytes=50))
    of_one = passes[Wav2Vec2]
    featcache.extract(manifest, configs, tmp_path / "all", options(shard_megabytes=50))
    assert passes[Wav2Vec2] == 3 * of_one
