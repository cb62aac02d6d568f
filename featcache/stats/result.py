"""Statistics of a version's features, and the file that keeps them."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, StoreError
from featcache.storage.base import open_store
from featcache.storage.files import write_file

FORMAT = "featcache stats 1"

_AT_MOST_BYTES = 1 << 30

_STILL = 1e-3
"""A dimension hardly varies if its standard deviation is at most this part of the median over dimensions."""


@dataclass(frozen=True, eq=False)
class Stats:
    """Mean and variance of every dimension of a version's features.

    Variances are those of the frames themselves, not estimates for other frames: sum((x - mean)²) / frames."""

    version: str
    """The name of the version's folder."""
    fingerprint: str
    units: str
    """What a value means, for a reader."""
    frames: int
    utterances: int
    mean: NDArray[np.float64]
    """The mean of every dimension, float64 `[*item_shape]`."""
    variance: NDArray[np.float64]
    """The variance of every dimension, float64 `[*item_shape]`."""
    by: str | None = None
    """The column of the manifest whose values are the groups; None if there are no groups."""
    groups: list[str] = field(default_factory=list)
    """The names of the groups, sorted."""
    group_frames: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The number of frames of each group, int64 `[groups]`."""
    group_utterances: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The number of utterances of each group, int64 `[groups]`."""
    group_mean: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """The mean of every dimension of each group, float64 `[groups, *item_shape]`."""
    group_variance: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    """The variance of every dimension of each group, float64 `[groups, *item_shape]`."""

    @property
    def std(self) -> NDArray[np.float64]:
        """Standard deviations, float64 `[*item_shape]`."""
        return np.sqrt(self.variance)

    @property
    def still(self) -> list[int]:
        """The dimensions that hardly vary, in C order: silent channels, for example, or bins above the audio's band."""
        std = self.std.ravel()
        return np.flatnonzero(std <= _STILL * np.median(std)).tolist()

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the file: an `.npz` of the fields by their names. Equal statistics give equal bytes.

        Raises:
            ArgumentError: The file exists, and `overwrite` is not set.
            StoreError: It cannot be written.
        """
        refuse_to_replace(Path(path), overwrite)
        arrays: dict[str, Any] = {"format": FORMAT, **vars(self), "by": self.by or ""}
        if self.by is None:
            arrays = {name: value for name, value in arrays.items() if not name.startswith("group")}
        data = io.BytesIO()
        np.savez(data, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})
        write_file(Path(path), data.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Stats:
        """Read the file. Nothing in it is ever unpickled.

        Raises:
            StoreError: There is no such file, or it is not a file of statistics.
        """
        place = Path(path)
        try:
            data = io.BytesIO(open_store(place.parent).read(place.name, _AT_MOST_BYTES))
            with zipfile.ZipFile(data) as members:
                # What is packed might unpack to any size; `save` packs nothing.
                if any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist()):
                    raise ValueError("packed")
            with np.load(data, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except FileNotFoundError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{path}: not a file written by `featcache stats`") from error
        if str(arrays.pop("format", "")) != FORMAT:
            raise StoreError(f"{path}: not a file written by `featcache stats`")
        scalar = ("version", "fingerprint", "units", "frames", "utterances")
        try:
            scalars = {name: arrays[name].item() for name in scalar}
            groups = [str(name) for name in arrays["groups"].tolist()] if "groups" in arrays else []
            stats = cls(**{**arrays, **scalars, "by": arrays["by"].item() or None, "groups": groups})
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path}: damaged: an incomplete file of `featcache stats` ({error})") from error
        if (fault := stats._fault()) is not None:
            raise StoreError(f"{path}: damaged: {fault}")
        return stats

    def _fault(self) -> str | None:
        """What is wrong with the arrays, if anything."""
        groups = (len(self.groups), *self.mean.shape) if self.by is not None else (0,)
        shapes = {"mean": self.mean.shape, "variance": self.mean.shape, "group_mean": groups, "group_variance": groups}
        for name, shape in shapes.items():
            array = getattr(self, name)
            if array.dtype != np.float64 or array.shape != shape or not np.isfinite(array).all():
                return f"{name} is {array.dtype} {list(array.shape)}, and must be finite float64 {list(shape)}"
        return None


def refuse_to_replace(path: Path, overwrite: bool) -> None:
    """Raise an ArgumentError if a file exists, and `overwrite` is not set."""
    if path.exists() and not overwrite:
        raise ArgumentError(f"{path}: already exists: give another name, or --force to replace it")
