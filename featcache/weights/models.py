"""A model's folder: its JSON, its tensors, their hash, and the model that transformers
builds."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, remove_weight_norm

from featcache.errors import ConfigError, MissingDependencyError, first_line, listing
from featcache.trust import remote_code_is_allowed

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")

_STANDARD_NAMES = ("model.safetensors", "pytorch_model.bin")

_ONE_OF_SEVERAL = re.compile(r"-\d+-of-(?!0*1\.)\d+\.")
"""The part of a file's name that shows that there are several."""

PREPROCESSING = ("preprocessor_config.json", "processor_config.json")
"""The files that may say how a model's waveforms are prepared."""

_IRRELEVANT_KEYS = {
    "_name_or_path",
    "_commit_hash",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
}
"""Keys of a model's JSON files that decide no values: models run from float32, and the
stored dtype is hashed with the tensors."""

_WEIGHT_NORM = {
    ".weight_g": ".parametrizations.weight.original0",
    ".weight_v": ".parametrizations.weight.original1",
}
"""The old and the new names of weight norm's magnitude and direction."""

_TRAINING_ONLY = re.compile(r"(^|\.)masked_spec_embed$")
"""Parameters that a model in eval mode never uses. Fine-tuned checkpoints may lack them."""

_MOST_JSON_BYTES = 32 << 20
"""The largest size of a JSON file; an index of tensors has some MB."""

_loading = threading.Lock()
"""A lock for silencing transformers, which affects the whole process."""

_digests: dict[tuple[object, ...], str] = {}


@dataclass(frozen=True)
class Located:
    """Weights on this machine."""

    folder: Path
    file: Path | None = None
    """The file of weights, if the user named one."""

    @property
    def path(self) -> Path:
        """The file if there is one, else the folder; for messages."""
        return self.file or self.folder


@dataclass(frozen=True)
class Part:
    """A model that is a part of the one in the folder; by default, all of it."""

    config: str = ""
    """The key of config.json under which the part's own config is."""
    prefix: str = ""
    """What the names of the part's tensors begin with."""
    unused: tuple[str, ...] = ()
    """Modules of the class for which the part has no weights, since it never uses them."""


WHOLE = Part()


def weights_error(path: Path | str, what: str) -> ConfigError:
    """Make the error about weights at `path`."""
    return ConfigError(f"params.weights: {path}: {what}")


def read_json(located: Located, name: str) -> dict[str, Any]:
    """Read one of the folder's JSON files; {} if it does not exist. Raises ConfigError if
    it is no mapping in JSON."""
    path = located.folder / name
    if not path.exists():
        return {}
    try:
        if not path.is_file():  # a pipe would wait for its writer
            raise ValueError("not a file")
        if path.stat().st_size > _MOST_JSON_BYTES:
            raise ValueError(f"more than {_MOST_JSON_BYTES:,} bytes")
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise weights_error(path, f"cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise weights_error(path, "expected a mapping")
    return loaded


def read_config(located: Located) -> dict[str, Any]:
    """Read config.json; raise ConfigError if it says nothing."""
    config = read_json(located, "config.json")
    if not config:
        what = "holds no config.json that says what the model is"
        raise weights_error(located.folder, what)
    return config


def read_preprocessing(located: Located) -> dict[str, Any]:
    """Read how waveforms are prepared for the model; {} if the folder does not say.
    transformers 5 may write it to a part of processor_config.json."""
    settings: Any = read_json(located, "preprocessor_config.json")
    if not settings:
        settings = read_json(located, "processor_config.json").get("feature_extractor")
    return settings if isinstance(settings, dict) else {}


def weight_candidates(folder: Path) -> list[Path]:
    """List a folder's files that may hold weights."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def folder_with_weights(folder: Path) -> Path | None:
    """Return the folder itself if it holds weights, or the only folder in it that does."""
    if not folder.is_dir():
        return None
    if weight_candidates(folder):
        return folder
    inside = [path for path in folder.iterdir() if path.is_dir() and weight_candidates(path)]
    return inside[0] if len(inside) == 1 else None


def weight_files(located: Located) -> list[Path]:
    """Return the file that the user named, or those that transformers would load. Raises
    ConfigError if some are missing, or several have no standard name."""
    if located.file:
        return [located.file]
    folder = located.folder
    standard = _standard_files(folder)
    missing = [file.name for file in standard if not file.is_file()]
    if missing:
        raise weights_error(folder, f"lacks {listing(missing)}, which its index lists")
    files = standard or weight_candidates(folder)
    if not files:
        raise weights_error(folder, "the folder holds no weights")
    if len(files) > 1 and not standard:
        names = listing(path.name for path in files)
        raise weights_error(folder, f"it holds several files of weights; name one: {names}")
    return files


def has_all_weights(folder: Path) -> bool:
    """Tell whether a folder with weights has all of them."""
    standard = _standard_files(folder)
    if standard:
        return all(file.is_file() for file in standard)
    return not any(_ONE_OF_SEVERAL.search(file.name) for file in weight_candidates(folder))


def _standard_files(folder: Path) -> list[Path]:
    """Return the file with the first standard name, or the files that its index lists."""
    for name in _STANDARD_NAMES:
        if (folder / name).is_file():
            return [folder / name]
        index = read_json(Located(folder), f"{name}.index.json").get("weight_map")
        if isinstance(index, dict) and index:
            return [folder / file for file in sorted(set(map(str, index.values())))]
    return []


def state_dict(located: Located) -> dict[str, Tensor]:
    """Read the tensors by name, on the CPU, in their stored dtypes, maybe as views of the
    file: do not write to them. Raises ConfigError for a missing or damaged file."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(located):
        read = _read_safetensors if file.suffix == ".safetensors" else _read_torch
        try:
            tensors |= read(file)
        except OSError as error:
            raise weights_error(file, f"cannot be read: {error.strerror or error}") from error
    return tensors


def digest(located: Located) -> str:
    """Return the SHA-256, in hex, of what decides values: the tensors by name, config.json,
    how waveforms are prepared, and the folder's Python code if config.json names some.
    Raises ConfigError as `state_dict` and `read_json` do.

    Copies in other files, as safetensors or saved by torch, have the same digest, unless a
    model uses a tensor twice, which torch saves twice."""
    jsons = [located.folder / name for name in ("config.json", *PREPROCESSING)]
    config = read_json(located, "config.json")
    code = sorted(located.folder.rglob("*.py")) if "auto_map" in config else []
    key = tuple(file_identity(path) for path in (*weight_files(located), *jsons, *code))
    if key not in _digests:
        sha256 = hashlib.sha256()
        for document in (config, read_preprocessing(located)):
            sha256.update(_canonical(_without_irrelevant_keys(document)))
        for path in code:
            sha256.update(_canonical([path.name, hashlib.sha256(path.read_bytes()).hexdigest()]))
        tensors = {_modern_name(name): tensor for name, tensor in state_dict(located).items()}
        for name, tensor in sorted(tensors.items()):
            sha256.update(_canonical([name, str(tensor.dtype), list(tensor.shape)]))
            sha256.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        _digests[key] = sha256.hexdigest()
    return _digests[key]


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingDependencyError("safetensors", f"params.weights: {file}") from error
    try:
        return dict(load_file(file))
    except SafetensorError as error:
        what = f"damaged, or no safetensors file: {first_line(error)}"
        raise weights_error(file, what) from error


def read_pickle(file: Path) -> Any:
    """Read a file that torch saved, as weights only: nothing in it is run. Raises
    ConfigError if it is damaged, or holds other things than tensors and plain values."""
    try:
        return torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except PermissionError:
        raise
    except Exception as error:  # on a garbled pickle, torch raises whatever its parser meets
        what = "damaged, or not tensors alone; never unpickled: save it as safetensors"
        raise weights_error(file, what) from error


def _read_torch(file: Path) -> dict[str, Tensor]:
    loaded = read_pickle(file)
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and _is_plain(value) for name, value in loaded.items()
    ):
        what = "expected tensors by name (a state dict) and nothing else; none that is sparse"
        raise weights_error(file, f"{what}, a conjugate or without values")
    return loaded


def _is_plain(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_meta or value.is_conj() or value.is_neg())


def file_identity(path: Path) -> tuple[object, ...]:
    """Return what changes when a file is written again."""
    if not path.exists():
        return (path,)
    stat = path.stat()
    return path.absolute(), stat.st_size, stat.st_mtime_ns, stat.st_ino


def _without_irrelevant_keys(value: Any) -> Any:
    if isinstance(value, dict):
        keys = value.keys() - _IRRELEVANT_KEYS
        return {key: _without_irrelevant_keys(value[key]) for key in keys}
    if isinstance(value, list):
        return [_without_irrelevant_keys(inner) for inner in value]
    return value


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _modern_name(name: str) -> str:
    stem, dot, last = name.rpartition(".")
    return stem + _WEIGHT_NORM.get(dot + last, dot + last)


def transformers_class(name: str, needed_for: str) -> Any:
    """Import a class of transformers; a MissingDependencyError if that fails."""
    try:
        import transformers

        # it asks for a newer torch than featcache does
        if not transformers.is_torch_available():
            raise ImportError
        _import_without_broken_torchaudio("transformers.audio_utils")
        return getattr(transformers, name)
    except (ImportError, AttributeError, RuntimeError) as error:  # the last: a broken backend
        raise MissingDependencyError("transformers", needed_for, extra="models") from error


def _import_without_broken_torchaudio(module: str) -> None:
    """Import a module of transformers. A torchaudio that does not import, and which no
    model calls, is replaced by an empty module meanwhile."""
    try:
        import_module(module)
    except (ImportError, OSError, RuntimeError):
        empty = ModuleType("torchaudio")
        empty.__spec__ = ModuleSpec("torchaudio", None)
        sys.modules["torchaudio"] = empty
        try:
            import_module(module)
        finally:
            del sys.modules["torchaudio"]


def load(model_class: Any, located: Located, device: torch.device, part: Part = WHOLE) -> Any:
    """Build a transformers model from its weights, or from a part of them, complete or not
    at all.

    The model is in eval mode, in float32, needs no gradients, and has weight norm folded
    into its weights. `model_class` is `EncodecModel`, say, or `AutoModel` for the class
    that config.json names. Raises ConfigError if config.json or weights do not fit or are
    damaged, or the model brings its own code."""
    with _loading, _quiet_transformers():
        tensors = {
            name.removeprefix(part.prefix): tensor
            for name, tensor in state_dict(located).items()
            if name.startswith(part.prefix)
        }
        config, resolved_class = _resolve(model_class, located, part)
        try:
            model, info = resolved_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _require_complete names them
            )
        except Exception as error:  # on others' weights, a model's code may raise anything
            what = f"not a {resolved_class.__name__}: {first_line(error)}"
            raise weights_error(located.path, what) from error
        _require_complete(info, located, resolved_class, part)
        fold_weight_norm(model)
        for parameter in [*model.parameters(), *model.buffers()]:
            # the model's own memory, not a view of the file
            parameter.data = parameter.data.clone()
        for name, parameter in model.named_parameters():
            if name in info["missing_keys"]:
                parameter.data.zero_()
        return model.eval().requires_grad_(False).to(device)


def load_module(
    make: Callable[[dict[str, Any]], Any], located: Located, device: torch.device, name: str
) -> Any:
    """Build a model, called `name` in messages, that is none of transformers: `make` takes
    config.json. Otherwise as `load`."""
    config = read_config(located)
    tensors = state_dict(located)
    model_type = config.get("model_type")  # as in every config.json of transformers
    if model_type is not None:
        what = f"holds a model of type {model_type!r}, not a {name}'s"
        raise weights_error(located.folder, what)
    with warnings.catch_warnings(action="ignore"):  # packages use torch's old weight norm
        try:
            model = make(config)
            model.load_state_dict(tensors)
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as error:
            reason = shorten(str(error), 200, placeholder=" …")
            raise weights_error(located.path, f"not a {name}'s: {reason}") from error
    fold_weight_norm(model)
    return model.eval().requires_grad_(False).to(device)


def fold_weight_norm(model: nn.Module) -> None:
    """Replace weight norm, in torch's old or new form, by the weights that it computes."""
    threads = torch.get_num_threads()
    # threads share the norm's sum, so its last bits depend on their number
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            for module in list(model.modules()):
                if parametrize.is_parametrized(module):
                    for name in list(module.parametrizations):  # type: ignore[arg-type]
                        parametrize.remove_parametrizations(module, name)
                for hook in list(module._forward_pre_hooks.values()):
                    if type(hook).__name__ == "WeightNorm":
                        remove_weight_norm(module, hook.name)  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(threads)


def _resolve(model_class: Any, located: Located, part: Part) -> tuple[Any, Any]:
    """Return the config and the class of a model."""
    folder = located.folder
    settings: Any = read_config(located)
    own_code = settings.get("auto_map") or {}
    is_auto = hasattr(model_class, "_model_mapping")
    if part.config:
        settings = settings.get(part.config)
        if not isinstance(settings, dict):
            raise weights_error(folder, f"config.json has no mapping {part.config}")
    else:
        _require_trusted(own_code, folder)
        model_type = settings.get("model_type", "")
        expected = model_type if is_auto else model_class.config_class.model_type
        if model_type != expected:
            what = f"holds a model of type {model_type!r}"
            if not model_type:
                what = "config.json names no model_type"
            raise weights_error(folder, f"{what}, not {expected!r}")
    try:
        if part.config:
            return model_class.config_class.from_dict(settings), model_class
        if not is_auto:
            config = model_class.config_class.from_pretrained(folder, local_files_only=True)
            return config, model_class
        from transformers import AutoConfig
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=remote_code_is_allowed()
        )
        reference = own_code.get(model_class.__name__)
        if reference:
            return config, get_class_from_dynamic_module(reference, folder, local_files_only=True)
        return config, model_class._model_mapping[type(config)]
    except Exception as error:  # config classes check their values, each in its own way
        raise weights_error(folder / "config.json", first_line(error)) from error


def _require_trusted(own_code: dict[str, Any], folder: Path) -> None:
    """Raise ConfigError for a model with its own code, unless it may run and is pinned."""
    if own_code and not remote_code_is_allowed():
        what = "has its own Python code: if you trust it, --trust-remote-code runs it"
        raise weights_error(folder, what)
    for name in own_code.values():
        if "--" in str(name):
            what = f"the model's code is in another repository, which is not pinned: {name}"
            raise weights_error(folder, what)


def _require_complete(info: dict[str, Any], located: Located, model_class: Any, part: Part) -> None:
    """Raise ConfigError if transformers drew weights at random."""
    mismatched = [
        f"{name} {tuple(has)} for {tuple(needs)}" for name, has, needs in info["mismatched_keys"]
    ]
    missing = [
        name
        for name in info["missing_keys"]
        if not _TRAINING_ONLY.search(name) and name.partition(".")[0] not in part.unused
    ]
    if mismatched:
        fault = f"wrong shapes: {listing(sorted(mismatched), 3)}"
    elif missing:
        fault = f"it lacks {listing(sorted(missing), 3)}"
    elif info["error_msgs"]:
        fault = first_line(info["error_msgs"][0])
    else:
        return
    raise weights_error(located.path, f"is not a whole {model_class.__name__}: {fault}")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with silenced(logging), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        if bars:
            logging.enable_progress_bar()


@contextmanager
def silenced(logging: Any) -> Iterator[None]:
    """Silence all but errors, by the `logging` of transformers or huggingface_hub."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
