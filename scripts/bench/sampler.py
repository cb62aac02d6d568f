"""What padding costs with BucketBatchSampler, sorted by length, and at random; and how long an epoch's batches take.

    pip install .
    python scripts/bench/sampler.py [--utterances 28000] [--large 10000000]

`padding` is how many frames are added to those that there are, `batches` how many an epoch has, and `again` how many of
those that an utterance shares a batch with it meets again in the next epoch's. Lengths are at 100 frames a second:
with two peaks as in LibriSpeech (most just under 15 s, 12 s on average), or log-normal, as in read prompts (5 s).
"""

from time import perf_counter

import numpy as np
from harness import Table, options, present

from featcache import BucketBatchSampler


def two_peaks(count, rng):
    most = rng.normal(1450, 110, count)
    return np.where(rng.random(count) < 0.65, most, rng.uniform(150, 1400, count)).clip(120, 2450).astype(np.int64)


def log_normal(count, rng):
    return rng.lognormal(np.log(480), 0.4, count).clip(80, 3000).astype(np.int64)


def padding(lengths, batches):
    return sum(len(batch) * lengths[batch].max() for batch in batches) / lengths.sum() - 1


def seen_again(before, after, count):
    """How many of those that an utterance shared a batch with it shares one with again, on average."""
    numbers = np.empty((2, count), np.int64)
    for row, batches in zip(numbers, (before, after), strict=True):
        for number, batch in enumerate(batches):
            row[batch] = number
    _, both, shared = np.unique(numbers, axis=1, return_inverse=True, return_counts=True)
    others = np.bincount(numbers[0])[numbers[0]] - 1
    return np.mean((shared[both.ravel()] - 1) / np.maximum(others, 1))


def compare(name, lengths, rng, max_frames):
    sampler = BucketBatchSampler(lengths, max_frames=max_frames)
    ours = list(sampler)
    sampler.set_epoch(1)
    again = seen_again(ours, list(sampler), len(lengths))
    by_length = list(BucketBatchSampler(lengths, max_frames=max_frames, shuffle=False))
    at_random = np.array_split(rng.permutation(len(lengths)), len(ours))
    shares = again, 1, np.mean([len(batch) for batch in at_random]) / len(lengths)
    title = f"{name}, {len(lengths):,} utterances"
    table = Table(title, {"padding": "{:.1%}", "batches": "{:,}", "again": "{:.1%}"})
    ways = {"BucketBatchSampler": ours, "sorted by length": by_length, "at random": at_random}
    for (what, batches), share in zip(ways.items(), shares, strict=True):
        table.add(what, padding(lengths, batches), len(batches), share)
    return table


def time_one(lengths, max_frames):
    begin = perf_counter()
    sampler = BucketBatchSampler(lengths, max_frames=max_frames, world_size=8)
    made = perf_counter()
    batches = iter(sampler)
    next(batches)
    first = perf_counter()
    count = sum(1 for _ in batches)
    last = perf_counter()
    other = BucketBatchSampler(lengths, max_frames=max_frames, world_size=6)
    state = sampler.state_dict(consumed=count // 2)
    resume = perf_counter()
    other.load_state_dict(state)
    next(iter(other))
    return "\n".join(
        [
            f"{len(lengths):,} utterances: made in {(made - begin) * 1e3:.0f} ms",
            f"  the first batch of an epoch after {first - made:.1f} s",
            f"  each further one after {(last - first) / count * 1e6:.1f} µs",
            f"  the first with 6 ranks, after half an epoch with 8, after {perf_counter() - resume:.1f} s",
        ]
    )


def main():
    arguments = options(__doc__, utterances=28_000, large=10_000_000, max_frames=20_000)
    rng = np.random.default_rng(0)
    tables = [
        compare(make.__name__.replace("_", " "), make(count, rng), rng, arguments.max_frames)
        for count in (arguments.utterances, 1000)
        for make in (two_peaks, log_normal)
    ]
    present(arguments, *tables, time_one(log_normal(arguments.large, rng), arguments.max_frames))


if __name__ == "__main__":
    main()
