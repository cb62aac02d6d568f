"""A codebook of units: centroids, what they were fitted to, their file, and the search for the nearest."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from featcache.errors import ConfigError, MissingDependencyError
from featcache.extractors.frames import ROWS, with_whole_columns

FORMAT = "featcache units 1"


@dataclass(frozen=True)
class Codebook:
    """Centroids, and the version whose frames they are centroids of.

    Attributes:
        centroids: float32 `[k, D]`, finite.
        config: of the version, resolved: every default filled in.
        fingerprint: of the version.
        dtype: numpy name of the dtype that the version stores: frames are rounded to it before they are compared.
        fitted: how: `seed`, `frames`, `inertia` and the like, as text, for a reader.
    """

    centroids: torch.Tensor
    config: dict[str, Any]
    fingerprint: str
    dtype: str
    fitted: dict[str, str]

    def digest(self) -> str:
        """SHA-256, in hex, of all that decides which unit a frame is: the centroids, and what they are of."""
        digest = hashlib.sha256(f"{self.fingerprint} {list(self.centroids.shape)} ".encode())
        digest.update(self.centroids.numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    def to_bytes(self) -> bytes:
        """The codebook as a safetensors file: `centroids`, and the rest in its metadata.

        It is written here, in the format's few lines, because the library puts metadata in a random order; so equal
        codebooks are equal files.
        """
        k, dimensions = self.centroids.shape
        metadata = {
            **self.fitted,
            "format": FORMAT,
            "k": str(k),
            "dimensions": str(dimensions),
            "name": str(self.config["name"]),
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "config": json.dumps(self.config, ensure_ascii=False),
        }
        data = self.centroids.numpy().astype("<f4").tobytes()
        centroids = {"dtype": "F32", "shape": [k, dimensions], "data_offsets": [0, len(data)]}
        header = json.dumps({"__metadata__": metadata, "centroids": centroids}, sort_keys=True).encode()
        header += b" " * (-len(header) % 8)
        return struct.pack("<Q", len(header)) + header + data


def read_codebook(path: str | Path) -> Codebook:
    """Read the file that `featcache fit-kmeans` wrote.

    Raises:
        ConfigError: there is no such file, or it is another one.
        MissingDependencyError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependencyError("safetensors", "the extractor units", extra="models") from error
    try:
        with safe_open(str(path), framework="pt") as file:
            fitted = dict(file.metadata() or {})
            if fitted.pop("format", None) != FORMAT:
                raise ConfigError(f"params.weights: {path}: not a file written by `featcache fit-kmeans`")
            centroids = file.get_tensor("centroids")
        config = json.loads(fitted.pop("config"))
        codebook = Codebook(centroids, config, fitted.pop("fingerprint"), fitted.pop("dtype"), fitted)
    except OSError as error:
        raise ConfigError(f"params.weights: {path}: cannot be read: {error.strerror or error}") from error
    except (SafetensorError, KeyError, ValueError) as error:
        raise ConfigError(f"params.weights: {path}: an incomplete file of `featcache fit-kmeans`: {error}") from error
    if centroids.dtype != torch.float32 or centroids.ndim != 2 or not centroids.isfinite().all():
        found = f"{centroids.dtype} {list(centroids.shape)}"
        raise ConfigError(f"params.weights: {path}: centroids are finite float32 [k, D]; these are not: {found}")
    return codebook


class Nearest:
    """Finds each frame's nearest centroid, by squared Euclidean distance in float32; of equals, the lowest.

    Frames are compared in blocks of one shape, so that a frame's code does not depend on those around it (see
    `featcache.extractors.frames`). Distances are `|x|² - 2xc + |c|²`, counted from the centroids' mean: of features
    far from zero, float32 would have few digits left for the differences.

    Args:
        centroids: float32 `[k, D]`.
        device: to compute on.
    """

    def __init__(self, centroids: torch.Tensor, device: torch.device) -> None:
        exact = centroids.to(device, torch.float64)
        self._middle = exact.mean(0).float()
        exact = exact - self._middle
        self._minus_twice = with_whole_columns(-2 * exact.float().T).contiguous()
        self._squares = torch.full((self._minus_twice.shape[1],), torch.inf, device=device)
        self._squares[: len(exact)] = exact.square().sum(1).float()
        self._rows = ROWS[device.type]

    def __call__(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the nearest centroids.

        Args:
            features: floats `[N, D]` on the device.

        Returns:
            The codes, int64 `[N]`, and the squared distances, float32 `[N]`.
        """
        codes = features.new_empty(len(features), dtype=torch.int64)
        distances = features.new_empty(len(features), dtype=torch.float32)
        for first in range(0, len(features), self._rows):
            block = features[first : first + self._rows].float() - self._middle
            used = len(block)
            block = torch.nn.functional.pad(block, (0, 0, 0, self._rows - used))
            nearest = torch.addmm(self._squares, block, self._minus_twice).min(1)
            codes[first : first + used] = nearest.indices[:used]
            distances[first : first + used] = (nearest.values + block.square().sum(1))[:used]
        return codes, distances.clamp_(min=0)
