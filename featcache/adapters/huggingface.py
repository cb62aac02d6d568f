"""Hugging Face datasets: a column of features that is read from a cache on access, or a copy.

Before you load a saved dataset with such a column, import this module, which defines the
column's type."""

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
from featcache.export.huggingface import as_arrow, type_of_features
from featcache.loader.cache import Cache
from featcache.loader.dataset import FeatureDataset
from featcache.loader.utterances import flat

try:
    import datasets
    import pyarrow as pa
except ImportError as error:
    raise missing_toolkit(error, "huggingface") from error


@dataclass
class CachedFeatures:
    """The type of a column that stores ids, and whose values are the utterances' features,
    `[frames, *item_shape]`.

    As with `datasets.Audio`, a value is read when it is accessed. It is a numpy array of
    the stored dtype that belongs to the caller. The id alone decides: if an utterance is
    extracted again, from another file, a saved dataset reads its new features."""

    path: str
    """The version's folder."""
    decode: bool = True
    """True if values are the features; otherwise they are the ids."""
    id: str | None = field(default=None, repr=False)
    dtype: ClassVar[str] = "numpy.ndarray"
    pa_type: ClassVar[Any] = pa.string()
    _type: str = field(default="CachedFeatures", init=False, repr=False)

    def __call__(self) -> Any:
        """Return the stored Arrow type."""
        return self.pa_type

    def encode_example(self, value: str) -> str:
        """Return an id. Raises ArgumentError for anything else."""
        if not isinstance(value, str):
            raise _no_id(type(value).__name__)
        return value

    def cast_storage(self, storage: Any) -> Any:
        """Return the stored array of ids. Raises ArgumentError for features, which `map`
        would write because its function accessed them."""
        if storage.type not in (pa.string(), pa.large_string(), pa.null()):
            raise _no_id(str(storage.type))
        return storage.cast(self.pa_type)

    def decode_example(self, value: str, token_per_repo_id: Any = None) -> NDArray[Any]:
        """Return the features of an utterance. Raises MissingItemError or DamagedError."""
        features = cache_of(self.path)[value]
        if features.flags.writeable:
            return features
        return features.copy()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the function is experimental
    datasets.features.features.register_feature(CachedFeatures, CachedFeatures.__name__)


def to_hf(
    given: Cache | FeatureDataset, *, copy: bool = False, cache_dir: str | None = None
) -> datasets.Dataset:
    """Make a `datasets.Dataset` of the same utterances, in the same order.

    Its columns are `id`, `features` (with several versions, one for each, called by its
    name), and the dataset's own: text, int64 or float64. Its fingerprint, of its content
    and the versions' folders, is the same in every process.

    Args:
        given: A cache or a dataset.
        copy: Whether to write the features into an Arrow file of Hugging Face's, as
            `Array2D` and the like. By default, features are read from the cache when they
            are accessed, also after `save_to_disk`, which saves their ids.
        cache_dir: The folder for copies; by default Hugging Face's own.

    Raises:
        ArgumentError: A column has the name of a version; or the dataset crops its
            utterances, or reads only some codebooks, and `copy` is not set.
    """
    dataset = dataset_of(given)
    if not copy:
        whole_dataset(dataset, "take parts of what you read, or copy=True")
    for name in dataset.columns:
        if name in dataset.names:
            what = f"the column {name!r} would hide the version of that name"
            raise ArgumentError(f"{what}: rename one of them")
    folders = {version.name: remember(version.cache) for version in dataset.versions}
    columns = {name: as_arrow(column, pa) for name, column in dataset.columns.items()}
    schema = pa.schema([(name, column.type) for name, column in columns.items()])
    types: dict[str, Any] = {"id": datasets.Value("string")}
    types |= {name: CachedFeatures(folder) for name, folder in folders.items()}
    if copy:
        arrays = {version.name: type_of_features(version.cache) for version in dataset.versions}
        types |= datasets.Features.from_dict(arrays)
    features = datasets.Features(types | datasets.Features.from_arrow_schema(schema))
    fingerprint = _fingerprint(dataset, folders, columns, copy)
    if copy:
        return datasets.Dataset.from_generator(
            _rows,
            features,
            gen_kwargs={"dataset": dataset},
            cache_dir=cache_dir,
            fingerprint=fingerprint,
        )
    ids = [as_arrow(flat(dataset.ids), pa)] * (1 + len(folders))
    table = pa.Table.from_arrays([*ids, *columns.values()], schema=features.arrow_schema)
    info = datasets.DatasetInfo(features=features)
    return datasets.Dataset(table, info=info, fingerprint=fingerprint)


def _no_id(kind: str) -> ArgumentError:
    return ArgumentError(
        f"a column of CachedFeatures holds ids, not {kind}: have map name what its function "
        'looks at, as in input_columns=["features"], and write to another column'
    )


def _rows(dataset: FeatureDataset) -> Iterator[dict[str, Any]]:
    columns = {name: as_arrow(column, pa) for name, column in dataset.columns.items()}
    caches = {version.name: version.cache for version in dataset.versions}
    for number in range(len(dataset)):
        row = dataset[number]
        features = row.pop("features")
        if isinstance(dataset.cache, Cache):
            features = {dataset.names[0]: features}
        row |= {name: column[number].as_py() for name, column in columns.items()}
        row |= {name: _array_of(features[name], caches[name]) for name in features}
        yield row


def _array_of(features: Any, cache: Cache) -> Any:
    """Return a tensor as an array; of bfloat16, which Arrow lacks, as float32."""
    if cache.spec.dtype != cache.spec.values_dtype.name:
        features = features.float()
    return features.numpy()


def _fingerprint(
    dataset: FeatureDataset, folders: dict[str, str], columns: dict[str, Any], copy: bool
) -> str:
    digest = hashlib.sha256(repr((copy, folders)).encode())
    for version in dataset.versions:
        cache = version.cache
        digest.update(repr((cache.version.info.fingerprint, cache.index.shards)).encode())
    if copy:
        for part in dataset.frame_ranges(np.arange(len(dataset)), dataset.epoch):
            digest.update(repr(part.version.codebooks).encode())
            digest.update(part.firsts.tobytes())
            digest.update(part.counts.tobytes())
    table = pa.table({"id": as_arrow(flat(dataset.ids), pa), **columns})
    for name in table.column_names:
        column = table[name]
        digest.update(f"{name} {column.type}".encode())
        for chunk in column.chunks:  # of at most 2 GiB of text
            for buffer in chunk.buffers():
                digest.update(buffer or b"")
    return digest.hexdigest()[:16]
