"""Measure what padding costs with BucketBatchSampler, sorted by length, and at random;
and how long an epoch's batches take.

    pip install .
    python scripts/bench/sampler.py [--utterances 28000] [--large 10000000]

`padding` is how many frames are added to those that there are, `batches` how many an
epoch has, and `again` how many of those that an utterance shares a batch with it meets
again in the next epoch's. Lengths are at 100 frames a second: like those of LibriSpeech
(most near 15 s, 12.3 s on average), or log-normal, as in read prompts (5 s)."""

from itertools import islice
from time import perf_counter

import numpy as np
from corpus import KINDS
from harness import Table, options, present

from featcache import BucketBatchSampler

MAX_FRAMES = 20_000
"""Of a batch, padding included."""


def like_librispeech(count, rng):
    seconds = np.fromiter(islice(KINDS["long"].lengths(rng), count), float)
    return (100 * seconds).astype(np.int64)


def log_normal(count, rng):
    return rng.lognormal(np.log(480), 0.4, count).clip(80, 3000).astype(np.int64)


def padding(lengths, batches):
    return sum(len(batch) * lengths[batch].max() for batch in batches) / lengths.sum() - 1


def seen_again(before, after, count):
    """How many of those that an utterance shared a batch with it shares one with again,
    on average."""
    numbers = np.empty((2, count), np.int64)
    for row, batches in zip(numbers, (before, after), strict=True):
        for number, batch in enumerate(batches):
            row[batch] = number
    _, both, shared = np.unique(numbers, axis=1, return_inverse=True, return_counts=True)
    others = np.bincount(numbers[0])[numbers[0]] - 1
    return np.mean((shared[both.ravel()] - 1) / np.maximum(others, 1))


def compare(name, lengths, rng):
    sampler = BucketBatchSampler(lengths, max_frames=MAX_FRAMES)
    ours = list(sampler)
    sampler.set_epoch(1)
    again = seen_again(ours, list(sampler), len(lengths))
    by_length = list(BucketBatchSampler(lengths, max_frames=MAX_FRAMES, shuffle=False))
    at_random = np.array_split(rng.permutation(len(lengths)), len(ours))
    shares = again, 1, np.mean([len(batch) for batch in at_random]) / len(lengths)
    title = f"{name}, {len(lengths):,} utterances"
    table = Table(title, {"padding": "{:.1%}", "batches": "{:,}", "again": "{:.1%}"})
    ways = {"BucketBatchSampler": ours, "sorted by length": by_length, "at random": at_random}
    for (what, batches), share in zip(ways.items(), shares, strict=True):
        table.add(what, padding(lengths, batches), len(batches), share)
    return table


def time_one(lengths):
    begin = perf_counter()
    sampler = BucketBatchSampler(lengths, max_frames=MAX_FRAMES, world_size=8)
    made = perf_counter()
    batches = iter(sampler)
    next(batches)
    first = perf_counter()
    count = sum(1 for _ in batches)
    last = perf_counter()
    other = BucketBatchSampler(lengths, max_frames=MAX_FRAMES, world_size=6)
    state = sampler.state_dict(consumed=count // 2)
    resume = perf_counter()
    other.load_state_dict(state)
    next(iter(other))
    return (
        f"{len(lengths):,} utterances: made in {(made - begin) * 1e3:.0f} ms\n"
        f"  the first batch of an epoch after {first - made:.1f} s\n"
        f"  each further one after {(last - first) / count * 1e6:.1f} µs\n"
        "  the first with 6 ranks, after half an epoch with 8, after "
        f"{perf_counter() - resume:.1f} s"
    )


def main():
    asked = options(__doc__, utterances=28_000, large=10_000_000)
    rng = np.random.default_rng(0)
    makers = {"like LibriSpeech": like_librispeech, "log-normal": log_normal}
    counts = asked.utterances, 1000
    tables = [
        compare(name, make(count, rng), rng) for count in counts for name, make in makers.items()
    ]
    present(asked, *tables, time_one(log_normal(asked.large, rng)))


if __name__ == "__main__":
    main()
