"""Finds weights: a folder, a file, or a commit of a model on a hub, which is downloaded if this machine lacks it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from featcache.errors import ConfigError, MissingDependencyError, first_line, listing
from featcache.weights.files import SUFFIXES, Located, folder_with_weights, weights_error
from featcache.weights.hub import HubModel, download

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def locate(weights: str, revision: str | None) -> Located:
    """Find weights on this machine, after downloading them from the hub if necessary and allowed.

    `weights` is a folder, a file in such a folder, or a hub's id, `org/name`, with a commit of 40 hex digits as
    `revision`. Raises ConfigError if there is no such folder, file, model or commit, or it may not be downloaded: then
    the message says what to download, and to where; ExtractorError if the hub cannot be reached, or its files cannot be
    kept.
    """
    path = Path(os.path.expanduser(weights))  # Path.expanduser would raise for the home of an unknown user
    if weights and os.path.isdir(path):  # "" would be the current folder
        folder = folder_with_weights(path)
        if folder is None and not (path / "config.json").is_file():
            raise weights_error(path, "the folder holds neither config.json nor weights")
        return Located(folder or path)
    if os.path.isfile(path):
        if path.suffix not in SUFFIXES:
            raise weights_error(path, f"a file of weights ends in {listing(SUFFIXES)}")
        return Located(path.parent, path)
    if not _HUB_ID.fullmatch(weights) or weights.startswith((".", "~")) or path.suffix in SUFFIXES:
        raise weights_error(weights, "there is no such folder or file")
    if revision is None or not _COMMIT.fullmatch(revision):
        if revision is None:
            given = f"there is no folder {weights}, and a hub's id needs one"
        else:
            given = f"{revision!r} is none"
        raise ConfigError(f"params.revision: {given}: the commit of {weights}, in 40 hex digits")
    return Located(_folder_of_hub_model(weights, revision))


def _folder_of_hub_model(name: str, revision: str) -> Path:
    """The folder of a hub's model in the hub's cache on this machine, downloaded first if anything is missing."""
    try:
        from huggingface_hub import constants
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", f"params.weights: {name}", extra="models") from error
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"params.weights: {name}: neither a folder nor a model id: {first_line(error)}") from error
    model = HubModel(name, revision, constants.ENDPOINT, Path(constants.HF_HUB_CACHE).expanduser())
    if complete := model.complete_folder():
        return complete
    download(model)
    downloaded = folder_with_weights(model.snapshot)
    if downloaded is None:
        raise ConfigError(f"params.weights: {name} at {revision} holds no weights that torch reads")
    return downloaded
