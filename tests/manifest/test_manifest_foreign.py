"""Tables that other tools made: read where that is plain, or refused in one line that says what to do."""

from __future__ import annotations

import gzip

import pytest
from manifests import faults_of, rows_of

import featcache
from featcache.errors import ManifestError
from featcache.manifest import Utterance, read_manifest

CSV = "id,path,start\na,x.wav,0.5\nb,y.wav,\n"
JSONL = '{"id": "a", "path": "x.wav", "start": 0.5}\n{"id": "b", "path": "y.wav"}\n'
ROWS = [Utterance(id="a", path="x.wav", start=0.5), Utterance(id="b", path="y.wav")]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.csv.gz", CSV),
        ("train.TSV.GZ", CSV.replace(",", "\t")),
        ("train.jsonl.gz", JSONL),
        ("train.gz", CSV),
        ("train.gz", JSONL),
        ("train.csv", CSV),
    ],
)
def test_a_gzip_file_is_read_as_what_it_holds(written, name, text):
    assert rows_of(read_manifest(written(gzip.compress(text.encode()), name))) == ROWS


def test_a_name_that_ends_in_gz_may_be_no_gzip(written):
    assert rows_of(read_manifest(written(CSV, "train.csv.gz"))) == ROWS


def test_a_damaged_gzip_file_is_refused_in_one_line(written):
    whole = gzip.compress((CSV + "".join(f"u{i},x.wav,{i}\n" for i in range(9000))).encode())
    middle = len(whole) // 2
    for content in (whole[:-4], whole[:middle], whole[:middle] + b"spoilt" + whole[middle:]):
        with pytest.raises(ManifestError, match=r"train\.csv\.gz: cannot be read: .+") as caught:
            read_manifest(written(content, "train.csv.gz"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_one_fault(written, encoding):
    mark = "" if encoding == "utf-16" else "\ufeff"
    (fault,) = faults_of(written((mark + CSV).encode(encoding)))
    assert fault == "line 1: UTF-16, and UTF-8 is expected: iconv -f UTF-16 -t UTF-8 converts it"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.tsv", "a\tx.wav\nb\ty.wav\n", "there is no header, but a file's name"),
        ("train.csv", "a,x.FLAC,1.5\nb,y.flac,2\n", "there is no header, but a file's name"),
        ("train.csv", CSV.replace(",", "\t"), "fields are separated by tabs: name the file .tsv"),
        ("train.csv", "a b;x.wav\n", "fields are separated by semicolons: name one of them id or path"),
        ("train.txt", "a|x|y|z|hello\n", "fields are separated by |: name the columns in a line above"),
        ("segments", "a rec 0.0 1.5\nb rec 1.5 2.5\n", "fields are separated by spaces: of Kaldi's files, give"),
    ],
)
def test_a_table_without_a_header_or_commas_is_one_fault(written, name, text, words):
    """Not one for each column that it seems to lack, nor for each line."""
    (fault,) = faults_of(written(text, name))
    assert fault.startswith("line 1: ")
    assert words in fault


def test_what_has_a_header_is_not_suspected(written):
    """A column may be called after a file, and a name hold a space, where the columns that are needed are there."""
    manifest = read_manifest(written("id,path,notes.wav\na,x.wav,long\n"))
    assert list(manifest.columns) == ["notes.wav"]
    assert list(read_manifest(written("id\na b;c\n"), audio=False).ids) == ["a b;c"]
    assert len(faults_of(written("some name\nx\n"), audio=False)) == 1


def test_null_is_a_value_not_given_in_every_column(written, folder):
    """As an empty cell is: numbers stay numbers, and NaN where there is none."""
    ids = list(featcache.open(folder).ids)[:3]
    lines = [
        f'{{"id": "{ids[0]}", "digit": 7, "speaker": "jo", "inner": [null]}}',
        f'{{"id": "{ids[1]}", "digit": null, "speaker": null}}',
        f'{{"id": "{ids[2]}"}}',
    ]
    manifest = read_manifest(written("\n".join(lines), "train.jsonl"), audio=False)
    columns = {name: list(column) for name, column in manifest.columns.items()}
    assert columns == {"digit": ["7", "", ""], "speaker": ["jo", "", ""], "inner": ["[null]", "", ""]}
    dataset = featcache.FeatureDataset(featcache.open(folder), manifest=written("\n".join(lines), "train.jsonl"))
    digits = dataset.batch([0, 1, 2])["digit"]
    assert digits.tolist()[0] == 7.0
    assert digits.isnan().tolist() == [False, True, True]
