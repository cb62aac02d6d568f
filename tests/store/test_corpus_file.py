"""`corpus.json` is a stranger's like everything else: what it says of parts is checked before it is used."""

from __future__ import annotations

import json
import random
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from make_cache import make_features, make_version
from make_corpus import make_corpus

from featcache.errors import ArgumentError, DamagedError
from featcache.storage.location import parse_location
from featcache.store.copying import copy_parts_list, copy_version
from featcache.store.corpus import CORPUS, Part, by_part_name, part_name, read_parts, update_parts
from featcache.store.documents import UNSEALED, seal


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
        ("more", 1),
    ],
)
def test_what_is_no_corpus_is_refused(tmp_path, name, value):
    folder = make_corpus(tmp_path / "corpus", [1], [1])
    document = json.loads((folder / CORPUS).read_bytes())
    document["parts"][0][name] = value
    (folder / CORPUS).write_bytes(seal({**document, "checksum": UNSEALED}))
    with pytest.raises(DamagedError, match=r"corpus\.json: damaged: .*; remove it, and run `featcache extract`"):
        read_parts(folder)


def test_a_flipped_bit_is_noticed_and_nothing_is_written_over_it(tmp_path):
    folder = make_corpus(tmp_path / "corpus", [1])
    data = bytearray((folder / CORPUS).read_bytes())
    data[data.index(b"p0")] ^= 1
    (folder / CORPUS).write_bytes(data)
    with pytest.raises(DamagedError, match="its checksum does not match"):
        update_parts(folder, lambda parts: parts.clear())
    assert (folder / CORPUS).read_bytes() == bytes(data)


def test_parts_are_named_after_their_manifests(tmp_path):
    names = {"a.parquet": "a", "b.1.csv.gz": "b.1", "c": "c", "d.JSONL": "d"}
    assert [part_name(tmp_path / name) for name in names] == [*names.values()]
    assert [*by_part_name(tmp_path / name for name in reversed(names))] == ["a", "b.1", "c", "d"]
    for odd in (".hidden.csv", "a\nb.csv"):
        with pytest.raises(ArgumentError, match="cannot name a part"):
            by_part_name([tmp_path / odd])


@pytest.mark.parametrize("fault", [None, "before", "after", "503", "409"])
def test_jobs_that_list_their_parts_at_once_in_a_store_lose_none(s3, fault):
    corpus = parse_location("corpus", f"s3://speech/{uuid.uuid4()}")
    rng = random.Random(0)
    if fault is not None:
        s3.fault = lambda method, path: fault if method == "PUT" and rng.random() < 0.2 else None

    def add(number):
        for name in (f"p{number}", f"q{number}"):
            update_parts(corpus, lambda parts, name=name: parts.setdefault(name, Part(name, name)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(4)))
    assert [part.name for part in read_parts(corpus)] == [f"{letter}{number}" for letter in "pq" for number in range(4)]


def test_a_cache_is_not_copied_onto_a_corpus_nor_a_corpus_onto_a_cache(tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [1])
    version = make_version(tmp_path / "cache", make_features(1))
    with pytest.raises(ArgumentError, match="corpus: is a corpus: copy to one of its parts"):
        copy_version(version, corpus)
    with pytest.raises(ArgumentError, match="cache: is the cache of one manifest, with fbank80-"):
        copy_parts_list(corpus, tmp_path / "cache")
    assert sorted(path.name for path in corpus.iterdir()) == ["corpus.json", "p0"]
