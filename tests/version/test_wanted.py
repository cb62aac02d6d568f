"""What a version lacks is what manifests want, without what is there and what has failed:
whatever the history."""

import shutil
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest
from damage import each_cut, each_flip, flip
from hypothesis import given, settings
from hypothesis import strategies as st
from scratch import scratch_folder
from small_shards import INFO, create, item, write

from featcache.care.prune import forget_rows
from featcache.errors import DamagedError, ManifestError
from featcache.extraction.tasks import want
from featcache.format.documents import encode_line
from featcache.manifest.segments import SegmentColumns, Utterance
from featcache.manifest.strings import Strings
from featcache.version.indexing import build_index, open_index
from featcache.version.join import RowKeys, join
from featcache.version.ledger import (
    Failure,
    failures_by_row,
    put_failures,
    read_failures,
    standing_failures,
)
from featcache.version.tags import at_tag, make_tag
from featcache.version.version import Version
from featcache.version.wanted import (
    Unfinished,
    Wanted,
    damaged_wanted,
    find_lacking,
    find_missing,
    name_of,
    read_all_wanted,
    read_wanted,
)

Rows = dict[str, float]
"""A manifest: where each row's segment begins, by id; a row that has changed begins
elsewhere."""


def utterance(id_: str, start: float) -> Utterance:
    return Utterance(id=id_, path=f"{id_}.wav", start=start)


def keys(rows: Rows) -> np.ndarray:
    utterances = [utterance(id_, start) for id_, start in rows.items()]
    hashes = Strings.of(rows).hashes(), SegmentColumns.of(utterances).hashes()
    return np.stack([*hashes, np.zeros(len(rows), np.uint64)])


def failure(id_: str, start: float = 0.0, generation: int = 1, reason: str = "empty") -> Failure:
    return Failure(
        id=id_, path=f"{id_}.wav", start=start, reason=reason, message="seen", generation=generation
    )


def plan(version: Version, manifest: str, rows: Rows, again=()) -> Wanted:
    """Begin a run over a manifest: what it wants is kept."""
    wanted = want(manifest, keys(rows), open_index(version), [*read_all_wanted(version)], again)
    wanted.save(version)
    return wanted


def run(
    version: Version, manifest: str, rows: Rows, failing=(), stop: int | None = None
) -> str | None:
    """A run over a manifest, which extracts what is missing, but for what fails, and ends
    after so many rows. Returns the name of its shard, if it makes one."""
    wanted = plan(version, manifest, rows)
    ((_, numbers, _),) = find_missing([wanted], open_index(version), read_failures(version))
    ids, generations = list(rows), wanted.rows[2].tolist()
    todo = [(ids[number], generations[number]) for number in numbers.tolist()[:stop]]
    failed = [failure(id_, rows[id_], generation) for id_, generation in todo if id_ in failing]
    put_failures(version, f"run {len(version.store.names('failures')):06}", failed)
    items = [
        item(id_, start=rows[id_], generation=generation)
        for id_, generation in todo
        if id_ not in failing
    ]
    return write(version, items, manifest=wanted.name).name if items else None


def missing(version: Version) -> dict[str, set[str]]:
    """The ids that are missing, by manifest, as far as there are some; here they are
    single letters."""
    by_hash = dict(zip(Strings.of(IDS).hashes().tolist(), IDS, strict=True))
    return {
        one.manifest: {by_hash[id_hash] for id_hash in one.rows[0, numbers].tolist()}
        for one, numbers, _ in find_missing(
            read_all_wanted(version), open_index(version), read_failures(version)
        )
        if len(numbers)
    }


# Histories

IDS = "abcde"
ROWS = st.dictionaries(st.sampled_from(IDS), st.sampled_from([0.0, 0.5, 1.0]), min_size=1)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("run"),
            st.sampled_from(["m", "n"]),
            ROWS,
            st.sets(st.sampled_from(IDS), max_size=2),
            st.none() | st.integers(0, 3),
        ),
        st.tuples(st.just("lose"), st.integers(0, 9)),
    ),
    max_size=8,
)


@dataclass
class Model:
    """What is wanted, there and failed, in dicts: id -> (start, generation)."""

    wanted: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    shards: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    failed: set[tuple[str, float, int]] = field(default_factory=set)

    def counting(self) -> dict[str, tuple[float, int]]:
        """The item of each id that counts: of the highest generation, and of several the
        first by name of its shard."""
        items: dict[str, tuple[float, int]] = {}
        for name in sorted(self.shards):
            for id_, (start, generation) in self.shards[name].items():
                if id_ not in items or generation > items[id_][1]:
                    items[id_] = start, generation
        return items

    def lacks(self, manifest: str) -> list[str]:
        """The rows that have neither an item that is as good, nor a failure."""
        items, lacking = self.counting(), []
        for id_, (start, generation) in self.wanted[manifest].items():
            is_there = id_ in items and (
                items[id_] == (start, generation) or items[id_][1] > generation
            )
            if not is_there and not self.stands_failed(id_, start, generation):
                lacking.append(id_)
        return lacking

    def stands_failed(self, id_: str, start: float, generation: int) -> bool:
        """Whether a failure of the row is of this generation, or of a later one than what
        there is of its id."""
        failed = max((of for *row, of in self.failed if row == [id_, start]), default=0)
        _, counting = self.counting().get(id_, (0.0, 0))
        return failed >= generation or failed > counting

    def want(self, manifest: str, rows: Rows) -> None:
        """A row has the generation of what is known of its id, and the next one if that
        is another row."""
        contained = [
            other
            for other, theirs in self.wanted.items()
            if other == manifest
            or all(rows.get(id_) == start for id_, (start, _) in theirs.items())
        ]
        known = [self.counting(), *(self.wanted[other] for other in contained)]
        mine = {}
        for id_, start in rows.items():
            of_id = [one[id_] for one in known if id_ in one]
            highest = max((generation for _, generation in of_id), default=1)
            is_same = all(other == start for other, generation in of_id if generation == highest)
            mine[id_] = start, highest if is_same else highest + 1
        for other in contained:
            del self.wanted[other]
        self.wanted[manifest] = mine


@settings(max_examples=settings.default.max_examples // 3)
@given(STEPS)
def test_whatever_the_history_what_is_missing_is_what_the_model_says(steps):
    """Runs over manifests that grow, shrink, move and change; with failures, kills and
    lost shards between them."""
    with scratch_folder() as folder:
        version, model = create(folder), Model()
        version.store.remove(f"wanted/{name_of('made up')}")
        for step in steps:
            if step[0] == "lose":
                if names := sorted(model.shards):
                    name = names[step[1] % len(names)]
                    shutil.rmtree(version.path / "shards" / name)
                    del model.shards[name]
            else:
                _, manifest, rows, failing, stop = step
                model.want(manifest, rows)
                todo = model.lacks(manifest)[:stop]
                for id_ in failing.intersection(todo):
                    model.failed.add((id_, *model.wanted[manifest][id_]))
                made = {id_: model.wanted[manifest][id_] for id_ in todo if id_ not in failing}
                name = run(version, manifest, rows, failing, stop)
                assert (name is not None) == bool(made)
                if name is not None:
                    model.shards[name] = made
            lacking = {
                manifest: {*ids} for manifest in model.wanted if (ids := model.lacks(manifest))
            }
            assert missing(version) == lacking
            index = open_index(version)
            found = [one for one in find_lacking(version, index) if isinstance(one, Unfinished)]
            assert {one.manifest: one.missing for one in found} == {
                name: len(ids) for name, ids in lacking.items()
            }
            counting = zip(
                index.ids, index.row_hash.tolist(), index.generation.tolist(), strict=True
            )
            assert {id_: what for id_, *what in counting} == {
                id_: [keys({id_: start})[1].item(), generation]
                for id_, (start, generation) in model.counting().items()
            }
        # and what is lacking is there once it is extracted
        for manifest, wanted in [*model.wanted.items()]:
            rows = {id_: start for id_, (start, _) in wanted.items()}
            run(version, manifest, rows)
            assert manifest not in missing(version)


# Single cases


@pytest.fixture
def version(scratch) -> Version:
    """An empty version, of which nothing is wanted yet."""
    return Version.create(scratch / INFO.folder_name, INFO)


def says(version: Version) -> list[str]:
    return [str(finding) for finding in find_lacking(version, open_index(version))]


A, B = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0, "c": 0.0}


def test_a_manifest_that_has_moved_or_grown_leaves_nothing_behind(version):
    """What it wants takes the place of what it wanted elsewhere; its shards are known to
    be of it."""
    run(version, "old/m.csv", A, stop=1)
    assert "1 of the 2 utterances of old/m.csv are missing" in says(version)[0]
    run(version, "new/m.csv", A)
    assert says(version) == []
    run(version, "larger.csv", B)
    (wanted,) = read_all_wanted(version)
    assert wanted.names == {
        name_of(manifest) for manifest in ("old/m.csv", "new/m.csv", "larger.csv")
    }
    assert says(version) == []


def test_a_manifest_of_other_or_of_fewer_rows_takes_no_others_place(version):
    run(version, "m", B, stop=1)
    run(version, "fewer", A)
    run(version, "changed", {**B, "b": 1.5})
    run(version, "others", {"d": 0.0})
    assert {wanted.manifest for wanted in read_all_wanted(version)} == {
        "m",
        "fewer",
        "changed",
        "others",
    }
    assert missing(version) == {}  # a later generation of a row is as good


def test_rows_that_are_extracted_again_get_the_next_generation(version):
    """Because their audio has changed, for example; also if the run dies, and is run
    again without a word of them."""
    run(version, "m", A)
    plan(version, "m", A, again=[1])
    assert missing(version) == {"m": {"b"}}
    run(version, "m", A)
    assert missing(version) == {}
    assert open_index(version).generation[open_index(version).find_one("b")] == 2


def test_two_ids_of_one_hash_are_refused(version):
    rows = np.array([[7, 7], [1, 2], [0, 0]], np.uint64)
    with pytest.raises(
        ManifestError, match=r"m\.csv: two ids have the same hash: rename one of them"
    ):
        want("m.csv", rows, open_index(version), [])


def test_a_wanted_set_that_is_lost_is_noticed(version):
    """By the shards that were made for it; a run over the manifest mends it."""
    run(version, "m", A)
    (path,) = (version.path / "wanted").iterdir()
    path.unlink()
    (finding,) = says(version)
    assert (
        f"{name_of('m')} is gone, of which 1 shard was made: what else the manifest wants "
        "is not known" in finding
    )
    run(version, "m", A)
    assert says(version) == []


def test_a_version_that_holds_nothing_and_wants_nothing_is_not_whole(version):
    assert "it holds nothing, and nothing says what it is to hold" in says(version)[0]
    plan(version, "m", {})
    assert says(version) == []


def test_no_flipped_bit_of_a_wanted_set_is_believed(version):
    """Nor one that is cut off, or lies under another's name; and the other sets count."""
    run(version, "n", {"d": 0.0})
    plan(version, "m", A)
    assert missing(version) == {"m": {"a", "b"}}
    path = version.path / "wanted" / name_of("m")
    for _ in chain(each_flip(path), each_cut(path)):
        with pytest.raises(DamagedError, match=f"{path}: damaged"):
            read_wanted(version, path.name)
    shutil.copy(path, path.with_name(name_of("n")))
    assert missing(version) == {"m": {"a", "b"}}
    (damaged,) = [
        finding for finding in says(version) if name_of("n") in finding and "damaged" in finding
    ]
    assert "not what was written" in damaged


def test_a_wanted_set_that_claims_more_rows_than_it_has_takes_no_memory_for_them(version):
    name = name_of("m")
    version.store.put(
        f"wanted/{name}",
        encode_line({"manifest": "m", "rows": 1 << 47, "crc32c": 0, "instead_of": []}),
    )
    with pytest.raises(DamagedError, match=f"wanted/{name}: damaged: it is not what was written"):
        read_wanted(version, name)
    assert damaged_wanted(version) == [name]


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_wanted_set_is_damaged_that_cannot_be_read_twice(version, monkeypatch, times):
    """A disk may refuse once: what is damaged is removed by repair, and a run over the
    manifest has to make it anew."""
    run(version, "m", A)
    refusals, looks = iter([DamagedError("Input/output error")] * times), []

    def read(*arguments: object) -> Wanted:
        looks.append(arguments)
        for refusal in refusals:
            raise refusal
        return read_wanted(*arguments)

    monkeypatch.setattr("featcache.version.wanted.read_wanted", read)
    assert damaged_wanted(version) == [name_of("m")] * (times > 1)
    assert len(looks) == min(times + 1, 2)  # what has been read is not read again


def test_rows_that_an_index_is_known_to_have_are_not_read_again(version):
    """So opening takes no longer for a long manifest. Whoever looks at everything reads
    them."""
    run(version, "m", A)
    assert says(version) == []
    path = version.path / "wanted" / name_of("m")
    flip(path, path.stat().st_size - 1)
    assert says(version) == []
    (finding,) = find_lacking(version, build_index(version))
    assert "damaged" in str(finding)
    plan(version, "m", B)
    assert "1 of the 3 utterances of m are missing" in says(version)[0]


def test_rows_that_nobody_wants_any_more_are_forgotten(version):
    plan(version, "m", B)
    forget_rows(version, Strings.of(["a", "c"]).hashes(), open_index(version))
    assert missing(version) == {"m": {"a", "c"}}


def generations(version: Version, rows: Rows) -> list[int]:
    """Those of the items of a run over a manifest."""
    run(version, "m", rows)
    index = open_index(version)
    return index.generation[index.find(Strings.of(rows))].tolist()


def forget(version: Version, rows: Rows) -> None:
    """Prune what is not in these rows."""
    forget_rows(version, Strings.of(rows).hashes(), open_index(version))
    for name in version.shard_names():
        if not {*version.shard(name).table.ids} & rows.keys():
            version.store.remove(f"shards/{name}")


def test_a_row_that_was_forgotten_and_comes_back_gets_a_higher_generation(version):
    """Also after other runs, and if it was wanted and never extracted; and what nobody has
    forgotten keeps the first generation."""
    assert generations(version, {"a": 0.0}) == [1]
    assert generations(version, {"a": 0.0, "b": 0.0}) == [1, 1]
    assert generations(version, {"a": 0.0, "b": 0.5}) == [1, 2]
    assert b"forgotten" not in version.store.read(f"wanted/{name_of('m')}", 1 << 16)
    plan(version, "m", {"a": 0.0, "b": 1.0})
    forget(version, {"a": 0.0})
    run(version, "m", {"a": 0.0})
    run(version, "larger", {"a": 0.0, "d": 0.0})
    assert generations(version, {"a": 0.0, "b": 1.5}) == [1, 4]
    forget(version, {"a": 0.0})
    assert generations(version, {"a": 0.0, "b": 0.0}) == [1, 5]
    assert missing(version) == {}


def test_what_was_dropped_before_and_goes_is_forgotten_too(version):
    """No manifest wants it any more, and there is an item."""
    generations(version, {"a": 0.0})
    generations(version, {"a": 0.0, "b": 0.0})
    generations(version, {"a": 0.0, "b": 0.5})
    run(version, "m", {"a": 0.0})
    forget(version, {"a": 0.0})
    assert generations(version, {"a": 0.0, "b": 1.0}) == [1, 3]


def test_joined_sets_want_what_each_wants_in_the_higher_generation(version):
    ours, theirs = (
        Wanted("m", np.array(rows, np.uint64).T, {other}, forgotten)
        for rows, other, forgotten in (
            ([[7, 1, 1], [3, 1, 2]], "a" * 16, 4),
            ([[9, 1, 1], [3, 5, 3], [7, 5, 1]], "b" * 16, 2),
        )
    )
    joined = ours.joined(theirs, {9: 2, 3: 2, 5: 5})
    assert joined.rows.T.tolist() == [[7, 1, 1], [3, 5, 3], [9, 1, 2]]
    assert (joined.instead_of, joined.forgotten) == ({"a" * 16, "b" * 16}, 4)
    nothing = Wanted("m", np.zeros((3, 0), np.uint64))
    for both in (ours.joined(nothing, {}), nothing.joined(ours, {})):
        assert both.rows.tolist() == ours.rows.tolist()


def test_a_row_that_has_failed_has_failed_in_each_generation(version):
    """It fails, is another and good while a run is killed, and is then the first again."""
    run(version, "m", {"a": 0.0}, failing={"a"})
    plan(version, "m", {"a": 0.5})
    assert missing(version) == {"m": {"a"}}
    wanted = plan(version, "m", {"a": 0.0})
    assert wanted.rows[2].tolist() == [3]
    assert missing(version) == {}
    status = join(
        RowKeys.of_utterances([utterance("a", 0.0)]),
        open_index(version),
        failures_by_row(version, open_index(version)),
    )
    assert (status.missing.tolist(), status.failures[0].generation) == ([False], 1)


def test_two_rows_of_an_id_that_have_failed_have_both_failed(version):
    """Of two manifests: neither is tried again, and neither is missing."""
    rows = {"m": 0.0, "n": 0.5}
    for manifest, start in rows.items():
        run(version, manifest, {"a": start}, failing={"a"})
    index = open_index(version)
    keys = RowKeys.of_utterances([utterance("a", start) for start in rows.values()])
    assert join(keys, index, failures_by_row(version, index)).failed.tolist() == [True, True]
    assert missing(version) == {}


@pytest.mark.parametrize(("larger", "smaller"), ["mn", "nm"])
def test_rows_are_forgotten_of_a_manifest_whose_others_are_all_that_another_wants(
    version, larger, smaller
):
    """It takes that one's place, whichever of the two is read first."""
    plan(version, larger, B)
    plan(version, smaller, A)
    forget_rows(version, Strings.of(A).hashes(), open_index(version))
    (wanted,) = read_all_wanted(version)
    assert (wanted.manifest, wanted.names, len(wanted)) == (
        larger,
        {name_of("m"), name_of("n")},
        len(A),
    )


def test_of_a_tag_nothing_is_lacking(version):
    run(version, "m", A, stop=1)
    make_tag(version, "paper", open_index(version))
    assert len(says(version)) == 1
    assert says(at_tag(version, "paper")) == []


# The ledger


def test_a_failure_stands_until_there_is_an_item_of_its_generation(version):
    run(version, "m", B, failing={"a", "b"})
    assert {*standing_failures(version, open_index(version))} == {"a", "b"}
    assert says(version) == []
    run(version, "m", {**B, "a": 1.5})  # another row, which does not fail
    assert {*standing_failures(version, open_index(version))} == {"b"}
    run(version, "m", {**B, "a": 0.0}, failing={"a"})
    assert standing_failures(version, open_index(version))["a"].generation == 3
    assert len(open_index(version)) == 2  # its older item is still there
    assert missing(version) == {}


def test_of_several_failures_the_last_of_the_highest_generation_is_told(version):
    put_failures(version, "run 1", [failure("a"), failure("b", generation=2)])
    put_failures(version, "run 2", [failure("a", reason="decode"), failure("b")])
    standing = standing_failures(version, open_index(version))
    assert {id_: (one.reason, one.generation) for id_, one in standing.items()} == {
        "a": ("decode", 1),
        "b": ("empty", 2),
    }
    assert len(read_failures(version, run="run 1")) == 2


@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        unique=True,
        min_size=1,
        max_size=5,
    )
)
def test_the_ledger_keeps_any_text(names):
    """Ids, paths and messages of whatever characters, one record a line."""
    failures = [Failure(id=name, path=name, reason="empty", message=name) for name in names]
    with scratch_folder() as folder:
        version = create(folder)
        put_failures(version, "run", failures)
        assert read_failures(version) == failures


def test_a_damaged_ledger_is_all_that_is_told_of_what_may_have_failed(version):
    """Its utterances count as missing, which they may not be."""
    plan(version, "m", A)
    put_failures(version, "one", [failure("a"), failure("b")])
    assert says(version) == []
    (path,) = (version.path / "failures").iterdir()
    flip(path, 5)
    (finding,) = says(version)
    assert finding.startswith("failures/one, line 1: damaged")
    assert finding.endswith(": 1 utterance may be missing, or have failed")


def test_a_damaged_line_is_passed_over_and_named(version):
    """Its utterance is missing then, and tried again; the other lines count."""
    run(version, "m", B, failing={"a", "b", "c"})
    (path,) = (version.path / "failures").iterdir()
    data = path.read_bytes()
    first, second, _ = data.splitlines(keepends=True)
    for at in each_flip(path):
        if 0 <= at - len(first) < len(second) - 1:
            damaged = []
            assert [one.id for one in read_failures(version, damaged)] == ["a", "c"]
            assert f"{path}, line 2: damaged: " in damaged[0]
    flip(path, len(first), 0)
    assert missing(version) == {"m": {"b"}}
    assert any("line 2" in finding for finding in says(version))
    path.write_bytes(data[:-3])  # torn
    assert missing(version) == {"m": {"c"}}
    run(version, "m", B)
    assert missing(version) == {}
