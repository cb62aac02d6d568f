"""SpeechBrain: features as an item of its datasets' pipelines, or gathered in one call for each `PaddedBatch`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.adapters.given import caches_of, dataset_of, missing, position_of
from featcache.errors import ArgumentError, MissingItemError, listing
from featcache.loader import Cache, FeatureDataset
from featcache.strings import Strings

if TYPE_CHECKING:
    from speechbrain.dataio.batch import PaddedBatch
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.utils.data_pipeline import DynamicItem

__all__ = ["Collate", "item", "to_dynamic_item_dataset"]


def item(given: Cache | FeatureDataset, *, takes: str = "id", provides: str | None = None) -> DynamicItem:
    """A dynamic item that reads features by id: `dataset.add_dynamic_item(item(cache))`.

    The id alone decides: what else SpeechBrain's table says of an utterance, such as its file, is not compared.

    Args:
        given: a cache; or a dataset, which may crop, and whose own columns are not looked at.
        takes: the key of the utterances' ids.
        provides: the key of the features, `feats` by default: a tensor `[frames, *item_shape]` of the stored dtype. Of
            a dataset with several versions, each is provided by its name.

    Raises:
        MissingDependencyError: SpeechBrain is not installed.
        ArgumentError: `provides` is given, and there are several versions.
    """
    try:
        from speechbrain.utils.data_pipeline import DynamicItem
    except ImportError as error:
        raise missing(error, "speechbrain") from error
    reader = _Reader(given, provides)
    return DynamicItem(takes=[takes], func=reader.read, provides=reader.keys)


def to_dynamic_item_dataset(given: Cache | FeatureDataset, *, provides: str | None = None) -> DynamicItemDataset:
    """A `DynamicItemDataset` of the same utterances, in the same order.

    It has the dataset's columns, how long each utterance is as `num_frames`, and the features as a dynamic item. All of
    them are among its output keys; leave out the features where `Collate` is to gather them. Empty cells of `start` are
    0, and those of `duration` the seconds that the features last: SpeechBrain sorts and filters by them.

    Args:
        given: a cache, or a dataset.
        provides: as for `item`.

    Raises:
        MissingDependencyError: SpeechBrain is not installed.
        ArgumentError: a column has the name of something else that the dataset is to provide; or as `item` does.
    """
    try:
        from speechbrain.dataio.dataset import DynamicItemDataset
    except ImportError as error:
        raise missing(error, "speechbrain") from error
    dataset = dataset_of(given)
    features = item(dataset, provides=provides)
    hidden = [repr(name) for name in dataset.columns if name in ("num_frames", *features.provides)]
    if hidden:
        raise ArgumentError(f"the columns {listing(hidden)} would hide what the dataset itself provides: rename them")
    names = [*dataset.columns, "num_frames"]
    frame_rate = next(iter(caches_of(dataset).values())).spec.frame_rate
    if_empty = {"start": np.zeros(len(dataset)), "duration": dataset.lengths / frame_rate}
    columns = [_values(column, if_empty.get(name)) for name, column in dataset.columns.items()]
    rows = zip(*columns, dataset.lengths.tolist(), strict=True)
    data = {id_: dict(zip(names, row, strict=True)) for id_, row in zip(dataset.ids, rows, strict=True)}
    return DynamicItemDataset(data, [features], ["id", *features.provides, *names])


class Collate:
    """A `collate_fn` that gathers the features of a batch in one call: for `make_dataloader`, `SaveableDataLoader`.

    The batch is the `PaddedBatch` that would come of examples with the features in them, which come last. So leave
    their key out of the dataset's output keys, or each utterance is read for itself, and have the ids among them. As
    with `item`, the id alone decides.

    Args:
        given: a cache; or a dataset, which may crop, and says what to pad with.
        takes: the key of the utterances' ids.
        provides: as for `item`.
        options: for `PaddedBatch`; they concern the other keys.

    Raises:
        MissingDependencyError: SpeechBrain is not installed.
        ArgumentError: `provides` is given, and there are several versions; or the examples of a batch have no ids, or
            have features.
        MissingItemError: an example is of an utterance that is not there.
    """

    def __init__(
        self, given: Cache | FeatureDataset, *, takes: str = "id", provides: str | None = None, **options: Any
    ) -> None:
        try:
            from speechbrain.utils.data_utils import batch_pad_right
        except ImportError as error:
            raise missing(error, "speechbrain") from error
        self._reader = _Reader(given, provides)
        self._takes = takes
        self._pad_others = options.pop("padding_func", batch_pad_right)
        if options.get("padded_keys") is not None:
            options["padded_keys"] = [*options["padded_keys"], *self._reader.keys]
        self._options = options

    def __call__(self, examples: Sequence[dict[str, Any]]) -> PaddedBatch:
        """The batch of some examples."""
        from speechbrain.dataio.batch import PaddedBatch

        keys = self._reader.keys
        if self._takes not in examples[0]:
            raise ArgumentError(
                f"examples have no {self._takes!r}: include it in set_output_keys, since features are found by it"
            )
        if read := [repr(key) for key in keys if key in examples[0]]:
            raise ArgumentError(
                f"examples have {listing(read)} already, read one by one: leave them out of set_output_keys, or "
                "collate with PaddedBatch"
            )
        gathered = self._reader.gather([example[self._takes] for example in examples])
        places = {key: torch.empty(0) for key in keys}  # PaddedBatch is to hand them to `pad`, where they are known

        def pad(tensors: Sequence[torch.Tensor], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
            for key, place in places.items():
                if tensors[0] is place:
                    return gathered[key]
            padded: tuple[torch.Tensor, torch.Tensor] = self._pad_others(tensors, **options)
            return padded

        return PaddedBatch([{**example, **places} for example in examples], padding_func=pad, **self._options)


class _Reader:
    """Reads a dataset's utterances by their ids."""

    def __init__(self, given: Cache | FeatureDataset, provides: str | None) -> None:
        self.dataset = dataset_of(given)
        has_names = not isinstance(self.dataset.cache, Cache)
        if has_names and provides is not None:
            raise ArgumentError(f"provides is {provides!r}, but the dataset's versions have names: leave it out")
        self.keys = self.dataset.names if has_names else [provides or "feats"]
        self._cache = next(iter(caches_of(self.dataset).values()))
        self._rows: NDArray[np.int64] | None = None  # by the cache's positions; None: the same
        if self.dataset.ids is not self._cache.ids:
            self._rows = np.full(len(self._cache), -1)
            self._rows[self._cache.find(self.dataset.ids)] = np.arange(len(self.dataset))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Filtering a DynamicItemDataset copies its items: they may share what is open."""
        return self

    def read(self, id_: str) -> Any:
        """The features of one utterance: a tensor, or one of each version."""
        rows = self._rows_at(np.array([position_of(self._cache, id_)]))
        values = self._of(self.dataset.batch(rows)["features"])
        return values[0][0] if len(values) == 1 else tuple(value[0] for value in values)

    def gather(self, ids: Iterable[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Padded features by key, and how much of the longest each is, float32 `[batch]`."""
        batch = self.dataset.batch(self._rows_at(self._cache.find(ids)))
        values = zip(self._of(batch["features"]), self._of(batch["lengths"]), strict=True)
        return {key: (padded, _relative(counts)) for key, (padded, counts) in zip(self.keys, values, strict=True)}

    def _rows_at(self, positions: NDArray[np.int64]) -> list[int]:
        """The dataset's rows of utterances at these positions in the cache."""
        rows = positions if self._rows is None else self._rows[positions]
        if len(outside := positions[rows < 0]):
            there = listing(self._cache.ids[position] for position in outside.tolist())
            raise MissingItemError(f"in the cache, but not in the dataset given: {there}")
        found: list[int] = rows.tolist()
        return found

    def _of(self, values: Any) -> list[torch.Tensor]:
        return list(values.values()) if isinstance(values, dict) else [values]


def _values(column: Strings | NDArray[Any], if_nan: NDArray[np.float64] | None) -> list[Any]:
    """A column as plain values, with others in place of NaN."""
    if isinstance(column, Strings):
        return list(column)
    values: list[Any] = (column if if_nan is None else np.where(np.isnan(column), if_nan, column)).tolist()
    return values


def _relative(counts: torch.Tensor) -> torch.Tensor:
    """Lengths as SpeechBrain has them: 1 for the longest of the batch."""
    longest = max(int(counts.max()), 1)
    return torch.tensor([count / longest for count in counts.tolist()])
