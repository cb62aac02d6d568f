"""A GPU computes what the CPU does, to rounding, and the same bits in every run; its fp32
is fp32; no host waits."""

import random
from functools import cache, partial
from pathlib import Path

import pytest
import small_models
import small_ssl
import torch
from devices import DEVICES

import featcache
from featcache.care.compare import SampledClip, compare_all, extract_results
from featcache.config import Config, config_from, load_config
from featcache.device import Device, Tf32, set_tf32
from featcache.extractors import Extractor, rows
from featcache.extractors.model import computing
from featcache.extractors.rows import pad_rows

ROUNDING = 1e-4
"""How far a frame may be from the CPU's, relative in norm: kernels of a GPU add up in
other orders than a CPU's."""

TIES = 1e-3
"""The share of codes that rounding may decide otherwise."""

TIES_OF = {"xcodec": 3e-3}
"""The same of models with more: of the small X-Codec's codes, on the CPU too, 5 in 2,176."""

SECONDS = (0.31, 1.7, 0.9, 0.31, 2.2)

MODELS = {
    "encodec-24": ("encodec", 24000, small_models.encodec_24khz, {"bandwidth": 6.0}),
    "encodec-48": ("encodec", 48000, small_models.encodec_48khz, {}),
    "dac-16": ("dac", 16000, small_models.dac_16khz, {}),
    "dac-44": ("dac", 44100, small_models.dac_44khz, {}),
    "mimi": ("mimi", 24000, small_models.mimi, {}),
    "xcodec": ("xcodec", 16000, small_models.xcodec, {}),
    **{
        name: ("ssl", 16000, partial(small_ssl.save, name), {})
        for name in (*small_ssl.WAVEFORM_MODELS, *small_ssl.OTHER_MODELS)
    },
}
"""Name -> extractor, sample rate, what saves the model, and further parameters."""

PACKAGED = ["fbank80", "mfcc13", "whisper-mel80", "hifigan-mel80"]

ON_THE_CPU = ("fbank80", "hubert")
"""Of these also without a GPU, so that the tests themselves are tested."""

WHERE = [
    pytest.param(name, device, marks=pytest.mark.gpu if device == "cuda" else ())
    for name in (*PACKAGED, *MODELS)
    for device in ("cpu", "cuda")
    if device == "cuda" or name in ON_THE_CPU
]


@pytest.fixture(scope="module", autouse=True)
def as_in_a_run():
    """TF32 is off."""
    Device("cpu").configure_torch()
    if torch.cuda.is_available():
        Device("cuda").configure_torch()


def make_config(name: str, folder: Path, **params: str) -> Config:
    """The config of a model, which is saved in a folder; or a packaged one."""
    if name in PACKAGED:
        return load_config(name)
    extractor, rate, save, own = MODELS[name]
    params = {"weights": str(save(folder)), **own, **params}
    return config_from(
        {"name": name, "extractor": extractor, "params": params, "audio": {"sample_rate": rate}}
    )


@pytest.fixture(scope="module")
def config_of(tmp_path_factory):
    """The config of a model, which is made once."""
    return cache(lambda name: make_config(name, tmp_path_factory.mktemp("weights")))


def clips_for(extractor: Extractor) -> list[SampledClip]:
    """Of each of `SECONDS`, or of as many as the extractor takes."""
    rate, longest = extractor.spec.sample_rate, extractor.max_seconds or max(SECONDS)
    source = small_models.speech_like(max(SECONDS), rate, seed=3).numpy()
    lengths = [round(min(seconds, longest) * rate) for seconds in SECONDS]
    return [SampledClip(str(number), source[:length]) for number, length in enumerate(lengths)]


def results_on(config: Config, name: str):
    device = Device(name)
    extractor = config.build(device.torch_device)
    with device.slot():
        return [result.cpu() for result in extract_results(extractor, clips_for(extractor), device)]


@pytest.mark.parametrize(("name", "device"), WHERE)
def test_values_are_those_of_the_cpu(config_of, monkeypatch, name, device):
    """The two batches have different numbers of rows, on the CPU too."""
    config = config_of(name)
    monkeypatch.setitem(rows.ROW_SECONDS, "cpu", 0.5)
    expected = results_on(config, "cpu")
    monkeypatch.setattr(rows, "ROW_SECONDS", {"cpu": 4.0, "cuda": 8.0})
    apart = compare_all(results_on(config, device), expected, ROUNDING)
    assert not apart.mismatched, apart
    assert apart.relative <= ROUNDING, apart
    if expected[0].latents is not None:
        assert apart.differing <= TIES_OF.get(name, TIES) * apart.values, apart


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["encodec-24", "encodec-48", "dac-16"])
def test_the_host_never_waits_while_a_batch_of_rows_is_launched(config_of, name):
    extractor = config_of(name).build(torch.device("cuda"))
    pieces = [(clip, extractor.pieces(len(clip.waveform))[0]) for clip in clips_for(extractor)]
    waveforms = [
        torch.from_numpy(clip.waveform[: piece.num_samples]).cuda() for clip, piece in pieces
    ]
    with torch.inference_mode():
        batch = pad_rows(waveforms, 8, extractor.padded_length(max(map(len, waveforms))))
        expected = extractor.run(*batch).features
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = extractor.run(*batch).features
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


@pytest.fixture(params=["old", "new", "both"])
def as_a_user_left_it(request):
    """TF32 is as the user has set it before the run, in one of torch's ways."""
    if request.param == "old":
        torch.set_float32_matmul_precision("high")
    elif request.param == "new":
        torch.backends.fp32_precision = "tf32"
    else:
        set_tf32(Tf32(True, True, True))
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    Device(None).configure_torch()


@pytest.mark.usefixtures("as_a_user_left_it")
@pytest.mark.parametrize("name", DEVICES)
def test_tf32_is_off_unless_the_config_asks_for_it(name):
    """Errors of products, convolutions and LSTMs are those of fp32, and with tf32 those
    of ten bits."""
    device = torch.device(name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 64, 512, generator=generator)
    linear, conv, lstm = (
        torch.nn.Linear(512, 256),
        torch.nn.Conv1d(64, 64, 5),
        torch.nn.LSTM(64, 64),
    )
    modules = {"product": linear, "convolution": conv, "lstm": lambda given: lstm(given.mT)[0]}

    def outputs(dtype: torch.dtype, where: torch.device) -> dict[str, torch.Tensor]:
        for module in (linear, conv, lstm):
            module.to(where, dtype)
        given = x.to(where, dtype)
        with torch.inference_mode():
            return {what: module(given).double().cpu() for what, module in modules.items()}

    exact = outputs(torch.float64, torch.device("cpu"))

    def errors() -> dict[str, float]:
        found = outputs(torch.float32, device)
        return {
            what: float((found[what] - exact[what]).norm() / exact[what].norm()) for what in exact
        }

    Device(name).configure_torch()
    assert max(errors().values()) < 1e-5, errors()
    with computing("fp32", device):
        assert max(errors().values()) < 1e-5, errors()
    if name == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
        with computing("tf32", device):
            rounded = errors()
        assert min(rounded["product"], rounded["convolution"]) > 5e-5, rounded
    assert max(errors().values()) < 1e-5, errors()


# Whole runs


@pytest.mark.parametrize("device", DEVICES)
def test_no_bit_depends_on_anything_but_the_clip(corpus, written, tmp_path, scratch, device):
    """Frames on the device, and rows at two precisions."""
    params = f"weights: {small_ssl.save('hubert', tmp_path / 'weights')}, layer: 2"
    configs = ["fbank80"]
    for precision in ("fp32", "bf16"):
        text = f"name: {precision}\nextractor: ssl\nparams: {{{params}, precision: {precision}}}\n"
        configs.append(written(text, f"{precision}.yaml"))

    def extract(rows, name, **options):
        path = corpus.manifest(rows, f"{name}.csv")
        summary = featcache.extract(
            path, configs, scratch / name, featcache.Options(device, **options)
        )
        assert summary.failed_by_reason == {}
        caches = [featcache.open(scratch / name, config) for config in ("fbank80", "fp32", "bf16")]
        return [{id_: cache[id_].tobytes() for id_ in cache.ids} for cache in caches]

    shuffled = random.Random(0).sample(corpus.rows, len(corpus.rows))
    expected = extract(corpus.rows, "one", threads=1)
    assert extract(shuffled, "two", threads=4, shard_megabytes=0.05) == expected
    extract(shuffled[:9], "three", threads=2)
    assert extract(corpus.rows, "three", threads=3) == expected
