"""Where weights are: a folder, a file, or a commit of a hub's repository, in the hub's cache or downloaded to it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from featcache.errors import ConfigError, MissingDependencyError, listing
from featcache.weights.files import SUFFIXES, Located, candidates, fault, first_line, is_complete

_FORMS = (
    r"model\.safetensors",
    r"model-\d+-of-\d+\.safetensors",
    r"pytorch_model\.bin",
    r"pytorch_model-\d+-of-\d+\.bin",
    r".*\.safetensors",
    r".*\.(bin|pt|pth|ckpt)",
)
"""Names of weights in a hub's repository, best first: one form is downloaded."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_SECONDS = 10.0
"""To wait for an answer of the hub."""


def locate(weights: str, revision: str | None) -> Located:
    """Find weights on this machine, downloading them from the hub if need be.

    Args:
        weights: a folder, a file in such a folder, or a hub's id: `org/name`.
        revision: the commit of a hub's id, 40 hex digits.

    Raises:
        ConfigError: there is no such folder or file, or nothing in it; a hub's id has no revision, or cannot be had,
            and then the message says what to download to where.
        MissingDependencyError: a hub's id needs huggingface_hub.
    """
    path = Path(os.path.expanduser(weights))  # where Path's own would raise, this leaves the name as it is
    if weights and os.path.isdir(path):  # "" would be the current folder
        folder = _with_weights(path)
        if folder is None and not (path / "config.json").is_file():
            raise fault(path, "the folder holds neither config.json nor weights")
        return Located(folder or path)
    if os.path.isfile(path):
        if path.suffix not in SUFFIXES:
            raise fault(path, f"a file of weights ends in {listing(SUFFIXES)}")
        return Located(path.parent, path)
    if not _HUB_ID.fullmatch(weights) or weights.startswith((".", "~")) or path.suffix in SUFFIXES:
        raise fault(weights, "there is no such folder or file")
    if revision is None or not _COMMIT.fullmatch(revision):
        if revision is None:
            given = f"there is no folder {weights}, and a hub's id needs one"
        else:
            given = f"{revision!r} is none"
        raise ConfigError(f"params.revision: {given}: the commit of {weights}, in 40 hex digits")
    return Located(_snapshot(weights, revision))


def _snapshot(name: str, revision: str) -> Path:
    """The folder of a hub's model in the hub's cache on this machine, downloaded if it is not there."""
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", f"params.weights: {name}", extra="models") from error
    with suppress(LocalEntryNotFoundError):  # it is not there yet, and downloaded below
        cached = _with_weights(Path(snapshot_download(name, revision=revision, local_files_only=True)))
        if cached and is_complete(cached):
            return cached
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        info = HfApi().model_info(name, revision=revision, timeout=_HUB_SECONDS)
        wanted = _wanted([file.rfilename for file in info.siblings or []])
        downloaded = _with_weights(Path(snapshot_download(name, revision=revision, allow_patterns=wanted)))
    except Exception as error:  # the hub's own errors, and those of whatever HTTP library it uses now
        raise ConfigError(
            f"params.weights: {name} is not in {constants.HF_HUB_CACHE}, and cannot be downloaded "
            f"({first_line(error)}): on a machine with network, `hf download {name} --revision {revision}`; then copy "
            "its HF_HOME to this one and set HF_HOME to it, or give the downloaded folder as params.weights"
        ) from error
    finally:
        if shown:
            enable_progress_bars()
    if downloaded is None:
        raise ConfigError(f"params.weights: {name} at {revision} holds no weights that torch reads")
    return downloaded


def _wanted(names: Sequence[str]) -> list[str]:
    """Of a repository's files, those to download: JSON, and the best form of the weights."""
    jsons = [name for name in names if name.endswith(".json")]
    for form in _FORMS:
        weights = [name for name in names if re.fullmatch(form, name)]
        if weights:
            return jsons + weights
    return jsons


def _with_weights(snapshot: Path) -> Path | None:
    """The folder that holds weights: this one, or the one folder in it that does; None where there is none."""
    folders = [folder for folder in (snapshot, *sorted(snapshot.iterdir())) if folder.is_dir() and candidates(folder)]
    return folders[0] if folders and (folders[0] == snapshot or len(folders) == 1) else None
