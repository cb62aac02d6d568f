"""What becomes of tasks when workers die: all in this process, with workers that are none."""

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partialmethod
from multiprocessing import Pipe
from pathlib import Path
from unittest import mock

import pytest
from cache_contents import check, items, ledger, only_version
from extractions import ONE_EACH, write_config
from hypothesis import given
from hypothesis import strategies as st
from test_suspects import assert_it_cost_itself_alone, crashing

import featcache
from featcache.engines import dispatch as dispatching
from featcache.engines import worker as workers
from featcache.engines.dispatch import MOST_DEATHS, MOST_TASKS, Chunks, Dispatch
from featcache.engines.process import passable
from featcache.engines.worker import Died, Ready, Stop, Work, WorkerSetup, serve
from featcache.errors import ConfigError, ExtractorError, ManifestError, MissingDependencyError
from featcache.extraction.tasks import ShardTask
from featcache.manifest.read import read_manifest
from featcache.version.records import read_run, run_names


class InlineTeam:
    """A team of which some die.

    Args:
        size: The number of workers.
        deadly: The ids of utterances that end whoever is told to extract them, unless apart.
        even_apart: Whether they do so also apart.
        labels: The models of the workers' devices.
        fate: Called with the number of a worker and the tasks that it is to do; may
            return how it dies of them.
    """

    def __init__(
        self,
        size: int,
        deadly: Collection[str] = (),
        labels: Collection[str] = (),
        fate: Callable[[int, Work], Died | None] = lambda number, work: None,
        even_apart: bool = False,
    ) -> None:
        self.names = [f"worker {number + 1}" for number in range(size)]
        self.started: list[int] = []
        self.works: list[tuple[int, Work]] = []
        self._deadly, self._labels, self._fate = frozenset(deadly), [*labels], fate
        self._even_apart = even_apart
        self._events = []
        self._workers = {}
        self._inbox = workers.Inbox()

    def start(self, worker, setup):
        self.started.append(worker)
        made = workers._Worker(
            setup.on("cpu", 1), self._inbox, lambda event: self._events.append((worker, event))
        )
        self._workers[worker] = made
        label = self._labels[worker] if self._labels else "cpu"
        self._events.append((worker, Ready(label, 1, [job.run.id for job in made.jobs])))

    def send(self, worker, message):
        match message:
            case Work(tasks, suspects):
                self.works.append((worker, message))
                died = self._fate(worker, message)
                spared = suspects.fatal if self._even_apart else suspects.ids
                if (self._deadly - spared) & {row.id for task in tasks for row in task.utterances}:
                    died = Died("SIGKILL")
                if died is None:
                    self._workers[worker].do(message)
                else:
                    self._events.append((worker, died))
            case Stop():
                self._inbox.stop.set()

    def wait(self, seconds):
        events, self._events = self._events, []
        return events

    def end(self):
        """Nothing has to end: there are no processes."""


@pytest.fixture
def run(plain, slow_config, scratch):
    """Runs a job over the plain utterances, all of which a team does."""

    def run(team, manifest=None, config=slow_config, **options):
        options = featcache.Options("cpu", 1, **{"shard_megabytes": ONE_EACH, **options})

        def engine(group, tasks, control):
            Dispatch(group, tasks, control, team, options).run()

        chosen = replace(options, engine=engine)
        return featcache.extract(manifest or plain.manifest(), config, scratch / "cache", chosen)

    return run


def attempts(team: InlineTeam, id_: str) -> int:
    """How often somebody was told to extract an utterance."""
    return sum(
        id_ in {row.id for task in work.tasks for row in task.utterances} for _, work in team.works
    )


def test_what_always_ends_a_process_is_in_the_ledger_and_everything_else_is_there(
    cli, run, plain, scratch
):
    """Whatever it does leaves no marks here, so that only its shard is known: at last,
    its utterances are extracted apart."""
    manifest, config = crashing(plain, "segfault"), write_config(scratch, "Crashing")
    bad = f"{plain.ids[1]}!segfault"
    team = InlineTeam(2, deadly=[bad])
    summary = run(team, manifest, config, shard_megabytes=ONE_EACH * 4)
    assert summary.failed_by_reason == {"crashed": 1}
    assert (summary.versions[0].extracted, summary.versions[0].failed) == (11, 1)
    assert_it_cost_itself_alone(cli, plain, config, scratch / "cache", "segfault")
    assert check(scratch / "cache", manifest=read_manifest(manifest)).problems == []
    assert attempts(team, bad) <= 6
    # it is not tried again
    assert run(InlineTeam(2), manifest, config).versions[0].failed == 1


@pytest.mark.parametrize("shard", [4, 6])
def test_a_whole_shard_has_crashed_if_nothing_tells_which_utterance_does(
    run, plain, scratch, whole, shard
):
    """Also if it is the first, and there is one worker."""
    team = InlineTeam(1, deadly=[plain.ids[0]], even_apart=True)
    summary = run(team, shard_megabytes=ONE_EACH * shard)
    failed = ledger(scratch / "cache")
    assert plain.ids[0] in failed
    assert {failure.reason for failure in failed.values()} == {"crashed"}
    assert items(scratch / "cache") == {
        id_: item for id_, item in whole.items() if id_ not in failed
    }
    assert summary.versions[0].failed == len(failed) < 12
    assert attempts(team, plain.ids[0]) <= 7  # at the last of which its process gives it up


def test_a_device_that_ends_every_process_is_left_out(run, scratch, whole):
    team = InlineTeam(2, fate=lambda number, work: Died("SIGBUS") if number == 0 else None)
    assert run(team).versions[0].extracted == 12
    assert items(scratch / "cache") == whole
    assert team.started.count(0) <= 7


def test_where_nothing_lives_long_the_run_fails(run, scratch):
    for size in (ONE_EACH, 6 * ONE_EACH):
        team = InlineTeam(2, fate=lambda number, work: Died("SIGBUS"))
        with pytest.raises(
            ExtractorError, match=r"worker 1, worker 2: processes ended again and again.*SIGBUS"
        ):
            run(team, shard_megabytes=size)
        assert [*(scratch / "cache").iterdir()] == []  # not even a version


def test_nobody_waits_for_a_worker_that_never_begins(run, scratch, whole):

    class Alone(InlineTeam):
        def start(self, worker, setup):
            if worker == 0:
                super().start(worker, setup)

        def send(self, worker, message):
            if worker == 0:
                super().send(worker, message)

    fates = iter([Died("SIGBUS")])
    assert run(Alone(2, fate=lambda number, work: next(fates, None))).versions[0].extracted == 12
    assert items(scratch / "cache") == whole


def test_preemption_is_no_death_however_often_it_happens(run, scratch, whole):
    fates = iter([Died("its node was preempted", counts=False)] * 20)
    summary = run(InlineTeam(2, fate=lambda number, work: next(fates, None)))
    assert (summary.versions[0].extracted, summary.failed_by_reason) == (12, {})
    assert items(scratch / "cache") == whole


def test_devices_of_several_models_are_refused_unless_they_are_wanted(run):
    labels = ["NVIDIA A", "NVIDIA B"]
    with pytest.raises(
        ConfigError, match=r"worker 2 is NVIDIA B, and worker 1 is NVIDIA A.*--allow-mixed-devices"
    ):
        run(InlineTeam(2, labels=labels))
    assert (
        run(InlineTeam(2, labels=labels), allow_mixed_devices=True).device == "NVIDIA A, NVIDIA B"
    )


def test_failures_of_all_workers_count_for_the_limit(run, plain):
    rows = [
        {**row, "path": "missing.wav"} if number % 2 else row
        for number, row in enumerate(plain.rows)
    ]
    summary = run(InlineTeam(2), plain.manifest(rows, "half.csv"), max_failures="2")
    assert summary.too_many_failures.endswith("have failed, and --max-failures allows 2")
    assert summary.interrupted


class Elsewhere(InlineTeam):
    """A team on a machine that has the audio in another folder, or not at all."""

    def __init__(self, root):
        super().__init__(2)
        self._root = root

    def start(self, worker, setup):
        super().start(worker, replace(setup, root=self._root))


def test_a_machine_without_the_audio_is_refused_as_extract_would(run, scratch):
    refusal = r"has none of 12 audio files, such as /no/such/.*share"
    with pytest.raises(ManifestError, match=refusal):
        run(Elsewhere(Path("/no/such")))
    assert [*(scratch / "cache").iterdir()] == []


def test_what_one_machine_cannot_read_and_another_can_has_not_failed(run, plain, scratch, whole):
    manifest, name = plain.manifest(), plain.rows[4]["path"]
    here, there = (
        Path(shutil.copytree(plain.folder, scratch / name)) for name in ("here", "there")
    )
    for row in plain.rows[2:5]:
        (there / row["path"]).unlink()
    kept = (here / name).rename(scratch / "kept")
    with pytest.raises(
        ExtractorError, match=f"^workers could not read 2 .* {plain.ids[2]} on .*this machine can:"
    ):
        run(Elsewhere(there), here / manifest.name)
    failed = ledger(scratch / "cache")
    assert {id_: failure.reason for id_, failure in failed.items()} == {
        plain.ids[4]: "file_missing"
    }
    kept.rename(here / name)
    assert run(InlineTeam(2), here / manifest.name).versions[0].extracted == 3
    assert items(scratch / "cache") == whole


def test_what_all_workers_cannot_read_keeps_them_from_nothing(run, plain, scratch, monkeypatch):
    """Once it is clear that the run is to be repeated, this machine reads no more of it."""
    monkeypatch.setattr(dispatching, "_ENOUGH_UNREAD", 2)
    looked = mock.Mock(wraps=dispatching.can_be_read)
    monkeypatch.setattr(dispatching, "can_be_read", looked)
    there = Path(shutil.copytree(plain.folder, scratch / "there"))
    for row in plain.rows[1:]:
        (there / row["path"]).unlink()
    with pytest.raises(
        ExtractorError, match=r"^workers could not read 11 utterances, such as .*this machine can:"
    ):
        run(Elsewhere(there))
    assert looked.call_count == 2
    assert (ledger(scratch / "cache"), [*items(scratch / "cache")]) == ({}, plain.ids[:1])


def test_workers_that_got_nothing_have_ended_too(run, scratch):
    run(InlineTeam(3), shard_megabytes=1)
    store = only_version(scratch / "cache").store
    records = [read_run(store, name) for name in run_names(store)]
    assert all(record.finished for record in records)
    assert sorted(record.outcome["extracted"] for record in records) == [0, 0, 12, 12]
    assert not any(record.outcome["interrupted"] for record in records)


def test_another_checkout_of_the_same_version_is_another_featcache(run, monkeypatch):
    version = featcache.__version__
    monkeypatch.setattr(
        WorkerSetup, "__init__", partialmethod(WorkerSetup.__init__, featcache=f"{version}, code 0")
    )
    with pytest.raises(
        ExtractorError, match=rf"has featcache {version}, code [0-9a-f]{{12}}, .*code 0: install"
    ):
        run(InlineTeam(1))


def test_an_extractor_that_always_raises_an_exception_in_a_worker_ends_the_run(run, scratch):
    summary = run(InlineTeam(2), config=write_config(scratch, "Broken"))
    assert "Broken raised exceptions at 5 utterances in a row" in summary.too_many_failures
    assert summary.traceback.endswith("RuntimeError: CUDA error: out of cheese\n")
    assert summary.interrupted


def test_a_worker_knows_that_a_version_holds_something(run, plain, scratch):
    """Then more utterances in a row may fail than the five at its beginning."""
    config = write_config(scratch, "Crashing")
    run(InlineTeam(1), config=config)
    mute = [{**row, "id": f"{row['id']}!mute"} for row in plain.rows[:8]]
    summary = run(InlineTeam(1), plain.manifest([*mute, *plain.rows], "mute.csv"), config)
    assert (summary.too_many_failures, summary.failed_by_reason) == ("", {"extractor_error": 8})


def test_a_worker_that_cannot_read_its_setup_says_so():
    """As of an extractor that a script defines: in another process, `__main__` is another
    module."""
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=[theirs])
    thread.start()
    ours.send_bytes(b"cno_such_module\nExtractor\n.")  # a pickle
    fault = ours.recv()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(fault, ConfigError)
    assert "define extractors in a module of their own" in str(fault)


def test_a_package_that_only_a_worker_lacks_ends_the_run_with_the_same_exit_code():
    lacking = MissingDependencyError("transformers", "extractor: ssl")
    assert (passable(lacking).exit_code, str(passable(lacking))) == (
        lacking.exit_code,
        str(lacking),
    )


# Chunks of tasks


def tasks(count: int, hours: float = 0.0):
    return iter([ShardTask(number, (), (3600 * hours,), (), "") for number in range(count)])


@given(st.integers(0, 60), st.integers(1, 5), st.sets(st.integers(0, 59), max_size=4), st.data())
def test_every_task_is_done_once(count, workers, deadly, data):
    """Deaths that have another cause, and workers that are preempted, come at any time; a
    task that always kills, until it is given up, costs no more than six workers."""
    chunks = Chunks(tasks(count), workers)
    done, held = Counter(), chunks.held
    accidents = most_accidents = data.draw(st.integers(0, 5))
    deaths, rows = 0, {number for number in deadly if number < count}
    while not chunks.are_done:
        worker = data.draw(st.integers(0, workers - 1))
        own = held.get(worker, [])
        if not own or (len(own) == 1 and data.draw(st.booleans())):
            chunk = chunks.take(worker, is_alone=workers == 1)
            if chunk is None:
                assert held or workers > 1
                continue
            assert 1 <= len(chunk.tasks) <= MOST_TASKS
            assert not (own and chunk.deaths)
            continue
        chunk = own[0]
        is_given_up = chunk.deaths >= 2 * MOST_DEATHS
        assert len(chunk.tasks) == 1 or chunk.deaths < MOST_DEATHS
        kills = [
            number
            for number, task in enumerate(chunk.tasks)
            if task.row in rows and not is_given_up
        ]
        accident = accidents > 0 and data.draw(st.booleans())
        accidents -= accident
        reached = kills[0] if kills else len(chunk.tasks)
        if accident:
            reached = data.draw(st.integers(0, reached))
        committed = {task.row for task in chunk.tasks[:reached]}
        done.update(committed)
        if accident or kills:
            preempted = accident and data.draw(st.booleans())
            deaths += not preempted
            chunks.died(worker, committed, counts=not preempted)
            assert worker not in held
        else:
            chunks.done(worker)
    assert not chunks.held
    assert {*done} == {*range(count)}
    assert max(done.values(), default=1) == 1
    assert deaths <= 2 * MOST_DEATHS * len(rows) + most_accidents


def test_chunks_get_smaller_near_the_end():
    chunks = Chunks(tasks(600), 2)
    sizes = []
    while not chunks.are_done:
        sizes.append(len(chunks.take(0, is_alone=True).tasks))
        chunks.done(0)
    assert sum(sizes) == 600
    assert sizes[:5] == [MOST_TASKS] * 5
    assert sizes[-4:] == [1] * 4
    assert sizes == sorted(sizes, reverse=True)
    assert len(Chunks(tasks(600, hours=1), 2).take(0).tasks) == 16


def test_a_worker_is_not_given_what_it_died_of_while_there_are_others():
    chunks = Chunks(tasks(1), 2)
    assert chunks.take(0) is not None
    chunks.died(0, set())
    assert chunks.take(0) is None
    assert not chunks.are_done
    assert chunks.take(1).deaths == 1
