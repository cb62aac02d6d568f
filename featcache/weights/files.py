"""The files of a model in its folder: its JSON, and those that hold its tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcache.errors import ConfigError, listing

SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
"""Of files of weights."""

_WHOLE = ("model.safetensors", "pytorch_model.bin")
"""What transformers calls a model's one file; sharded, there is an index beside the shards."""

PREPROCESSING = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class Located:
    """Weights on this machine.

    Attributes:
        folder: that holds config.json and what else belongs to the model.
        file: the one file that was named; None where a folder or a hub's id was.
    """

    folder: Path
    file: Path | None = None

    @property
    def path(self) -> Path:
        """What was named, for messages."""
        return self.file or self.folder


def read_json(located: Located, name: str) -> dict[str, Any]:
    """One of the folder's JSON files; {} where there is none.

    Raises:
        ConfigError: it is no JSON, or no mapping.
    """
    path = located.folder / name
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise fault(path, f"cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise fault(path, "expected a mapping")
    return loaded


def read_preprocessing(located: Located) -> dict[str, Any]:
    """What the folder says of how a model wants its waveforms; {} where it says nothing.

    It is in preprocessor_config.json, or in the part of processor_config.json that transformers 5 writes in its place
    where a tokenizer is saved together with it.

    Raises:
        ConfigError: it is no JSON, or no mapping.
    """
    found = read_json(located, PREPROCESSING[0])
    if not found:
        found = read_json(located, PREPROCESSING[1]).get("feature_extractor", {})
    return found if isinstance(found, dict) else {}


def candidates(folder: Path) -> list[Path]:
    """The files of a folder that may hold weights."""
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def with_weights(folder: Path) -> Path | None:
    """The folder that holds weights: this one, or the one folder in it that does; None where there is none."""
    found = [one for one in (folder, *sorted(folder.iterdir())) if one.is_dir() and candidates(one)]
    return found[0] if found and (found[0] == folder or len(found) == 1) else None


def weight_files(located: Located) -> list[Path]:
    """The files that hold the tensors: the one that was named, or what transformers would take from the folder.

    Raises:
        ConfigError: there is none, one is missing, or several might be meant.
    """
    if located.file:
        return [located.file]
    folder = located.folder
    for name in _WHOLE:
        if (folder / name).is_file():
            return [folder / name]
        if shards := _shards(located, name):
            if missing := [file.name for file in shards if not file.is_file()]:
                raise fault(folder, f"lacks {listing(missing)}, which its index lists")
            return shards
    found = candidates(folder)
    if len(found) != 1:
        names = listing(path.name for path in found)
        raise fault(
            folder, f"it holds several files of weights; name one: {names}" if found else "the folder holds no weights"
        )
    return found


def is_complete(folder: Path) -> bool:
    """Whether there are weights in a folder, and all shards that an index names."""
    shards = [file for name in _WHOLE for file in _shards(Located(folder), name)]
    return bool(candidates(folder)) and all(file.is_file() for file in shards)


def fault(path: Path | str, what: str) -> ConfigError:
    """The error to raise of weights at `path`."""
    return ConfigError(f"params.weights: {path}: {what}")


def first_line(error: object) -> str:
    """What another library's error says, for a message of one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _shards(located: Located, name: str) -> list[Path]:
    """The files that the index of a sharded `name` lists; [] where there is no index."""
    index = read_json(located, f"{name}.index.json").get("weight_map")
    return [located.folder / str(shard) for shard in sorted(set(index.values()))] if isinstance(index, dict) else []
