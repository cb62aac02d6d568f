"""What a part of a corpus costs, whatever the number of parts: planning, a rerun, opening; seconds and memory.

    python scripts/scale/parts.py --rows 1000000 --parts 1 3 10 --open 10 100 1000

One part is made by the store's own writer: items of one frame each, of rows of a Parquet manifest. The others are hard
links of it under other names. Each figure is of a process of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet

import featcache
from featcache.config import load_config
from featcache.device import Device
from featcache.extraction.version_plan import BuiltConfig
from featcache.version.corpus import Part, PartVersion, put_part
from featcache.version.index import open_index
from featcache.version.selection import select_version

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from harness import in_child, options, status_bytes
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
    table = {"id": ids, "path": pa.array([path] * rows), "start": starts, "duration": np.full(rows, 0.1)}
    pyarrow.parquet.write_table(pa.table(table), manifest)
    info = BuiltConfig(load_config("mfcc13"), Device("cpu", 1)).info
    version = create(cache, info)
    frame = np.zeros((1, *info.spec.item_shape), version.dtype)
    for first in range(0, rows, ITEMS):
        numbers = range(first, min(first + ITEMS, rows))
        of_manifest = {ids[row]: {"path": path, "start": float(starts[row]), "duration": 0.1} for row in numbers}
        add_shard(version, dict.fromkeys(of_manifest, frame), row=first, rows=of_manifest)
    open_index(version)


def open_corpus(path: Path) -> str:
    """What opening a corpus takes, and its first batch."""
    started, before = perf_counter(), resources()
    corpus = featcache.open(path)
    opened, after = perf_counter(), resources()
    own, mapped, descriptors, maps = (now - earlier for now, earlier in zip(after, before, strict=True))
    began = perf_counter()
    corpus.batch(range(0, len(corpus), max(1, len(corpus) // 64)))
    return (
        f"{len(corpus.parts)} parts, {len(corpus):,} utterances: opened in {opened - started:.3f} s, "
        f"{own / 1e6:.0f} MB of its own, {mapped / 1e6:.0f} MB mapped, {maps} maps, {descriptors} descriptors; "
        f"the first batch, of 64 from all parts, in {perf_counter() - began:.3f} s"
    )


def begin_epoch(path: Path) -> str:
    """What the first batch of an epoch takes."""
    dataset = featcache.FeatureDataset(featcache.open(path))
    before, started = status_bytes("VmHWM"), perf_counter()
    next(iter(featcache.BucketBatchSampler(dataset.lengths, batch_size=1000)))
    memory = (status_bytes("VmHWM") - before) / 1e6
    return f"first batch of an epoch after {perf_counter() - started:.2f} s, {memory:.0f} MB more memory"


def resources() -> tuple[int, ...]:
    """This process's own memory, what it has mapped of files, its descriptors and its maps."""
    maps = Path("/proc/self/maps").read_text().count("\n")
    return status_bytes("RssAnon"), status_bytes("RssFile"), len(os.listdir("/proc/self/fd")), maps


def corpus_of(folder: Path, source: Path, manifest: Path, count: int) -> tuple[Path, Path]:
    """A corpus of so many links of a part, and the folder of their manifests."""
    manifests, corpus = folder / f"manifests-{count}", folder / f"corpus-{count}"
    manifests.mkdir()
    for number in range(count):
        shutil.copytree(source, corpus / f"part-{number:03}", copy_function=os.link)
        os.link(manifest, manifests / f"part-{number:03}.parquet")
    return manifests, corpus


def main() -> None:
    given = options(
        __doc__,
        rows=1_000_000,
        parts=[1, 3, 10],
        open=([10, 100, 1000], "how many parts to open"),
        folder=(Path, "where to work; a temporary folder by default"),
    )
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        folder = Path(temporary)
        started = perf_counter()
        in_child(make_part, folder / "part", folder / "part.parquet", given.rows)  # whose memory is not this process's
        print(f"a part of {given.rows:,} rows, made in {perf_counter() - started:.0f} s", flush=True)
        start, base, *_ = watch([*FEATCACHE, "configs"])
        print(f"a command that does nothing: {start:.1f} s, {base:.0f} MB", flush=True)
        for count in given.parts:
            manifests, corpus = corpus_of(folder, folder / "part", folder / "part.parquet", count)
            command = [*FEATCACHE, "extract", f"{manifests}/*.parquet", "-c", "mfcc13", "-o", str(corpus)]
            for what in ("first run, which finds everything there", "the same again"):
                seconds, memory, *_ = watch([*command, "--device", "cpu"])
                print(f"{count} parts, {what}: {seconds:.1f} s, {seconds / count:.2f} s a part, {memory:.0f} MB")
        for count in given.open:
            corpus = folder / f"opened-{count}"
            for number in range(count):
                shutil.copytree(folder / "part", corpus / f"part-{number:04}", copy_function=os.link)
            record(corpus)
            print(in_child(open_corpus, corpus), flush=True)
            print(f"{count} parts: {in_child(begin_epoch, corpus)}", flush=True)


def record(corpus: Path) -> None:
    """Record what is known of the parts, which are links of one another, as extracting them would have done."""
    names = sorted(path.name for path in corpus.iterdir())
    version = select_version(corpus / names[0])
    known = {version.path.name: PartVersion.of(version, open_index(version))}
    for name in names:
        put_part(corpus, Part(name, "", versions=known))


if __name__ == "__main__":
    main()
