"""Large and odd manifests end, in time and memory that grow as they do."""

import gzip
import json
from collections import Counter

import pytest
from manifests import faults_of

from featcache.errors import ManifestError
from featcache.manifest import read
from featcache.manifest.formats import tables
from featcache.manifest.read import manifest_of, read_manifest

MANY = 20_000


_compared = Counter()


class Counted(str):
    """A name that counts how often it is compared."""

    __slots__ = ()

    def __eq__(self, other):
        _compared["="] += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_names_of_columns_are_not_compared_with_each_other(written):
    path = written("id,path\n")
    _compared.clear()
    with read.open_source(path) as source:
        names = [Counted(f"c{number}") for number in range(1000)]
        assert tables._meanings(["id", "path", *names], 1, source)[2:] == names
    assert _compared["="] < 10_000


@pytest.mark.parametrize(("name", "mark"), [("train.csv", ","), ("train.tsv", "\t")])
def test_a_table_of_many_columns_is_read(written, name, mark):
    names = ["id", "path", *(f"c{number}" for number in range(MANY))]
    rows = [names, *([f"u{row}", "a.wav", *map(str, range(MANY))] for row in range(2))]
    manifest = read_manifest(written("".join(f"{mark.join(row)}\n" for row in rows), name))
    assert list(manifest.columns) == names[2:]
    assert list(manifest.columns["c19999"]) == ["19999", "19999"]


def test_batches_of_wide_tables_have_fewer_rows():
    assert tables.rows_at_once(0, 256) == tables.rows_at_once(20, 256) == 256
    assert tables.rows_at_once(100_000, 256) == 10
    assert tables.rows_at_once(10**9, 256) == 1


@pytest.mark.parametrize("name", ["train.csv.gz", "train.tsv.gz", "train.jsonl.gz", "train.txt.gz"])
@pytest.mark.parametrize("blank", [b"\n", b" \r\n"])
def test_blank_lines_without_end_are_refused(tmp_path, name, blank):
    first = b'{"id": "u", "path": "a.wav"}\n' if "json" in name else b"id,path\nu,a.wav\n"
    if "tsv" in name:
        first = first.replace(b",", b"\t")
    if "txt" in name:
        first = b"a.wav\n"
    path = tmp_path / name
    path.write_bytes(gzip.compress(first + blank * ((10 << 20) // len(blank)), 1))
    assert faults_of(path)[-1].endswith("more than 4,194,304 bytes of blank lines")
    path.write_bytes(gzip.compress(first + blank * ((3 << 20) // len(blank)) + b"\x01,", 1))
    with pytest.raises(ManifestError) as caught:  # the last line is half of one
        read_manifest(path)
    assert "blank lines" not in str(caught.value)


def test_keys_that_are_ids_are_told(written):
    rows = [{"id": f"u{row}", "path": "a.wav", f"text of u{row}": "hi"} for row in range(MANY)]
    (fault,) = faults_of(written("\n".join(map(json.dumps, rows)), "train.jsonl"))
    assert fault == "line 999: more than 1,000 different keys: keys are columns, not ids"
    with pytest.raises(ManifestError, match="row 999: more than 1,000 different keys"):
        manifest_of(rows)


def test_objects_of_many_keys_are_read_if_they_have_the_same(written):
    row = {"id": "u", "path": "a.wav", **{f"c{number}": number for number in range(MANY)}}
    rows = [row, {**row, "id": "v"}]
    manifest = read_manifest(written("\n".join(map(json.dumps, rows)), "train.jsonl"))
    assert list(manifest.columns["c19999"]) == ["19999", "19999"]


def nested(depth):
    cell = []
    for _ in range(depth):
        cell = [cell]
    return cell


@pytest.mark.parametrize(
    "cell", [nested(100_000), 10**5000, {(1, 2): 3}], ids=["deep", "long", "keys"]
)
def test_a_cell_in_memory_that_cannot_be_stored_is_a_fault(cell):
    with pytest.raises(ManifestError, match=r"<list>: 1 error\n  row 2: x cannot be stored: "):
        manifest_of([{"id": "a", "x": 1}, {"id": "b", "x": cell}])


@pytest.mark.parametrize("part", ["%", "a@", "?a=", "https://u:p@h/"])
def test_a_long_path_is_refused_without_a_look_for_secrets(written, monkeypatch, part):
    def look(text, **options):
        assert len(text) < 5000

    monkeypatch.setattr("featcache.manifest.utterances.secret_in", look)
    (fault,) = faults_of(written(f"id,path\nu,{part * 10_000}\n"))
    assert fault == f"line 2: path has {10_000 * len(part):,} bytes, and may have 4,000: a URL"
