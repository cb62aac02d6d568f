"""Parameters of extractors whose model is one file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, model_validator

from featcache import weights
from featcache.extractors.base import LocalPath, Params


class WeightFileParams(Params):
    """The parameters of every extractor whose model is one file."""

    locations: ClassVar[frozenset[str]] = frozenset({"weights", "sha256"})

    weights: LocalPath
    """The file. `package:NAME==VERSION/PATH` is a file inside an installed package, which
    is not imported. A relative path is relative to the config file. The fingerprint
    includes the file's content, not its location."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """The SHA-256 of the file, in hex. Another file is refused. Default: any file."""

    @property
    def file(self) -> Path:
        """The file, which has the expected hash; otherwise raises ConfigError."""
        return weights.find_file(self.weights, self.sha256)

    @property
    def digest(self) -> str:
        """The SHA-256 of the file's content, in hex; raises what `file` does."""
        return weights.file_digest(self.file)


class PitchParams(WeightFileParams):
    """The parameters of models of pitch. Subclasses limit the band, in Hz."""

    fmin: float
    fmax: float

    @model_validator(mode="after")
    def _is_a_band(self) -> PitchParams:
        if self.fmin >= self.fmax:
            raise ValueError(f"fmin: {self.fmin:g} Hz is not below fmax, {self.fmax:g} Hz")
        return self
