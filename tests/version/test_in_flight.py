"""What was in flight in runs that died is suspect; marks go once it is known what became
of it."""

import errno
import os
from threading import Timer

import numpy as np
import pytest
from small_shards import create, item, write

from featcache.errors import StoreError
from featcache.manifest.segments import SegmentColumns
from featcache.manifest.strings import Strings
from featcache.storage.files import Lock, is_held
from featcache.version.in_flight import (
    InFlight,
    Suspects,
    find_suspects,
    forget_suspects,
    remove_marks,
)
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure
from featcache.version.wanted import Wanted

NAMES = ["20260101T000000.000000Z-0001", "20260102T000000.000000Z-0002"]


def die(version, run: str, ids: list[str], *, apart: bool = False, crash: str = "") -> None:
    """Leave the marks of a run that was killed."""
    with InFlight([(version, run)], 1) as in_flight, in_flight.working_on(0, ids, apart):
        marks = {
            path.name: path.read_bytes() for path in (version.store.marks_folder / run).iterdir()
        }
    assert not (
        version.store.marks_folder / run
    ).exists()  # a run that ends by itself leaves nothing
    (version.store.marks_folder / run).mkdir()
    for name, data in {**marks, "crash.txt": crash.encode()}.items():
        (version.store.marks_folder / run / name).write_bytes(data)


@pytest.mark.parametrize(("crash", "suspects"), [("", set()), ("Segmentation fault", {"a", "b"})])
def test_one_run_that_was_killed_says_nothing_and_a_fatal_signal_does(version, crash, suspects):
    die(version, NAMES[0], ["a", "b"], crash=crash)
    assert find_suspects(version, {}).ids == suspects


def test_what_two_killed_runs_had_in_flight_is_suspect(version):
    die(version, NAMES[0], ["a", "b"])
    die(version, NAMES[1], ["b", "c"])
    assert find_suspects(version, {}).ids == {"b"}
    assert find_suspects(version, {}, living={NAMES[1]}).ids == set()
    crashed = Failure(id="x", path="x.wav", reason="crashed", message="")
    assert find_suspects(version, {"x": crashed}).ids == {"a", "b", "c", "x"}


def test_what_ends_runs_even_apart_is_not_tried_again(version):
    for run in NAMES:
        die(version, run, ["a"], apart=True)
    assert find_suspects(version, {}).fatal == {"a"}


def test_marks_stay_while_what_they_name_is_missing(version, monkeypatch):
    die(version, NAMES[0], ["a"])
    rows = [item(id_) for id_ in "ab"]
    hashes = [Strings.of("ab").hashes(), SegmentColumns.of(rows).hashes(), np.ones(2, np.uint64)]
    Wanted("m", np.stack(hashes)).save(version)
    forget_suspects(version, open_index(version))
    assert (version.store.marks_folder / NAMES[0]).exists()
    write(version, rows[:1])
    forget_suspects(version, open_index(version))
    assert not (version.store.marks_folder / NAMES[0]).exists()
    # nothing is read where there are no marks
    monkeypatch.delattr("featcache.version.in_flight.read_all_wanted")
    forget_suspects(version, open_index(version))


def test_a_run_that_lives_is_left_alone(version, scratch):
    other = create(scratch / "other")
    with (
        InFlight([(version, NAMES[0]), (other, NAMES[1])], 2) as in_flight,
        in_flight.working_on(1, ["a"]),
    ):
        for one, run in ((version, NAMES[0]), (other, NAMES[1])):
            forget_suspects(one, open_index(one))
            assert (
                (one.store.marks_folder / run / "in_flight.1")
                .read_bytes()
                .startswith(b'{"ids": ["a"]')
            )


def test_a_run_holds_its_folder_also_if_somebody_looks_at_it_just_then(version):
    """Else it would be taken for dead while it lives."""
    folder = version.store.marks_folder / NAMES[0]
    folder.mkdir()
    looking = Lock(folder, os.O_RDONLY)
    assert looking.take()
    end = Timer(0.2, looking.release)
    end.start()
    with InFlight([(version, NAMES[0])], 1):
        end.join()
        assert is_held(folder)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOSYS])
def test_a_run_that_ends_while_somebody_looks_is_no_error(version, monkeypatch, number):
    die(version, NAMES[0], ["a"], crash="Segmentation fault")

    def gone(run):
        remove_marks(run)
        raise OSError(number, "")

    monkeypatch.setattr("featcache.version.in_flight.is_held", gone)
    assert find_suspects(version, {}) == Suspects()


@pytest.mark.parametrize("made", [0, 1])
def test_a_run_that_can_mark_nothing_leaves_nothing(version, scratch, monkeypatch, made):
    """Neither the folder that was made and cannot be opened, nor those before it."""
    runs = [(version, NAMES[0]), (create(scratch / "other"), NAMES[1])]
    left = iter(range(made))

    def lock(path, *flags):
        if next(left, None) is None:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return Lock(path, *flags)

    monkeypatch.setattr("featcache.storage.files.Lock", lock)
    with (
        pytest.raises(StoreError, match="cannot be written: Too many open files"),
        InFlight(runs, 1),
    ):
        pass
    assert [path for one, _ in runs for path in one.store.marks_folder.iterdir()] == []
