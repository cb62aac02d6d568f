"""Measure what float16 and uint8 cost: bytes, differences from float32, and the time of
an epoch's batches.

    pip install '.[extract]'
    python scripts/bench/quantization.py MANIFEST [--config fbank80]

The manifest is extracted three times, into a folder of its own, which goes afterwards.
`bytes` are those of features on disk, for uint8 with their scales and offsets.
Differences are in the features' units; `noise` is the root of the mean square of them
over the standard deviation of the values. Time is of reading all utterances in padded
batches of 64 from the page cache, best of twenty: as values, and as levels, whose values
a GPU would compute."""

from dataclasses import replace
from functools import partial

import numpy as np
from harness import Table, options, present, quick_turns, temporary_folder

import featcache
from featcache.config import load_config
from featcache.loader.cache import Cache

DTYPES = ("float32", "float16", "uint8")
ARRAYS = ("features", "side_quantization")
PASSES = 20


def bytes_of(cache: Cache) -> int:
    """Of features, scales and offsets on disk."""
    files = (
        file
        for array in ARRAYS
        for file in cache.version.path.glob(f"shards/*/{array}/**/0")
        if file.is_file()
    )
    return sum(file.stat().st_size for file in files)


def differences(cache: Cache, reference: Cache) -> tuple[float, float, float]:
    """The largest, the mean, and the root of the mean square over the standard deviation."""
    apart = np.concatenate([(cache[id_] - reference[id_]).ravel() for id_ in reference.ids]).astype(
        np.float64
    )
    values = np.concatenate([item.ravel() for item in reference.values()]).astype(np.float64)
    return (
        np.abs(apart).max(),
        np.abs(apart).mean(),
        np.sqrt(np.square(apart).mean()) / values.std(),
    )


def read_all(cache: Cache, raw: bool) -> None:
    order = np.random.default_rng(0).permutation(len(cache))
    for first in range(0, len(order), 64):
        cache.batch(order[first : first + 64], raw=raw)


def main() -> None:
    asked = options(
        __doc__, "manifest", config=("fbank80", "whose features; its stored dtype does not matter")
    )
    configs = [replace(load_config(asked.config), name=dtype, dtype=dtype) for dtype in DTYPES]
    with temporary_folder() as folder:
        featcache.extract(asked.manifest, configs, folder)
        caches = {dtype: featcache.open(folder, dtype) for dtype in DTYPES}
        reference = caches["float32"]
        runs = {
            f"{dtype}, {raw}": partial(read_all, cache, raw)
            for dtype, cache in caches.items()
            for raw in (False, True)
        }
        turns = quick_turns(runs, PASSES, 1)
        seconds = reference.lengths.sum() / reference.spec.frame_rate / len(reference)
        formats = {"bytes": "{:.1%}", "largest": "{:.4f}", "mean": "{:.5f}", "noise": "{:.3%}"}
        formats |= {"values": "{:.1f} µs", "levels": "{:.1f} µs"}
        table = Table(f"{len(reference):,} utterances of {seconds:.2f} s", formats)
        for dtype, cache in caches.items():
            times = (1e6 * turns.best(f"{dtype}, {raw}") / len(cache) for raw in (False, True))
            table.add(
                dtype, bytes_of(cache) / bytes_of(reference), *differences(cache, reference), *times
            )
        present(asked, table)


if __name__ == "__main__":
    main()
