"""An ONNX model as extractors run it: its names, shapes and dtypes are checked, and its
session computes in the thread that calls it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError, MissingDependencyError, listing
from featcache.weights import weights_error

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}

_SILENT = 4
"""The level at which onnxruntime logs what is fatal, and nothing that it also raises."""

_OUT_OF_MEMORY = ("Failed to allocate", "out of memory", "bad_alloc")


class OnnxError(RuntimeError):
    """A model's refusal of its inputs, in one line."""


class OnnxModel:
    """An ONNX file in a session of onnxruntime, which worker threads share.

    The session has no threads of its own, so values do not depend on their number. The
    model is loaded from its bytes, and files beside it are not read: its hash covers all
    that it is. It runs on a GPU if onnxruntime was built for GPUs, else on the CPU.

    Raises MissingDependencyError without onnxruntime; ConfigError for a file that is no
    such model."""

    def __init__(self, file: Path, device: torch.device) -> None:
        try:
            import onnxruntime
        except ImportError as error:
            needed_for = f"params.weights: {file.name}"
            raise MissingDependencyError("onnxruntime", needed_for, extra="onnx") from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = _SILENT
        options.use_deterministic_compute = True
        nowhere = "/dev/null"
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", nowhere
        )
        providers: list[Any] = ["CPUExecutionProvider"]
        if device.type == "cuda" and "CUDAExecutionProvider" in (
            onnxruntime.get_available_providers()
        ):
            # otherwise it rounds to TF32, and chooses algorithms by trial
            on_gpu: dict[str, Any] = {"device_id": device.index or 0, "use_tf32": 0}
            on_gpu["cudnn_conv_algo_search"] = "DEFAULT"
            providers.insert(0, ("CUDAExecutionProvider", on_gpu))
        try:
            self._session = onnxruntime.InferenceSession(
                file.read_bytes(), options, providers=providers
            )
        except Exception as error:  # its classes of errors inherit from nothing else
            what = f"onnxruntime cannot load it: {_message(error)}"
            raise weights_error(file, what) from error
        self.file = file
        self._inputs = {node.name: node for node in self._session.get_inputs()}
        self._outputs = {node.name: node for node in self._session.get_outputs()}

    def require_inputs(self, names_by_key: Mapping[str, Iterable[str]]) -> None:
        """Raise ConfigError unless names, by the parameter that holds them, are all inputs
        of the model."""
        self._require_known("input", names_by_key, self._inputs)
        fed = {name for names in names_by_key.values() for name in names}
        unfed = [name for name in self._inputs if name not in fed]
        if unfed:
            raise ConfigError(
                f"params.constants: {self.file.name} also needs the input {listing(unfed)}"
            )

    def require_outputs(self, names_by_key: Mapping[str, Iterable[str]]) -> None:
        """Raise ConfigError unless names, by the parameter that holds them, are outputs."""
        self._require_known("output", names_by_key, self._outputs)

    def _require_known(
        self, kind: str, names_by_key: Mapping[str, Iterable[str]], known: Mapping[str, Any]
    ) -> None:
        for key, names in names_by_key.items():
            for name in names:
                if name not in known:
                    raise ConfigError(
                        f"params.{key}: {self.file.name} has no {kind} {name!r}; it has "
                        f"{listing(known)}"
                    )

    def dtype(self, name: str) -> np.dtype[Any]:
        """Return the dtype of an input or output. Raises ConfigError for strings and the
        like."""
        node = self._inputs.get(name) or self._outputs[name]
        if node.type not in _DTYPES:
            raise ConfigError(f"params.weights: {self.file.name}: {name} is a {node.type}")
        return np.dtype(_DTYPES[node.type])

    def filled(self, name: str, value: float) -> Array:
        """Return an array for an input, of its shape, filled with one value; dimensions
        without a number have the size 1."""
        shape = [size if isinstance(size, int) else 1 for size in self._inputs[name].shape]
        return np.full(shape, value, self.dtype(name))

    def cast(self, name: str, array: Array) -> Array:
        """Return a contiguous array for an input, of its dtype."""
        return np.ascontiguousarray(array, self.dtype(name))

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Compute outputs, in their order. Raises OnnxError if the model refuses the
        inputs; MemoryError if memory runs out."""
        try:
            computed: list[Array] = self._session.run([*outputs], dict(inputs))
        except Exception as error:  # its classes of errors inherit from nothing else
            message = _message(error)
            if any(text in message for text in _OUT_OF_MEMORY):
                raise MemoryError(message) from error
            shapes = ", ".join(f"{name} {[*array.shape]}" for name, array in inputs.items())
            raise OnnxError(f"refuses {shapes}: {message}") from error
        return computed


def _message(error: Exception) -> str:
    """Return onnxruntime's message in one line, without its prefix."""
    return " ".join(str(error).split()).rpartition("[ONNXRuntimeError] : ")[2]
