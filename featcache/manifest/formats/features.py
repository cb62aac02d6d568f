"""Manifests of features that another program made: a folder of `.npy` or `.pt` files, a
`feats.scp` of Kaldi's, or features or cuts of Lhotse's. A path is the path of the
features."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from featcache.errors import ManifestError, listing
from featcache.manifest.formats.folders import batches_of_paths, files_below
from featcache.manifest.formats.kaldi import recordings
from featcache.manifest.formats.source import Batch, Source, batched
from featcache.manifest.formats.tables import json_rows
from featcache.manifest.utterances import float_of

SUFFIXES = (".npy", ".pt")
"""The suffixes of files that hold the features of one utterance."""

_STORAGES = (
    "lilcom_files",
    "lilcom_chunky",
    "lilcom_hdf5",
    "chunked_lilcom_hdf5",
    "numpy_files",
    "numpy_hdf5",
)
"""Lhotse's storages whose path and key together are a path here."""

_COLUMNS = ("id", "path", "start", "duration", "frame_rate", "sample_rate")


def read_features(source: Source) -> Iterator[Batch]:
    """Read where the features of each utterance are."""
    if not source.is_folder:
        if {"features", "storage_type"} & source.first_object.keys():
            source.has_types = True
            yield from batched(json_rows(source.text), _COLUMNS, _of_lhotse, source.faults)
        elif source.first_object or source.suffix == ".csv":
            kinds = "a folder of .npy or .pt, a feats.scp, or Lhotse's cuts or features"
            raise ManifestError(f"names no features: import reads {kinds}")
        else:
            yield from recordings(source.text, False)
    elif "feats.scp" in source.names:
        with source.opened("feats.scp") as file:
            yield from recordings(file, False)
    else:
        files = files_below(source.path)
        paths = [path for path in files if path.lower().endswith(SUFFIXES)]
        yield from batches_of_paths(source, paths)


def _of_lhotse(row: dict[str, Any]) -> list[Any]:
    """Read the cells of a cut, or of features without a cut, whose id is the recording's."""
    try:
        return _cells_of(row)
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"these are no cut with features of Lhotse's: {error!r}") from None


def _cells_of(row: dict[str, Any]) -> list[Any]:
    features = row
    if "storage_type" not in row:
        features = row.get("features") or {}
    storage = features.get("storage_type")
    if storage not in _STORAGES:
        if storage == "featcache":  # as `export --to lhotse` writes them
            cache = features.get("storage_path")
            raise ValueError(
                f"its features are in the cache {cache} already: featcache copy copies it"
            )
        if storage == "shar":
            raise ValueError(
                "its features are members of a tar: unpack features.*.tar, and import that"
            )
        known = listing(_STORAGES)
        raise ValueError(f"the storage {storage!r} of its features is none of {known}")
    id_ = row.get("id", features.get("recording_id"))
    start = duration = None
    shift, sample_rate = features["frame_shift"], int(float_of(features["sampling_rate"]))
    if features is not row:
        start = row["start"] - features["start"]
        duration = row["duration"]
        is_whole = math.isclose(duration, features["duration"], abs_tol=1e-4)
        if is_whole and abs(start) < 1e-4:
            start = duration = None
        else:
            start = _whole_frames(start, shift, sample_rate)
            duration = max(shift, _whole_frames(duration, shift, sample_rate))
    path = f"{features['storage_path']}/{features['storage_key']}"
    return [id_, path, start, duration, round(1 / shift, 6), sample_rate]


def _whole_frames(seconds: float, shift: float, sample_rate: int) -> float:
    """Round seconds to frames as `lhotse.utils.compute_num_frames` does: half a frame up."""
    hop = round(shift * sample_rate)
    frames = (round(seconds * sample_rate) + hop // 2) // hop
    return round(frames * shift, 9)
