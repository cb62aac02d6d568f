"""Versions of quantised features, from audio to what is made of them."""

import json

import numpy as np
import pytest
import soundfile
import torch
import zarr
from corpora import speech
from extractions import TINY
from real_speech import digits
from small_units import nearest

import featcache
from featcache.care.recompute import recompute
from featcache.care.sources import SourceCheck
from featcache.care.verify import verify
from featcache.config import config_from
from featcache.device import Device
from featcache.errors import AudioError, Reason
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import Extracted
from featcache.extractors import Clip
from featcache.extractors.units import Codebook, Units, UnitsParams, read_codebook
from featcache.manifest.segments import Utterance
from featcache.spec import QUANTIZATION, dequantize_array
from featcache.spec.quantize import quantize
from featcache.stats.kmeans import draw_frames, fit_version
from featcache.version.indexing import open_index

pytestmark = pytest.mark.usefixtures("trusted")

FBANK = {"extractor": "fbank"}
ROWS = {"extractor": "row_extractors:Moments"}
PIECES = {"extractor": "row_extractors:Moments", "params": {"piece": 20}}
"""Clips of more than 0.4 s are computed in two pieces."""


def config_of(source, dtype="uint8"):
    return config_from({"name": f"some-{dtype}", **source, "store": {"dtype": dtype}})


def extract(manifest, config, cache, **options):
    """Fill a version; opened."""
    featcache.extract(manifest, config, cache, featcache.Options("cpu", **options))
    return featcache.open(cache)


def stored(cache):
    """What is on disk of each utterance, as bytes: levels, and everything beside them."""
    sides = [side.name for side in cache.spec.side]
    return {
        id_: (
            cache.item(id_, raw=True).tobytes(),
            *(cache.side(name, id_).tobytes() for name in sides),
        )
        for id_ in cache.ids
    }


# Extraction


@pytest.fixture(scope="module", params=[FBANK, ROWS, PIECES], ids=["frames", "rows", "pieces"])
def source(request):
    return request.param


@pytest.fixture(scope="module")
def quantized(source, corpus, tmp_path_factory):
    """The corpus by one thread, in one shard; nobody changes it."""
    return extract(
        corpus.manifest(), config_of(source), tmp_path_factory.mktemp("levels"), threads=1
    )


def test_each_item_is_quantised_as_a_whole_and_alone(quantized, source, corpus, scratch):
    """However it was cut and put together: the bytes are those of the whole item's
    float32, quantised by itself."""
    exact = extract(corpus.manifest(), config_of(source, "float32"), scratch)
    assert list(quantized.ids) == list(exact.ids)
    assert len(quantized) > 25
    for id_ in exact.ids:
        levels, parameters = quantize(torch.tensor(exact[id_]), [len(exact[id_])])
        assert quantized.item(id_, raw=True).tobytes() == levels.numpy().tobytes(), id_
        assert quantized.side(QUANTIZATION, id_).tobytes() == parameters.numpy().tobytes(), id_
        for side in exact.spec.side:
            assert np.array_equal(quantized.side(side.name, id_), exact.side(side.name, id_))
    assert verify(quantized.version).problems == []


def test_threads_shards_and_order_change_no_byte(quantized, source, corpus, scratch):
    backwards = corpus.manifest(corpus.rows[::-1], "backwards.csv")
    small = extract(
        corpus.manifest(), config_of(source), scratch / "small", threads=3, shard_megabytes=4e-4
    )
    assert len(small.index.shards) > 8
    assert stored(small) == stored(quantized)
    assert stored(
        extract(backwards, config_of(source), scratch / "backwards", threads=2)
    ) == stored(quantized)


def test_recomputing_finds_the_same_bytes(quantized):
    again = recompute(
        quantized.version, quantized.index, range(len(quantized)), SourceCheck(), Device("cpu", 1)
    )
    assert (again.problems, again.identical, again.largest_difference) == ([], len(quantized), 0.0)


def test_recomputing_tells_rounding_from_other_values(plain, scratch, tmp_path):
    path = tmp_path / "factor"
    path.write_text("1.0")
    source = {"extractor": "small_units:Scaled", "params": {"weights": str(path)}}
    cache = extract(plain.manifest(), config_of(source), scratch)
    positions = range(len(cache))
    path.write_text("1.0000002")
    again = recompute(cache.version, cache.index, positions, SourceCheck(), Device("cpu", 1))
    assert again.problems == []
    assert again.identical == 0
    scale, _ = cache.quantization([*positions]).numpy().max(axis=(0, 2))
    assert 0 < again.largest_difference <= 1.01 * scale
    path.write_text("1.5")
    again = recompute(cache.version, cache.index, positions, SourceCheck(), Device("cpu", 1))
    assert len(again.problems) == len(cache)
    assert "it differs by 0." in again.problems[0].message


def test_a_batch_of_failures_alone_is_no_trouble(plain, scratch):
    manifest = plain.manifest([{**row, "id": f"nan-{row['id']}"} for row in plain.rows], "nan.csv")
    config = config_of({"extractor": "odd_extractors:Picky"})
    summary = featcache.extract(manifest, config, scratch)
    assert (summary.versions[0].extracted, summary.failed_by_reason) == (
        0,
        {"non_finite_features": len(plain.rows)},
    )
    part = Extracted.of(BuiltConfig(config, Device("cpu", 1)), plain.folder)
    part.fail(Utterance(id="a", path="a.wav"), AudioError(Reason.CRASHED, "it ended a process"))
    extracted = part.take([], [])
    assert (
        [failure.id for failure in extracted.failures],
        extracted.items,
        extracted.features,
    ) == (["a"], [], [])


def test_digits_and_the_loudest_clip_are_within_a_tenth_of_what_they_are(tmp_path, scratch):
    """fbank80's values are natural logarithms: a tenth is less than half a decibel."""
    loudest = np.sign(np.sin(2 * np.pi * 7000 * np.arange(16000) / 16000))
    clips = {"loudest": (np.concatenate([np.zeros(8000), loudest]), 16000)}
    clips |= {str(number): clip for number, clip in enumerate(digits(20))}
    for id_, clip in clips.items():
        soundfile.write(tmp_path / f"{id_}.wav", *clip)
    rows = [{"id": id_, "path": str(tmp_path / f"{id_}.wav")} for id_ in clips]
    exact = extract(rows, config_of(FBANK, "float32"), scratch / "exact")
    cache = extract(rows, config_of(FBANK), scratch / "levels")
    apart = {id_: np.abs(cache[id_] - exact[id_]).ravel() for id_ in exact.ids}
    assert 0.08 < apart.pop("loudest").max() < 0.1
    assert np.concatenate([*apart.values()]).max() < 0.1
    assert np.concatenate([*apart.values()]).mean() < 0.02


# What is said of them


def test_info_and_show_say_what_is_stored(cli, plain, scratch):
    cli("extract", plain.manifest(), "-c", "fbank80-uint8", "-o", scratch, "--device", "cpu")
    cache = featcache.open(scratch)
    lines = cli("info", scratch).out
    assert "float32 [frames, 80], 100 frames/s: log mel energy" in lines
    assert "quantised to uint8 with a scale and an offset for each utterance and dimension" in lines
    assert QUANTIZATION not in lines
    (document,) = cli("info", scratch, "--json").json()["versions"]
    # with float32 scales and offsets
    assert document["bytes"] == (int(cache.lengths.sum()) + len(cache) * 2 * 4) * 80
    assert [side["name"] for side in document["spec"]["side"]] == [QUANTIZATION]

    scale, _ = cache.quantization(["utt-03"])[0]
    (document,) = cli("show", scratch, "utt-03", "--json").json()["versions"]
    assert (document["dtype"], document["shape"], document["side"]) == (
        "float32",
        [*cache["utt-03"].shape],
        {},
    )
    assert document["min"] == pytest.approx(float(cache["utt-03"].min()))
    assert document["quantized"] == {
        "dtype": "uint8",
        "smallest_scale": pytest.approx(float(scale.min())),
        "largest_scale": pytest.approx(float(scale.max())),
        "largest_error": pytest.approx(float(scale.max()) / 2),
    }
    assert (
        f"uint8, off by at most {float(scale.max()) / 2:.3g}" in cli("show", scratch, "utt-03").out
    )


def test_a_probe_measures_the_extractor_as_ever(cli, plain):
    cli("probe", "fbank80-uint8", plain.manifest(), "--device", "cpu", "--utterances", 4).with_code(
        0
    )


# What is made of them


def test_k_means_takes_values(corpus, scratch):
    cache = extract(corpus.manifest(), config_of(FBANK), scratch, shard_megabytes=float(TINY))
    frames = int(cache.lengths.sum())
    sample = draw_frames(cache.version, open_index(cache.version), frames, np.random.default_rng(0))
    values = np.concatenate(list(cache.values()))
    assert np.array_equal(sample[np.lexsort(sample.T)], values[np.lexsort(values.T)])
    codebook, _ = fit_version(cache.version, 5)
    assert codebook.dtype == "float32"


def units_of(cache, path):
    """Units of a cache's features: 30 of its frames as centroids."""
    values = np.concatenate(list(cache.values()))
    centroids = values[np.random.default_rng(0).choice(len(values), 30, replace=False)]
    codebook = Codebook(
        torch.from_numpy(centroids),
        cache.config,
        cache.version.info.fingerprint,
        cache.spec.dtype,
        {},
    )
    path.write_bytes(codebook.to_bytes())
    return config_from({"name": "units", "extractor": "units", "params": {"weights": str(path)}})


@pytest.mark.parametrize("source", [FBANK, ROWS], ids=["frames", "rows"])
def test_units_from_audio_and_from_a_version_are_the_same(source, corpus, scratch, tmp_path):
    cache = extract(corpus.manifest(), config_of(source), scratch / "features")
    config = units_of(cache, tmp_path / "units.safetensors")
    from_audio = extract(corpus.manifest(), config, scratch / "audio")
    from_version = extract(
        corpus.manifest(), config, scratch / "version", source=cache.version.path
    )
    assert len(from_audio) == len(cache)
    assert stored(from_audio) == stored(from_version)
    codebook = read_codebook(tmp_path / "units.safetensors")
    for id_, codes in from_version.items():
        assert (codes == nearest(cache[id_], codebook)).mean() > 0.99


def test_units_of_clips_in_pieces_are_made_from_a_version_alone(corpus, scratch, tmp_path):
    cache = extract(corpus.manifest(), config_of(PIECES), scratch / "features")
    config = units_of(cache, tmp_path / "units.safetensors")
    from_version = extract(
        corpus.manifest(), config, scratch / "version", source=cache.version.path
    )
    assert list(from_version.ids) == list(cache.ids)
    units = Units(
        UnitsParams(weights=str(tmp_path / "units.safetensors")), 16000, torch.device("cpu")
    )
    waveform = torch.from_numpy(speech(0.3)[:, 0].astype(np.float32))
    with torch.inference_mode():
        assert units.extract([Clip("short", waveform)])[0].shape == (30, 1)
        with pytest.raises(
            AudioError, match=r"quantised over a whole clip, .* in 2 chunks: .* with --from"
        ) as caught:
            units.extract([Clip("long", torch.cat([waveform, waveform]))])
    assert caught.value.reason == Reason.TOO_LONG


def test_the_version_says_it_in_its_metadata(plain, scratch):
    """And a reader that knows side arrays and not this one sees a dtype that is not the
    one it was promised."""
    cache = extract(plain.manifest(), config_of(FBANK), scratch)
    document = json.loads((cache.version.path / "zarr.json").read_text())["attributes"]["featcache"]
    assert document["format"] == 2
    assert document["spec"]["dtype"] == "float32"
    assert [side["name"] for side in document["spec"]["side"]] == [QUANTIZATION]
    (name,) = cache.version.shard_names()
    features = json.loads((cache.version.shard(name).folder / "features" / "zarr.json").read_text())
    assert features["data_type"] == "uint8"
    shard = zarr.open_group(cache.version.shard(name).folder, mode="r")
    first, last = shard["items"][0, 3:5]  # `frame_offset`
    scale, offset = shard[f"side_{QUANTIZATION}"][3]
    assert np.array_equal(offset + scale * shard["features"][int(first) : int(last)], cache[3])
    assert np.array_equal(dequantize_array(cache.item(3, raw=True), scale, offset), cache[3])
