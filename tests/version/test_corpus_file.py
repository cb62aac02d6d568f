"""What a corpus says of its parts is a stranger's like everything else: it is checked
before it is used."""

import os

import msgspec
import pytest
from damage import each_flip
from make_cache import add_shard, make_features, make_version

from featcache.care.copying import copy_parts_list, copy_version
from featcache.errors import ArgumentError, DamagedError
from featcache.format.documents import encode_line
from featcache.storage.directory import Directory
from featcache.version.corpus import (
    Part,
    PartVersion,
    by_part_name,
    gone_parts,
    part_name,
    put_part,
    read_parts,
    record_version,
    remove_part,
)
from featcache.version.indexing import open_index
from featcache.version.selection import PARTS, corpus_of, is_corpus


@pytest.fixture
def corpus(tmp_path):
    """A corpus of one part, which holds a version of two utterances."""
    folder = tmp_path / "corpus"
    version = make_version(folder / "p0", make_features(2))
    put_part(folder, Part("p0", "/manifests/p0.csv"))
    record_version(version, PartVersion.of(version, open_index(version), manifest="0" * 16))
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "../outside"),
        ("name", ".."),
        ("name", "a\n"),
        ("name", "p1"),
        ("rows", -1),
        ("hash", "x"),
        ("versions", {"v": {"utterances": 10**30}}),
        ("versions", []),
    ],
)
def test_what_is_no_part_is_refused(corpus, name, value):
    (part,) = read_parts(corpus)
    (corpus / PARTS / "p0.json").write_bytes(
        encode_line({**msgspec.to_builtins(part), name: value})
    )
    with pytest.raises(
        DamagedError,
        match=r"p0\.json: damaged: .*; remove it, and run `featcache extract` with all",
    ):
        read_parts(corpus)


def test_a_manifest_may_be_older_than_1970(corpus):
    """Its file's time says so, if it was copied by a tool that keeps odd ones."""
    part = Part("p0", "/manifests/p0.csv", rows=2, mtime_ns=-1)
    put_part(corpus, part)
    assert read_parts(corpus) == [part]


def test_a_corpus_is_listed_only_if_a_part_is_gone(corpus, monkeypatch):
    """In a bucket that takes a request for each part."""
    names, listed = Directory.names, []
    monkeypatch.setattr(
        Directory, "names", lambda store, folder: listed.append(folder) or names(store, folder)
    )
    assert gone_parts(corpus, read_parts(corpus)) == {}
    assert listed == [PARTS]
    (corpus / "p0").rename(corpus / "p9")
    assert (
        "; if it was renamed to p9, rename it back" in gone_parts(corpus, read_parts(corpus))["p0"]
    )


def test_every_flipped_bit_is_noticed_and_nothing_is_written_over_it(corpus):
    path = corpus / PARTS / "p0.json"
    version = make_version(corpus / "p0")
    for _ in each_flip(path):
        data = path.read_bytes()
        with pytest.raises(DamagedError, match=r"p0\.json: damaged: "):
            read_parts(corpus)
        with pytest.raises(DamagedError):
            record_version(version, PartVersion.of(version, open_index(version)))
        assert path.read_bytes() == data


def test_what_is_known_of_a_part_holds_until_its_shards_are_others(corpus):
    (part,) = read_parts(corpus)
    version = make_version(corpus / "p0")
    (known,) = part.versions.values()
    assert (known.utterances, known.shards, known.manifest) == (2, 1, "0" * 16)
    assert known.is_of(version)
    add_shard(version, make_features(1, prefix="more"))
    assert not known.is_of(version)
    record_version(version, PartVersion.of(version, open_index(version)))
    (known,) = read_parts(corpus)[0].versions.values()
    # what it was made of is as before
    assert (known.utterances, known.manifest) == (3, "0" * 16)


def test_parts_are_listed_by_name_and_can_be_forgotten(corpus):
    for name in ("q", "a", "p0"):
        put_part(corpus, Part(name, f"/m/{name}.csv", rows=1))
    assert [part.name for part in read_parts(corpus)] == ["a", "p0", "q"]
    assert [part.name for part in read_parts(corpus, ["q", "nobody"])] == ["q"]
    remove_part(corpus, "q")
    assert [part.name for part in read_parts(corpus)] == ["a", "p0"]
    assert is_corpus(corpus)
    assert corpus_of(corpus) == (corpus, "")
    assert corpus_of(corpus / "fbank80") == (corpus, "fbank80")
    assert corpus_of(corpus / "p0") is None


def test_parts_are_named_after_their_manifests(tmp_path):
    names = {"a.parquet": "a", "b.1.csv.gz": "b.1", "c": "c", "d.JSONL": "d"}
    assert [part_name(tmp_path / name) for name in names] == [*names.values()]
    assert [*by_part_name(tmp_path / name for name in reversed(names))] == ["a", "b.1", "c", "d"]
    for odd in (".hidden.csv", "a\nb.csv", "parts.csv", os.fsdecode(b"caf\xe9.csv")):
        with pytest.raises(ArgumentError, match="cannot name a part"):
            by_part_name([tmp_path / odd])
    with pytest.raises(ArgumentError, match="would both be the part a"):
        by_part_name([tmp_path / "a.csv", tmp_path / "a.tsv"])


def test_a_cache_is_not_copied_onto_a_corpus_nor_a_corpus_onto_a_cache(corpus, tmp_path):
    version = make_version(tmp_path / "cache", make_features(1))
    with pytest.raises(ArgumentError, match="corpus: is a corpus: copy to one of its parts"):
        copy_version(version, corpus)
    with pytest.raises(ArgumentError, match="cache: is the cache of one manifest, with fbank80-"):
        copy_parts_list(corpus, tmp_path / "cache")
    assert sorted(path.name for path in corpus.iterdir() if path.name != "work") == ["p0", "parts"]
