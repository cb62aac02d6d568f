"""A copy into a version that has changed since, or has been extracted into: it goes on wanting
what it wants, and what neither of both has seen of the other is made once more."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from make_cache import make_features, make_version
from small_shards import INFO, item, write

import featcache
from featcache.care.copying import Copied, copy_parts_list, copy_version
from featcache.care.prune import plan_prune, prune
from featcache.care.verify import verify
from featcache.errors import ArgumentError, StoreError
from featcache.extraction.tasks import want
from featcache.manifest.segments import SegmentColumns, Utterance
from featcache.manifest.strings import Strings
from featcache.storage.location import ObjectPath
from featcache.version.corpus import Part, put_part, read_parts
from featcache.version.indexing import open_index
from featcache.version.join import item_at
from featcache.version.records import Run
from featcache.version.selection import select_version
from featcache.version.version import Version
from featcache.version.wanted import find_missing, read_all_wanted

Rows = dict[str, str]
"""A manifest: the path of each row's file, by id."""


@dataclass
class Side:
    """A cache in a folder."""

    folder: Path

    @property
    def version(self) -> Version:
        return Version.create(self.folder / INFO.folder_name, INFO)

    def run(self, rows: Rows, stop: int | None = None, again: Rows | None = None) -> None:
        """Extract a manifest; or so many rows of it, and then be killed. Rows are extracted
        `again` from other audio: each value is the number of what is in the file."""
        version, again = self.version, again or {}
        utterances = [Utterance(id=id_, path=path) for id_, path in rows.items()]
        hashes = Strings.of(rows).hashes(), SegmentColumns.of(utterances).hashes()
        keys = np.stack([*hashes, np.zeros(len(rows), np.uint64)])
        numbers = [number for number, id_ in enumerate(rows) if id_ in again]
        before = [*read_all_wanted(version)]
        wanted = want("m", keys, open_index(version), before, numbers)
        wanted.save(version)
        run = Run(version, {})
        ((_, missing, _),) = find_missing([wanted], open_index(version), [])
        todo = [(utterances[row], int(wanted.rows[2, row])) for row in missing.tolist()[:stop]]
        if todo:
            items = [
                item(
                    one.id,
                    path=one.path,
                    generation=generation,
                    content_hash=int(again.get(one.id, "7")),
                )
                for one, generation in todo
            ]
            contents = [sum(map(ord, one.path)) + int(again.get(one.id, "7")) for one, _ in todo]
            values = np.repeat(np.array(contents, np.float32), 3)[:, None] * np.ones((1, 2))
            write(version, items, values, manifest=wanted.name, run=run.id)

    def copy(self, to: "Side") -> Copied:
        return copy_version(self.version, to.folder)

    def prune(self, rows: Rows) -> None:
        ids = Strings.of(rows).hashes()
        prune(self.version, plan_prune(self.version, ids), ids)

    @property
    def paths(self) -> Rows:
        """The rows that what is served was made from, by id."""
        index = featcache.open(self.folder, strict=True).index
        assert verify(self.version).problems == []
        items = [item_at(self.version, index, position) for position in range(len(index))]
        return {one.id: one.path for one in items}

    @property
    def lacking(self) -> str:
        """Why it is not whole, as a strict opening and `verify` say."""
        with pytest.raises(StoreError) as caught:
            featcache.open(self.folder, strict=True)
        kinds = {problem.kind for problem in verify(self.version).problems}
        assert kinds & {"unfinished", "record"}
        return str(caught.value)


@pytest.fixture
def one(scratch) -> Side:
    return Side(scratch / "one")


@pytest.fixture
def two(scratch) -> Side:
    return Side(scratch / "two")


A, B, C = ({"x": f"{path}.wav", "y": "y.wav"} for path in "abc")
WITHOUT = {"y": "y.wav"}


@pytest.mark.parametrize("before", [[A], [A, B]])
def test_a_row_that_was_pruned_and_comes_back_replaces_what_a_copy_has(one, two, before):
    for rows in before:
        one.run(rows)
    one.copy(two)
    one.run(WITHOUT)
    one.prune(WITHOUT)
    one.run(C)
    assert one.copy(two).diverged == 0
    assert two.paths == one.paths == C
    prune(two.version, plan_prune(two.version))
    assert two.paths == C


def test_a_copy_goes_on_wanting_what_it_lacks(one, two):
    rows = {f"u{number}": f"{number}.wav" for number in range(22)}
    one.run(dict([*rows.items()][:3]))
    two.run(rows, stop=6)
    one.copy(two)
    assert "16 of the 22 utterances of m are missing" in two.lacking
    two.run(rows)
    assert two.paths == rows
    two.copy(one)
    assert one.paths == rows


def test_what_both_have_made_anew_is_missing_until_it_is_extracted_again(one, two):
    """Generations are equal, or one is higher: neither says what is newer."""
    for others in ([B], [B, A]):
        shutil.rmtree(one.folder, ignore_errors=True)
        shutil.rmtree(two.folder, ignore_errors=True)
        one.run(A)
        one.copy(two)
        for rows in others:
            one.run(rows)
        two.run(C)
        for source, target in ((one, two), (two, one)):
            assert source.copy(target).diverged == (source is one)
            assert "1 of the 2 utterances of m are missing" in target.lacking
            assert "`featcache extract`" in target.lacking
            assert source.copy(target).diverged == 0
        two.run(C)
        assert two.copy(one).diverged == 0
        assert one.paths == two.paths == C


def test_files_that_changed_in_their_place_are_other_files(one, two):
    one.run(A)
    one.copy(two)
    one.run(A, again={"x": "8"})
    two.run(A, again={"x": "9"})
    assert one.copy(two).diverged == 1
    assert "1 of the 2 utterances" in two.lacking
    assert verify(two.version).repeated == 0


def test_what_both_have_made_of_the_same_files_is_the_same(one, two):
    """Two machines may have extracted parts of a corpus each."""
    one.run(A, stop=1)
    two.run({**A, "z": "z.wav"})
    for source, target in ((one, two), (two, one), (one, two)):
        assert source.copy(target).diverged == 0
    assert one.paths == two.paths == {**A, "z": "z.wav"}


def test_what_one_has_seen_of_the_other_is_replaced_by_what_is_newer(one, two):
    """Whatever the way, also after a prune, which writes shards again."""
    one.run(A)
    one.copy(two)
    two.run({**B, "z": "z.wav"})
    two.copy(one)
    one.run({**C, "z": "z.wav"})
    one.prune({**C, "z": "z.wav"})
    two.prune({**B, "z": "z.wav"})
    assert (one.copy(two).diverged, two.copy(one).diverged) == (0, 0)
    assert one.paths == two.paths == {**C, "z": "z.wav"}


def test_a_generation_that_came_again_hides_nothing(one, two):
    """An earlier featcache began anew after a prune."""
    one.run(A)
    one.run(B)
    one.copy(two)
    one.run(WITHOUT)
    one.prune(WITHOUT)
    (wanted,) = read_all_wanted(one.version)
    data = replace(wanted, forgotten=0).encode()
    one.version.store.put(f"wanted/{wanted.name}", data)
    one.run(C)
    assert one.copy(two).diverged == 1
    assert "1 of the 2 utterances" in two.lacking


def test_a_wanted_set_of_the_copy_that_cannot_be_read_stays_so(one, two):
    one.run(A)
    one.copy(two)
    (path,) = (two.version.path / "wanted").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = one.copy(two).problems
    assert (problem.kind, str(path) in problem.message) == ("record", True)
    assert f"wanted/{path.name}: damaged" in two.lacking


def test_features_of_several_files_are_not_called_equal(one):
    one.run(A)
    (name,) = one.version.shard_names()
    wanted = one.version.shard(name).info.manifest
    for content in (8, 9):
        values = np.full((3, 2), content, np.float32)
        items = [item("x", path="a.wav", content_hash=content)]
        write(one.version, items, values, manifest=wanted)
    report = verify(one.version)
    assert report.repeated == 0
    (note,) = [note for note in report.notes if "features of several files" in note]
    assert "which are right, for x: `featcache extract --check-sources`" in note
    prune(one.version, plan_prune(one.version))
    assert "several files" not in str(verify(one.version).notes)


def test_what_is_there_twice_has_an_equal_row(one):
    one.run(A)
    (name,) = one.version.shard_names()
    wanted = one.version.shard(name).info.manifest
    write(one.version, [item("x", path="other.wav")], manifest=wanted)
    assert verify(one.version).repeated == 0
    write(one.version, [item("new")], manifest=wanted)
    write(one.version, [item("new"), item("newer")], manifest=wanted)
    assert verify(one.version).repeated == 1


# Where a copy may not be


@pytest.fixture
def cache(scratch) -> Path:
    """The folder of a cache, in a folder of its own."""
    make_version(scratch / "home/cache", make_features(3))
    return scratch / "home/cache"


@pytest.mark.parametrize(
    "to", [".", "fbank80", "other", "a/b", "..", "../..", "VERSION", "VERSION/shards", "../link/a"]
)
def test_a_copy_neither_lies_in_what_is_copied_nor_holds_it(cache, to):
    (cache.parent / "link").symlink_to(cache)
    version = select_version(cache)
    before = sorted(cache.parent.rglob("*"))
    with pytest.raises(ArgumentError, match="give another cache to copy to"):
        copy_version(version, cache / to.replace("VERSION", version.path.name))
    assert sorted(cache.parent.rglob("*")) == before


def test_a_link_that_leads_back_is_no_copy(cache):
    version = select_version(cache)
    (cache.parent / "other").mkdir()
    (cache.parent / "other" / version.path.name).symlink_to(version.path)
    with pytest.raises(ArgumentError, match="give another cache to copy to"):
        copy_version(version, cache.parent / "other")
    copy_version(version, cache.parent / "cache2")  # whose name only begins alike
    copied = select_version(cache.parent / "cache2")
    assert copied.shard_names() == version.shard_names()


@pytest.mark.parametrize("key", ["cache", "cache/other", ""])
def test_in_a_bucket_likewise(key):
    version = make_version(ObjectPath("memory://bucket", "cache"), make_features(3))
    with pytest.raises(ArgumentError, match="give another cache to copy to"):
        copy_version(version, ObjectPath("memory://bucket", key))


def test_a_corpus_is_not_copied_into_itself_and_what_is_known_of_parts_stays(scratch):
    corpus, other = scratch / "corpus", scratch / "other"
    for folder, rows in ((corpus, 3), (other, 5)):
        put_part(folder, Part("train", "train.csv", rows))
    put_part(corpus, Part("dev", "dev.csv", 2))
    for to in (corpus, corpus / "inside", scratch):
        with pytest.raises(ArgumentError, match="give another cache to copy to"):
            copy_parts_list(corpus, to)
    copy_parts_list(corpus, other)
    assert {part.name: part.rows for part in read_parts(other)} == {"dev": 2, "train": 5}
