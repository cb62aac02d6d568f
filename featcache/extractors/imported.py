"""Features that another program made, read from its files: NumPy's, PyTorch's, Kaldi's
archives, and Lhotse's storages of lilcom and HDF5. Nothing in a file is executed."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Sequence
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from featcache.errors import AudioError, ExtractorError, MissingDependencyError, Reason, first_line
from featcache.extractors.base import Clip, Extractor, Params
from featcache.spec import MAIN, FeatureSpec, Frames, Track
from featcache.spec import Clip as WholeClip

if TYPE_CHECKING:
    import torch

_Size = Annotated[int, Field(ge=1, le=1 << 22)]
_Dtype = Literal["float32", "float16", "uint8", "uint16", "uint32", "int32", "int64"]
_Array = NDArray[Any]


class ImportedParams(Params):
    """The parameters of `imported`."""

    made_by: Annotated[str, Field(min_length=1, max_length=1000)]
    """The program, config and version that made the features. Another text makes another
    version."""
    item_shape: tuple[_Size, ...] = ()
    """The shape of a frame, such as [80]."""
    dtype: _Dtype = "float32"
    """The dtype of the features. Files may have another dtype, if this dtype holds its
    values."""
    frame_rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Frames per second. Default: a file holds one vector of its clip."""
    units: Annotated[str, Field(max_length=200)] = "imported features"
    """The meaning of a value, for readers."""
    codebook_sizes: tuple[_Size, ...] = ()
    """For codes, the size of each codebook."""

    @property
    def bytes_per_second(self) -> float:
        """The bytes of a second of frames of this dtype; 0 of vectors."""
        return math.prod(self.item_shape) * np.dtype(self.dtype).itemsize * (self.frame_rate or 0)


class Imported(Extractor[ImportedParams]):
    """Features of files, with the frame rate and the shape of the parameters."""

    Params = ImportedParams
    revision = 1
    batching = "frames"  # no clip is ever padded

    def __init__(self, params: ImportedParams, sample_rate: int, device: torch.device) -> None:
        axis = WholeClip() if params.frame_rate is None else Frames(params.frame_rate)
        main = Track(
            MAIN, params.item_shape, params.dtype, params.units, axis, params.codebook_sizes
        )
        self.spec = FeatureSpec.of(sample_rate, main)
        self.spec.require_sound()

    @classmethod
    def stored_dtype(cls, params: ImportedParams) -> str:
        return params.dtype

    def num_frames(self, num_samples: int) -> int:
        return 1

    def extract(self, clips: Sequence[Clip]) -> Any:
        raise ExtractorError("imported features are read from files, and not made of waveforms")

    def read(self, file: str, inside: str) -> _Array:
        """Read the features of a file, or of an entry inside it, as entries `[entries,
        *item_shape]` of the spec's dtype. Raises AudioError if they are damaged or have
        another shape; MissingDependencyError."""
        values = read_array(file, inside)
        spec = self.spec
        shape = (*(len(values) for _ in spec.axis.dimensions), *spec.item_shape)
        if values.shape != shape or 0 in shape:
            wanted = spec.main.shape_text()
            raise _damaged(f"its shape is {[*values.shape]}, and the config says {wanted}")
        if values.dtype.kind not in "biuf":
            raise _damaged(f"its values are {values.dtype}, and no real numbers")
        with np.errstate(over="ignore"):  # what is not finite is refused for all versions
            cast = values.astype(spec.dtype)
        is_rounded = cast.dtype == np.float32 and values.dtype.kind == "f"
        if not is_rounded and not np.array_equal(cast, values, equal_nan=True):
            raise _damaged(f"{spec.dtype} cannot hold its values, of {values.dtype}")
        entries: _Array = spec.axis.as_entries(cast)
        sizes = spec.codebook_sizes
        if sizes and ((entries < 0) | (entries >= np.reshape(sizes, spec.item_shape))).any():
            raise _damaged(f"it has a code beyond the codebooks' sizes {[*sizes]}")
        return entries


def read_array(file: str, inside: str) -> _Array:
    """Read the array of a file, or of an entry inside it. Raises AudioError if the file is
    damaged, or its name is no name of features; MissingDependencyError."""
    suffix = os.path.splitext(file)[1].lower()
    if suffix not in _READERS:
        names = ", ".join(_READERS)
        raise _damaged(f"its name has none of the endings of features: {names}")
    try:
        return _READERS[suffix](file, inside)
    except (AudioError, MissingDependencyError):
        raise
    except FileNotFoundError:
        raise AudioError(Reason.FILE_MISSING, "there is no such file") from None
    except Exception as error:  # noqa: BLE001 - whatever damage makes a reader raise
        raise _damaged(f"it cannot be read: {first_line(error)}") from None


def _damaged(what: str) -> AudioError:
    return AudioError(Reason.NOT_FEATURES, what)


def _read_npy(file: str, inside: str) -> _Array:
    # mapped, so that a damaged header takes no memory
    return np.array(np.lib.format.open_memmap(file, mode="r"))


def _read_pt(file: str, inside: str) -> _Array:
    import torch

    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError:  # whose message says how to execute what is in the file
        raise _damaged("it is no file of torch.save, or holds more than tensors") from None
    if not isinstance(loaded, torch.Tensor):
        raise _damaged(f"it holds a {type(loaded).__name__}, and not one tensor")
    if loaded.nbytes > loaded.untyped_storage().nbytes():  # a few bytes may say any shape
        raise _damaged("its tensor repeats values of a smaller one: save a copy by .clone()")
    if loaded.dtype == torch.bfloat16:
        loaded = loaded.float()
    return loaded.detach().numpy()


# Kaldi: https://github.com/kaldi-asr/kaldi/blob/master/src/matrix/compressed-matrix.h


def _read_kaldi(file: str, inside: str) -> _Array:
    """Read a binary matrix or vector of Kaldi's, from the byte `inside` on."""
    with open(file, "rb") as archive:
        archive.seek(int(inside or 0))
        if archive.read(2) != b"\0B":
            raise _damaged("there is no binary matrix of Kaldi's: copy-feats makes them")
        kind = b""
        while not kind.endswith(b" ") and len(kind) < 5:
            kind += archive.read(1)
        name = kind.decode("ascii", "replace").strip()
        if name in _PLAIN:
            dtype, dimensions = _PLAIN[name]
            sizes = [struct.unpack("<bi", _taken(archive, 5))[1] for _ in range(dimensions)]
            return _values(archive, dtype, sizes)
        if name not in ("CM", "CM2", "CM3"):
            raise _damaged(f"its kind is {name!r}, which is no matrix or vector of floats")
        return _read_compressed(archive, name)


_PLAIN = {"FM": ("<f4", 2), "FV": ("<f4", 1), "DM": ("<f8", 2), "DV": ("<f8", 1)}
"""The dtype and the dimensions of what is not compressed."""


def _read_compressed(archive: BinaryIO, kind: str) -> _Array:
    least, span, rows, columns = struct.unpack("<ffii", _taken(archive, 16))
    low, width = np.float32(least), np.float32(span)
    if kind == "CM2":
        return low + width * np.float32(1 / 65535) * _values(archive, "<u2", [rows, columns])
    if kind == "CM3":
        return low + width * np.float32(1 / 255) * _values(archive, "u1", [rows, columns])
    marks = low + width * np.float32(1 / 65535) * _values(archive, "<u2", [columns, 4])
    levels = _values(archive, "u1", [columns, rows]).astype(np.float32)
    zeroth, quarter, three_quarters, last = (mark[:, None] for mark in marks.T)
    below = zeroth + (quarter - zeroth) * levels * np.float32(1 / 64)
    middle = quarter + (three_quarters - quarter) * (levels - 64) * np.float32(1 / 128)
    above = three_quarters + (last - three_quarters) * (levels - 192) * np.float32(1 / 63)
    values = np.where(levels <= 64, below, np.where(levels <= 192, middle, above))
    return np.ascontiguousarray(values.T)


def _values(archive: BinaryIO, dtype: str, shape: Sequence[int]) -> _Array:
    if min(shape) < 0:
        raise _damaged(f"its header says the shape {[*shape]}")
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    return np.frombuffer(_taken(archive, num_bytes), dtype).reshape(shape)


def _taken(archive: BinaryIO, num_bytes: int) -> bytes:
    left = os.fstat(archive.fileno()).st_size - archive.tell()
    if not 0 <= num_bytes <= left:  # before memory is allocated
        raise AudioError(Reason.TRUNCATED, f"the file ends {num_bytes - left:,} bytes too early")
    return archive.read(num_bytes)


# Lhotse: https://github.com/lhotse-speech/lhotse/blob/master/lhotse/features/io.py


def _lilcom() -> Any:
    try:
        import lilcom
    except ImportError as error:
        raise MissingDependencyError("lilcom", "features in lilcom", "imports") from error
    return lilcom


def _read_lilcom(file: str, inside: str) -> _Array:
    with open(file, "rb") as opened:
        values: _Array = _lilcom().decompress(opened.read())
    return values


def _read_chunks(file: str, inside: str) -> _Array:
    """Read chunks of lilcom: `inside` has the first one's offset, and the size of each."""
    first, *sizes = map(int, inside.split(","))
    with open(file, "rb") as opened:
        opened.seek(first)
        chunks = [_lilcom().decompress(_taken(opened, size)) for size in sizes]
    return np.concatenate(chunks)


def _read_hdf5(file: str, inside: str) -> _Array:
    """Read a dataset of HDF5: numbers, or arrays packed by lilcom, in one or in chunks."""
    try:
        import h5py
    except ImportError as error:
        raise MissingDependencyError("h5py", "features in HDF5", "imports") from error
    with h5py.File(file, "r") as opened:
        if inside not in opened:
            raise AudioError(Reason.FILE_MISSING, f"the file has no entry {inside!r}")
        dataset = opened[inside]
        leads_away = dataset.file.filename != opened.filename or dataset.external
        if leads_away or dataset.is_virtual:
            raise _damaged("its entry leads to another file, which is not read")
        if dataset.nbytes > max(_UNPACKED_BYTES, _UNPACKED_TIMES * os.path.getsize(file)):
            raise _damaged(f"its entry would unpack to {dataset.nbytes:,} bytes")
        values = dataset[()]
    if isinstance(values, np.void):
        return np.asarray(_lilcom().decompress(values.tobytes()))
    if values.dtype == object or values.dtype.kind == "V":
        return np.concatenate([_lilcom().decompress(chunk.tobytes()) for chunk in values])
    return np.asarray(values)


_UNPACKED_BYTES, _UNPACKED_TIMES = 1 << 30, 100  # as of compressed tars
_READERS: dict[str, Callable[[str, str], _Array]] = {
    ".npy": _read_npy,
    ".pt": _read_pt,
    ".ark": _read_kaldi,
    ".llc": _read_lilcom,
    ".lca": _read_chunks,
    ".h5": _read_hdf5,
}
