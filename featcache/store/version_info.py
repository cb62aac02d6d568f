"""What a version says of itself: its config, its features, and what made it; and what format 1 allows there."""

from __future__ import annotations

import math
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Any

from featcache.errors import ExtractorError
from featcache.spec import QUANTIZATION, FeatureSpec, SideSpec
from featcache.store import zarr3
from featcache.store.columns import SIDE_NAME, check_side_specs
from featcache.store.fields import anything, fields, listed, mapped, number, one_of, optional, text, whole

FORMAT = 1
MOST_NAME_CHARACTERS = 232
"""The longest name of a version: with its fingerprint, and while it is made, its folder's has 23 more; 255 may be."""

_FRAME_VALUES = 1 << 22
_CODES = 1 << 24
_SHAPE = listed(whole(1, _FRAME_VALUES), 8)
_NOISE = {"manifest": text(), "snr": listed(number(-1000, 1000), 100), "seed": whole(0, 2**64)}
_AUGMENT = fields(
    {},
    or_not={"speed": listed(number(0.01, 100), 100), "noise": optional(fields(_NOISE, others=anything))},
    others=anything,
)
_SIDE = {"name": text(SIDE_NAME), "item_shape": _SHAPE, "dtype": one_of(zarr3.DTYPES), "units": text()}
_VERSION = fields(
    {
        "format": whole(FORMAT, FORMAT),
        "name": text("[A-Za-z0-9][A-Za-z0-9._-]*", at_most=MOST_NAME_CHARACTERS),
        "fingerprint": text("[0-9a-f]{64}"),
        "config": fields({}, or_not={"extractor": text(), "augment": optional(_AUGMENT)}, others=anything),
        "spec": fields(
            {
                "item_shape": _SHAPE,
                "dtype": one_of(zarr3.DTYPES),
                "frame_rate": number(1e-6, 1e9),
                "frame_length": whole(0, 2**40),
                "sample_rate": whole(1, 10**9),
                "units": text(),
                "codebook_sizes": listed(whole(1, _CODES), 4096),
            },
            or_not={
                "padded_to": whole(0, 2**40),
                "side": listed(fields(_SIDE), 64),
            },
        ),
        "made_by": mapped(text(), text()),
    }
)
"""The attributes of a version's group."""

_LIBRARIES = ("featcache", "numpy", "torch", "torchaudio", "transformers", "soundfile", "miniaudio", "av", "soxr")


def library_versions() -> dict[str, str]:
    """The versions of Python, of the libraries that decide values, and of libsndfile.

    They are recorded with every version and shard, and are no part of the fingerprint.
    """
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):  # an optional one
            found[library] = version_of(library)
    try:
        import soundfile
    except ImportError:
        return found
    return {**found, "libsndfile": soundfile.__libsndfile_version__}


@dataclass(frozen=True)
class VersionInfo:
    """The attributes of a version's group."""

    name: str
    """The config's name."""
    fingerprint: str
    """The config's fingerprint, 64 hex digits; see `featcache.config`."""
    config: dict[str, Any]
    """The config with every default filled in."""
    spec: FeatureSpec
    """What the features are when they are read; `spec.stored_dtype` is what is on disk."""
    made_by: dict[str, str]
    """The versions of featcache and of the libraries that made the version."""
    format: int = FORMAT
    """The format of everything below the version's folder."""

    @classmethod
    def of(cls, attributes: dict[str, Any]) -> VersionInfo:
        """The attributes as JSON has them, checked.

        Raises:
            ValueError: Says which of them is not what format 1 allows.
        """
        checked = _VERSION(attributes)
        return cls(**{**checked, "spec": _spec_of(checked["spec"])})

    @property
    def folder_name(self) -> str:
        """The name of the version's folder in its cache."""
        return f"{self.name}-{self.fingerprint[:12]}"

    def attributes(self) -> dict[str, Any]:
        """As JSON has them: without `spec.side` if it is empty, and without `spec.padded_to` if it is 0."""
        attributes = asdict(self)
        if not self.spec.side:
            del attributes["spec"]["side"]
        if not self.spec.padded_to:
            del attributes["spec"]["padded_to"]
        return attributes


def _spec_of(document: dict[str, Any]) -> FeatureSpec:
    """A version's spec from JSON, which has lists for tuples; ValueError if its fields contradict each other."""
    shapes = {key: tuple(document[key]) for key in ("item_shape", "codebook_sizes")}
    side = tuple(SideSpec(**{**array, "item_shape": tuple(array["item_shape"])}) for array in document.get("side", []))
    spec = FeatureSpec(**{**document, **shapes, "side": side})
    try:
        check_side_specs(side)
    except ExtractorError as error:
        raise ValueError(str(error)) from error
    for name, shape in [("frame", spec.item_shape), *((f"entry of {one.name}", one.item_shape) for one in side)]:
        if math.prod(shape) > _FRAME_VALUES:
            raise ValueError(f"one {name} has {math.prod(shape):,} values, and may have {_FRAME_VALUES:,}")
    if spec.is_quantized and spec.dtype != "float32":
        raise ValueError(f"quantised features of dtype {spec.dtype}")
    scales = [(one.dtype, one.item_shape) for one in side if one.name == QUANTIZATION]
    if scales not in ([], [("float32", (2, *spec.item_shape))]):
        raise ValueError("scales and offsets of another form than the features")
    if sum(spec.codebook_sizes) > _CODES or (spec.codebook_sizes and spec.dtype.startswith("float")):
        raise ValueError(f"codes of {sum(spec.codebook_sizes):,} values, of dtype {spec.dtype}")
    return spec
