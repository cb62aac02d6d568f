"""Hugging Face datasets: a column of features that is read from a cache on access, or a copy.

A dataset saved with such a column names a type of this module. So import the module
before you load such a dataset: `import featcache.adapters.huggingface`."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from featcache.adapters.caches import cache_of, dataset_of, missing_toolkit, remember, whole_dataset
from featcache.errors import ArgumentError
from featcache.loader.cache import Cache
from featcache.loader.dataset import FeatureDataset
from featcache.loader.utterances import flat
from featcache.manifest.columns import TypedColumn, Values, to_arrow
from featcache.strings import Strings

try:
    import datasets
    import pyarrow as pa
except ImportError as error:
    raise missing_toolkit(error, "huggingface") from error

_ARRAYS = {1: datasets.Array2D, 2: datasets.Array3D, 3: datasets.Array4D, 4: datasets.Array5D}


@dataclass
class CachedFeatures:
    """The type of a column that holds utterances' ids, and whose values are their
    features, `[frames, *item_shape]`.

    As with `datasets.Audio`, a value is read when it is accessed, and nothing is copied
    into the dataset. A value is a numpy array of the stored dtype that belongs to the
    caller; formats convert it like any array. The id alone decides: if an utterance is
    extracted again, from another file, a saved dataset reads its new features."""

    path: str
    """The version's folder."""
    decode: bool = True
    """Whether values are the features; otherwise they are the ids."""
    id: str | None = field(default=None, repr=False)
    dtype: ClassVar[str] = "numpy.ndarray"
    pa_type: ClassVar[Any] = pa.string()
    _type: str = field(default="CachedFeatures", init=False, repr=False)

    def __call__(self) -> Any:
        """The Arrow type of what is stored."""
        return self.pa_type

    def encode_example(self, value: str) -> str:
        """What is stored for a value: an id. An ArgumentError refuses anything else."""
        if not isinstance(value, str):
            raise _no_id(type(value).__name__)
        return value

    def cast_storage(self, storage: Any) -> Any:
        """The Arrow array that is stored for an Arrow array of values: ids. `map` writes
        what its function accessed, and would write features, which an ArgumentError
        refuses."""
        if storage.type not in (pa.string(), pa.large_string(), pa.null()):
            raise _no_id(str(storage.type))
        return storage.cast(self.pa_type)

    def decode_example(self, value: str, token_per_repo_id: Any = None) -> NDArray[Any]:
        """The features of an utterance; a MissingItemError if the cache does not have it,
        a DamagedError for damage."""
        features = cache_of(self.path)[value]
        return features if features.flags.writeable else features.copy()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # which says that the function is experimental
    datasets.features.features.register_feature(CachedFeatures, CachedFeatures.__name__)


def to_hf(
    given: Cache | FeatureDataset, *, copy: bool = False, cache_dir: str | None = None
) -> datasets.Dataset:
    """A `datasets.Dataset` of the same utterances, in the same order.

    Its columns are `id`, `features` (with several versions, one for each, called by its
    name), and the dataset's own: text, int64 or float64. Its fingerprint, of its content
    and the versions' folders, is the same in every process.

    Args:
        given: A cache or a dataset.
        copy: Whether to write the features into an Arrow file of Hugging Face's, as
            `Array2D` and the like. By default there is no copy: features are read from
            the cache when they are accessed, also after `save_to_disk`, which saves their
            ids.
        cache_dir: The folder for copies; by default Hugging Face's own.

    Raises:
        ArgumentError: A column has the name of a version; or the dataset crops its
            utterances, or reads only some codebooks, and `copy` is not set.
    """
    dataset = (
        dataset_of(given)
        if copy
        else whole_dataset(given, "take parts of what you read, or copy=True")
    )
    if hidden := [name for name in dataset.columns if name in dataset.names]:
        raise ArgumentError(
            f"the column {hidden[0]!r} would hide the version of that name: rename one of them"
        )
    caches = {version.name: version.cache for version in dataset.versions}
    folders = {name: remember(cache) for name, cache in caches.items()}
    columns = {name: _arrow(column) for name, column in dataset.columns.items()}
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    types = datasets.Features.from_arrow_schema(schema)
    fingerprint = _fingerprint(dataset, folders, copy)
    values = {
        name: _array_type(cache) if copy else CachedFeatures(folders[name])
        for name, cache in caches.items()
    }
    features = datasets.Features({"id": datasets.Value("string"), **values, **types})
    if copy:
        options: dict[str, Any] = {"cache_dir": cache_dir, "fingerprint": fingerprint}
        return datasets.Dataset.from_generator(
            _rows, features, gen_kwargs={"dataset": dataset}, **options
        )
    ids = _arrow(flat(dataset.ids))
    table = pa.Table.from_arrays(
        [ids, *(ids for _ in folders), *columns.values()], schema=features.arrow_schema
    )
    return datasets.Dataset(
        table, info=datasets.DatasetInfo(features=features), fingerprint=fingerprint
    )


def _arrow(column: TypedColumn) -> Any:
    """A column as an Arrow array; as text, if its values have no type in common."""
    if isinstance(column, np.ndarray):
        return pa.array(column)
    return pa.array(column, pa.string()) if isinstance(column, Strings) else to_arrow(column, pa)


def _no_id(what: str) -> ArgumentError:
    remedy = (
        'have map name what its function looks at, as in input_columns=["features"], and '
        "write to another column"
    )
    return ArgumentError(f"a column of CachedFeatures holds ids, not {what}: {remedy}")


def _rows(dataset: FeatureDataset) -> Iterator[dict[str, Any]]:
    columns = {name: _arrow(column) for name, column in dataset.columns.items()}
    for row in range(len(dataset)):
        item = dataset[row]
        features = item.pop("features")
        named = {dataset.names[0]: features} if isinstance(dataset.cache, Cache) else features
        cells = {name: column[row].as_py() for name, column in columns.items()}
        yield {**item, **cells, **{name: value.numpy() for name, value in named.items()}}


def _array_type(cache: Cache) -> Any:
    shape, dtype = cache.spec.item_shape, cache.spec.dtype
    return (
        _ARRAYS[len(shape)]((None, *shape), dtype)
        if shape
        else datasets.List(datasets.Value(dtype))
    )


def _fingerprint(dataset: FeatureDataset, folders: dict[str, str], copy: bool) -> str:
    """A hash of the dataset: of its columns, and of its versions' folders and shards."""
    digest = hashlib.sha256(repr((copy, folders)).encode())
    for version in dataset.versions:
        digest.update(
            repr((version.cache.version.info.fingerprint, version.cache.index.shards)).encode()
        )
    for part in dataset.frame_ranges(np.arange(len(dataset)), dataset.epoch) if copy else ():
        digest.update(repr(part.version.codebooks).encode())
        for numbers in (part.firsts, part.counts):
            digest.update(numbers.tobytes())
    for name, column in {"id": flat(dataset.ids), **dataset.columns}.items():
        digest.update(f"{name} {getattr(column, 'dtype', 'string')}".encode())
        arrays = [column] if isinstance(column, np.ndarray) else []
        if isinstance(column, Values):
            arrays, column = [column.kinds], column.texts
        if isinstance(column, Strings):
            arrays += [column.blob, column.offsets]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()[:16]
