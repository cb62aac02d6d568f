"""Lhotse: cuts whose requested frames, of features and other arrays, are read from a cache.

Manifests of cuts name the reader `featcache`. Import this module before you read their
features."""

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
from featcache.loader.shards import Spans
from featcache.loader.utterances import flat
from featcache.manifest.columns import records_of
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
    """Lhotse's reader of a version's features and arrays; Lhotse makes one for each array,
    with the version's folder, and `@` and a tag if it has one.

    The id alone decides: if an utterance is extracted again, from another file, saved cuts
    read its new features."""

    name = "featcache"

    def __init__(self, storage_path: str | Path) -> None:
        self._cache = cache_of(storage_path)

    def read(
        self, key: str, left_offset_frames: int = 0, right_offset_frames: int | None = None
    ) -> NDArray[Any]:
        """Read the frames of the utterance `key` from the left offset to the right offset,
        or to the end.

        Returns a new array `[frames, *item_shape]`: float32 if floats are stored, and
        otherwise the stored dtype. Raises MissingItemError or DamagedError."""
        position = self._cache.position(key)
        num_frames = int(self._cache.lengths[position])
        first, end, _ = slice(left_offset_frames, right_offset_frames).indices(num_frames)
        spans = Spans(np.array([position]), np.array([first]), np.array([max(0, end - first)]))
        frames = self._cache.gather(spans)[0]
        if frames.is_floating_point():
            frames = frames.float()
        return np.asarray(frames)


def cuts(given: Cache | FeatureDataset) -> CutSet:
    """Make a lazy `CutSet` of all utterances, in their order.

    A cut is a `MonoCut` with the utterance's id, its features and one supervision:

    * It is as long as its frames last. The audio may be longer, by less than a window, or
      shorter, by less than a frame.
    * Its `start` and `channel` are those of the manifest, or 0. Its recording is named by
      the manifest's `recording_id`, its `path`, or the utterance's id; no recording is
      attached. At another speed, they are those of the recording at that speed.
    * Its supervision has the manifest's `text`, `speaker`, `language` and `gender`, and
      in `custom` all other columns.

    With several versions, the first version's features are the cut's, and the others are
    arrays in its `custom`, by their names: `cut.load_codes()`.

    Args:
        given: A cache; or a dataset, which adds a manifest's columns.

    Raises:
        ArgumentError: The dataset crops its utterances, or reads only some codebooks: use
            `cut.truncate`, or slices.
        StoreError: A frame of the first version is not one row of numbers, or the number
            of samples from one frame to the next is not whole.
    """
    dataset = whole_dataset(given, "truncate cuts, or slice what they load")
    lazy_cuts = _Cuts(dataset)
    for version in dataset.versions:
        remember(version.cache)
    return CutSet(lazy_cuts)


class _Cuts:
    """An iterable that makes the cuts again in each iteration."""

    def __init__(self, dataset: FeatureDataset) -> None:
        first, *others = dataset.versions
        self._dataset = dataset
        self._cache = first.cache
        self._others = {version.name: version for version in others}
        path, spec = first.cache.version.path, first.cache.spec
        if len(spec.item_shape) != 1 or not spec.axis.exact_rate:
            raise StoreError(
                f"{path}: has features {spec.main.shape_text()}, but Lhotse's cuts need "
                "[frames, dims]: pass a dataset that has such a version first, then this one"
            )
        hop = float(spec.sample_rate / spec.axis.exact_rate)
        self._hop = round(hop)  # samples from one frame to the next
        if abs(hop - self._hop) > 1e-6 * hop:
            what = f"has {hop:g} samples from one frame to the next"
            raise StoreError(f"{path}: {what}, but Lhotse needs a whole number")

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[MonoCut]:
        dataset, num_rows = self._dataset, len(self._dataset)
        copies = copies_of(self._cache.config)
        speeds = copies.speeds[copies.numbers(flat(dataset.ids))].data
        lengths = {
            name: version.values_of(version.cache.lengths) for name, version in self._others.items()
        }
        return map(
            self._cut,
            dataset.ids,
            np.ascontiguousarray(dataset.lengths).data,
            speeds,
            records_of(dataset.columns, num_rows),
            records_of(lengths, num_rows),
        )

    def _cut(
        self,
        id_: str,
        num_frames: int,
        speed: float,
        columns: dict[str, Any],
        array_lengths: dict[str, int],
    ) -> MonoCut:
        cache, spec = self._cache, self._cache.spec
        duration = num_frames * self._hop / spec.sample_rate
        for name, value in [*columns.items()]:
            if isinstance(value, np.ndarray):
                columns[name] = value.tolist()  # which JSON can hold
            if value is None or (isinstance(value, float) and value != value):  # NaN
                del columns[name]
        start = columns.pop("start", 0.0) / speed
        channel = max(0, columns.pop("channel", 0))
        columns.pop("duration", None)
        path = columns.pop("path", "")
        recording = str(columns.pop("recording_id", path))
        if recording and speed != 1:
            recording += f"_sp{speed:g}"  # the suffix that Lhotse's perturb_speed adds
        recording = recording or id_
        labels = {name: str(columns.pop(name)) for name in SAID if name in columns}
        supervision = SupervisionSegment(
            id=id_,
            recording_id=recording,
            start=0.0,
            duration=duration,
            channel=channel,
            custom=columns or None,
            **labels,
        )
        features = Features(
            type=cache.config.get("extractor", cache.version.info.name),
            recording_id=recording,
            channels=channel,
            start=start,
            duration=duration,
            num_frames=num_frames,
            num_features=spec.item_shape[0],
            frame_shift=self._hop / spec.sample_rate,
            sampling_rate=spec.sample_rate,
            **_storage(cache, id_),
        )
        arrays = {
            name: _array(version.cache, id_, array_lengths[name], start)
            for name, version in self._others.items()
        }
        return MonoCut(
            id=id_,
            start=start,
            duration=duration,
            channel=channel,
            supervisions=[supervision],
            features=features,
            custom=arrays or None,
        )


def _array(cache: Cache, id_: str, num_frames: int, start: float) -> TemporalArray:
    array = Array(shape=[num_frames, *cache.spec.item_shape], **_storage(cache, id_))
    frame_shift = cache.spec.axis.seconds(1)
    return TemporalArray(array=array, temporal_dim=0, frame_shift=frame_shift, start=start)


def _storage(cache: Cache, id_: str) -> dict[str, str]:
    return {"storage_type": Reader.name, "storage_path": folder_of(cache), "storage_key": id_}
