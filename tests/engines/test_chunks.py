"""Chunks of tasks, dealt to workers that die: each task is done once or poison, whatever happens."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from featcache.engines.dispatch import MOST_DEATHS, MOST_TASKS, Chunks
from featcache.extraction.tasks import ShardTask


def tasks(count: int):
    return iter([ShardTask(f"{number:012x}", number, (), (), (), "") for number in range(count)])


@given(st.integers(0, 60), st.integers(1, 5), st.sets(st.integers(0, 59), max_size=4), st.data())
def test_every_task_is_done_once_or_is_poison(count, workers, deadly, data):
    """Deaths that have another cause, and workers that are preempted, come at any time; a task that always kills is
    poison, and costs no more than six workers.
    """
    chunks = Chunks(tasks(count), workers)
    done, poison, held = Counter(), Counter(), {}
    accidents = most_accidents = data.draw(st.integers(0, 5))
    deaths, names = 0, {f"{number:012x}" for number in deadly if number < count}
    while not chunks.are_done:
        worker = data.draw(st.integers(0, workers - 1))
        if worker not in held:
            chunk = chunks.take(worker, is_alone=workers == 1)
            if chunk is None:
                assert held or workers > 1
                continue
            assert 1 <= len(chunk.tasks) <= MOST_TASKS
            held[worker] = chunk
            continue
        chunk = held.pop(worker)
        kills = [number for number, task in enumerate(chunk.tasks) if task.name in names]
        accident = accidents > 0 and data.draw(st.booleans())
        accidents -= accident
        reached = kills[0] if kills else len(chunk.tasks)
        if accident:
            reached = data.draw(st.integers(0, reached))
        committed = {task.name for task in chunk.tasks[:reached]}
        done.update(committed)
        if accident or kills:
            preempted = accident and data.draw(st.booleans())
            deaths += not preempted
            poison.update(task.name for task in chunks.died(worker, committed, counts=not preempted))
        else:
            chunks.done(worker)
    assert not chunks.is_any_held
    assert {*done, *poison} == {f"{number:012x}" for number in range(count)}
    assert max([*done.values(), *poison.values()], default=1) == 1
    assert not {*done} & {*poison}
    assert names <= {*poison}
    assert len(poison) <= len(names) + most_accidents // MOST_DEATHS
    assert deaths <= 2 * MOST_DEATHS * len(poison) + most_accidents


def test_chunks_get_smaller_near_the_end():
    chunks = Chunks(tasks(70), 2)
    sizes = []
    while not chunks.are_done:
        sizes.append(len(chunks.take(0, is_alone=True).tasks))
        chunks.done(0)
    assert sum(sizes) == 70
    assert sizes[:5] == [8] * 5
    assert sizes[-4:] == [1] * 4
    assert sizes == sorted(sizes, reverse=True)


def test_a_worker_is_not_given_what_it_died_of_while_there_are_others():
    chunks = Chunks(tasks(1), 2)
    assert chunks.take(0) is not None
    assert chunks.died(0, set()) == ()
    assert chunks.take(0) is None
    assert not chunks.are_done
    assert chunks.take(1).deaths == 1
