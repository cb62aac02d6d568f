"""Files whose names number them are counted."""

import gzip
import json
import logging

import pytest
from manifests import refused

from featcache.errors import ManifestError
from featcache.extraction.corpus import plan_corpus
from featcache.extraction.options import Options
from featcache.manifest.numbered import broken_promises, gaps
from featcache.manifest.read import read_manifest


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["train-00000-of-00003.parquet", "train-00002-of-00003.parquet"], "train-00001-of-00003"),
        (["a/x-00000-of-00002-5f3c1b2a.parquet"], "a/x-00001-of-00002.parquet"),
        (["part_1_of_3.csv", "part_3_of_3.csv"], "part_2_of_3.csv"),
        (["1of2.jsonl.gz", "b.csv"], "0of2"),
        (["data/split3/1", "data/split3/2"], "data/split3/3"),
        (["split3utt/1", "split3utt/3"], "split3utt/2"),
        ([f"x-{n}-of-{10**20}.csv" for n in (0, 1)], "x-2-of-1000"),
    ],
)
def test_a_name_that_promises_a_count_is_counted(names, missing):
    (line,) = broken_promises(names)
    assert missing in line
    assert gaps(names) == []


@pytest.mark.parametrize(
    "names",
    [
        [f"train-0000{n}-of-00003.parquet" for n in range(3)],
        [f"train-0000{n}-of-00003.parquet" for n in (1, 2, 3)],
        ["a-0-of-1.csv", "b-0-of-1.csv"],
        ["profile-2.csv", "lecture-of-2019.csv"],
        ["split2/1", "split2/2"],
    ],
)
def test_all_that_are_promised_are_there(names):
    assert broken_promises(names) == []


@pytest.mark.parametrize(
    "names",
    [
        ["a-0-of-2.parquet", "a-1-of-2.parquet", "a-0-of-3.parquet"],
        ["a-0-of-2-aa.parquet", "a-0-of-2-bb.parquet", "a-1-of-2-bb.parquet"],
    ],
)
def test_two_exports_in_one_folder_are_told(names):
    (line,) = broken_promises(names)
    assert line.startswith("two sets of numbered files are mixed: a-0-of-2")


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["wav.1.scp", "wav.2.scp", "wav.4.scp"], ["1 of 4 numbered files missing: wav.3.scp"]),
        (["part-00000-a1-c000.csv", "part-00002-a1-c000.csv"], ["1 of 3 numbered files missing: "]),
        (
            ["cuts.000000.jsonl", "cuts.999999999999.jsonl"],
            ["999,999,999,998 of 1,000,000,000,000"],
        ),
        (["manifest_0.json", "manifest_1.json"], []),
        (["2019.csv", "2021.csv"], []),
        (["a1.csv"], []),
    ],
)
def test_a_row_of_numbers_has_no_gap(names, lines):
    found = gaps(names)
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True))


@pytest.mark.parametrize(
    ("fields", "missing"),
    [
        ({"cuts": [0, 2], "recording": [0, 2]}, "cuts.000001.jsonl.gz"),
        ({"cuts": [0, 1], "recording": [0, 1, 2]}, "cuts.000002.jsonl.gz"),
        ({"cuts": [1, 2], "recording": [0, 1, 2]}, "cuts.000000.jsonl.gz"),
        ({"cuts": [0, 1, 2], "recording": [0, 2]}, "recording.000001.tar"),
        ({"cuts": [0, 1], "features": [0, 1, 2]}, "cuts.000002.jsonl.gz"),
    ],
)
def test_shar_lacks_no_number_of_any_field(tmp_path, fields, missing):
    for field, numbers in fields.items():
        for number in numbers:
            end = "jsonl.gz" if field == "cuts" else "tar"
            (tmp_path / f"{field}.{number:06}.{end}").write_bytes(gzip.compress(b""))
    assert f"1 of 3 numbered files missing: {missing}" in refused(tmp_path)


@pytest.mark.parametrize("folder", ["", "data"])
def test_a_dataset_lacks_no_file(tmp_path, folder):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"audio": [{"bytes": b"x", "path": "a.wav"}]})
    top = tmp_path / folder
    top.mkdir(exist_ok=True)
    for number in range(3):
        parquet.write_table(table, top / f"train-0000{number}-of-00003.parquet")
    assert len(read_manifest(tmp_path)) == 3
    (top / "train-00001-of-00003.parquet").unlink()
    assert "train-00001-of-00003.parquet" in refused(tmp_path)
    (top / "train-00000-of-00003.parquet").rename(top / "0000.parquet")
    (top / "train-00002-of-00003.parquet").rename(top / "0002.parquet")
    assert read_manifest(tmp_path).notes[-1].endswith("0001.parquet")  # of Spark, one may be empty


def test_what_save_to_disk_lists_is_counted(tmp_path):
    names = [{"filename": f"data-0000{number}-of-00003.arrow"} for number in (0, 2)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": names}))
    with pytest.raises(ManifestError, match=r"missing: data-00001-of-00003\.arrow"):
        read_manifest(tmp_path)


def test_parts_of_a_corpus_that_lack_are_said(tmp_path, caplog):
    for number in (0, 2):
        (tmp_path / f"train-{number}-of-3.csv").write_text("id,path\n")
    with caplog.at_level(logging.INFO):
        plan_corpus(tmp_path / "out", [str(tmp_path / "train-*.csv")], Options(), {})
    assert "missing: " in caplog.text
    assert "train-1-of-3.csv" in caplog.text
