"""Builds a transformers model from its weights: complete, without messages, and with weight norm folded."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, remove_weight_norm

from featcache.errors import ConfigError, MissingDependencyError, first_line, listing
from featcache.trust import remote_code_is_allowed
from featcache.weights.files import Located, read_json, state_dict, weights_error

_TRAINING_ONLY = re.compile(r"(^|\.)masked_spec_embed$")
"""Parameters that a model in eval mode never uses, and that fine-tuned checkpoints may lack."""

_loading = threading.Lock()
"""Held while transformers is silenced, which affects the whole process."""


def transformers_class(name: str, needed_for: str) -> Any:
    """A class of transformers, by its name; a MissingDependencyError if it or a package that it needs cannot be
    imported."""
    try:
        import transformers

        if not transformers.is_torch_available():  # it asks for a newer torch than featcache does
            raise ImportError
        return getattr(transformers, name)
    except (ImportError, AttributeError, RuntimeError) as error:  # RuntimeError: a backend does not import
        raise MissingDependencyError("transformers", needed_for, extra="models") from error


def load(model_class: Any, located: Located, device: torch.device, **options: Any) -> Any:
    """Build a transformers model from its weights, complete or not at all.

    The model is in eval mode, in float32, needs no gradients, and has weight norm folded into its weights. Folding is
    done on the CPU in one thread, as the model's own forward does it there, so every device gets the same bits.

    `model_class` is `EncodecModel`, say, or `AutoModel` for the class that config.json names; `options` are further
    ones of `from_pretrained`. Raises ConfigError if config.json is missing or another class's; weights are damaged,
    missing or have other shapes; or the model brings its own code."""
    with _loading, _quiet():
        config, found_class = _resolve(model_class, located)
        tensors = state_dict(located)
        try:
            model, info = found_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _require_complete names them
                **options,
            )
        except Exception as error:  # a model's own code may raise anything on weights that are not its own
            raise weights_error(located.path, f"not a {found_class.__name__}: {first_line(error)}") from error
        _require_complete(info, located, found_class)
        fold_weight_norm(model)
        for parameter in [*model.parameters(), *model.buffers()]:
            parameter.data = parameter.data.clone()  # the model's own memory, not a view of the file
        for name, parameter in model.named_parameters():
            if name in info["missing_keys"]:
                parameter.data.zero_()
        return model.eval().requires_grad_(False).to(device)


def fold_weight_norm(model: nn.Module) -> None:
    """Replace weight norm, in torch's old or new form, by the weights that it computes, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads share the norm's sum, so its last bits depend on their number
    try:
        with torch.no_grad():
            for module in list(model.modules()):
                if isinstance(module, nn.Module) and parametrize.is_parametrized(module):
                    for name in list(module.parametrizations):  # type: ignore[arg-type]
                        parametrize.remove_parametrizations(module, name)
                for hook in list(module._forward_pre_hooks.values()):
                    if type(hook).__name__ == "WeightNorm":
                        remove_weight_norm(module, hook.name)  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(threads)


def _resolve(model_class: Any, located: Located) -> tuple[Any, Any]:
    """The config and the class to build; for an auto class, the class that config.json names."""
    raw = read_json(located, "config.json")
    if not raw:
        raise weights_error(located.folder, "holds no config.json, which says what the model is")
    own_code = raw.get("auto_map") or {}
    if own_code and not remote_code_is_allowed():
        raise weights_error(
            located.folder, "the model comes with its own Python code: if you trust it, --trust-remote-code runs it"
        )
    if elsewhere := [name for name in own_code.values() if "--" in str(name)]:
        raise weights_error(
            located.folder, f"the model's code is in another repository, which is not pinned: {elsewhere[0]}"
        )
    try:
        if not hasattr(model_class, "_model_mapping"):  # not an auto class
            expected, found = model_class.config_class.model_type, raw.get("model_type", "")
            if found != expected:
                what = f"holds a model of type {found!r}" if found else "config.json names no model_type"
                raise weights_error(located.folder, f"{what}, not {expected!r}")
            return model_class.config_class.from_pretrained(located.folder, local_files_only=True), model_class
        from transformers import AutoConfig
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        config = AutoConfig.from_pretrained(
            located.folder, local_files_only=True, trust_remote_code=remote_code_is_allowed()
        )
        if reference := own_code.get(model_class.__name__):
            return config, get_class_from_dynamic_module(reference, located.folder, local_files_only=True)
        return config, model_class._model_mapping[type(config)]
    except ConfigError:
        raise
    except Exception as error:  # config classes check their values, each in its own way
        raise weights_error(located.folder / "config.json", first_line(error)) from error


def _require_complete(info: dict[str, Any], located: Located, model_class: Any) -> None:
    """Raise ConfigError if transformers drew weights at random, since the file lacks them or has other shapes."""
    what = f"is not a whole {model_class.__name__}"
    if mismatched := sorted(f"{name} {tuple(has)} for {tuple(needs)}" for name, has, needs in info["mismatched_keys"]):
        raise weights_error(located.path, f"{what}: wrong shapes: {listing(mismatched, 3)}")
    if missing := sorted(name for name in info["missing_keys"] if not _TRAINING_ONLY.search(name)):
        raise weights_error(located.path, f"{what}: it lacks {listing(missing, 3)}")
    if info["error_msgs"]:
        raise weights_error(located.path, f"{what}: {first_line(info['error_msgs'][0])}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers on stderr: its progress bars, and its report of missing keys, for which `load` raises."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise MissingDependencyError("transformers", "loading a model", extra="models") from error
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
