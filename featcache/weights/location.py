"""The location of weights: a folder, a file, or a commit of a repository on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from featcache.errors import ConfigError, listing
from featcache.weights.files import SUFFIXES, Located, fault, with_weights
from featcache.weights.hub import snapshot

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def locate(weights: str, revision: str | None) -> Located:
    """Find weights on this machine, downloading them from the hub if need be.

    Args:
        weights: a folder, a file in such a folder, or a hub's id: `org/name`.
        revision: the commit of a hub's id, 40 hex digits.

    Raises:
        ConfigError: there is no such folder or file, or nothing in it; a hub's id has no revision, or the hub has no
            such model; or it may not be downloaded, and then the message says what to download to where.
        ExtractorError: the hub cannot be reached, or its files cannot be kept.
        MissingDependencyError: a hub's id needs huggingface_hub.
    """
    path = Path(os.path.expanduser(weights))  # where Path's own would raise, this leaves the name as it is
    if weights and os.path.isdir(path):  # "" would be the current folder
        folder = with_weights(path)
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
    return Located(snapshot(weights, revision))
