"""Small ONNX models, one for each form that `extractor: onnx` knows; each is saved into a folder.

Weights are random and fixed."""

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save_model

KERNEL, STRIDE = 400, 160
RANDOM = np.random.default_rng(0)
FILTERS = RANDOM.standard_normal((6, 1, KERNEL)).astype(np.float32)
MATRIX = RANDOM.standard_normal((80, 16)).astype(np.float32)

WAVEFORM = {"input": "audio", "output": "frames"}
CONVOLUTION = {**WAVEFORM, "output_axes": "BDT", "stride": STRIDE, "extra": STRIDE - KERNEL}
FBANK = {"num_mel_bins": 80}


def save(folder: Path, nodes, inputs, outputs, constants) -> Path:
    """Write `model.onnx`. Inputs and outputs are dtype and shape by name."""

    def infos(of):
        return [
            helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in of.items()
        ]

    initializers = [numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()]
    graph = helper.make_graph(nodes, "small", infos(inputs), infos(outputs), initializers)
    opset = [helper.make_opsetid("", 17)]
    path = folder / "model.onnx"
    save_model(helper.make_model(graph, opset_imports=opset, ir_version=10), path)
    return path


def convolution(folder: Path) -> Path:
    """A convolution of the waveform `[1, n]` that pads nothing: `[1, 6, T]`."""
    return save(
        folder,
        [
            helper.make_node("Unsqueeze", ["audio", "one"], ["channel"]),
            helper.make_node("Conv", ["channel", "filters"], ["frames"], strides=[STRIDE]),
        ],
        {"audio": (TensorProto.FLOAT, [1, "n"])},
        {"frames": (TensorProto.FLOAT, [1, 6, "t"])},
        {"one": np.array([1]), "filters": FILTERS},
    )


def vector(folder: Path) -> Path:
    """The mean over time of features `[1, S, 80]` times a matrix: `[1, 16]`."""
    return save(
        folder,
        [
            helper.make_node("MatMul", ["feats", "matrix"], ["values"]),
            helper.make_node("ReduceMean", ["values"], ["embs"], axes=[1], keepdims=0),
        ],
        {"feats": (TensorProto.FLOAT, ["b", "s", 80])},
        {"embs": (TensorProto.FLOAT, ["b", 16])},
        {"matrix": MATRIX},
    )


def codes(folder: Path) -> Path:
    """The largest of 16 values of each fourth step of features `[1, 80, S]`, of which the
    model is told the number: int64 `[1, ceil(S / 4)]`."""
    return save(
        folder,
        [
            helper.make_node("Slice", ["feats", "zero", "length", "two", "four"], ["kept"]),
            helper.make_node("Transpose", ["kept"], ["steps"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["steps", "matrix"], ["values"]),
            helper.make_node("ArgMax", ["values"], ["indices"], axis=2, keepdims=0),
        ],
        {"feats": (TensorProto.FLOAT, [1, 80, "s"]), "length": (TensorProto.INT32, [1])},
        {"indices": (TensorProto.INT64, [1, "t"])},
        {
            "zero": np.array([0], np.int32),
            "two": np.array([2], np.int32),
            "four": np.array([4], np.int32),
            "matrix": MATRIX,
        },
    )


CODEBOOK = RANDOM.standard_normal((16, 6561)).astype(np.float32)
FIRST, SECOND = (
    RANDOM.standard_normal(shape).astype(np.float32) / 20 for shape in ((16, 128, 3), (16, 16, 3))
)


def s3(folder: Path) -> Path:
    """A tokenizer of the form of S3's: two convolutions, each of stride 2, of features `[1,
    128, S]` give int64 `[1, ceil(S / 4)]`. The mean over the window goes into each code, so
    that codes depend on the window; it is told how many steps there are."""
    strides = {"strides": [2], "pads": [1, 1]}
    return save(
        folder,
        [
            helper.make_node("Slice", ["feats", "zero", "feats_length", "two"], ["kept"]),
            helper.make_node("Conv", ["kept", "first"], ["halved"], **strides),
            helper.make_node("Conv", ["halved", "second"], ["values"], **strides),
            helper.make_node("ReduceMean", ["values"], ["mean"], axes=[2]),
            helper.make_node("Sub", ["values", "mean"], ["centred"]),
            helper.make_node("Transpose", ["centred"], ["steps"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["steps", "codebook"], ["scores"]),
            helper.make_node("ArgMax", ["scores"], ["indices"], axis=2, keepdims=0),
        ],
        {"feats": (TensorProto.FLOAT, [1, 128, "s"]), "feats_length": (TensorProto.INT32, [1])},
        {"indices": (TensorProto.INT64, [1, "t"])},
        {
            "zero": np.array([0], np.int32),
            "two": np.array([2], np.int32),
            "first": FIRST,
            "second": SECOND,
            "codebook": CODEBOOK,
        },
    )


def recurrent(folder: Path) -> Path:
    """The mean of a window, by `PARAMS` of 320 samples with 64 of context, plus what is left of
    earlier ones: `[1, 1]`, and the state `[1]`."""
    return save(
        folder,
        [
            helper.make_node("ReduceMean", ["audio"], ["mean"], axes=[1], keepdims=1),
            helper.make_node("Mul", ["state", "decay"], ["left"]),
            helper.make_node("Add", ["mean", "left"], ["frames"]),
            helper.make_node("Squeeze", ["frames", "one"], ["next"]),
        ],
        {
            "audio": (TensorProto.FLOAT, ["b", "n"]),
            "state": (TensorProto.FLOAT, ["b"]),
            "decay": (TensorProto.FLOAT, []),
        },
        {"frames": (TensorProto.FLOAT, ["b", 1]), "next": (TensorProto.FLOAT, ["b"])},
        {"one": np.array([1])},
    )


def dnsmos(folder: Path) -> Path:
    """Three values of a window, and one of its log mel spectrogram, as DNSMOS's models have:
    here means, and maxima."""
    for name, shape, count in (("p835", ["n", 144160], 3), ("p808", ["n", 900, 120], 1)):
        (folder / name).mkdir()
        save(
            folder / name,
            [
                helper.make_node("Flatten", ["input_1"], ["flat"]),
                helper.make_node("ReduceMax", ["flat"], ["largest"], axes=[1], keepdims=1),
                helper.make_node("ReduceMean", ["flat"], ["mean"], axes=[1], keepdims=1),
                helper.make_node("Sum", ["largest", "mean"], ["sum"]),
                helper.make_node("Concat", ["sum"] * count, ["Identity:0"], axis=1),
            ],
            {"input_1": (TensorProto.FLOAT, shape)},
            {"Identity:0": (TensorProto.FLOAT, ["n", count])},
            {},
        )
    return folder / "p835" / "model.onnx"


PARAMS = {
    "convolution": CONVOLUTION,
    "windows": {
        **CONVOLUTION,
        "window": {"length": 1600 + 320 + KERNEL - STRIDE, "hop": 1600, "before": 320},
    },
    "vector": {
        "input": "feats",
        "input_axes": "BTD",
        "fbank": FBANK,
        "subtract_mean": True,
        "output": "embs",
        "output_axes": "BD",
    },
    "vectors": {
        "input": "feats",
        "input_axes": "BTD",
        "fbank": {**FBANK, "waveform_scale": 1.0},
        "output": "embs",
        "output_axes": "BD",
        "window": {"length": 40, "hop": 30},
    },
    "codes": {
        "input": "feats",
        "input_axes": "BDT",
        "log_mel": {"num_mel_bins": 80},
        "length_input": "length",
        "output": "indices",
        "output_axes": "BT",
        "stride": 4,
        "extra": 3,
        "codebook_size": 16,
    },
    "recurrent": {
        **WAVEFORM,
        "constants": {"decay": 0.5},
        "states": {"state": "next"},
        "output_axes": "BT",
        "stride": 256,
        "extra": 255,
        "window": {"length": 320, "hop": 256, "before": 64, "pad": True},
    },
}
"""The parameters with which each model is run, besides `weights`."""

SAVE = {
    "convolution": convolution,
    "windows": convolution,
    "vector": vector,
    "vectors": vector,
    "codes": codes,
    "recurrent": recurrent,
}


def document(name: str, folder: Path) -> dict:
    """A config with the model of that name, which is saved into the folder."""
    if name == "dnsmos":
        params = {
            "weights": str(dnsmos(folder)),
            "p808_weights": str(folder / "p808" / "model.onnx"),
        }
        return {"name": name, "extractor": name, "params": params}
    params = {"weights": str(SAVE[name](folder)), **PARAMS[name]}
    return {"name": name, "extractor": "onnx", "params": params}
