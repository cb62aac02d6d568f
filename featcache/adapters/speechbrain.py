"""SpeechBrain: features as a dynamic item of its datasets, or gathered for each batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.adapters.caches import dataset_of, missing_toolkit, require_same
from featcache.errors import ArgumentError, MissingItemError, listing
from featcache.loader.cache import Cache
from featcache.loader.corpus import Corpus
from featcache.loader.dataset import FeatureDataset, FrameRanges
from featcache.manifest.columns import records_of

try:
    from speechbrain.dataio.batch import PaddedBatch
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.utils.data_pipeline import DynamicItem
    from speechbrain.utils.data_utils import batch_pad_right
except ImportError as error:
    raise missing_toolkit(error, "speechbrain") from error


def item(
    given: Cache | FeatureDataset, *, takes: str = "id", provides: str | None = None
) -> DynamicItem:
    """Make a dynamic item that reads features: `dataset.add_dynamic_item(item(cache))`.

    The id alone decides: other columns of SpeechBrain's table are not compared.

    Args:
        given: A cache; or a dataset, which may crop, and whose columns are not used.
        takes: The key of the utterances' ids.
        provides: The key of the features, `feats` by default: a tensor `[frames,
            *item_shape]` of the stored dtype. A dataset with several versions provides
            the features of each version under its name.

    Raises:
        ArgumentError: `provides` is given, and there are several versions.
    """
    reader = _Reader(given, provides)
    return DynamicItem(takes=[takes], func=reader.read, provides=reader.keys)


def to_dynamic_item_dataset(
    given: Cache | FeatureDataset, *, provides: str | None = None
) -> DynamicItemDataset:
    """Make a `DynamicItemDataset` of the same utterances, in the same order.

    Its output keys are the dataset's columns, the number of frames as `num_frames`, and the
    features as a dynamic item; leave out the features if `Collate` is to gather them. Empty
    cells of `start` and `duration` become 0, and the seconds that the features last.

    Args:
        given: A cache or a dataset.
        provides: The key of the features, as for `item`.

    Raises:
        ArgumentError: A column has the name of something else that the dataset provides;
            or as for `item`.
    """
    dataset = dataset_of(given)
    features = item(dataset, provides=provides)
    added = {"num_frames", *features.provides}
    hidden = [repr(name) for name in dataset.columns if name in added]
    if hidden:
        what = f"the columns {listing(hidden)} would hide what the dataset itself provides"
        raise ArgumentError(f"{what}: rename them")
    axis = dataset.versions[0].cache.spec.axis
    defaults = {"start": 0.0, "duration": axis.seconds(dataset.lengths)}
    columns = dict(dataset.columns)
    for name in defaults.keys() & columns.keys():
        columns[name] = np.where(np.isnan(columns[name]), defaults[name], columns[name])
    columns["num_frames"] = dataset.lengths
    data = dict(zip(dataset.ids, records_of(columns, len(dataset)), strict=True))
    if len(data) < len(dataset):
        what = f"{len(dataset) - len(data):,} rows have the id of another"
        raise ArgumentError(f"{what}, and SpeechBrain knows rows by id: select some with where=")
    return DynamicItemDataset(data, [features], ["id", *features.provides, *columns])


class Collate:
    """A `collate_fn` that gathers the features of a batch in one call: for
    `make_dataloader`, `SaveableDataLoader`.

    The batch is the `PaddedBatch` that examples with features would give, with the
    features last. The dataset's output keys must include the ids, and must not include
    the features. As with `item`, the id alone decides.

    Args:
        given: A cache; or a dataset, which may crop, and whose padding value is used.
        takes: The key of the utterances' ids.
        provides: The key of the features, as for `item`.
        options: Arguments of `PaddedBatch`, for the other keys.

    Raises:
        ArgumentError: `provides` is given, and there are several versions; or the
            examples of a batch have no ids, or have features.
        MissingItemError: The utterance of an example does not exist.
    """

    def __init__(
        self,
        given: Cache | FeatureDataset,
        *,
        takes: str = "id",
        provides: str | None = None,
        **options: Any,
    ) -> None:
        self._reader = _Reader(given, provides)
        self._takes = takes
        self._pad_others = options.pop("padding_func", batch_pad_right)
        if options.get("padded_keys") is not None:
            options["padded_keys"] = [*options["padded_keys"], *self._reader.keys]
        self._options = options

    def __call__(self, examples: Sequence[dict[str, Any]]) -> PaddedBatch:
        """Collate examples into a batch."""
        keys = self._reader.keys
        if self._takes not in examples[0]:
            what = f"examples have no {self._takes!r}"
            raise ArgumentError(f"{what}: include it in set_output_keys, to find features")
        read = [repr(key) for key in keys if key in examples[0]]
        if read:
            raise ArgumentError(
                f"examples have {listing(read)} already, read one by one: leave them out of "
                "set_output_keys, or collate with PaddedBatch"
            )
        gathered = self._reader.gather([example[self._takes] for example in examples])
        # PaddedBatch passes these to `pad`, which replaces them
        places = {key: torch.empty(0) for key in keys}

        def pad(tensors: Sequence[torch.Tensor], **options: Any) -> Any:
            for key, place in places.items():
                if tensors[0] is place:
                    return gathered[key]
            return self._pad_others(tensors, **options)

        examples = [example | places for example in examples]
        return PaddedBatch(examples, padding_func=pad, **self._options)


class _Reader:
    def __init__(self, source: Cache | FeatureDataset, provides: str | None) -> None:
        self.dataset = dataset_of(source)
        self.keys = [provides or "feats"]
        if not isinstance(self.dataset.cache, Cache):
            if provides is not None:
                what = f"provides is {provides!r}, but the dataset's versions have names"
                raise ArgumentError(f"{what}: leave it out")
            self.keys = self.dataset.names
        first = self.dataset.versions[0]
        rows = np.arange(len(self.dataset))
        self._cache = first.cache
        positions = first.positions_of(rows)
        if isinstance(self._cache, Corpus):
            positions = self._cache.find(self.dataset.ids)
        # the dataset's row of each position to which its ids lead
        self._rows = np.full(len(self._cache), -1)
        self._rows[positions] = rows
        require_same(first, self.dataset, first.positions_of(self._rows[positions]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Share the open files: filtering a dataset copies its items."""
        return self

    def read(self, id_: str) -> Any:
        position = np.array([self._cache.position(id_)])
        values = tuple(ranges.gather()[0] for ranges in self._ranges(position))
        if len(values) == 1:
            return values[0]
        return values

    def gather(self, ids: Iterable[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Gather padded features by key, and their lengths relative to the longest, float32
        `[batch]`."""
        gathered = {}
        for key, ranges in zip(self.keys, self._ranges(self._cache.find(ids)), strict=True):
            lengths = (ranges.counts / max(int(ranges.counts.max()), 1)).astype(np.float32)
            gathered[key] = ranges.gather(), torch.from_numpy(lengths)
        return gathered

    def _ranges(self, positions: NDArray[np.int64]) -> list[FrameRanges]:
        rows = self._rows[positions]
        outside = positions[rows < 0].tolist()
        if outside:
            ids = listing(self._cache.ids[position] for position in outside)
            raise MissingItemError(f"in the cache, but not in the dataset given: {ids}")
        return self.dataset.frame_ranges(rows, self.dataset.epoch)
