"""Every registered extractor passes the public suite, and the suite notices what real
extractors get wrong."""

import inspect
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import analysis
import pytest
import small_ssl
import torch
import torchaudio
import wrong_extractors
from small_units import write_codebook

from featcache.config import Config, config_from, load_config
from featcache.extractors.base import _BUILT_IN
from featcache.extractors.rows import ROW_SECONDS
from featcache.testing import ExtractorSuite, make_clip

pytest_plugins = ["pytester"]


class TestFbank(ExtractorSuite):
    config = "fbank80"


class TestFbankDithered(ExtractorSuite):
    config = {  # noqa: RUF012
        "name": "dithered",
        "extractor": "fbank",
        "params": {"dither": 1.0, "snip_edges": False, "use_energy": True},
        "audio": {"sample_rate": 44100},
    }


class TestMfcc(ExtractorSuite):
    config = "mfcc13"


class TestAudioStats(ExtractorSuite):
    config = "audio-stats"


class TestLogMelOfWhisper(ExtractorSuite):
    config = "whisper-mel80"


class TestLogMelPadded(ExtractorSuite):
    """Clips are padded to half a second: 30 s, as in whisper-mel80-30s, would take long,
    and some clips are longer."""

    config = {"name": "padded", "extractor": "log_mel", "params": {"pad_to_seconds": 0.5}}  # noqa: RUF012


class TestLogMelOfHifigan(ExtractorSuite):
    config = "hifigan-mel80"


class OfModel(ExtractorSuite):
    """The base of those whose config names a small model's folder, which is made first.

    Attributes:
        save: saves the model into a folder, and returns what `weights` must be.
    """

    seconds = 0.3
    extractor_name: ClassVar[str]
    sample_rate: ClassVar[int] = 16000
    params: ClassVar[dict[str, Any]] = {}
    save: ClassVar[Callable[[Path], Path]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _small_batches(cls):
        """Batches have half a second, and not four: most rows would be dummies, which
        take time."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ROW_SECONDS, "cpu", 0.5)
            patch.setitem(ROW_SECONDS, "cuda", 4.0)
            yield

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, tmp_path_factory) -> Path:
        return cls.save(tmp_path_factory.mktemp("weights"))

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, place) -> Config:
        params, audio = {"weights": str(place), **cls.params}, {"sample_rate": cls.sample_rate}
        return config_from(
            {"name": "small", "extractor": cls.extractor_name, "params": params, "audio": audio}
        )


class OfCodec(OfModel):
    """The base of those with a model that tests of codecs share.

    Attributes:
        model: the function of `small_models` that makes it.
    """

    model: ClassVar[str]

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, saved) -> Path:
        return saved(cls.model)


class TestEncodec24(OfCodec):
    extractor_name, sample_rate, model = "encodec", 24000, "encodec_24khz"
    params = {"bandwidth": 6.0}  # noqa: RUF012


class TestEncodec48(OfCodec):
    extractor_name, sample_rate, model = "encodec", 48000, "encodec_48khz"
    seconds = 1.2
    lengths = (47_519, 47_521, 95_041)


class TestDac(OfCodec):
    extractor_name, sample_rate, model = "dac", 16000, "dac_16khz"


class TestMimi(OfCodec):
    extractor_name, sample_rate, model = "mimi", 24000, "mimi"


class TestPocketTTS(OfCodec):
    extractor_name, sample_rate, model = "pocket_tts", 24000, "pocket_tts"
    params = {"chunk": {"seconds": 0.9, "overlap": 0.5}}  # noqa: RUF012
    seconds = 1.0


class TestVibeVoice(OfCodec):
    extractor_name, sample_rate, model = "vibevoice", 24000, "vibevoice"


class TestWavTokenizer(OfCodec):
    extractor_name, sample_rate, model = "wavtokenizer", 24000, "wavtokenizer_40hz"


class TestXcodec(OfCodec):
    extractor_name, sample_rate, model = "xcodec", 16000, "xcodec"


class TestXcodec2(OfCodec):
    extractor_name, sample_rate, model = "xcodec2", 16000, "xcodec2"


class TestNeuCodec(OfCodec):
    extractor_name, sample_rate, model = "neucodec", 16000, "neucodec"


class TestHiggs2(OfCodec):
    extractor_name, sample_rate, model = "higgs2", 24000, "higgs2"


class TestSnac(OfCodec):
    extractor_name, sample_rate, model = "snac", 24000, "snac_24khz"

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, saved) -> Path:
        pytest.importorskip("snac", exc_type=ImportError)
        return saved(cls.model)


class TestSpeechTokenizer(OfCodec):
    extractor_name, sample_rate, model = "speechtokenizer", 16000, "speechtokenizer"


class OfSsl(OfModel):
    extractor_name = "ssl"
    seconds, tolerance = 0.5, 2e-5


class TestHubert(OfSsl):
    save, params = partial(small_ssl.save, "hubert"), {"layer": 2}


class TestWav2Vec2Large(OfSsl):
    save, params = partial(small_ssl.save, "wav2vec2-large"), {"layers": [3, 0]}


class TestWavLM(OfSsl):
    save, params = (
        partial(small_ssl.save, "wavlm-large"),
        {"layers": [1, 3], "weights_per_layer": [0.25, 0.75]},
    )


class TestData2vec(OfSsl):
    save, params = partial(small_ssl.save, "data2vec"), {"layer": 2}


class TestConformer(OfSsl):
    # whose module of positions keeps the last ones
    save = partial(small_ssl.save, "conformer-relative")


class TestW2vBert(OfSsl):
    # whose module of positions keeps the last ones
    save = partial(small_ssl.save, "w2v-bert-rotary")
    tolerance = 2e-4


class TestParakeet(OfSsl):
    save = partial(small_ssl.save, "parakeet")


class TestWhisper(OfSsl):
    save = partial(small_ssl.save, "whisper")


class TestTorchaudio(OfModel):
    """A small model as torchaudio builds it, under the name of its own bundle."""

    extractor_name = "torchaudio"
    params = {"bundle": "SMALL", "layer": 2}  # noqa: RUF012
    bundle, model = (
        small_ssl.torchaudio_bundle("HUBERT_BASE"),
        staticmethod(torchaudio.models.wav2vec2_model),
    )

    @classmethod
    def save(cls, folder: Path) -> Path:
        return small_ssl.save_torchaudio(cls.model(**cls.bundle._params), folder / "small.pt")

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _bundle(cls):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torchaudio.pipelines, "SMALL", cls.bundle, raising=False)
            yield


class TestTorchaudioWavLM(TestTorchaudio):
    seconds, tolerance = 0.5, 2e-5
    bundle, model = (
        small_ssl.torchaudio_bundle("WAVLM_BASE"),
        staticmethod(torchaudio.models.wavlm_model),
    )


class TestUnits(OfModel):
    """Units of a small HuBERT, with some of its frames as centroids."""

    extractor_name = "units"

    @classmethod
    def save(cls, folder: Path) -> Path:
        document = {"weights": str(small_ssl.save("hubert", folder / "hubert")), "layer": 2}
        config = config_from({"name": "hubert", "extractor": "ssl", "params": document})
        with torch.inference_mode():
            (features,) = config.build(torch.device("cpu")).extract([make_clip(1, 64_000)])
        path = folder / "units" / "units.safetensors"
        write_codebook(path, config, features[::2].clone())
        return path


class OfOnnx(ExtractorSuite):
    """The base of those with a small ONNX model.

    Attributes:
        form: its name in `small_onnx.PARAMS`.
    """

    form: ClassVar[str]
    extractor_name = "onnx"

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, tmp_path_factory) -> Config:
        small_onnx = pytest.importorskip("small_onnx", reason="the package onnx is missing")
        pytest.importorskip("onnxruntime")
        return config_from(small_onnx.document(cls.form, tmp_path_factory.mktemp("onnx")))


class TestOnnxFramesInWindows(OfOnnx):
    form = "windows"


class TestOnnxVectorOfWindows(OfOnnx):
    form = "vectors"


class TestOnnxCodes(OfOnnx):
    form = "codes"


class TestOnnxStates(OfOnnx):
    form = "recurrent"


class OfPackage(ExtractorSuite):
    """The base of those whose weights come inside a package, which may be missing."""

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> Config:
        return analysis.loaded(cls.config)


class TestVadSilero(OfPackage):
    config = "vad-silero"


class TestSwiftF0(OfPackage):
    config = "f0-swift"


class TestDnsmos(OfOnnx):
    """Small models take the place of DNSMOS's, which take long."""

    form = extractor_name = "dnsmos"
    seconds = 0.2


class TestGE2E(OfModel):
    extractor_name, save = "ge2e", staticmethod(analysis.save_ge2e)
    lengths = (30_000, 32_000)


class TestCrepe(OfModel):
    extractor_name, save = "crepe", staticmethod(analysis.save_crepe)


if torch.cuda.is_available():
    CASES = {name: case for name, case in globals().items() if name.startswith("Test")}
    if not find_spec("speechtokenizer"):  # an extra of its own
        CASES.pop("TestSpeechTokenizer")
    for name, case in CASES.items():  # the same on a GPU
        globals()[f"{name}OnGpu"] = pytest.mark.gpu(
            type(f"{name}OnGpu", (case,), {"device": "cuda"})
        )


def test_every_registered_extractor_has_a_case_above():
    cases = [case for name, case in globals().items() if name.startswith("Test")]
    covered = {case.extractor_name for case in cases if hasattr(case, "extractor_name")}
    configs = [case.config for case in cases if not hasattr(case, "extractor_name")]
    covered |= {
        one["extractor"] if isinstance(one, dict) else load_config(one).extractor for one in configs
    }
    assert covered == set(_BUILT_IN) - {"imported", "labels"}  # which take no waveforms


# What the suite notices

WRONG = {
    "FrameRate": ("test_the_frame_rate_is_that_of_the_frames", "num_frames grows by 1000 in 10 s"),
    "SampleRate": (
        "test_the_spec_is_coherent",
        "spec.sample_rate: 24000, but it was built for 16000",
    ),
    "FrameLength": ("test_frame_length", "160 samples, so at most 1 frames see a sample, but"),
    "SmallDtype": (
        "test_codes_fit_their_dtypes",
        "uint8 does not hold the numbers of 1000 codewords; uint16 does",
    ),
    "LargeCode": (
        "test_num_frames_is_what_extract_gives",
        "has codes 4 to 4; codebook_sizes: (4,)",
    ),
    "Boundary": ("test_num_frames_is_what_extract_gives", "num_frames and spec.item_shape say"),
    "Flat": ("test_num_frames_is_what_extract_gives", "num_frames and spec.item_shape say"),
    "NeverShort": ("test_num_frames_counts_up_from_none", "num_frames(0) is 1, and must be 0"),
    "LongestClip": ("test_neighbours", "has different values among others than alone"),
    "FirstClip": ("test_order", "has different values in another order"),
    "FullBatch": ("test_number_of_clips", "has different values 19 times in a call"),
    "RunningMean": ("test_earlier_calls", "has different values in a later call"),
    "Chance": ("test_earlier_calls", "has different values in a later call"),
    "EachItsOwn": ("test_instances", "has different values from another instance"),
    "CallOnSelf": ("test_threads", "is a call's state on self?"),
    "Strides": ("test_where_a_waveform_lies", "copy it first"),
    "InPlace": ("test_the_waveform_is_left_alone", "extract wrote to the waveform of clip-0"),
    "OneBuffer": ("test_features_are_left_alone", "is a buffer reused?"),
    "Process": ("test_torch_is_left_alone", "torch.backends.cudnn.benchmark"),
    "Log": ("test_unusual_sound[silence]", "values of silence (160 samples) are NaN or infinite"),
    "Nothing": ("test_no_clips", "expected a non-empty list"),
    "Growing": ("test_a_config_survives_being_kept", "params do not survive JSON"),
    "DigestOfPath": (
        "test_weights_in_another_place_are_the_same_version",
        "in another folder are another version",
    ),
    "DigestOfSize": (
        "test_other_weights_are_another_version",
        "does not see that the weights have changed",
    ),
    "DigestOfNow": ("test_the_fingerprint_is_stable", "see weights_digest"),
    "PaddedMean": (
        "test_batching_policies",
        "differ from those of one row alone, batched as padded",
    ),
    "LostTail": ("test_pieces_cover_a_clip", "end at"),
    "NoSide": ("test_tracks", "gives ['features'], the spec has ['counts', 'features']"),
}
"""The check that each wrong extractor fails, and what the failure says."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    path.write_bytes(bytes(100))
    return path


def run_suite(pytester, weights: Path, checks: dict[str, str]) -> dict[str, str]:
    """Run a check of the suite, or with "" all checks, for each extractor; returns what
    failures say."""
    lines = ["import featcache.testing"]
    for name in checks:
        params = {"weights": str(weights)} if "Digest" in name else {}
        config = {"name": "a", "extractor": f"wrong_extractors:{name}", "params": params}
        lines += [
            f"class Test{name}(featcache.testing.ExtractorSuite):",
            f"    config = {config!r}",
        ]
    path = pytester.makepyfile("\n".join(lines))
    nodes = [
        f"{path}::Test{name}" + (f"::{check}" if check else "") for name, check in checks.items()
    ]
    reports = pytester.inline_run("-p", "no:cacheprovider", "--tb=line", *nodes).getreports(
        "pytest_runtest_logreport"
    )
    assert sum(report.when == "call" for report in reports) >= len(checks)
    return {
        one.nodeid.split("::")[1].removeprefix("Test"): one.longreprtext
        for one in reports
        if one.failed
    }


def test_the_suite_notices_what_is_wrong(pytester, weights, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
    said = run_suite(pytester, weights, {name: check for name, (check, _) in WRONG.items()})
    for name, (check, words) in WRONG.items():
        assert words in said.get(name, ""), f"{check} of {name} says {said.get(name)!r}"


def test_the_suite_finds_nothing_where_nothing_is_wrong(pytester, weights):
    assert run_suite(pytester, weights, {"Right": "", "Moments": ""}) == {}


def test_every_wrong_extractor_is_told_of():
    classes = inspect.getmembers(
        wrong_extractors, lambda found: inspect.isclass(found) and hasattr(found, "extract")
    )
    ours = {name for name, found in classes if found.__module__ == "wrong_extractors"}
    assert ours == {*WRONG, "Right"}
