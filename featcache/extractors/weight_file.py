"""Parameters of extractors whose model is one file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors.base import LocalPath, Params


class WeightFileParams(Params):
    """The parameters of every extractor whose model is one file."""

    locations: ClassVar[frozenset[str]] = frozenset({"weights", "sha256"})

    weights: LocalPath
    """The file; or `package:NAME==VERSION/PATH` for one inside an installed package, which
    is not imported. A relative path is relative to the config file. The fingerprint
    includes the file's content, not its location."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 of the file, in hex. Another file is refused. Default: any file."""

    @property
    def file(self) -> Path:
        """The file, which has the expected hash. Raises ConfigError otherwise."""
        path = weights.find_file(self.weights)
        weights.file_digest(path, self.sha256)
        return path

    @property
    def digest(self) -> str:
        """The SHA-256 of the file's content, in hex. Raises ConfigError as `file` does."""
        return weights.file_digest(self.file)


def require_rate(sample_rate: int, expected: int, model: str) -> None:
    """Raise ConfigError for waveforms at another rate, in Hz, than the model's."""
    if sample_rate != expected:
        raise ConfigError(f"audio.sample_rate: {sample_rate}; {model} is for {expected}")
