"""Of a large manifest, a job of an array keeps its own rows and hashes of the others: its
plan and its messages are those of all rows."""

import os
import threading

import pytest

from featcache.config import load_config
from featcache.errors import ManifestError
from featcache.extraction.options import Options
from featcache.extraction.partition import Partition
from featcache.extraction.plan import plan_extraction
from featcache.extraction.tasks import shard_tasks
from featcache.manifest.read import read_manifest, read_some_rows

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


PARQUET = {
    "plain": {"duration": [1.5, 2.5, 0.5, 3.0, 1.0, 2.0, 0.25]},
    "without durations": {},
    "some durations": {"duration": [1.5, None, 0.5, 3.0, None, 2.0, 0.25]},
    "segments": {
        "start": [0.0, 1.5, 0.5, 0.0, -0.0, 7.0, 1.0],
        "end": [1.5, 4, 1, 3, 1, 9, 1.25],
        "channel": [0, 1, 0, 1, 0, 1, 0],
        "text": list("abcdefg"),
    },
    "milliseconds": {"start_ms": [0, 5, 10, 15, 20, 25, 30], "end_ms": [9, 19, 29, 39, 49, 59, 69]},
    "paths for ids": {"id": None, "duration": [1.0] * 7},
    "clips of one file": {"path": ["00.wav"] * 7, "duration": [0.01 * n for n in range(1, 8)]},
    "a clip twice": {"path": [f"0{min(n, 5)}.wav" for n in range(7)]},
    "clips of UrbanSound8K": {
        "fsID": list(range(7)),
        "start": [0.0, 1.5, 0.5, 0.0, 2.5, 7.0, 1.0],
        "end": [1.5, 4, 1, 3, 3, 9, 1.25],
    },
    "not ASCII": {"id": ["ä", "b", "ć", "d", "é", "f", "ğ"], "duration": list(range(1, 8))},
    "one file": {"path": [f"gone{n}.wav" if n else "00.wav" for n in range(7)]},
    "no files": {"path": [f"gone{n}.wav" for n in range(7)]},
}
WHOLE = {
    "rows of one clip": {"id": list("abcdefa"), "path": [f"0{n % 6}.wav" for n in range(7)]},
    "repeated ids": {"id": list("abcdefa")},
    "bad numbers": {"duration": [1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1e12]},
    "bad paths": {"path": ["00.wav", "a|", "", None, "x\0", "https://me:secret@host/a", "b.wav"]},
    "unread times": {"begin_frame": list(range(7)), "end_frame": list(range(7))},
    "no paths": {"path": None},
}


def planned(read, table, cache, number, *configs):
    """A partition's plan, and the tasks of its shards; or the error of planning it."""
    try:
        options = Options(device="cpu", partition=f"{number}/3", shard_megabytes=0.003)
        manifest = read(table, Partition(number, 3).span)
        plan = plan_extraction(manifest, [*map(load_config, configs)], cache, options)
    except ManifestError as error:
        return str(error)
    rows = [
        (
            version.wanted.rows.tolist(),
            version.wanted.manifest,
            version.first_row,
            version.seconds.tolist(),
            version.rows.missing.tolist(),
            [
                *shard_tasks(
                    version.manifest,
                    version.rows,
                    version.wanted,
                    version.seconds,
                    60.0,
                    version.first_row,
                )
            ],
        )
        for version in plan.versions
    ]
    return manifest.notes, plan.notes, rows


def read_all(table, span):
    return read_manifest(table, carry=False)


def read_some(table, span):
    return read_some_rows(table, span, carry=False)


def table_of(plain, scratch, name):
    columns = {"id": list("abcdefg"), "path": [f"0{n}.wav" for n in range(7)]}
    columns |= {**PARQUET, **WHOLE}[name]
    table = {name: cells for name, cells in columns.items() if cells is not None}
    path = scratch / "m.parquet"
    pq.write_table(pa.table(table), path, row_group_size=2)
    for audio in plain.folder.glob("*.wav"):
        (scratch / audio.name).symlink_to(audio)
    return path


@pytest.mark.parametrize("name", [*PARQUET, *WHOLE])
def test_a_plan_is_the_same_if_only_the_partition_s_rows_are_kept(plain, scratch, name):
    table, cache = table_of(plain, scratch, name), scratch / "c"
    for number in range(3):
        kept = planned(read_some, table, cache, number, "fbank80", "audio-stats")
        assert kept == planned(read_all, table, cache, number, "fbank80", "audio-stats")
        if name in PARQUET:
            first, end = Partition(number, 3).span(read_manifest(table).duration)
            some = read_some(table, Partition(number, 3).span)
            assert 0 < len(some) == end - first < 7
            assert len(some.complete()) == 7
        elif not isinstance(kept, str):
            assert read_some(table, Partition(number, 3).span).whole is None


def test_rows_that_another_run_has_kept_keep_their_generations(plain, scratch, cli):
    table = table_of(plain, scratch, "plain")
    cli("extract", table, "-o", scratch / "c", "--partition", "1/3").with_code(3)  # one has failed
    for number in range(3):
        plans = [
            planned(read, table, scratch / "c", number, "fbank80") for read in (read_all, read_some)
        ]
        assert plans[0] == plans[1]


@pytest.mark.parametrize("pipe", [False, True])
def test_other_formats_and_pipes_keep_all_rows(plain, scratch, pipe):
    path = plain.manifest()
    if pipe:
        table = table_of(plain, scratch, "plain")
        path = scratch / "pipe"
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_bytes, args=[table.read_bytes()])
        writer.start()
    manifest = read_some(path, Partition(1, 3).span)
    assert (manifest.whole, len(manifest)) == (None, 7 if pipe else 12)
