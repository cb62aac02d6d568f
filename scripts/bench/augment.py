"""How fast a batch is augmented on its device, beside a loop over its utterances, and what others have.

    pip install '.[bench]'    # what is not there is left out
    python scripts/bench/augment.py [--rows 64] [--frames 1500] [--dims 80] [--device cuda] [--threads 1] [--json]

SpecAugment is two masks of frequency and two of time, within each utterance's own length. The loop is the usual one:
for each utterance widths and places from Python's generator, and slices that are set. torchaudio's FrequencyMasking and
TimeMasking are called for each utterance's own frames, as their masks are the same for a whole batch otherwise; its
loop is as short as it can be. lhotse's SpecAugment has a loop of its own. SpeechBrain's SpectrogramDrop is vectorised,
takes no lengths and puts masks into the padding too. Noise is at 20 dB of each utterance's own frames; the loop draws
and scales for each.

In each round all take turns, the best of three calls counts, and times and ratios are medians of the rounds. On a GPU
each call is waited for. `operations` are those that torch is asked for, views aside: on a GPU, about as many kernels.

Seen on one of 2 shared cores without a GPU, Python 3.11, torch 2.11, in one run, 64 rows of 750 to 1,500 frames and 80
dimensions: SpecAugment 9.8 ms and 42 operations; the loop 0.63 × as long and 257 operations, with torchaudio 5.6 ×
and 4,417, lhotse 1.3 × and 1,793, SpeechBrain 1.4 × and 36. Noise 32 ms and 28 operations; the loop 0.85 × and 641. A
loop writes only what it masks, and draws no noise for padding: on a CPU, that counts. On a GPU, operations do.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from clock import median, remark, timed, undisturbed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from featcache.augment import GaussianNoise, SpecAugment
from featcache.device import keep_freed_memory

MASKS, TIME_WIDTH, FREQ_WIDTH, FRACTION, SNR = 2, 100, 27, 0.2, 20.0
OURS = "featcache"

Augment = Callable[[Tensor, Tensor, list[int]], object]


def loop_masks(features: Tensor, lengths: Tensor, lengths_list: list[int]) -> Tensor:
    features = features.clone()
    for row, length in zip(features, lengths_list, strict=True):
        for _ in range(MASKS):
            width = random.randint(0, min(TIME_WIDTH, int(FRACTION * length)))
            start = random.randint(0, length - width)
            row[start : start + width] = 0
            width = random.randint(0, FREQ_WIDTH)
            start = random.randint(0, features.shape[2] - width)
            row[:length, start : start + width] = 0
    return features


def loop_noise(features: Tensor, lengths: Tensor, lengths_list: list[int]) -> Tensor:
    features = features.clone()
    for row, length in zip(features, lengths_list, strict=True):
        signal = row[:length]
        noise = torch.randn_like(signal)
        signal += noise * (signal.square().mean() / noise.square().mean() / 10 ** (SNR / 10)).sqrt()
    return features


def torchaudio_masks() -> Augment:
    from torchaudio.transforms import FrequencyMasking, TimeMasking

    in_freq, in_time = FrequencyMasking(FREQ_WIDTH), TimeMasking(TIME_WIDTH, p=FRACTION)

    def run(features: Tensor, lengths: Tensor, lengths_list: list[int]) -> Tensor:
        features = features.clone()
        for row, length in zip(features, lengths_list, strict=True):
            item = row[None, :length].mT
            for _ in range(MASKS):
                item = in_time(in_freq(item))
            row[:length] = item[0].mT
        return features

    return run


def lhotse_masks() -> Augment:
    from lhotse.dataset.signal_transforms import SpecAugment as Theirs

    theirs = Theirs(
        time_warp_factor=None,
        num_feature_masks=MASKS,
        features_mask_size=FREQ_WIDTH,
        num_frame_masks=MASKS,
        frames_mask_size=TIME_WIDTH,
        max_frames_mask_fraction=FRACTION,
        p=1.0,
    )
    return lambda features, lengths, lengths_list: theirs(features)


def speechbrain_masks() -> Augment:
    from speechbrain.augment.freq_domain import SpectrogramDrop

    counts = {"drop_count_low": MASKS, "drop_count_high": MASKS, "replace": "zeros"}
    in_time = SpectrogramDrop(drop_length_low=0, drop_length_high=TIME_WIDTH + 1, dim=1, **counts)
    in_freq = SpectrogramDrop(drop_length_low=0, drop_length_high=FREQ_WIDTH + 1, dim=2, **counts)
    return lambda features, lengths, lengths_list: in_freq(in_time(features))


def our_masks() -> Augment:
    options = {"time_masks": MASKS, "freq_masks": MASKS, "time_width": TIME_WIDTH, "freq_width": FREQ_WIDTH}
    augment = SpecAugment(**options, max_time_fraction=FRACTION)
    return lambda features, lengths, lengths_list: augment(features, lengths, step=0)


def our_noise() -> Augment:
    augment = GaussianNoise(snr_db=SNR)
    return lambda features, lengths, lengths_list: augment(features, lengths, step=0)


KINDS: dict[str, dict[str, Callable[[], Augment]]] = {
    "SpecAugment": {
        OURS: our_masks,
        "loop": lambda: loop_masks,
        "torchaudio, loop": torchaudio_masks,
        "lhotse": lhotse_masks,
        "SpeechBrain": speechbrain_masks,
    },
    "noise at 20 dB": {OURS: our_noise, "loop": lambda: loop_noise},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--frames", type=int, default=1500, help="of the longest utterance; the shortest has half")
    parser.add_argument("--dims", type=int, default=80)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    results = {kind: measure(given, arguments) for kind, given in KINDS.items()}
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    shape = f"[{arguments.rows}, {arguments.frames}, {arguments.dims}]"
    print(f"{arguments.device}, torch {torch.__version__}, {arguments.threads} threads, {shape}")
    for kind, result in results.items():
        print(f"\n{kind:20}{'ms':>8}{'× featcache':>14}{'operations':>13}")
        for name, seconds in result["seconds"].items():
            print(f"{name:20}{1e3 * seconds:8.2f}{result['ratio'][name]:14.2f}{result['operations'][name]:13,}")
        if disturbed := remark(result["others"]):
            print(disturbed)


def measure(given: dict[str, Callable[[], Augment]], arguments: argparse.Namespace) -> dict:
    """Median seconds of each, and how many times as long as `featcache` it took in the same round."""
    runs = {}
    for name, make in given.items():
        try:
            runs[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(arguments.frames // 2, arguments.frames + 1, (arguments.rows,), generator=generator)
    lengths_list = lengths.tolist()
    shape = arguments.rows, arguments.frames, arguments.dims
    features = torch.randn(shape, generator=generator).to(arguments.device)
    lengths = lengths.to(arguments.device)

    def take_turns() -> None:
        seconds.update({name: [] for name in runs})
        for _ in range(arguments.rounds):
            for name, run in runs.items():
                best = float("inf")
                for _ in range(3):
                    settle(arguments.device)
                    started = perf_counter()
                    run(features, lengths, lengths_list)
                    settle(arguments.device)
                    best = min(best, perf_counter() - started)
                seconds[name].append(best)

    seconds: dict[str, list[float]] = {}
    take_turns()  # the first calls take memory, and compile
    measured = undisturbed(lambda: timed(take_turns))
    return {
        "seconds": {name: median(values) for name, values in seconds.items()},
        "ratio": {
            name: median([its / ours for its, ours in zip(values, seconds[OURS], strict=True)])
            for name, values in seconds.items()
        },
        "operations": {
            name: operations(lambda run=run: run(features, lengths, lengths_list)) for name, run in runs.items()
        },
        "others": measured.others,
    }


class Counting(TorchDispatchMode):
    """Counts operations, but for those that only make views."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def operations(call: Callable[[], object]) -> int:
    with Counting() as counting:
        call()
    return counting.count


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
