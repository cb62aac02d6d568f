"""Measure what a part of a corpus costs, for any number of parts: planning, a rerun,
opening; seconds and memory.

    python scripts/scale/parts.py --rows 1000000 --parts 1 3 10 --open 10 100 1000

One part is made by the store's own writer: items of one frame each, of rows of a Parquet
manifest. The others are hard links of it under other names. Each figure is of a process
of its own."""

import os
import shutil
import sys
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet

import featcache
from featcache.config import load_config
from featcache.device import Device
from featcache.extraction.built_config import BuiltConfig
from featcache.version.corpus import Part, PartVersion, put_part
from featcache.version.indexing import open_index
from featcache.version.selection import select_version

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from harness import Table, in_child, options, present, status_bytes, temporary_folder
from make_cache import add_shard
from memory import watch
from small_shards import create

FEATCACHE = [sys.executable, "-m", "featcache"]
ITEMS = 100_000
"""The utterances of a shard."""


def make_part(cache: Path, manifest: Path, rows: int) -> None:
    """A manifest, and the version that extracting it would have made."""
    ids, path = [f"utterance-{row:08}" for row in range(rows)], "audio.flac"
    starts = np.arange(rows) / 10
    table = {
        "id": ids,
        "path": pa.array([path] * rows),
        "start": starts,
        "duration": np.full(rows, 0.1),
    }
    pyarrow.parquet.write_table(pa.table(table), manifest)
    info = BuiltConfig(load_config("mfcc13"), Device("cpu", 1)).info
    version = create(cache, info)
    frame = np.zeros((1, *info.spec.item_shape), version.dtype)
    for first in range(0, rows, ITEMS):
        numbers = range(first, min(first + ITEMS, rows))
        of_manifest = {
            ids[row]: {"path": path, "start": float(starts[row]), "duration": 0.1}
            for row in numbers
        }
        add_shard(version, dict.fromkeys(of_manifest, frame), row=first, rows=of_manifest)
    open_index(version)


def open_corpus(path: Path) -> list[float]:
    """What opening a corpus takes: time, memory, maps and descriptors; and the time of a
    batch of 64 of all parts."""
    started, before = perf_counter(), resources()
    corpus = featcache.open(path)
    seconds = perf_counter() - started
    used = [after - earlier for after, earlier in zip(resources(), before, strict=True)]
    began = perf_counter()
    corpus.batch(range(0, len(corpus), max(1, len(corpus) // 64)))
    return [seconds, *used, perf_counter() - began]


def begin_epoch(path: Path) -> list[float]:
    """What the first batch of an epoch takes: seconds, and MB more of memory."""
    dataset = featcache.FeatureDataset(featcache.open(path))
    before, started = status_bytes("VmHWM"), perf_counter()
    next(iter(featcache.BucketBatchSampler(dataset.lengths, batch_size=1000)))
    return [perf_counter() - started, (status_bytes("VmHWM") - before) / 1e6]


def resources() -> list[float]:
    """MB of this process's own, MB that it has mapped of files, its maps and its
    descriptors."""
    maps = Path("/proc/self/maps").read_text().count("\n")
    return [
        status_bytes("RssAnon") / 1e6,
        status_bytes("RssFile") / 1e6,
        maps,
        len(os.listdir("/proc/self/fd")),
    ]


def corpus_of(part: Path, corpus: Path, count: int) -> Path:
    for number in range(count):
        shutil.copytree(part, corpus / f"part-{number:04}", copy_function=os.link)
    return corpus


def main() -> None:
    asked = options(
        __doc__,
        rows=1_000_000,
        parts=[1, 3, 10],
        open=([10, 100, 1000], "how many parts to open"),
        folder=(Path, "where to work; a temporary folder by default"),
    )
    runs = Table("runs", {"seconds": "{:.1f}", "a part": "{:.2f}", "MB": "{:,.0f}"})
    taken = {
        "opened in": "{:.3f} s",
        **dict.fromkeys(("MB of its own", "MB mapped", "maps", "descriptors"), "{:,.0f}"),
    }
    taken |= {"a batch in": "{:.3f} s", "an epoch begins in": "{:.2f} s", "more MB": "{:,.0f}"}
    opened = Table("opened", taken)
    with temporary_folder(asked.folder) as folder:
        part, manifest = folder / "part", folder / "part.parquet"
        in_child(make_part, part, manifest, asked.rows)  # whose memory is not this process's
        seconds, memory = watch([*FEATCACHE, "configs"])
        runs.add("a command that does nothing", seconds, None, memory)
        for count in asked.parts:
            corpus, manifests = (
                corpus_of(part, folder / f"corpus-{count}", count),
                folder / f"manifests-{count}",
            )
            manifests.mkdir()
            for path in corpus.iterdir():
                os.link(manifest, manifests / f"{path.name}.parquet")
            command = [
                *FEATCACHE,
                "extract",
                f"{manifests}/*.parquet",
                "-c",
                "mfcc13",
                "-o",
                str(corpus),
            ]
            for what in ("first run, which finds everything there", "the same again"):
                seconds, memory = watch([*command, "--device", "cpu"])
                runs.add(f"{count} parts, {what}", seconds, seconds / count, memory)
        for count in asked.open:
            corpus = corpus_of(part, folder / f"opened-{count}", count)
            record(corpus)
            figures = in_child(open_corpus, corpus) + in_child(begin_epoch, corpus)
            opened.add(f"{count} parts, {count * asked.rows:,} utterances", *figures)
    present(asked, runs, opened)


def record(corpus: Path) -> None:
    """Record what is known of the parts, which are links of one another, as extracting
    them would have done."""
    names = sorted(path.name for path in corpus.iterdir())
    version = select_version(corpus / names[0])
    known = {version.path.name: PartVersion.of(version, open_index(version))}
    for name in names:
        put_part(corpus, Part(name, "", versions=known))


if __name__ == "__main__":
    main()
