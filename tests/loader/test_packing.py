"""Rows of whole documents: how full they are, in which order they come, and what is shuffled."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featcache.loader.packing import Layout, best_fit, in_balance, shuffled

BUDGETS = [1, 2, 13, 127, 128, 129, 1021, 4095, 4096, 4097]


def slow_best_fit(sizes, tokens):
    """The same by a list of free tokens, looked through for each document."""
    free, row_of = [], [0] * len(sizes)
    for document in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        fitting = [row for row in range(len(free)) if free[row] >= sizes[document]]
        row = min(fitting, key=lambda row: (free[row], row), default=len(free))
        if row == len(free):
            free.append(tokens)
        free[row] -= sizes[document]
        row_of[document] = row
    return row_of


def like_librispeech(count, rate, seed=0):
    """Lengths in frames, from a distribution that resembles LibriSpeech's, whose mean is 12.3 s:
    most utterances last 12 to 17 s, many less, few up to 35 s."""
    random = np.random.default_rng(seed)
    is_long = random.random(count) < 0.6
    seconds = np.where(is_long, random.normal(14.7, 1.1, count), random.uniform(1.3, 15, count))
    return (np.clip(seconds, 1.3, 35) * rate).astype(np.int64)


@given(st.sampled_from(BUDGETS), st.data())
@settings(max_examples=60, deadline=None)
def test_each_document_is_in_one_row_as_by_a_slow_best_fit(tokens, data):
    sizes = data.draw(st.lists(st.integers(0, tokens), max_size=60))
    row_of = best_fit(np.array(sizes, np.int64), tokens)
    assert row_of.tolist() == slow_best_fit(sizes, tokens)
    assert np.bincount(row_of, sizes).max(initial=0) <= tokens


@pytest.mark.parametrize("rate", [12.5, 25, 50])
@pytest.mark.parametrize("tokens", [2048, 8191, 8192, 8193])
def test_rows_of_speech_are_full(rate, tokens):
    """A window of 256 rows at a time."""
    sizes = like_librispeech(60_000, rate)
    cuts = np.searchsorted(np.cumsum(sizes), np.arange(256 * tokens, sizes.sum(), 256 * tokens))
    windows = np.split(sizes, cuts)[:-1] or [sizes]
    num_rows = sum(best_fit(window, tokens).max() + 1 for window in windows)
    assert sum(map(np.sum, windows)) >= 0.985 * num_rows * tokens


@given(st.integers(1, 3000), st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_a_shuffle_has_each_row_once(count, seed):
    places = shuffled(np.arange(count), count, (seed,))
    assert sorted(places.tolist()) == [*range(count)]
    part = np.arange(count // 3, count // 2)
    assert shuffled(part, count, (seed,)).tolist() == places[part].tolist()


def test_shuffles_differ_and_look_random_and_stay_the_same():
    first, second = (shuffled(np.arange(10_000), 10_000, (7, number)) for number in range(2))
    assert np.abs(np.corrcoef([np.arange(10_000), first, second]) - np.eye(3)).max() < 0.03
    assert np.abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.03
    assert shuffled(np.arange(6), 10**7, (1, 2)).tolist() == GOLDEN


GOLDEN = [1142042, 7998061, 3053194, 5995539, 8251168, 3477067]


@given(st.integers(1, 4), st.data())
@settings(max_examples=40, deadline=None)
def test_rows_in_balance_are_the_same_rows(num_sources, data):
    row = st.lists(st.integers(0, 4096), min_size=num_sources, max_size=num_sources)
    amounts = np.array(data.draw(st.lists(row, min_size=1, max_size=40)), np.int64)
    assert sorted(in_balance(amounts).tolist()) == [*range(len(amounts))]


def test_after_each_row_in_balance_each_source_has_about_its_share():
    random = np.random.default_rng(0)
    shares = random.dirichlet([0.3, 0.3, 0.3], 256)  # most rows are almost of one source
    amounts = (8192 * shares).astype(np.int64)
    reached = np.cumsum(amounts[in_balance(amounts)], axis=0)
    surplus = reached - amounts.mean(0) * np.arange(1, 257)[:, None]
    assert np.abs(surplus).max() < 2 * 8192


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_tokens_know_their_documents(data):
    num_rows, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30))
    rows = [data.draw(st.lists(st.integers(0, 7), max_size=8)) for _ in range(num_rows)]
    rows = [[size for at, size in enumerate(row) if sum(row[: at + 1]) <= length] for row in rows]
    ids, positions, starts, bounds, number = [], [], [], {0}, 0
    for row, sizes in enumerate(rows):
        for size in sizes:
            starts.append(len(ids))
            bounds |= {len(ids), len(ids) + size}
            ids += [number] * size
            positions += range(size)
            number += 1
        missing = (row + 1) * length - len(ids)
        ids += [-1] * missing
        positions += [0] * missing
        bounds.add(len(ids))
    row_of = np.repeat(np.arange(num_rows), [*map(len, rows)])
    sizes = np.array([size for row in rows for size in row], np.int64)
    layout = Layout.of(row_of, sizes, num_rows, length)
    told = np.empty((2, num_rows * length), np.int32)
    assert layout.starts.tolist() == starts
    assert layout.bounds.tolist() == sorted(bounds)
    layout.write(*told)
    assert [column.tolist() for column in told] == [ids, positions]
