"""How fast chunked attention masks are made, beside a loop over steps and a loop over chunks, at several lengths.

    pip install '.[extract]'
    python scripts/bench/masks.py [--chunk-size 16] [--left-chunks 4] [--device cuda] [--cold] [--json]

The loop over steps is WeNet's (`subsequent_chunk_mask`): a slice of each row. A loop over chunks sets the frames of a
chunk at once. SpeechBrain's pull request 2426 is about going from one to the other, "10x 50x"; its loop had two passes,
over what is ahead and, where the left context is limited, over what is too far back. One pass is the best that such
a loop can be, and is shown too. What was merged, and SpeechBrain has since 1.0, compares all frames with all.

All have the same values, which is checked. What featcache keeps is emptied before each call, but for the line that
shows what a mask costs that is kept. In each round all take turns, and the best of five calls in a row counts, as in
timeit: the memory is then near. With --cold it is not: 64 MB of other memory are written before each call, and how
fast the mask can be written decides. Times and ratios are medians of the rounds. The CPU has one thread, and malloc
keeps what is freed: else the kernel's page faults, 2 ms for a mask of 2,000 frames, hide what is measured.

Seen on one of 2 shared cores without a GPU, Python 3.11, torch 2.11, in one run, 2,000 frames, 16 to a chunk, 4 chunks
to the left: featcache 95 µs, 4 µs where it is kept; the loop over steps 90 ×; the loop over chunks 13.5 ×, in one pass
7.2 ×; all with all 43 ×. With the whole left context, where the loop has only one pass, 8 ×; with chunks of 4 frames
24 to 50 ×, of 32 frames 4 to 8 ×. With --cold, 0.9 ms for 4 MB, the loop over chunks is at 2.9 ×, in one pass 1.5 ×.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from harness import columns, options, present, quick_turns, remark
from torch import Tensor

from featcache import masks
from featcache.device import keep_freed_memory

FRAMES = (500, 1000, 2000, 4000)
CHUNK_SIZES = (4, 8, 16, 32)
AT = 2000  # frames: where the chunk sizes are compared
OTHER_MEMORY = torch.zeros(64 << 20, dtype=torch.uint8)

Mask = Callable[[int, int, int | None, torch.device], Tensor]


def loop_over_steps(num_frames: int, chunk_size: int, num_left_chunks: int | None, device: torch.device) -> Tensor:
    """As in WeNet, wenet/utils/mask.py."""
    mask = torch.zeros(num_frames, num_frames, dtype=torch.bool, device=device)
    for frame in range(num_frames):
        chunk = frame // chunk_size
        first = 0 if num_left_chunks is None else max((chunk - num_left_chunks) * chunk_size, 0)
        mask[frame, first : (chunk + 1) * chunk_size] = True
    return mask


def loop_over_chunks(num_frames: int, chunk_size: int, num_left_chunks: int | None, device: torch.device) -> Tensor:
    """In two passes, as SpeechBrain's loop was; it sets True what is masked."""
    masked = torch.zeros(num_frames, num_frames, dtype=torch.bool, device=device)
    for first in range(0, num_frames, chunk_size):
        masked[first : first + chunk_size, first + chunk_size :] = True
    if num_left_chunks is not None:
        for first in range(0, num_frames, chunk_size):
            masked[first : first + chunk_size, : max(first - num_left_chunks * chunk_size, 0)] = True
    return masked


def loop_of_one_pass(num_frames: int, chunk_size: int, num_left_chunks: int | None, device: torch.device) -> Tensor:
    mask = torch.zeros(num_frames, num_frames, dtype=torch.bool, device=device)
    for first in range(0, num_frames, chunk_size):
        start = 0 if num_left_chunks is None else max(first - num_left_chunks * chunk_size, 0)
        mask[first : first + chunk_size, start : first + chunk_size] = True
    return mask


def all_with_all(num_frames: int, chunk_size: int, num_left_chunks: int | None, device: torch.device) -> Tensor:
    """As in SpeechBrain since 1.0: two comparisons, of int64; it sets True what is masked."""
    frames = torch.arange(num_frames, device=device)
    ends = (frames // chunk_size + 1) * chunk_size
    masked = frames[None] >= ends[:, None]
    if num_left_chunks is not None:
        masked |= frames[None] < (ends - (num_left_chunks + 1) * chunk_size)[:, None]
    return masked


def ours(num_frames: int, chunk_size: int, num_left_chunks: int | None, device: torch.device) -> Tensor:
    return masks.chunk_mask(num_frames, chunk_size, num_left_chunks, device=device)


STEPS, TWO, ONE, ALL, MADE, KEPT = (
    "loop over steps (WeNet)",
    "loop over chunks (SpeechBrain's)",
    "loop over chunks, one pass",
    "all with all (SpeechBrain 1.0)",
    "featcache",
    "featcache, kept",
)
RUNS: dict[str, Mask] = {
    STEPS: loop_over_steps,
    TWO: loop_over_chunks,
    ONE: loop_of_one_pass,
    ALL: all_with_all,
    MADE: ours,
    KEPT: ours,  # which MADE has just made
}
SETS_MASKED = {TWO, ALL}


def main() -> None:
    asked = options(
        __doc__,
        chunk_size=16,
        left_chunks=(4, "-1 for all"),
        device="cpu",
        cold=(False, "write 64 MB of other memory before each call"),
        rounds=15,
    )
    torch.set_num_threads(1)
    keep_freed_memory()
    left = None if asked.left_chunks < 0 else asked.left_chunks
    grid = [(num_frames, asked.chunk_size, left) for num_frames in FRAMES]
    grid += [(AT, size, left) for size in CHUNK_SIZES for left in (None, asked.left_chunks)]
    results = [measure(*shape, asked) for shape in dict.fromkeys(grid)]
    present(results, partial(show, asked), asked)


def measure(num_frames: int, chunk_size: int, left: int | None, asked: argparse.Namespace) -> dict:
    """Median seconds of each, and how many times as fast `featcache` is, in one round; all have the same values."""
    device = torch.device(asked.device)
    expected = loop_over_steps(num_frames, chunk_size, left, device)
    for name, run in RUNS.items():
        values = run(num_frames, chunk_size, left, device)
        assert torch.equal(~values if name in SETS_MASKED else values, expected), name

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def prepare(name: str) -> None:
        if name == MADE:
            masks._shared = masks._SharedMasks(masks._SHARED_BYTES)
        if asked.cold:
            OTHER_MEMORY.add_(1)
        settle()

    def call(run: Mask) -> Tensor:
        mask = run(num_frames, chunk_size, left, device)
        settle()
        return mask

    turns = quick_turns({name: partial(call, run) for name, run in RUNS.items()}, asked.rounds, 5, prepare)
    return {
        "frames": num_frames,
        "chunk_size": chunk_size,
        "left_chunks": left,
        "seconds": {name: turns.median(name) for name in RUNS},
        "ratio": {name: turns.ratio(name, MADE) for name in RUNS},
        "others": turns.others,
    }


def show(asked: argparse.Namespace, results: list[dict]) -> str:
    by_frames, by_chunk_size = results[: len(FRAMES)], [result for result in results if result["frames"] == AT]
    rows = [
        (name, *(f"{found['seconds'][name] * 1e6:,.0f}  {found['ratio'][name]:.2f} ×" for found in by_frames))
        for name in RUNS
    ]
    by_chunk_size.sort(key=lambda found: (found["chunk_size"], found["left_chunks"] is not None))
    chunks = [(title_of(found), *(f"{found['ratio'][name]:.1f} ×" for name in (TWO, ONE))) for found in by_chunk_size]
    return "\n".join(
        [
            f"{asked.device}, torch {torch.__version__}, 1 thread{', cold' * asked.cold}",
            f"{title_of(by_frames[0])}: µs, and × featcache",
            columns(["frames", *(f"{found['frames']:,}" for found in by_frames)], *rows),
            columns([f"{AT:,} frames: times as fast as the loop over chunks", "two passes", "one"], *chunks),
            remark(max(found["others"] for found in results)),
        ]
    )


def title_of(result: dict) -> str:
    left = "all" if result["left_chunks"] is None else result["left_chunks"]
    return f"chunks of {result['chunk_size']}, {left} to the left"


if __name__ == "__main__":
    main()
