"""`extractor: onnx`, held to numpy on small models; what it refuses; files inside packages."""

import hashlib
import os

import numpy as np
import pytest
import torch

from featcache.config import config_from, load_config
from featcache.errors import ConfigError
from featcache.extractors.base import Clip
from featcache.testing import make_clip
from featcache.weights import find_file

onnxruntime = pytest.importorskip("onnxruntime")
small_onnx = pytest.importorskip("small_onnx", reason="the package onnx is missing")

CPU = torch.device("cpu")
LENGTHS = (560, 1_999, 16_000, 37_777)


def build(document, **params):
    document = {**document, "params": {**document["params"], **params}}
    return config_from(document).build(CPU)


def extract(extractor, clip: Clip) -> np.ndarray:
    with torch.inference_mode():
        return extractor.extract([clip])[0].numpy()


def features_of(document, clip: Clip) -> np.ndarray:
    """The frames of the input, as the named extractor itself gives them."""
    (name,) = {"fbank", "log_mel"} & document["params"].keys()
    config = config_from({"name": "a", "extractor": name, "params": document["params"][name]})
    return extract(config.build(CPU), clip)


def convolved(waveform: np.ndarray) -> np.ndarray:
    frames = np.lib.stride_tricks.sliding_window_view(waveform, small_onnx.KERNEL)
    return frames[:: small_onnx.STRIDE] @ small_onnx.FILTERS[:, 0].T


@pytest.mark.parametrize("form", ["convolution", "windows"])
@pytest.mark.parametrize("num_samples", LENGTHS)
def test_frames_are_those_of_the_whole_clip_in_windows_too(form, num_samples, tmp_path):
    extractor = build(small_onnx.document(form, tmp_path))
    clip = make_clip(3, num_samples)
    expected = convolved(clip.waveform.numpy())
    assert extractor.num_frames(num_samples) == len(expected)
    assert extractor.spec.frame_rate == 100
    np.testing.assert_allclose(extract(extractor, clip), expected, rtol=1e-4, atol=1e-4)


def test_a_vector_is_of_features_less_their_mean(tmp_path):
    document = small_onnx.document("vector", tmp_path)
    clip = make_clip(1, 20_000)
    feats = features_of(document, clip)
    assert abs(extract(build(document), clip)).max() < 1e-4  # the mean of what has no mean
    expected = (feats @ small_onnx.MATRIX).mean(axis=0)
    vector = extract(build(document, subtract_mean=False), clip)
    np.testing.assert_allclose(vector, expected, rtol=1e-4)


@pytest.mark.parametrize("num_samples", [400, 8_000, 16_000])
def test_a_vector_of_windows_is_their_mean_and_the_last_ends_with_the_clip(num_samples, tmp_path):
    document = small_onnx.document("vectors", tmp_path)
    clip = make_clip(1, num_samples)
    values = features_of(document, clip) @ small_onnx.MATRIX
    starts = range(0, max(1, len(values) - 10), 30)
    expected = np.mean([values[start : start + 40].mean(axis=0) for start in starts], axis=0)
    np.testing.assert_allclose(extract(build(document), clip), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_samples", LENGTHS)
def test_codes_are_of_features_with_their_number(num_samples, tmp_path):
    document = small_onnx.document("codes", tmp_path)
    extractor = build(document)
    clip = make_clip(2, num_samples)
    values = features_of(document, clip)[::4] @ small_onnx.MATRIX
    assert (extract(extractor, clip)[:, 0] == values.argmax(axis=1)).mean() > 0.99  # but ties
    assert extractor.spec.codebook_sizes == (16,)
    assert config_from(document).dtype == "uint8"


def s3_windows(num_steps):
    """The windows of the reference tool for a clip over 30 s, as mel frames of each and of
    what it gives, 2 s inside its inner edges; but if the last one has 4 s or less, the one
    before gives its frames, for the tool loses some there."""
    starts = [start for start in range(0, num_steps, 2600) if start == 0 or num_steps - start > 400]
    edges = [0, *(start + 200 for start in starts[1:]), num_steps]
    return zip(starts, edges, edges[1:], strict=False)


@pytest.mark.parametrize(
    ("seconds", "count"),
    [
        (0.5, 13),
        (29.99, 750),
        (30, 750),
        (31, 775),
        (52.5, 1313),
        (53, 1325),
        (54, 1350),
        (55, 1375),
        (56, 1400),
        (57.01, 1426),
        (78.5, 1963),
    ],
)
def test_s3_loses_no_code_of_long_recordings(seconds, count, tmp_path):
    extractor = load_config("s3-v2", {"params.weights": str(small_onnx.s3(tmp_path))}).build(CPU)
    clip = make_clip(5, round(seconds * 16000))
    codes = extract(extractor, clip)
    assert codes.shape == (count, 1)
    assert extractor.num_frames(len(clip.waveform)) == count
    assert (extractor.spec.frame_rate, extractor.spec.codebook_sizes) == (25, (6561,))
    mels = features_of({"params": {"log_mel": {"num_mel_bins": 128}}}, clip)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for start, first, end in s3_windows(len(mels)):
        window = mels[start : start + 3000]
        inputs = {"feats": window.T[None], "feats_length": np.array([len(window)], np.int32)}
        (expected,) = session.run(["indices"], inputs)
        first, end = first // 4, -(-end // 4)
        of_window = expected[0][first - start // 4 : end - start // 4]
        np.testing.assert_array_equal(codes[first:end, 0], of_window)


@pytest.mark.parametrize("num_samples", [1, 256, 257, 5_000])
def test_states_are_handed_on_within_a_clip_and_no_further(num_samples, tmp_path):
    extractor = build(small_onnx.document("recurrent", tmp_path))
    clip = make_clip(2, num_samples)
    padded = np.pad(clip.waveform.numpy(), (64, 256))
    expected, state = [], 0.0
    for number in range(-(-num_samples // 256)):
        state = padded[256 * number :][:320].mean() + 0.5 * state
        expected.append([state])
    for _ in range(2):
        np.testing.assert_allclose(extract(extractor, clip), expected, atol=1e-6)


def test_a_frame_may_be_longer_than_the_first_trial(tmp_path):
    window = {"length": 32_064, "hop": 32_000, "before": 64, "pad": True}
    document = small_onnx.document("recurrent", tmp_path)
    extractor = build(document, stride=32_000, extra=0, window=window)
    assert extractor.spec.frame_rate == 0.5
    assert extract(extractor, make_clip(1, 70_000)).shape == (2, 1)


WRONG = {
    "input": ("convolution", {"input": "x"}, "params.input: model.onnx has no input 'x'; it has"),
    "output": ("convolution", {"output": "y"}, "has no output 'y'; it has frames"),
    "unfed": ("recurrent", {"constants": {}}, "model.onnx also needs the input decay"),
    "whole": ("codes", {"length_input": None, "constants": {"length": 1.5}}, "length is int32, which 1.5 is not"),
    "large": ("recurrent", {"constants": {"decay": 1e39}}, "decay is float32, which 1e+39 is not"),
    "twice": ("recurrent", {"constants": {"decay": 1, "audio": 3}}, "an input is named twice"),
    "state": ("recurrent", {"states": {"state": "z"}}, "params.states: model.onnx has no output 'z'"),
    "rank": ("convolution", {"input_axes": "T"}, "refuses audio [16000]: "),
    "size": ("vector", {"fbank": {"num_mel_bins": 40}}, "Expected: 80"),
    "axes": ("convolution", {"output_axes": "BD"}, "params.output_axes: BD, but frames"),
    "stride": ("convolution", {"stride": 320}, "gives 98 frames for 16000 steps; with this"),
    "no frame": ("codes", {"extra": -20_000}, "params.stride: 120 s have no frame"),
    "codes": ("codes", {"codebook_size": None}, "params.codebook_size: None, but indices is int64"),
    "few codes": ("codes", {"codebook_size": 2}, "params.codebook_size: 2, but model.onnx gives"),
    "no codes": ("convolution", {"codebook_size": 9}, "but frames is float32: codes are whole"),
    "whole vector": ("codes", {"output_axes": "BD", "codebook_size": None}, "indices is int64, and a vector is of floats"),
    "lengths": ("convolution", {"output_axes": "BTD", "stride": 10_000, "extra": 45_000}, "D of frames depends on the clip: it is 98, 135"),
    "hash": ("vector", {"sha256": "0" * 64}, "and the config asks for 0000"),
    "two": ("vector", {"log_mel": {}}, "log_mel: a model takes this or fbank"),
    "fbank": ("vector", {"fbank": {"num_mel_bin": 8}}, "num_mel_bins?"),
    "mean": ("convolution", {"subtract_mean": True}, "is about features, and there are none"),
    "window": ("windows", {"window": {"length": 9, "hop": 160}}, "do not fit into 9"),
    "hop": ("windows", {"window": {"length": 900, "hop": 161}}, "are no multiple of the stride"),
    "ends": (
        "recurrent",
        {"window": {"length": 320, "hop": 256, "pad": True, "keep_ends": True}},
        "windows that are padded have no ends to keep",
    ),
    "ends of a vector": (
        "vectors",
        {"window": {"length": 40, "hop": 30, "keep_ends": True}},
        "before and keep_ends are about frames",
    ),
    "no window": ("recurrent", {"window": None}, "are handed on between windows"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_what_does_not_fit_is_one_line_before_a_run_begins(fault, tmp_path):
    form, params, words = WRONG[fault]
    with pytest.raises(ConfigError) as caught:
        build(small_onnx.document(form, tmp_path), **params)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("window", [None, {"length": 80, "hop": 80}])
def test_a_vector_whose_size_depends_on_the_clip_is_refused(window, tmp_path):
    document = small_onnx.document("vector", tmp_path)
    node = small_onnx.helper.make_node("ReduceMean", ["feats"], ["embs"], axes=[2], keepdims=0)
    inputs = {"feats": (small_onnx.TensorProto.FLOAT, ["b", "s", 80])}
    outputs = {"embs": (small_onnx.TensorProto.FLOAT, ["b", "s"])}
    small_onnx.save(tmp_path, [node], inputs, outputs, {})
    with pytest.raises(ConfigError, match="output_axes: BD, but D of embs depends on the clip"):
        build(document, window=window)


def with_noise(form: str, folder) -> None:
    """Save the model `convolution` of a waveform with noise, drawn in the graph, in an inner
    graph, or in a function; or drawn for another output only."""
    from onnx import load, save

    path = small_onnx.convolution(folder)
    model, helper = load(path), small_onnx.helper
    draw = helper.make_node("RandomNormalLike", ["audio"], ["noise"], scale=1e-9)
    if form == "seed":
        draw.attribute.append(helper.make_attribute("seed", 1.0))
    if form == "branch":
        value = helper.make_tensor_value_info("drawn", small_onnx.TensorProto.FLOAT, None)
        inner = helper.make_node("RandomNormalLike", ["audio"], ["drawn"], scale=1e-9)
        branch = helper.make_graph([inner], "inner", [], [value])
        draw = helper.make_node("If", ["flag"], ["noise"], then_branch=branch, else_branch=branch)
        flag = small_onnx.numpy_helper.from_array(np.array(True), "flag")
        model.graph.initializer.append(flag)
    if form == "function":
        inner = helper.make_node("RandomNormalLike", ["x"], ["y"], scale=1e-9)
        opset = helper.make_opsetid("", 17)
        model.functions.append(helper.make_function("own", "Noise", ["x"], ["y"], [inner], [opset]))
        model.opset_import.append(helper.make_opsetid("own", 1))
        draw = helper.make_node("Noise", ["audio"], ["noise"], domain="own")
    model.graph.node.insert(0, draw)
    if form == "unused":
        shape = [1, "n"]
        value = helper.make_tensor_value_info("noise", small_onnx.TensorProto.FLOAT, shape)
        model.graph.output.append(value)
    else:
        model.graph.node.insert(1, helper.make_node("Add", ["audio", "noise"], ["noisy"]))
        model.graph.node[2].input[0] = "noisy"
    save(model, path)


@pytest.mark.parametrize("form", ["plain", "seed", "branch", "function"])
def test_an_output_of_random_numbers_is_refused_however_small_they_are(form, tmp_path):
    """With a seed too: onnxruntime goes on drawing from one clip to the next."""
    document = small_onnx.document("convolution", tmp_path)
    with_noise(form, tmp_path)
    with pytest.raises(ConfigError) as caught:
        build(document)
    assert str(caught.value) == (
        "config convolution: params.output: model.onnx computes frames with RandomNormalLike, which "
        "draws other random numbers at each run: export the model without it"
    )


def test_random_numbers_for_an_output_that_is_not_taken_change_nothing(tmp_path):
    document = small_onnx.document("convolution", tmp_path)
    clip = make_clip(3, 16_000)
    expected = extract(build(document), clip)
    with_noise("unused", tmp_path)
    np.testing.assert_array_equal(extract(build(document), clip), expected)


def test_a_model_that_was_exported_for_training_is_refused(tmp_path):
    """onnxruntime itself leaves out dropout before another layer."""
    document = small_onnx.document("vector", tmp_path)
    small_onnx.save(
        tmp_path,
        [
            small_onnx.helper.make_node("MatMul", ["feats", "matrix"], ["values"]),
            small_onnx.helper.make_node("ReduceMean", ["values"], ["mean"], axes=[1], keepdims=0),
            small_onnx.helper.make_node("Dropout", ["mean", "ratio", "training"], ["embs"]),
        ],
        {"feats": (small_onnx.TensorProto.FLOAT, ["b", "s", 80])},
        {"embs": (small_onnx.TensorProto.FLOAT, ["b", 16])},
        {"matrix": small_onnx.MATRIX, "ratio": np.float32(0.5), "training": np.array(True)},
    )
    with pytest.raises(ConfigError, match="gives other values for the same waveform the second"):
        build(document)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    document = small_onnx.document("vector", tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"model.onnx: onnxruntime cannot load it: [^\n]+$"):
        build(document)
    (tmp_path / "model.onnx").unlink()
    with pytest.raises(ConfigError, match="there is no file"):
        build(document)


def test_weights_in_a_second_file_are_refused_since_the_hash_does_not_cover_them(
    tmp_path, monkeypatch
):
    import onnx

    document = small_onnx.document("vector", tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    onnx.save_model(
        model,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="model.data",
        size_threshold=0,
    )
    monkeypatch.chdir(tmp_path)  # where onnxruntime would look for them
    assert os.path.exists("model.data")
    with pytest.raises(ConfigError, match="External data path"):
        build(document)


def test_the_fingerprint_has_the_content_and_not_the_place_or_the_pin(tmp_path):
    document = small_onnx.document("vector", tmp_path)
    path = tmp_path / "model.onnx"
    before = config_from(document).fingerprint()
    document["params"]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(tmp_path / "other.onnx")
    document["params"]["weights"] = str(tmp_path / "other.onnx")
    assert config_from(document).fingerprint() == before
    document["params"]["fbank"] = {**document["params"]["fbank"], "low_freq": 0.0}
    assert config_from(document).fingerprint() != before


def test_without_its_package_the_command_to_install_it_is_named(monkeypatch):
    with pytest.raises(ConfigError) as caught:
        find_file("package:no-such-package==1.2.3/inside/model.onnx")
    assert "pip install --no-deps no-such-package==1.2.3" in str(caught.value)
    assert find_file("package:pytest==0.0/pytest/__init__.py").is_file()  # the hash decides


def test_without_onnxruntime_the_extra_is_named(monkeypatch, tmp_path):
    import sys

    document = small_onnx.document("vector", tmp_path)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(Exception, match=r"\[onnx\]|extra 'onnx'"):
        build(document)


def test_vad_silero_is_a_config_of_onnx():
    assert load_config("vad-silero").extractor == "onnx"
