"""The index knows every item that counts, and is the one that the shards give, whatever
is wrong with one on disk."""

import shutil
from dataclasses import dataclass, replace
from unittest.mock import Mock

import numpy as np
import pytest
from damage import each_flip, flip
from hostile_caches import columns_of, index_folder, reseal, seal_files
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs
from scratch import scratch_folder
from small_shards import INFO, create, item, write

from featcache.care.verify import verify
from featcache.errors import DamagedError, StoreError
from featcache.format.group import Group
from featcache.format.shard import Shard
from featcache.manifest.strings import Strings
from featcache.version.index import Index, Maker, index_name, load_index
from featcache.version.indexing import build_index, keep_index, open_index
from featcache.version.version import ShardGoneError, Version


def same(index: Index, other: Index) -> bool:
    """Whether two indexes are equal, down to every column."""
    return (
        (index.summaries, list(index.makers), index.ids)
        == (other.summaries, list(other.makers), other.ids)
        and np.array_equal(index.table.matrix, other.table.matrix)
        and np.array_equal(index.table.text, other.table.text)
    )


# Histories


@dataclass(frozen=True)
class Made:
    """A shard of a history: the generations and numbers of frames of its items, by id,
    and its row."""

    items: dict[str, tuple[int, int]]
    row: int


SHARDS = st.lists(
    st.builds(
        Made,
        st.dictionaries(
            st.sampled_from("abcdef\u00fc"),
            st.tuples(st.integers(1, 3), st.integers(1, 4)),
            min_size=1,
        ),
        st.integers(0, 3),
    ),
    max_size=8,
)


def publish(version: Version, made: Made) -> str:
    items = [
        item(id_, frames, generation=generation) for id_, (generation, frames) in made.items.items()
    ]
    return write(version, items, row=made.row).name


def reference(shards: dict[str, Made]) -> list[tuple[str, int, int, str, int]]:
    """What counts, in the slow and obvious way: id, generation, frames, shard and number
    in it; in order."""
    order = [
        (id_, *values, name, number)
        for name, made in sorted(shards.items(), key=lambda one: (one[1].row, one[0]))
        for number, (id_, values) in enumerate(made.items.items())
    ]
    counting = []
    for entry in order:
        of_id = [other for other in order if other[0] == entry[0]]
        if entry == max(of_id, key=lambda other: other[1]):  # of equal ones, the first
            counting.append(entry)
    return counting


@settings(max_examples=settings.default.max_examples // 4)
@given(SHARDS, st.lists(st.integers(0, 8), max_size=3))
@example([], [])
def test_whatever_the_history_the_index_is_what_the_reference_says(history, stops):
    """Built at once; and extended, step by step, by a few shards or many: the same, byte
    for byte."""
    with scratch_folder() as folder:
        version, shards = create(folder), {}
        for number, made in enumerate(history):
            if number in stops:
                open_index(version)
            name = publish(version, made)
            # equal items of another row are the same shard, which stays
            shards.setdefault(name, made)
        expected = reference(shards)
        extended = open_index(version)
        found = zip(
            extended.ids,
            extended.generation.tolist(),
            extended.num_frames.tolist(),
            [extended.shards[number] for number in extended.shard],
            extended.item.tolist(),
            strict=True,
        )
        assert list(found) == expected
        for position, (id_, _, frames, name, number) in enumerate(expected):
            first = int(extended.first_frame[position])
            assert (version.shard(name).features[first : first + frames] == number).all()
            assert extended.find_one(id_) == position
        assert extended.find(Strings.of(["nobody", *(one[0] for one in expected)])).tolist() == [
            -1,
            *range(len(expected)),
        ]
        assert extended.find_one("nobody") == -1
        shutil.rmtree(version.path / "index", ignore_errors=True)
        assert same(build_index(version), extended)
        some = {name: shard for name, shard in shards.items() if shard.row}
        assert [*build_index(replace(version, shards=[*some])).ids] == [
            one[0] for one in reference(some)
        ]


def test_an_index_is_extended_by_what_is_new(version, monkeypatch):
    for number in range(4):
        write(version, [item(f"a{number}"), item("b", generation=number + 1)], row=number)
    open_index(version)
    last = write(version, [item("c")], row=9).name
    read, shard = [], Version.shard
    monkeypatch.setattr(Version, "shard", lambda self, name: read.append(name) or shard(self, name))
    assert sorted(open_index(version).ids) == ["a0", "a1", "a2", "a3", "b", "c"]
    assert read == [last]


def test_of_the_indexes_that_are_kept_the_largest_alone_is_read(version, monkeypatch):
    """By the documents. If it is damaged, the next one is; and one of a shard that is
    gone goes first."""
    shards = []
    for number in range(4):
        shards.append(write(version, [item(f"a{number}")], row=number))
        if number:
            open_index(version)
    indexes = [index_name(version, [shard.name for shard in shards[:count]]) for count in (2, 3, 4)]
    write(version, [item("c")], row=9)
    read, table = [], Group.map
    monkeypatch.setattr(
        Group,
        "map",
        lambda self, *given, **how: read.append(self.key) or table(self, *given, **how),
    )

    def tables_read() -> list[str]:
        read.clear()
        assert len(build_index(version)) == len(version.shard_names())
        return [
            *dict.fromkeys(key.removeprefix("index/") for key in read if key.startswith("index/"))
        ]

    assert tables_read() == indexes[2:]
    flip(version.path / "index" / indexes[2] / "text/c/0", 0)
    assert tables_read() == [indexes[2], indexes[1]]
    shutil.rmtree(shards[2].folder)
    assert tables_read() == indexes[:1]
    for number in range(2):
        latest = open_index(version)
        write(version, [item(f"d{number}")], row=20 + number)
    assert {indexes[0], index_name(version, latest.shards)} < {*version.store.names("index")}
    assert not {*indexes[1:]} & {*version.store.names("index")}


def test_the_index_on_disk_is_the_one_that_is_built(version):
    """Kept once, found again, and another one when there is another shard; the latest few
    stay."""
    write(version, [item("a")])
    built, was_built = keep_index(version)
    age = index_folder(version).stat().st_mtime_ns
    again, is_built_again = keep_index(version)
    assert (was_built, is_built_again) == (True, False)
    assert same(built, again)
    assert index_folder(version).stat().st_mtime_ns == age
    for number in range(5):
        write(version, [item(f"x{number}")], row=1 + number)
        open_index(version, keep=False)
        assert not index_folder(version).exists()
        open_index(version)
        assert index_folder(version).exists()
    assert len(list((version.path / "index").iterdir())) == 3  # for who has them mapped


def test_two_ids_of_one_hash_are_refused(version, monkeypatch):
    """Nothing would find the second; and its name is in the message."""
    monkeypatch.setattr(Strings, "hashes", lambda self: np.full(len(self), 7, np.uint64))
    write(version, [item("a")])
    write(version, [item("b")], row=1)
    with pytest.raises(
        StoreError, match=r"'[ab]' and '[ab]' have the same hash: rename one of them"
    ):
        open_index(version)


def test_a_shard_that_is_gone_and_one_that_is_damaged_are_told_apart(version):
    first, second = write(version, [item("a")]), write(version, [item("b")], row=1)
    names = version.shard_names()
    shutil.rmtree(first.folder)
    with pytest.raises(ShardGoneError, match=f"{first.name}: is gone"):
        build_index(replace(version, shards=names))
    assert [*open_index(version).ids] == ["b"]
    flip(second.folder / "text/c/0", 0)
    shutil.rmtree(version.path / "index")
    with pytest.raises(
        DamagedError, match=f"{second.name}/text/c/0: damaged: its checksum does not match"
    ):
        open_index(version)


def test_a_shard_that_is_taken_away_while_it_is_read_is_looked_for_again_and_a_damaged_one_is_not(
    version, monkeypatch
):
    """A repair comes between its document and its table: what counts of it is in another
    one by then."""
    first = write(version, [item("a"), item("b")])
    check_table, looks = Shard.check_table, []

    def overtaken(shard: Shard) -> None:
        looks.append(shard.name)
        if len(looks) == 1:
            write(version, [item("a")])
            shutil.rmtree(shard.folder)
        check_table(shard)

    monkeypatch.setattr(Shard, "check_table", overtaken)
    assert [*open_index(version, keep=False).ids] == ["a"]
    second = looks[1]
    assert looks == [first.name, second]
    flip(version.shard(second).folder / "text/c/0", 0)
    with pytest.raises(
        DamagedError, match=f"{second}/text/c/0: damaged: its checksum does not match"
    ):
        open_index(version)
    assert looks[2:] == [second]


# Damage


@pytest.fixture
def small(version) -> Version:
    """Three utterances in two shards, one extracted twice, and their index."""
    write(version, [item("a", 2), item("b", 1)], row=0)
    write(version, [item("c", 3), item("a", 1, generation=2)], row=2, run="run 1")
    open_index(version)
    return version


def test_no_flipped_bit_of_an_index_is_believed(small):
    """A third of the bytes of each of its files; but for what only Zarr libraries read,
    the metadata of arrays."""
    names, believed = small.shard_names(), []
    sound = load_index(small, names)
    for path in sorted(path for path in index_folder(small).rglob("*") if path.is_file()):
        for _ in each_flip(path, 3):
            if load_index(small, names) is not None:
                believed.append(path.relative_to(index_folder(small)).as_posix())
    assert {*believed} <= {"items/zarr.json", "text/zarr.json"}
    assert same(load_index(small, names), sound)


@pytest.mark.parametrize("file", ["zarr.json", "items/c/0/0", "text/c/0"])
def test_a_damaged_index_is_built_anew(small, file):
    """Opening gives what the shards say, verify finds no damage, and the next one is
    sound."""
    expected = build_index(small)
    path = index_folder(small) / file
    for spoil in (lambda: flip(path, 2), path.unlink, lambda: path.write_bytes(b"")):
        spoil()
        report = verify(small)
        assert report.problems == []
        assert report.notes[-1] == (
            f"{index_folder(small)}: damaged: this index is built anew when the version "
            "is opened next"
        )
        assert same(open_index(small), expected)
        assert load_index(small, small.shard_names()) is not None


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("shard", [0, 1, 2]),
        ("by_id_hash", [0, 1, 3]),
        ("by_id_hash", [0, 1, 1 << 63]),
        ("first_frame", [0, 0, 1 << 63]),
        ("num_frames", [1, 1, 0]),
        ("num_frames", [1, 1, 1 << 50]),
        ("id_offset", [0, 2, 1, 3]),
        ("id_offset", [0, 1, 2, 9]),
    ],
)
def test_an_index_that_leads_out_of_its_lists_is_not_believed(small, column, values):
    """Though all its checksums are right, as a faulty writer's or a stranger's would be."""
    names = small.shard_names()
    seal_files(index_folder(small))
    assert load_index(small, names) is not None
    columns_of(index_folder(small))[column][: len(values)] = values
    seal_files(index_folder(small))
    assert load_index(small, names) is None
    assert [*open_index(small).ids] == ["b", "c", "a"]


@pytest.mark.parametrize("made_by", [{"run": 5}, {"run": None}, {"mismatch": "x"}])
def test_what_a_shard_says_of_its_maker_may_be_anything(version, made_by):
    shard = write(version, [item("a")])
    reseal(shard.folder, lambda it: it.update(made_by=made_by))
    assert open_index(version).makers == [Maker()]


def test_an_index_of_other_shards_or_of_another_version_is_not_believed(small):
    names = small.shard_names()
    for forged in ({"makers": []}, {"fingerprint": "f" * 64}):
        reseal(index_folder(small), lambda it: it.update(forged))  # noqa: B023
        assert load_index(small, names) is None
        open_index(small)
    expected = open_index(small)
    other = create(small.path / "other", structs.replace(INFO, fingerprint=INFO.fingerprint))
    write(other, [item("x")])
    open_index(other)
    shutil.rmtree(index_folder(small))
    shutil.copytree(index_folder(other), index_folder(small))
    assert load_index(small, names) is None
    assert same(open_index(small), expected)


def test_a_cache_that_cannot_be_written_is_read_all_the_same(small, monkeypatch):
    expected = build_index(small)
    shutil.rmtree(small.path / "index")
    for error in (StoreError("full"), OSError("read-only")):
        monkeypatch.setattr("featcache.format.writing.group_files", Mock(side_effect=error))
        assert same(open_index(small), expected)
        with pytest.raises(type(error)):
            keep_index(small)
