"""Lhotse: cuts whose features and other arrays are read from a cache, and only the
requested frames.

Manifests of cuts name the reader `featcache`. So wherever such manifests are read, import
this module before reading features: `import featcache.adapters.lhotse`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.adapters.caches import cache_of, folder_of, missing_toolkit, remember, whole_dataset
from featcache.errors import StoreError
from featcache.loader.cache import Cache
from featcache.loader.dataset import FeatureDataset
from featcache.loader.spans import Spans
from featcache.loader.utterances import flat, records_of
from featcache.manifest.copies import copies_of
from featcache.manifest.formats.lhotse import SAID

try:
    from lhotse import CutSet, Features, MonoCut, SupervisionSegment
    from lhotse.array import Array, TemporalArray
    from lhotse.features.io import FeaturesReader, register_reader
except ImportError as error:
    raise missing_toolkit(error, "lhotse") from error


@register_reader
class Reader(FeaturesReader):  # type: ignore[misc]
    """The reader with which Lhotse reads features and arrays of a version; Lhotse makes
    one for each array.

    The id alone decides: Lhotse passes a reader nothing else about a cut. So if an
    utterance is extracted again, from another file, saved cuts read its new features.

    Args:
        storage_path: The version's folder, and `@` and a tag if it is of one.
    """

    name = "featcache"

    def __init__(self, storage_path: str | Path) -> None:
        self._cache = cache_of(storage_path)

    def read(
        self, key: str, left_offset_frames: int = 0, right_offset_frames: int | None = None
    ) -> NDArray[Any]:
        """The frames of the utterance `key` from the left offset to the right one, or to
        the end; no others are read.

        Returns a new array `[frames, *item_shape]`: float32 if floats are stored, and
        otherwise the stored dtype. Raises MissingItemError if there is no such utterance,
        DamagedError if its shard is damaged."""
        position = self._cache.position(key)
        first, end, _ = slice(left_offset_frames, right_offset_frames).indices(
            int(self._cache.lengths[position])
        )
        spans = Spans(np.array([position]), np.array([first]), np.array([max(0, end - first)]))
        frames = self._cache.gather(spans)[0]
        return np.asarray(frames.float() if frames.is_floating_point() else frames)


def cuts(given: Cache | FeatureDataset) -> CutSet:
    """Cuts of all utterances, in their order: a lazy `CutSet`, which makes cuts as you
    iterate over it.

    A cut is a `MonoCut` with the utterance's id, its features and one supervision:

    * It is as long as its frames last, so that Lhotse computes the right number of
      frames. The audio may be longer, by less than a window, or shorter, by less than a
      frame.
    * Its `start` and `channel` are those of the manifest, or 0. Its recording has the
      manifest's `recording_id` as its name, or else its `path`, or else the utterance's
      id; no recording is attached. At another speed, they are those of the recording at
      that speed, as in Lhotse.
    * Its supervision has the manifest's `text`, `speaker`, `language` and `gender`, and
      in `custom` all other columns.

    If the dataset has several versions, the features of the first are the cut's, and the
    others are arrays in its `custom`, by their names: `cut.load_codes()`.

    Args:
        given: A cache; or a dataset, which adds a manifest's columns.

    Raises:
        ArgumentError: The dataset crops its utterances, or reads only some codebooks: use
            `cut.truncate`, or slices.
        StoreError: A frame of the first version is not one row of numbers, or the number
            of samples from one frame to the next is not whole; Lhotse has no such
            features.
    """
    dataset = whole_dataset(given, "truncate cuts, or slice what they load")
    lazy_cuts = _Cuts(dataset)
    for version in dataset.versions:
        remember(version.cache)
    return CutSet(lazy_cuts)


class _Cuts:
    """An iterable of the cuts, which are made anew in each iteration."""

    def __init__(self, dataset: FeatureDataset) -> None:
        first, *others = dataset.versions
        self._dataset, self._cache = dataset, first.cache
        self._others = {version.name: version for version in others}
        path, spec = first.cache.version.path, first.cache.spec
        if len(spec.item_shape) != 1 or not spec.axis.exact_rate:
            needed = (
                "Lhotse's cuts need [frames, dims]: pass a dataset that has such a version "
                "first, then this one"
            )
            raise StoreError(f"{path}: has features {spec.main.shape_text()}, but {needed}")
        hop = float(spec.sample_rate / spec.axis.exact_rate)
        self._hop = round(hop)  # samples from one frame to the next
        if abs(hop - self._hop) > 1e-6 * hop:
            raise StoreError(
                f"{path}: has {hop:g} samples from one frame to the next, but Lhotse needs "
                "a whole number"
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[MonoCut]:
        dataset, copies = self._dataset, copies_of(self._cache.config)
        others = {
            name: version.values_of(version.cache.lengths) for name, version in self._others.items()
        }
        numbers = {
            "num_frames": dataset.lengths,
            "speed": copies.speeds[copies.numbers(flat(dataset.ids))],
        }
        records = (
            records_of(columns, len(dataset)) for columns in (numbers, dataset.columns, others)
        )
        for id_, of_cut, columns, counts in zip(dataset.ids, *records, strict=True):
            yield self._cut(id_, columns, counts, **of_cut)

    def _cut(
        self,
        id_: str,
        columns: dict[str, Any],
        counts: dict[str, int],
        num_frames: int,
        speed: float,
    ) -> MonoCut:
        spec = self._cache.spec
        duration = num_frames * self._hop / spec.sample_rate
        # None and NaN are no values
        columns = {
            name: value for name, value in columns.items() if value is not None and value == value
        }
        start, channel = columns.pop("start", 0.0) / speed, max(0, columns.pop("channel", 0))
        columns.pop("duration", None)
        path = columns.pop("path", "")
        recording = str(columns.pop("recording_id", path))
        if recording and speed != 1:
            recording += f"_sp{speed:g}"  # the suffix that Lhotse's perturb_speed adds
        recording = recording or id_
        known = {name: str(columns.pop(name)) for name in SAID if name in columns}
        segment = {"id": id_, "duration": duration, "channel": channel}
        supervision = SupervisionSegment(
            recording_id=recording, start=0.0, **segment, **known, custom=columns or None
        )
        kind = self._cache.config.get("extractor", self._cache.version.info.name)
        time = {
            "frame_shift": self._hop / spec.sample_rate,
            "sampling_rate": spec.sample_rate,
            "start": start,
        }
        shape = {"num_frames": num_frames, "num_features": spec.item_shape[0]}
        place = {"recording_id": recording, "channels": channel, **_storage(self._cache, id_)}
        features = Features(type=kind, duration=duration, **time, **shape, **place)
        arrays = {
            name: _array(other.cache, id_, counts[name], start)
            for name, other in self._others.items()
        }
        return MonoCut(
            start=start,
            **segment,
            supervisions=[supervision],
            features=features,
            custom=arrays or None,
        )


def _array(cache: Cache, id_: str, num_frames: int, start: float) -> TemporalArray:
    """The utterance in another version, as an array of the cut."""
    array = Array(shape=[num_frames, *cache.spec.item_shape], **_storage(cache, id_))
    return TemporalArray(
        array=array, temporal_dim=0, frame_shift=cache.spec.axis.seconds(1), start=start
    )


def _storage(cache: Cache, id_: str) -> dict[str, str]:
    """Where Lhotse finds an utterance's array."""
    return {"storage_type": Reader.name, "storage_path": folder_of(cache), "storage_key": id_}
