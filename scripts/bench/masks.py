"""Measure how fast chunked attention masks are made, compared with a loop over steps and
a loop over chunks, at several lengths.

    pip install '.[extract]'
    python scripts/bench/masks.py [--rounds 15] [--cold] [--json]

The loop over steps is WeNet's (`subsequent_chunk_mask`): a slice of each row. A loop over
chunks sets the frames of a chunk at once. SpeechBrain's pull request 2426 is about going
from one to the other, "10x 50x"; its loop had two passes, over what is ahead and, where
the left context is limited, over what is too far back. One pass is the best that such a
loop can be, and is shown too. What was merged, and SpeechBrain has since 1.0, compares
all frames with all.

All have the same values, which is checked. What featcache keeps is emptied before each
call, but for the line that shows what a mask costs that is kept. In each round all take
turns, and the best of five calls in a row counts, as in timeit: the memory is then near.
With --cold it is not: 64 MB of other memory are written before each call, and how fast
the mask can be written decides. Times and ratios are medians of the rounds. The CPU has
one thread, and malloc keeps what is freed: else the kernel's page faults, 2 ms for a mask
of 2,000 frames, hide what is measured."""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from harness import Table, Turns, options, present, quick_turns, remark
from torch import Tensor

from featcache import masks
from featcache.device import keep_freed_memory

FRAMES = (500, 1000, 2000, 4000)
CHUNK_SIZE, LEFT_CHUNKS = 16, 4
CHUNK_SIZES = (4, 8, 16, 32)
AT = 2000  # frames: where the chunk sizes are compared
OTHER_MEMORY = torch.zeros(64 << 20, dtype=torch.uint8)

Mask = Callable[[int, int, int | None], Tensor]


def loop_over_steps(num_frames: int, chunk_size: int, num_left_chunks: int | None) -> Tensor:
    """As in WeNet, wenet/utils/mask.py."""
    mask = torch.zeros(num_frames, num_frames, dtype=torch.bool)
    for frame in range(num_frames):
        chunk = frame // chunk_size
        first = 0 if num_left_chunks is None else max((chunk - num_left_chunks) * chunk_size, 0)
        mask[frame, first : (chunk + 1) * chunk_size] = True
    return mask


def loop_over_chunks(num_frames: int, chunk_size: int, num_left_chunks: int | None) -> Tensor:
    """In two passes, as SpeechBrain's loop was; it sets True what is masked."""
    masked = torch.zeros(num_frames, num_frames, dtype=torch.bool)
    for first in range(0, num_frames, chunk_size):
        masked[first : first + chunk_size, first + chunk_size :] = True
    if num_left_chunks is not None:
        for first in range(0, num_frames, chunk_size):
            masked[first : first + chunk_size, : max(first - num_left_chunks * chunk_size, 0)] = (
                True
            )
    return masked


def loop_of_one_pass(num_frames: int, chunk_size: int, num_left_chunks: int | None) -> Tensor:
    mask = torch.zeros(num_frames, num_frames, dtype=torch.bool)
    for first in range(0, num_frames, chunk_size):
        start = 0 if num_left_chunks is None else max(first - num_left_chunks * chunk_size, 0)
        mask[first : first + chunk_size, start : first + chunk_size] = True
    return mask


def all_with_all(num_frames: int, chunk_size: int, num_left_chunks: int | None) -> Tensor:
    """As in SpeechBrain since 1.0: two comparisons, of int64; it sets True what is masked."""
    frames = torch.arange(num_frames)
    ends = (frames // chunk_size + 1) * chunk_size
    masked = frames[None] >= ends[:, None]
    if num_left_chunks is not None:
        masked |= frames[None] < (ends - (num_left_chunks + 1) * chunk_size)[:, None]
    return masked


TWO, ONE, ALL, MADE = (
    "loop over chunks (SpeechBrain's)",
    "loop over chunks, one pass",
    "all with all (SpeechBrain 1.0)",
    "featcache",
)
RUNS: dict[str, Mask] = {
    "loop over steps (WeNet)": loop_over_steps,
    TWO: loop_over_chunks,
    ONE: loop_of_one_pass,
    ALL: all_with_all,
    MADE: masks.chunk_mask,
    "featcache, kept": masks.chunk_mask,  # which MADE has just made
}
SETS_MASKED = {TWO, ALL}


def main() -> None:
    asked = options(
        __doc__, cold=(False, "write 64 MB of other memory before each call"), rounds=15
    )
    torch.set_num_threads(1)
    keep_freed_memory()
    by_frames = [(num_frames, CHUNK_SIZE, LEFT_CHUNKS) for num_frames in FRAMES]
    by_chunks = [(AT, size, left) for size in CHUNK_SIZES for left in (None, LEFT_CHUNKS)]
    found = {shape: measure(*shape, asked) for shape in dict.fromkeys([*by_frames, *by_chunks])}
    of_frames = {f"{shape[0]:,} frames": found[shape] for shape in by_frames}
    times = Table(f"µs, {title_of(CHUNK_SIZE, LEFT_CHUNKS)}", dict.fromkeys(of_frames, "{:,.0f}"))
    ratios = Table("× featcache", dict.fromkeys(of_frames, "{:.2f}"))
    for name in RUNS:
        times.add(name, *(turns.median(name) * 1e6 for turns in of_frames.values()))
        ratios.add(name, *(turns.ratio(name, MADE) for turns in of_frames.values()))
    gains = Table(
        f"{AT:,} frames: times as fast as the loop over chunks",
        {"two passes": "{:.1f} ×", "one": "{:.1f} ×"},
    )
    for shape in by_chunks:
        gains.add(title_of(*shape[1:]), *(found[shape].ratio(name, MADE) for name in (TWO, ONE)))
    about = f"torch {torch.__version__}, 1 thread{', cold' * asked.cold}"
    present(asked, about, times, ratios, gains, remark(*(turns.others for turns in found.values())))


def measure(num_frames: int, chunk_size: int, left: int | None, asked: argparse.Namespace) -> Turns:
    """What each took; all have the same values, which is checked."""
    shape = num_frames, chunk_size, left
    expected = loop_over_steps(*shape)
    for name, run in RUNS.items():
        values = run(*shape)
        assert torch.equal(~values if name in SETS_MASKED else values, expected), name

    def prepare(name: str) -> None:
        if name == MADE:
            masks._shared_mask.cache_clear()
        if asked.cold:
            OTHER_MEMORY.add_(1)

    return quick_turns(
        {name: partial(run, *shape) for name, run in RUNS.items()}, asked.rounds, 5, prepare
    )


def title_of(chunk_size: int, left: int | None) -> str:
    return f"chunks of {chunk_size}, {'all' if left is None else left} to the left"


if __name__ == "__main__":
    main()
