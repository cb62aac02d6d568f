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
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch
from harness import Table, Turns, options, present, quick_turns, remark
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
    by_shape = {shape: measure(*shape, asked) for shape in dict.fromkeys(grid)}
    of_frames = {f"{shape[0]:,} frames": by_shape[shape] for shape in grid[: len(FRAMES)]}
    times = Table(f"µs, {title_of(*grid[0][1:])}", dict.fromkeys(of_frames, "{:,.0f}"))
    ratios = Table("× featcache", dict.fromkeys(of_frames, "{:.2f}"))
    for name in RUNS:
        times.add(name, *(turns.median(name) * 1e6 for turns in of_frames.values()))
        ratios.add(name, *(turns.ratio(name, MADE) for turns in of_frames.values()))
    gains = Table(
        f"{AT:,} frames: times as fast as the loop over chunks", {"two passes": "{:.1f} ×", "one": "{:.1f} ×"}
    )
    for shape in grid[len(FRAMES) :]:
        gains.add(title_of(*shape[1:]), *(by_shape[shape].ratio(name, MADE) for name in (TWO, ONE)))
    about = f"{asked.device}, torch {torch.__version__}, 1 thread{', cold' * asked.cold}"
    present(asked, about, times, ratios, gains, remark(*(turns.others for turns in by_shape.values())))


def measure(num_frames: int, chunk_size: int, left: int | None, asked: argparse.Namespace) -> Turns:
    """What each took; all have the same values, which is checked."""
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

    return quick_turns({name: partial(call, run) for name, run in RUNS.items()}, asked.rounds, 5, prepare)


def title_of(chunk_size: int, left: int | None) -> str:
    return f"chunks of {chunk_size}, {'all' if left is None else left} to the left"


if __name__ == "__main__":
    main()
