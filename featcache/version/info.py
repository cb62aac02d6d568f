"""What a version says of itself: its config, its features, and what made it; and what may be in that."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Annotated, Any, Literal

import msgspec

from featcache.errors import DamagedError, StoreError, listing
from featcache.format.documents import AT_MOST_NAME, Hex
from featcache.format.group import read_attributes
from featcache.spec import DTYPES, QUANTIZATION, SIDE_NAME, FeatureSpec, SideSpec
from featcache.storage.location import Location

FORMAT: Literal[2] = 2

_FRAME_VALUES = 1 << 22
_CODES = 1 << 24
_LIBRARIES = (
    "featcache",
    "numpy",
    "torch",
    "torchaudio",
    "transformers",
    "soundfile",
    "miniaudio",
    "av",
    "soxr",
    "zarr",
)

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=AT_MOST_NAME)]


class _Noise(msgspec.Struct):
    manifest: str
    snr: Annotated[list[Annotated[float, msgspec.Meta(ge=-1000, le=1000)]], msgspec.Meta(max_length=100)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Augment(msgspec.Struct):
    speed: Annotated[list[Annotated[float, msgspec.Meta(ge=0.01, le=100)]], msgspec.Meta(max_length=100)]
    noise: _Noise | None = None


class _Config(msgspec.Struct):
    """What of a config is used without loading it."""

    extractor: str = ""
    augment: _Augment | None = None


class VersionInfo(msgspec.Struct, kw_only=True, frozen=True):
    """What the document of a version says."""

    format: Literal[2] = 2
    """The format of everything below the version's folder."""
    name: Name
    fingerprint: Hex
    """The config's fingerprint; see `featcache.config`."""
    config: dict[str, Any]
    """The config with every default filled in."""
    spec: FeatureSpec
    """What the features are when they are read; `spec.stored_dtype` is what is on disk."""
    made_by: dict[str, str]
    """The versions of featcache and of the libraries that made the version."""

    @property
    def folder_name(self) -> str:
        """The name of the version's folder in its cache."""
        return f"{self.name}-{self.fingerprint[:12]}"

    def require_sound(self) -> None:
        """Raise ValueError if the spec contradicts itself, no memory is enough for one frame, or the config is odd."""
        spec = self.spec
        msgspec.convert(self.config, _Config)
        _check_side_specs(spec.side)
        for name, shape in [
            ("frame", spec.item_shape),
            *((f"entry of {one.name}", one.item_shape) for one in spec.side),
        ]:
            if math.prod(shape) > _FRAME_VALUES:
                raise ValueError(f"one {name} has {math.prod(shape):,} values, and may have {_FRAME_VALUES:,}")
        if spec.is_quantized and spec.dtype != "float32":
            raise ValueError(f"quantised features of dtype {spec.dtype}")
        scales = [(one.dtype, one.item_shape) for one in spec.side if one.name == QUANTIZATION]
        if scales not in ([], [("float32", (2, *spec.item_shape))]):
            raise ValueError("scales and offsets of another form than the features")
        if sum(spec.codebook_sizes) > _CODES or (spec.codebook_sizes and spec.dtype.startswith("float")):
            raise ValueError(f"codes of {sum(spec.codebook_sizes):,} values, of dtype {spec.dtype}")


def _check_side_specs(specs: Sequence[SideSpec]) -> None:
    """Raise ValueError if side arrays cannot be stored beside each other."""
    for spec in specs:
        if not re.fullmatch(SIDE_NAME, spec.name):
            raise ValueError(f"side array {spec.name!r}: a name is lower-case letters, digits and _")
        if spec.dtype not in DTYPES:
            raise ValueError(f"side array {spec.name}: {spec.dtype!r} is none of {', '.join(DTYPES)}")
        if min(spec.item_shape, default=1) < 1:
            raise ValueError(f"side array {spec.name}: entries of shape {list(spec.item_shape)} hold no value")
    if len({spec.name for spec in specs}) < len(specs):
        raise ValueError(f"side arrays {listing(spec.name for spec in specs)}: two of them have the same name")


class _Kind(msgspec.Struct):
    kind: str = "frames"


class _Peek(msgspec.Struct):
    """What tells whether the rest can be understood."""

    format: int
    spec: _Kind


def read_info(data: bytes, path: Location) -> VersionInfo:
    """What a version says of itself, by the bytes of its `zarr.json`; `path` is the version's place. Raises StoreError
    if another featcache has written it; DamagedError if it is not what was written."""
    peek: _Peek = read_attributes(data, _Peek, path / "zarr.json", path)
    if peek.format == 1:
        raise StoreError(
            f"{path}: has format 1, which only development versions of featcache wrote: extract it again into another "
            "folder"
        )
    if peek.format != FORMAT:
        raise StoreError(f"{path}: has format {peek.format}; this featcache reads format {FORMAT}: upgrade it")
    if peek.spec.kind != "frames":
        raise StoreError(
            f"{path}: holds features of the kind {peek.spec.kind!r}, which this featcache cannot read: upgrade it"
        )
    info: VersionInfo = read_attributes(data, VersionInfo, path / "zarr.json", path)
    try:
        info.require_sound()
    except ValueError as error:
        raise DamagedError(f"{path / 'zarr.json'}: damaged: {error}", path) from error
    return info


def library_versions() -> dict[str, str]:
    """The versions of Python, of the libraries that decide values, and of libsndfile.

    They are recorded with every version and shard, and are no part of the fingerprint."""
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):  # an optional one
            versions[library] = version_of(library)
    try:
        import soundfile
    except ImportError:
        return versions
    return {**versions, "libsndfile": soundfile.__libsndfile_version__}
