"""Library versions, recorded with every version and shard but not part of the fingerprint."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("featcache", "numpy", "torch", "torchaudio", "transformers", "soundfile", "miniaudio", "soxr")


def library_versions() -> dict[str, str]:
    """The versions of Python, of the libraries that decide values, and of libsndfile."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue  # an optional one
    if "soundfile" in found:
        import soundfile

        found["libsndfile"] = soundfile.__libsndfile_version__
    return found
