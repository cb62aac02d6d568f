"""Lhotse: cuts whose requested frames, of features and other arrays, are read from a cache.

Manifests of cuts name the reader `featcache`. Import this module before you read their
features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.adapters.caches import cache_of, missing_toolkit, remember, whole_dataset
from featcache.errors import ArgumentError, StoreError
from featcache.export.lhotse import CutMaker, folder_of, stored_in_cache
from featcache.export.rows import without_missing
from featcache.loader.cache import Cache
from featcache.loader.dataset import FeatureDataset
from featcache.loader.shards import Spans
from featcache.loader.utterances import flat
from featcache.manifest.columns import records_of
from featcache.manifest.strings import Strings

try:
    from lhotse import CutSet, Features, MonoCut, SupervisionSegment
    from lhotse.array import Array, TemporalArray
    from lhotse.features.io import FeaturesReader, register_reader
except ImportError as error:
    raise missing_toolkit(error, "lhotse") from error


@register_reader
class Reader(FeaturesReader):  # type: ignore[misc]
    """Lhotse's reader of a version's features and arrays; Lhotse makes one for each array,
    with the version's folder, and its tag and its track if it has them.

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

        Returns a new array `[frames, *item_shape]`, or `[*item_shape]` of a vector: float32
        if floats are stored, and otherwise the stored dtype. Raises MissingItemError or
        DamagedError."""
        position = self._cache.position(key)
        num_frames = int(self._cache.lengths[position])
        first, end, _ = slice(left_offset_frames, right_offset_frames).indices(num_frames)
        count = max(0, end - first)
        spans = Spans(np.array([position]), np.array([first]), np.array([count]))
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
        try:
            CutMaker(first.cache, Strings.of([]))
        except ArgumentError as error:
            remedy = "pass a dataset that has another version first, then this one"
            raise StoreError(f"{error}: {remedy}") from error

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[MonoCut]:
        dataset, num_rows = self._dataset, len(self._dataset)
        ids = flat(dataset.ids)
        maker, folder = CutMaker(self._cache, ids), folder_of(self._cache)
        lengths = {
            name: version.values_of(version.cache.lengths) for name, version in self._others.items()
        }
        rows = zip(
            ids,
            np.ascontiguousarray(dataset.lengths).data,
            records_of(dataset.columns, num_rows),
            records_of(lengths, num_rows),
            strict=True,
        )
        for number, (id_, num_frames, columns, array_lengths) in enumerate(rows):
            columns, storage = without_missing(columns), stored_in_cache(folder, id_)
            cut = maker.make(number, id_, num_frames, columns, storage)
            if self._others:
                cut["custom"] = {
                    name: _array(version.cache, id_, array_lengths[name], cut["start"])
                    for name, version in self._others.items()
                }
            del cut["type"]
            cut["features"] = Features(**cut["features"])
            cut["supervisions"] = [SupervisionSegment(**one) for one in cut["supervisions"]]
            yield MonoCut(**cut)


def _array(cache: Cache, id_: str, num_entries: int, start: float) -> Array | TemporalArray:
    """Make the array of an utterance; one without frames in time is whole in every part of
    its cut."""
    axis, shape = cache.spec.axis, [*cache.spec.item_shape]
    if axis.is_ragged:
        shape = [num_entries, *shape]
    array = Array(shape=shape, **stored_in_cache(folder_of(cache), id_))
    if not axis.exact_rate:
        return array
    return TemporalArray(array=array, temporal_dim=0, frame_shift=axis.seconds(1), start=start)
