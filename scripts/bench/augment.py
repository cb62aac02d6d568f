"""Measure how fast a batch is augmented on its device, and compare it with a loop over
its utterances and with other packages.

    pip install '.[bench]'    # what is not there is left out
    python scripts/bench/augment.py [--device cuda] [--json]

SpecAugment is two masks of frequency and two of time, within each utterance's own length.
The loop is the usual one: for each utterance widths and places from Python's generator,
and slices that are set. torchaudio's FrequencyMasking and TimeMasking are called for each
utterance's own frames, as their masks are the same for a whole batch otherwise; its loop
is as short as it can be. lhotse's SpecAugment has a loop of its own. SpeechBrain's
SpectrogramDrop is vectorised, takes no lengths and puts masks into the padding too. Noise
is at 20 dB of each utterance's own frames; the loop draws and scales for each.

In each round all take turns, the best of three calls counts, and times and ratios are
medians of the rounds. On a GPU each call is waited for. `operations` are those that torch
is asked for, views aside: on a GPU, about as many kernels.
"""

import argparse
import random
from collections.abc import Callable
from functools import partial

import torch
from harness import Table, available, options, present, quick_turns, remark
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from featcache.augment import GaussianNoise, SpecAugment
from featcache.device import keep_freed_memory

ROWS, FRAMES, DIMS = 64, 1500, 80
"""Of a batch; its shortest utterance has half the frames of its longest."""
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

    in_freq = {"num_feature_masks": MASKS, "features_mask_size": FREQ_WIDTH}
    in_time = {
        "num_frame_masks": MASKS,
        "frames_mask_size": TIME_WIDTH,
        "max_frames_mask_fraction": FRACTION,
    }
    theirs = Theirs(time_warp_factor=None, **in_freq, **in_time, p=1.0)
    return lambda features, lengths, lengths_list: theirs(features)


def speechbrain_masks() -> Augment:
    from speechbrain.augment.freq_domain import SpectrogramDrop

    counts = {"drop_count_low": MASKS, "drop_count_high": MASKS, "replace": "zeros"}
    in_time = SpectrogramDrop(drop_length_low=0, drop_length_high=TIME_WIDTH + 1, dim=1, **counts)
    in_freq = SpectrogramDrop(drop_length_low=0, drop_length_high=FREQ_WIDTH + 1, dim=2, **counts)
    return lambda features, lengths, lengths_list: in_freq(in_time(features))


def our_masks() -> Augment:
    options = {
        "time_masks": MASKS,
        "freq_masks": MASKS,
        "time_width": TIME_WIDTH,
        "freq_width": FREQ_WIDTH,
    }
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
    asked = options(__doc__, device="cpu", rounds=15)
    torch.set_num_threads(1)
    keep_freed_memory()
    parts = [part for kind, makers in KINDS.items() for part in measure(kind, makers, asked)]
    present(
        asked,
        f"{asked.device}, torch {torch.__version__}, 1 thread, {[ROWS, FRAMES, DIMS]}",
        *parts,
    )


def measure(
    kind: str, makers: dict[str, Callable[[], Augment]], asked: argparse.Namespace
) -> tuple[Table, str]:
    """Median times, how many times as long as `featcache` each took in the same round,
    and a remark."""
    device, generator = torch.device(asked.device), torch.Generator().manual_seed(0)
    lengths = torch.randint(FRAMES // 2, FRAMES + 1, (ROWS,), generator=generator)
    features = torch.randn(ROWS, FRAMES, DIMS, generator=generator).to(device)
    batch = features, lengths.to(device), lengths.tolist()
    runs = {name: partial(call, augment, batch) for name, augment in available(makers).items()}
    quick_turns(runs, 1, 3)  # the first calls take memory, and compile
    turns = quick_turns(runs, asked.rounds, 3)
    table = Table(kind, {"ms": "{:.2f}", "× featcache": "{:.2f}", "operations": "{:,}"})
    for name, run in runs.items():
        table.add(name, 1e3 * turns.median(name), turns.ratio(name, OURS), operations(run))
    return table, remark(turns.others)


def call(augment: Augment, batch: tuple[Tensor, Tensor, list[int]]) -> None:
    augment(*batch)
    if batch[0].is_cuda:
        torch.cuda.synchronize(batch[0].device)


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


if __name__ == "__main__":
    main()
