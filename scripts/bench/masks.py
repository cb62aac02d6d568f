"""How fast chunked attention masks are made, beside a loop over steps and a loop over chunks, at several lengths.

    pip install '.[bench]'                    # matplotlib, for the picture
    python scripts/bench/masks.py [--chunk-size 16] [--left-chunks 4] [--device cuda] [--cold] [--png P] [--json]

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
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from clock import median, remark, timed, undisturbed
from pictures import pyplot_for
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunk-size", type=int, default=16)
    parser.add_argument("--left-chunks", type=int, default=4, help="-1 for all")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--cold", action="store_true", help="write 64 MB of other memory before each call")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--png", type=Path, default=Path("bench_masks.png"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    left = None if arguments.left_chunks < 0 else arguments.left_chunks
    grid = [(num_frames, arguments.chunk_size, left) for num_frames in FRAMES]
    grid += [(AT, size, left) for size in CHUNK_SIZES for left in (None, arguments.left_chunks)]
    options = arguments.device, arguments.rounds, arguments.cold
    results = [measure(*shape, *options) for shape in dict.fromkeys(grid)]
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        show(results, arguments)
    draw(results[: len(FRAMES)], arguments.png)


def measure(num_frames: int, chunk_size: int, left: int | None, device: torch.device, rounds: int, cold: bool) -> dict:
    """Median seconds of each, and how many times as fast `featcache` is, in one round; all have the same values."""
    expected = loop_over_steps(num_frames, chunk_size, left, device)
    for name, run in RUNS.items():
        values = run(num_frames, chunk_size, left, device)
        assert torch.equal(~values if name in SETS_MASKED else values, expected), name

    def take_turns() -> None:
        seconds.clear()
        seconds.update({name: [] for name in RUNS})
        for _ in range(rounds):
            for name, run in RUNS.items():
                best = math.inf
                for _ in range(5):
                    if name == MADE:
                        masks._shared = masks._SharedMasks(masks._SHARED_BYTES)
                    if cold:
                        OTHER_MEMORY.add_(1)
                    settle(device)
                    started = perf_counter()
                    mask = run(num_frames, chunk_size, left, device)
                    settle(device)
                    best = min(best, perf_counter() - started)
                    del mask
                seconds[name].append(best)

    seconds: dict[str, list[float]] = {}
    measured = undisturbed(lambda: timed(take_turns))
    return {
        "frames": num_frames,
        "chunk_size": chunk_size,
        "left_chunks": left,
        "seconds": {name: median(values) for name, values in seconds.items()},
        "ratio": {
            name: median([its / made for its, made in zip(values, seconds[MADE], strict=True)])
            for name, values in seconds.items()
        },
        "others": measured.others,
    }


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(results: list[dict], arguments: argparse.Namespace) -> None:
    by_frames, by_chunk_size = results[: len(FRAMES)], [result for result in results if result["frames"] == AT]
    left = "all" if arguments.left_chunks < 0 else arguments.left_chunks
    state = ", cold" if arguments.cold else ""
    print(f"{arguments.device}, torch {torch.__version__}, Python {sys.version.split()[0]}, 1 thread{state}\n")
    print(f"chunks of {arguments.chunk_size} frames, {left} to the left: µs, and × featcache")
    print(f"{'frames':34}" + "".join(f"{result['frames']:>18,}" for result in by_frames))
    for name in RUNS:
        cells = (f"{result['seconds'][name] * 1e6:,.0f} {result['ratio'][name]:8.2f} ×" for result in by_frames)
        print(f"{name:34}" + "".join(f"{cell:>18}" for cell in cells))
    print(f"\n{AT:,} frames: times as fast as the loop over chunks, its two passes and one")
    by_chunk_size.sort(key=lambda result: (result["chunk_size"], result["left_chunks"] is not None))
    for result in by_chunk_size:
        context = "all" if result["left_chunks"] is None else result["left_chunks"]
        title = f"chunks of {result['chunk_size']}, {context} to the left"
        print(f"{title:34}{result['ratio'][TWO]:16.1f} ×{result['ratio'][ONE]:16.1f} ×")
    if disturbed := remark(max(result["others"] for result in results)):
        print(f"\n{disturbed}")


def draw(results: list[dict], path: Path) -> None:
    """The times over the frames, as a PNG; without matplotlib, say how to get it."""
    if (pyplot := pyplot_for(path)) is None:
        return
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    frames = [result["frames"] for result in results]
    for name in RUNS:
        axes.loglog(frames, [result["seconds"][name] * 1e6 for result in results], "o-", label=name)
    axes.set_xticks(frames, [f"{number:,}" for number in frames])
    axes.minorticks_off()
    axes.set(xlabel="frames", ylabel="µs for a mask", title=f"Chunked attention masks, {title_of(results[0])}")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)
    print(f"\n{path}", file=sys.stderr)


def title_of(result: dict) -> str:
    left = "all" if result["left_chunks"] is None else result["left_chunks"]
    return f"chunks of {result['chunk_size']}, {left} to the left"


if __name__ == "__main__":
    main()
