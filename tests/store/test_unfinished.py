"""A version is whole or is said not to be, whatever its runs have been through: by their records, and by no clock."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace

import pytest
from clocks import set_clock
from hypothesis import given
from hypothesis import strategies as st
from recorded_runs import ROOT, Model
from scratch import scratch_folder
from small_shards import INFO, item, write

from featcache.errors import StoreError
from featcache.store.findings import LostShards, Unfinished, Unrecorded
from featcache.store.run_records import ShardEvent, run_names
from featcache.store.runs import Run
from featcache.store.unfinished import find_unfinished
from featcache.store.version import Version

MANIFESTS = {
    "a.csv": [f"a{number}" for number in range(9)],
    "b.csv": [f"b{number}" for number in range(5)],
    "both.csv": [*(f"a{number}" for number in range(9)), *(f"b{number}" for number in range(5)), "c"],
}
EVERY_ID = sorted({id_ for ids in MANIFESTS.values() for id_ in ids})
ACTIONS = ("step", "step", "fail", "end", "interrupt", "kill", "lose")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.sampled_from(sorted(MANIFESTS)), st.integers(-(10**9), 10**9)),
        st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(1, 4)),
        st.tuples(st.just("prune"), st.sets(st.sampled_from(EVERY_ID), max_size=4), st.just(0)),
    ),
    max_size=14,
)


def found(model: Model):
    return find_unfinished(model.version, model.index(), all_runs=True)


@pytest.fixture
def model(version) -> Model:
    return Model(version, MANIFESTS)


@given(steps)
def test_a_version_that_is_not_whole_is_never_accepted_and_one_made_whole_is(sequence):
    """Runs over manifests that overlap, side by side, by clocks that jump: killed, stopped, ended; with shards lost
    and utterances pruned.
    """
    with scratch_folder() as folder, pytest.MonkeyPatch.context() as patch:
        seconds = [0.0]
        set_clock(patch, iter(lambda: seconds[0], None))
        model = Model(Version.create(folder, INFO), MANIFESTS)
        for action, which, number in sequence:
            if action == "begin":
                seconds[0] = number
                model.begin(which)
            elif action == "prune":
                for job in [*model.jobs]:  # beside a run, nothing is pruned
                    model.kill(job)
                model.prune(which)
            elif action == "lose":
                names = model.version.shard_names()
                if names:
                    shutil.rmtree(model.version.shard(names[which % len(names)]).folder)
            elif model.jobs:
                job = model.jobs[which % len(model.jobs)]
                if action in ("step", "fail"):
                    model.step(job, number, failing=number // 2 if action == "fail" else 0)
                else:
                    getattr(model, action)(job)
            names = run_names(model.version)
            assert names == sorted(names)
            if model.missing():
                assert found(model)
        for job in [*model.jobs]:
            model.kill(job)
        for manifest in sorted(model.asked):
            model.whole_run(manifest)
        assert model.missing() == set()
        assert not model.asked or found(model) == []


def test_how_much_is_missing_is_said(model):
    """Of a run that was killed, exactly: what others over the same manifest have done since counts, as do failures."""
    first = model.begin("a.csv")
    model.step(first, 2, failing=1)
    second = model.begin("a.csv")  # beside the first
    model.step(first, 2, failing=1)
    model.step(second, 3)
    model.kill(first)
    model.kill(second)
    (finding,) = found(model)
    missing = len(model.missing())
    assert (finding.manifest, finding.utterances, finding.missing, finding.failed) == ("a.csv", 9, missing, 2)
    assert 0 < missing < 9
    model.whole_run("b.csv")
    assert [finding.missing for finding in found(model)] == [missing]
    model.whole_run("a.csv")
    assert found(model) == []


def test_a_run_that_ended_beside_one_that_was_killed_makes_up_for_it(model):
    """It began first and ended last, with a failure that the other did not live to see."""
    first = model.begin("a.csv")
    model.killed_run("a.csv", 2)
    model.step(first, 4, failing=1)
    model.end(first)
    assert model.missing() == set()
    assert found(model) == []


def test_a_run_beside_over_another_manifest_hides_nothing(model):
    """It began before the one that was killed, and added more than that one lacks."""
    beside = model.begin("b.csv")
    model.killed_run("a.csv", 6)
    model.end(beside)
    assert [(finding.manifest, finding.missing) for finding in found(model)] == [("a.csv", 3)]


def test_a_run_from_the_future_hides_nothing(model, monkeypatch):
    """A clock showed the year 2199 when a run ended; later ones are later all the same."""
    set_clock(monkeypatch, itertools.chain([5.5e9, 5.5e9], itertools.repeat(0)))
    model.whole_run("b.csv")
    killed = model.killed_run("a.csv", 4)
    assert run_names(model.version)[0].startswith("2200")
    assert killed.run.id == run_names(model.version)[1]
    assert [finding.missing for finding in found(model)] == [5]


def test_a_shard_that_is_gone_is_named(model):
    """Until it is there again, is superseded, was taken away by repair, or a whole run has made up for it."""
    job = model.whole_run("a.csv")
    first, second, third = (model.version.shard(name) for name in model.version.shard_names())
    items, of_second = first.info.items, list(second.items())
    shutil.move(first.folder, model.version.path / "elsewhere")
    (finding,) = found(model)
    assert isinstance(finding, LostShards)
    assert (finding.manifest, finding.shards, finding.missing) == ("a.csv", [first.name], items)
    shutil.move(model.version.path / "elsewhere", first.folder)
    assert found(model) == []

    write(model.version, of_second, run=job.run.id, supersedes={second.name: [*range(len(of_second))]})
    shutil.rmtree(second.folder)
    assert found(model) == []

    repair = Run(model.version, {"only": True})
    repair.record_shards([ShardEvent(third.name, 0, until=repair.id)])
    shutil.rmtree(third.folder)
    assert [finding.were_there for finding in found(model) if isinstance(finding, Unfinished)] == [True]
    model.whole_run("a.csv")
    assert found(model) == []


def test_what_is_lost_while_a_run_makes_up_for_it_is_lost_again(model):
    """The new shard has the old one's name, since it has its items."""
    model.whole_run("a.csv")
    name = model.version.shard_names()[0]
    for _ in range(3):
        shutil.rmtree(model.version.shard(name).folder)
        assert [finding.shards for finding in found(model)] == [[name]]
        model.whole_run("a.csv")
        assert found(model) == []


@pytest.mark.parametrize("is_all_gone", [True, False])
def test_shards_of_a_run_without_a_record_are_not_trusted(model, is_all_gone):
    """`runs/` was not on disk when the power went, or was removed; until a run finds these shards in its manifest."""
    killed = model.killed_run("a.csv", 4)
    shutil.rmtree(killed.run.folder.parent if is_all_gone else killed.run.folder)
    (finding,) = found(model)
    assert isinstance(finding, Unrecorded)
    assert (finding.runs, finding.shards, finding.utterances) == ([killed.run.id], model.version.shard_names(), 4)
    assert finding.is_copy == is_all_gone
    (model.version.path / "runs").mkdir(exist_ok=True)
    model.whole_run("b.csv")
    assert found(model) == [replace(finding, is_copy=False)]
    model.whole_run("a.csv")
    assert found(model) == []


def test_of_very_many_runs_the_latest_are_looked_at_unless_all_are_to_be(model):
    """So one made by a thousand jobs opens as fast; `strict=True` and `verify` look at all."""
    model.killed_run("a.csv", 0)
    for number in range(70):
        manifest = f"{number}.csv"
        model.manifests = {**model.manifests, manifest: []}
        model.whole_run(manifest)
    assert find_unfinished(model.version, model.index()) == []
    assert len(found(model)) == 1


def test_the_run_of_very_many_workers_is_looked_at_with_them(model):
    job = model.begin("a.csv")
    for _ in range(70):
        worker = {"manifest": "a.csv", "root": ROOT, "only": True, "part_of": job.run.id}
        Run(model.version, worker, after=[job.run.id]).finish({"extracted": 0, "failed": 0, "interrupted": False})
    model.kill(job)
    assert [finding.missing for finding in find_unfinished(model.version, model.index())] == [9]


def test_a_name_sorts_after_all_that_were_there(version, monkeypatch):
    """Whatever the clock says, and of runs of which there are only shards."""
    set_clock(monkeypatch, itertools.chain([10, 5, 5, 20, 3], itertools.repeat(0)))
    made = [Run(version, {}).id for _ in range(4)]
    lost = "20270101T000000.000000Z-ffff"
    write(version, [item("a")], run=lost)
    made += [lost, Run(version, {}, after=[lost, "", "first"]).id, Run(version, {}).id]
    assert made == sorted(made)
    assert len({*made}) == len(made)
    (version.path / "runs" / "99999999T235959.999999Z-0000").mkdir()  # there is no such day
    assert Run(version, {}).id > made[-1]
    (version.path / "runs" / "99991231T235959.999999Z-0000").mkdir()
    with pytest.raises(StoreError, match=r"99991231T235959.999999Z-0000: no run can be later"):
        Run(version, {})
