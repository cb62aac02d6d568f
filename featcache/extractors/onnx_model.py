"""An ONNX model as extractors run it."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import ConfigError, MissingDependencyError, listing
from featcache.weights import weights_error

Array = NDArray[Any]

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
}

_FATAL = 4
"""The level from which on onnxruntime logs. It also raises all other errors."""

_OUT_OF_MEMORY = ("Failed to allocate", "out of memory", "bad_alloc")

_RANDOM_OPERATORS = {
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}
"""Operators that draw other random numbers at each run, with a seed too."""

_WITH_LENGTH, _FIXED_SIZES = 2, {1: 8, 5: 4}
"""Kinds of protobuf's fields: with a length, and with a fixed number of bytes."""


class OnnxError(RuntimeError):
    """A model's refusal of its inputs, in one line."""


class OnnxModel:
    """An ONNX file in a session of onnxruntime, which worker threads share.

    The session has no threads of its own, so values do not depend on their number. The
    model is loaded from its bytes, and reads no other file, so its hash covers all that it
    is. It runs on a GPU if onnxruntime was built for GPUs, else on the CPU.

    Raises MissingDependencyError without onnxruntime; ConfigError for another file."""

    def __init__(self, file: Path, device: torch.device) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            needed_for = f"params.weights: {file.name}"
            raise MissingDependencyError("onnxruntime", needed_for, extra="onnx") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = _FATAL
        options.use_deterministic_compute = True
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", "/dev/null"
        )
        providers: list[Any] = ["CPUExecutionProvider"]
        on_gpu = "CUDAExecutionProvider"
        if device.type == "cuda" and on_gpu in onnxruntime.get_available_providers():
            # by default, it rounds to TF32, and chooses algorithms by trial
            settings = {"use_tf32": "0", "cudnn_conv_algo_search": "DEFAULT"}
            providers.insert(0, (on_gpu, {"device_id": str(device.index or 0), **settings}))
        try:
            document = file.read_bytes()
            self._session = onnxruntime.InferenceSession(document, options, providers=providers)
        except Exception as error:  # its classes of errors have no other base
            what = f"onnxruntime cannot load it: {_message(error)}"
            raise weights_error(file, what) from error
        self.file = file
        self._random = _random_values(document)
        self._nodes = {
            "input": {node.name: node for node in self._session.get_inputs()},
            "output": {node.name: node for node in self._session.get_outputs()},
        }

    def require(self, kind: str, names_by_key: Mapping[str, Iterable[str]]) -> None:
        """Raise ConfigError unless the model has these inputs or outputs (`kind`), which are
        listed by the parameter that names them, and needs no other inputs; or if an output
        depends on random numbers."""
        missing = dict(self._nodes[kind])
        for key, names in names_by_key.items():
            for name in names:
                missing.pop(name, None)
                if name not in self._nodes[kind]:
                    raise ConfigError(
                        f"params.{key}: {self.file.name} has no {kind} {name!r}; it has "
                        f"{listing(self._nodes[kind])}"
                    )
                if name in self._random:
                    raise ConfigError(
                        f"params.{key}: {self.file.name} computes {name} with "
                        f"{self._random[name]}, which draws other random numbers at each run: "
                        "export the model without it"
                    )
        if kind == "input" and missing:
            raise ConfigError(
                f"params.constants: {self.file.name} also needs the input {listing(missing)}"
            )

    def dtype(self, kind: str, name: str) -> np.dtype[Any]:
        """Return the dtype of an input or output. Raises ConfigError for text and the like."""
        of_model = self._nodes[kind][name].type
        if of_model not in _DTYPES:
            raise ConfigError(f"params.weights: {self.file.name}: {name} is a {of_model}")
        return np.dtype(_DTYPES[of_model])

    def filled(self, name: str, value: float) -> Array:
        """Return an array for an input, of one value. Dimensions without a number are 1.
        Raises ConfigError for a value that the input's dtype cannot hold."""
        shape = [n if isinstance(n, int) else 1 for n in self._nodes["input"][name].shape]
        dtype = self.dtype("input", name)
        if dtype.kind == "f":
            is_held = abs(value) <= float(np.finfo(dtype).max)
        else:
            limits = np.iinfo(dtype)
            is_held = float(value).is_integer() and limits.min <= value <= limits.max
        if not is_held:
            raise ConfigError(f"params.constants: {name} is {dtype}, which {value} is not")
        return np.full(shape, value, dtype)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Compute outputs, in their order. Raises OnnxError if the model refuses the
        inputs; MemoryError if memory runs out."""
        try:
            computed: list[Array] = self._session.run([*outputs], dict(inputs))
        except Exception as error:  # its classes of errors have no other base
            message = _message(error)
            if any(text in message for text in _OUT_OF_MEMORY):
                raise MemoryError(message) from error
            shapes = ", ".join(f"{name} {[*array.shape]}" for name, array in inputs.items())
            raise OnnxError(f"refuses {shapes}: {message}") from error
        return computed


def _message(error: Exception) -> str:
    return " ".join(str(error).split()).rpartition("[ONNXRuntimeError] : ")[2]


_Fields = defaultdict[int, list[memoryview]]


def _random_values(document: bytes) -> dict[str, str]:
    """Return the values of a model that depend on random numbers, each with the operator
    that draws them. Fields have their numbers in `onnx.proto`. (Models in onnxruntime's own
    format are not read.)"""
    if document[4:8] == b"ORTM":
        return {}
    model = _fields(memoryview(document))
    functions = {_text(function[1][0]): function for function in map(_fields, model[25])}
    return _random_of_nodes(_fields(model[7][0])[1], functions, {})


def _random_of_nodes(
    nodes: Iterable[memoryview], functions: Mapping[str, _Fields], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the random values that the nodes of a graph compute. `given` has those of the
    graph around it."""
    random: dict[str, str] = {}
    known = ChainMap(random, {**given})
    for node in map(_fields, nodes):
        operator = _text(node[4][0])
        behind = [known[name] for name in map(_text, node[1]) if name in known]
        if operator in _RANDOM_OPERATORS:
            behind.append(operator)
        if operator in functions:
            behind += _random_of_nodes(functions[operator][7], functions, {}).values()
        for attribute in map(_fields, node[5]):
            for graph in attribute[6] + attribute[11]:
                behind += _random_of_nodes(_fields(graph)[1], functions, known).values()
        if behind:
            random.update(dict.fromkeys(filter(None, map(_text, node[2])), behind[0]))
    return random


def _fields(message: memoryview) -> _Fields:
    """Return the contents of a protobuf message's fields that have a length, by number."""
    fields: _Fields = defaultdict(list)
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind in _FIXED_SIZES:
            place += _FIXED_SIZES[kind]
            continue
        value, place = _varint(message, place)
        if kind == _WITH_LENGTH:
            fields[key >> 3].append(message[place : place + value])
            place += value
    return fields


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Return the number at a place, and the place after it."""
    value = shift = 0
    while message[place] & 128:
        value |= (message[place] & 127) << shift
        place, shift = place + 1, shift + 7
    return value | message[place] << shift, place + 1


def _text(field: memoryview) -> str:
    return str(field, "utf-8")
