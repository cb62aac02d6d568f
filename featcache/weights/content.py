"""The content of weights: their tensors, never unpickled, and a hash of what decides values."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from featcache.errors import MissingDependencyError
from featcache.weights.files import (
    PREPROCESSING,
    Located,
    fault,
    first_line,
    read_json,
    read_preprocessing,
    weight_files,
)

_DECIDE_NOTHING = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "architectures", "dtype", "torch_dtype"}
)
"""Keys of a model's JSON files that say who wrote it. The dtype is among them: models are always run from float32, and
what the tensors were stored as is in their bytes."""

_WEIGHT_NORM = {
    re.compile(r"\.weight_g$"): ".parametrizations.weight.original0",
    re.compile(r"\.weight_v$"): ".parametrizations.weight.original1",
}
"""Weight norm's magnitude and direction, as torch named them before 2.0 and since."""

_digests: dict[tuple[object, ...], str] = {}
"""Of files as they are, by path, size, time and inode."""


def state_dict(located: Located) -> dict[str, torch.Tensor]:
    """The tensors by name, on the CPU, as they are stored. They may be a view of the file: not to be written to.

    Raises:
        ConfigError: there are none, or a file is missing, damaged, or not plain tensors.
        MissingDependencyError: a `.safetensors` file needs safetensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(located):
        try:
            tensors |= _read_safetensors(file) if file.suffix == ".safetensors" else _read_torch(file)
        except OSError as error:
            raise fault(file, f"cannot be read: {error.strerror or error}") from error
    return tensors


def digest(located: Located) -> str:
    """SHA-256, in hex, of what decides values: the tensors by name, config.json, and how waveforms are prepared.

    It is one for any two copies, wherever they are, in one file or in shards, as safetensors or as torch saves. Where
    config.json names code that the folder brings, that code is in it. A tensor that a model uses twice is saved twice
    by torch, and once as safetensors: then the two are two.

    Raises:
        ConfigError: what `state_dict` and `read_json` raise.
    """
    jsons = [located.folder / name for name in ("config.json", *PREPROCESSING)]
    code = sorted(located.folder.rglob("*.py")) if "auto_map" in read_json(located, "config.json") else []
    key = tuple(_identity(path) for path in (*weight_files(located), *jsons, *code))
    if key not in _digests:
        found = hashlib.sha256()
        for document in (read_json(located, "config.json"), read_preprocessing(located)):
            found.update(_canonical(_deciding(document)))
        for path in code:
            found.update(_canonical([path.name, hashlib.sha256(path.read_bytes()).hexdigest()]))
        tensors = {_modern(name): tensor for name, tensor in state_dict(located).items()}
        for name in sorted(tensors):
            tensor = tensors[name]
            found.update(_canonical([name, str(tensor.dtype), list(tensor.shape)]))
            found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        _digests[key] = found.hexdigest()
    return _digests[key]


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingDependencyError("safetensors", f"params.weights: {file}", extra="models") from error
    try:
        return dict(load_file(file))
    except SafetensorError as error:
        raise fault(file, f"damaged, or no safetensors file: {first_line(error)}") from error


def _read_torch(file: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except PermissionError:
        raise
    except Exception as error:  # a garbled pickle makes torch raise whatever its parser meets
        raise fault(
            file, "damaged, or holds more than tensors, which is never unpickled: save it as safetensors"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        raise fault(file, "expected tensors by name (a state dict), and nothing else in the file")
    return loaded


def _identity(path: Path) -> tuple[object, ...]:
    if not path.exists():
        return (path,)
    stat = path.stat()
    return path.absolute(), stat.st_size, stat.st_mtime_ns, stat.st_ino


def _deciding(value: Any) -> Any:
    """A JSON document without the keys that decide nothing, at any depth."""
    if isinstance(value, dict):
        return {key: _deciding(inner) for key, inner in value.items() if key not in _DECIDE_NOTHING}
    return [_deciding(inner) for inner in value] if isinstance(value, list) else value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _modern(name: str) -> str:
    for old, new in _WEIGHT_NORM.items():
        name = old.sub(new, name)
    return name
