"""What a part of a corpus costs, whatever the number of parts: planning, a rerun, opening; seconds and memory.

    python scripts/scale/parts.py --rows 1000000 --parts 1 3 10 --open 10 100 1000

One part is made by the store's own writer: items of one frame each, of rows of a Parquet manifest. The others are hard
links of it under other names. Each figure is of a process of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from featcache.config import load_config
from featcache.device import Device
from featcache.extraction.version_plan import BuiltConfig, version_info
from featcache.version.corpus import Part, PartVersion, put_part
from featcache.version.index import open_index
from featcache.version.selection import select_version
from featcache.version.version import Version

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from harness import in_child, options
from make_cache import add_shard, want_nothing

ITEMS = 100_000
"""The utterances of a shard."""

OPEN = """
import os, resource, sys, time, torch
import featcache
featcache.open  # which imports the loader
def kilobytes():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return [int(lines[name].split()[0]) for name in ("RssAnon", "RssFile")]
def counts():
    return len(os.listdir("/proc/self/fd")), sum(1 for _ in open("/proc/self/maps"))
before, had, started = kilobytes(), counts(), time.perf_counter()
corpus = featcache.open(sys.argv[1])
opened = time.perf_counter()
own, mapped = (after - earlier for after, earlier in zip(kilobytes(), before))
descriptors, maps = (after - earlier for after, earlier in zip(counts(), had))
started_batch = time.perf_counter()
corpus.batch(range(0, len(corpus), max(1, len(corpus) // 64)))
ended = time.perf_counter()
print(f"{len(corpus.parts)} parts, {len(corpus):,} utterances: opened in {opened - started:.3f} s, "
      f"{own / 1024:.0f} MB of its own, {mapped / 1024:.0f} MB mapped, {maps} maps, {descriptors} descriptors; "
      f"the first batch, of 64 from all parts, in {ended - started_batch:.3f} s")
"""

EPOCH = """
import resource, sys, time, torch
import featcache
dataset = featcache.FeatureDataset(featcache.open(sys.argv[1]))
before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
next(iter(featcache.BucketBatchSampler(dataset.lengths, batch_size=1000)))
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(f"first batch of an epoch after {time.perf_counter() - started:.2f} s, {memory / 1024:.0f} MB more memory")
"""


def make_part(cache: Path, manifest: Path, rows: int) -> None:
    """A manifest, and the version that extracting it would have made."""
    ids, path = [f"utterance-{row:08}" for row in range(rows)], "audio.flac"
    starts = np.arange(rows) / 10
    table = {"id": ids, "path": pa.array([path] * rows), "start": starts, "duration": np.full(rows, 0.1)}
    pyarrow.parquet.write_table(pa.table(table), manifest)
    built = BuiltConfig.build(load_config("mfcc13"), Device("cpu", 1).torch_device)
    info = version_info(built.config, built.extractor.spec)
    version = Version.create(cache / info.folder_name, info)
    want_nothing(version)
    frame = np.zeros((1, *info.spec.item_shape), version.dtype)
    for first in range(0, rows, ITEMS):
        numbers = range(first, min(first + ITEMS, rows))
        of_manifest = {ids[row]: {"path": path, "start": float(starts[row]), "duration": 0.1} for row in numbers}
        add_shard(version, dict.fromkeys(of_manifest, frame), row=first, rows=of_manifest)
    open_index(version)


def measured(*command: object) -> tuple[str, float, float]:
    """What a command prints, its seconds, and its peak of memory in MB."""
    started = perf_counter()
    process = subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    out = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, (command, status)
    return out, perf_counter() - started, usage.ru_maxrss / 1024


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
        _, start, base = measured("-m", "featcache", "configs")
        print(f"a command that does nothing: {start:.1f} s, {base:.0f} MB", flush=True)
        for count in given.parts:
            manifests, corpus = corpus_of(folder, folder / "part", folder / "part.parquet", count)
            command = ("-m", "featcache", "extract", f"{manifests}/*.parquet", "-c", "mfcc13", "-o", corpus)
            for what in ("first run, which finds everything there", "the same again"):
                _, seconds, memory = measured(*command, "--device", "cpu")
                print(f"{count} parts, {what}: {seconds:.1f} s, {seconds / count:.2f} s a part, {memory:.0f} MB")
        for count in given.open:
            corpus = folder / f"opened-{count}"
            for number in range(count):
                shutil.copytree(folder / "part", corpus / f"part-{number:04}", copy_function=os.link)
            record(corpus)
            print(measured("-c", OPEN, corpus)[0], end="", flush=True)
            print(f"{count} parts: {measured('-c', EPOCH, corpus)[0]}", end="", flush=True)


def record(corpus: Path) -> None:
    """Record what is known of the parts, which are links of one another, as extracting them would have done."""
    names = sorted(path.name for path in corpus.iterdir())
    version = select_version(corpus / names[0])
    known = {version.path.name: PartVersion.of(version, open_index(version))}
    for name in names:
        put_part(corpus, Part(name, "", versions=known))


if __name__ == "__main__":
    main()
