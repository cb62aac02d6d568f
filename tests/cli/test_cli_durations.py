"""`featcache durations` adds what `extract --partition` needs, and changes no features; `featcache index`, too."""

from __future__ import annotations

import csv
import gzip
import json
import os

import pytest
from cache_contents import items, only_version

from featcache.manifest import read_manifest
from featcache.store.index import load_index


def without_durations(corpus, name="bare.csv"):
    rows = [{key: value for key, value in row.items() if key != "duration"} for row in corpus.rows]
    return corpus.manifest(rows, name)


def test_features_are_the_same_with_durations_from_headers(cli, corpus, scratch, truth):
    """For every rate, format and segment; what gives a duration keeps it."""
    timed = scratch / "timed.csv"
    ended = cli("durations", corpus.manifest(), "-o", timed, "--root", corpus.folder, "--threads", 2)
    assert ended.code == 0, ended
    assert f"give --root {corpus.folder}" in ended.err
    before, after = read_manifest(corpus.manifest()), read_manifest(timed)
    given = before.duration == before.duration
    assert (after.duration[given] == before.duration[given]).all()
    assert (after.duration > 0).all()
    assert (list(after.ids), list(after.paths)) == (list(before.ids), list(before.paths))
    assert cli("extract", timed, "--root", corpus.folder, "-o", scratch / "cache", "--threads", 1).code == 0
    assert items(scratch / "cache") == truth


def test_other_columns_stay_as_they_are(cli, plain, scratch):
    manifest = scratch / "m.tsv"
    lines = ["utt\tText\tWAV", 'a\tsays "hi", \té/00.wav', f"b\t\t{plain.folder / '01.wav'}"]
    manifest.write_text("\n".join(lines) + "\n")
    ended = cli("durations", manifest, "-o", scratch / "o.tsv", "--root", plain.folder)
    assert ended.code == 3
    assert "file_missing 1" in ended.err
    made = (scratch / "o.tsv").read_text().splitlines()
    assert made == [f"{lines[0]}\tduration", f"{lines[1]}\t", f"{lines[2]}\t0.42"]


def test_json_lines_and_gzip(cli, plain, scratch):
    rows = [
        {"id": "a", "path": "00.wav", "n": 1, "dur": None, "t": "é"},
        {"id": "b", "path": "01.wav", "dur": 0.25, "x": [1.0]},
    ]
    source = scratch / "m.jsonl.gz"
    source.write_bytes(gzip.compress("\n\n".join(json.dumps(row) for row in rows).encode()))
    assert cli("durations", source, "-o", scratch / "o.jsonl.gz", "--root", plain.folder).code == 0
    made = [json.loads(line) for line in gzip.decompress((scratch / "o.jsonl.gz").read_bytes()).decode().splitlines()]
    assert made == [{**rows[0], "dur": 0.4}, rows[1]]


def test_files_that_cannot_be_read_are_counted_by_reason_and_stay(cli, plain, scratch):
    folder = plain.copy(scratch / "audio").folder
    (folder / "00.wav").write_bytes(b"nothing")
    (folder / "01.wav").unlink()
    whole = (folder / "02.wav").read_bytes()
    (folder / "02.wav").write_bytes(whole[: len(whole) // 2])
    rows = [{"id": f"u{number}", "path": f"{number:02}.wav"} for number in range(4)]
    rows.append({"id": "late", "path": "03.wav", "start": 9})
    manifest = type(plain)(folder, rows).manifest()
    ended = cli("durations", manifest, "-o", scratch / "o.csv", "--root", folder, "--json")
    assert ended.code == 3
    failed = {"file_missing": 1, "not_audio": 1, "segment_outside": 1, "truncated": 1}
    assert json.loads(ended.out) == {
        "output": str(scratch / "o.csv"),
        "utterances": 5,
        "added": 1,
        "failed": 4,
        "failed_by_reason": failed,
    }
    with (scratch / "o.csv").open() as file:
        assert [row["duration"] for row in csv.DictReader(file)] == ["", "", "", "0.46", ""]
    parts = [
        cli("extract", scratch / "o.csv", "--root", folder, "-o", scratch / "c", "--partition", f"{number}/2").code
        for number in range(2)
    ]
    assert max(parts) == 3
    report = cli("verify", scratch / "c", "--manifest", scratch / "o.csv", "--root", folder)
    assert report.code == 3, report


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-", "-o", "x.csv"), "give a file"),
        (("{manifest}", "-o", "{manifest}"), "is what this command reads"),
        (("{manifest}", "-o", "{folder}/x.jsonl"), "as CSV"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(cli, plain, scratch, arguments, said):
    manifest = without_durations(plain)
    ended = cli("durations", *(text.format(manifest=manifest, folder=scratch) for text in arguments))
    assert ended.code in (1, 2)
    assert said in ended.err
    assert len(ended.err.splitlines()) == 1


def test_index_is_built_once(cli, plain, scratch):
    for number in range(2):
        assert cli("extract", plain.manifest(), "-o", scratch, "--partition", f"{number}/2").code == 0
    version = only_version(scratch)
    assert load_index(version, version.shard_names()) is None
    assert "index built" in cli("index", scratch).out
    assert len(load_index(version, version.shard_names())) == 12
    ended = cli("index", scratch, "--json")
    assert json.loads(ended.out)["versions"][0]["built"] is False
    assert ended.err == ""


def test_index_says_what_is_missing_and_that_it_could_not_be_written(cli, plain, scratch):
    assert cli("extract", plain.manifest(), "-o", scratch, "--partition", "0/1", "--shard-size", "0.03").code == 0
    assert cli("extract", plain.manifest(), "-o", scratch / "b", "--partition", "0/2", "--shard-size", "0.03").code == 0
    ended = cli("index", scratch / "b")
    assert ended.code == 0
    assert "partition 1/2 is not known to be complete" in ended.err
    (version,) = scratch.glob("fbank80-*")
    os.symlink(scratch, version / "index")
    ended = cli("index", version)
    assert ended.code == 1
    assert "the index has not been kept" in ended.err


def test_parquet_is_not_written(cli, plain, scratch):
    pyarrow = pytest.importorskip("pyarrow")
    manifest = scratch / "m.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"id": ["a"], "path": ["00.wav"]}), manifest)
    ended = cli("durations", manifest, "-o", scratch / "o.parquet", "--root", plain.folder)
    assert ended.code == 2
    assert ended.err.strip().endswith(
        "m.parquet: is written as CSV or JSON lines first: `featcache manifest` converts it"
    )
    assert not (scratch / "o.parquet").exists()


def test_without_any_file_nothing_is_written(cli, corpus, scratch):
    ended = cli("durations", without_durations(corpus), "-o", scratch / "o.csv", "--root", scratch)
    assert ended.code == 2
    assert "; --root says what relative paths are relative to" in ended.err
    assert not (scratch / "o.csv").exists()
