"""Train an x-vector network that tells speakers apart, with noise before its pooling:
drawn on the CPU, or on the device.

    pip install '.[extract]'
    python scripts/stories/train_xvector.py [--epochs 10] [--channels 128]
                                            [--device cuda] [--json]

The features are the paper's, 24 log mel energies of 8 kHz speech, extracted once by
`featcache extract` and read by a `featcache.DataLoader`. The network (`xvector.py`) has
128 channels instead of 512, or --channels. Noise of 1e-5 is added to what is pooled,
[batch, frames, channels], so that no standard deviation over time is zero. Two ways:

on the CPU      x + 1e-5 * torch.randn(x.shape).to(x.device): the GPU waits while the CPU draws, and for the copy
on the device   featcache.augment.GaussianNoise(1e-5): nothing is copied, and the same step draws the same noise again

Both train on the same batches from the same seed, and take turns. A step goes from the
end of the one before to its own end, its batch included; on a GPU it is measured by
events in the stream, which hold nothing up, and so is the noise in it: the time for which
the stream stood at it. The first epoch of each is not counted.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from training import OPTIONS, Data, GpuUse, Pass, Trainer, Watch, split
from xvector import Noise, XVector

import featcache
from featcache.device import Device

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from harness import CORES, Table, median, options, present, remark, temporary_folder, timed

STD = 1e-5
CONFIG = {
    "name": "fbank24",
    "extractor": "fbank",
    "params": {"num_mel_bins": 24},
    "audio": {"sample_rate": 8000},
    "store": {"dtype": "float16"},
}
ON_THE_CPU = """The device is the CPU: both draw as many numbers on the same cores, and nothing is copied, so there is
little between them. What costs is drawing for a GPU on the CPU, and the copy: see --device cuda."""
TURN = 5
"""Epochs in a row: long enough for NVML to tell how busy a GPU is."""


def on_the_cpu(x: Tensor, lengths: Tensor, step: int) -> Tensor:
    """The common way."""
    return x + STD * torch.randn(x.shape).to(x.device)


def on_the_device(seed: int) -> Noise:
    """featcache's way."""
    noise = featcache.augment.GaussianNoise(STD, seed=seed)
    return lambda x, lengths, step: noise(x, lengths, step=step)


class Watched:
    """Noise, and when it was drawn: `marks` has the moments before and after each."""

    def __init__(self, noise: Noise, device: torch.device) -> None:
        self._noise = noise
        self._watch = Watch(device)
        self.marks: list[tuple[Any, Any]] = []

    def __call__(self, x: Tensor, lengths: Tensor, step: int) -> Tensor:
        before = self._watch.mark()
        noisy = self._noise(x, lengths, step)
        self.marks.append((before, self._watch.mark()))
        return noisy

    def seconds(self) -> list[float]:
        """Of each, when the device has settled."""
        return [self._watch.seconds(*pair) for pair in self.marks]


@dataclass
class Way:
    """One way to draw noise: its network in training, and what that has taken."""

    trainer: Trainer
    noise: Watched
    loader: featcache.DataLoader
    gpu: GpuUse
    passes: list[Pass] = field(default_factory=list)

    def train(self, numbers: range) -> None:
        with self.gpu.watched():
            self.passes += [self.trainer.epoch(self.loader, number) for number in numbers]

    def figures(self, test: featcache.DataLoader) -> list[Any]:
        """Those of `FIGURES`, without the first epoch."""
        counted = self.passes[1:]
        steps = np.array([seconds for epoch in counted for seconds in epoch.steps])
        noise = np.array(self.noise.seconds()[-len(steps) :])
        return [
            *(
                1e3 * seconds
                for seconds in (np.median(steps), np.quantile(steps, 0.9), np.median(noise))
            ),
            noise.sum() / steps.sum(),
            sum(epoch.cpu_seconds for epoch in counted) / sum(epoch.seconds for epoch in counted),
            self.gpu.text(counted),
            median([epoch.fetched / epoch.seconds for epoch in counted]),
            median([epoch.waited / epoch.seconds for epoch in counted]),
            self.trainer.accuracy(test),
        ]


FIGURES = {
    **dict.fromkeys(("a step, median", "p90", "noise"), "{:.2f} ms"),
    "of all steps": "{:.1%}",
    f"CPU, of {CORES} cores": "{:.2f}",
    "GPU busy": "{}",
    **dict.fromkeys(("fetching batches", "loader.waited"), "{:.2%}"),
    "accuracy": "{:.1%}",
}


def measure(asked: argparse.Namespace, folder: Path) -> list[Table | str]:
    data = Data(asked, split(asked.data, folder, asked.limit), CONFIG, "speaker")
    torch.set_num_threads(asked.threads)
    ways = {}
    for name, noise in {
        "on the CPU": on_the_cpu,
        "on the device": on_the_device(asked.seed),
    }.items():
        torch.manual_seed(asked.seed)
        watched = Watched(noise, asked.device)
        model = XVector(data.cache.spec.item_shape[0], len(data.classes), asked.channels, watched)
        trainer = Trainer(model, data.column, asked.device)
        ways[name] = Way(
            trainer, watched, data.loader("train", torch.float32), GpuUse(asked.device)
        )

    def take_turns() -> None:
        for first in range(0, asked.epochs, TURN):
            for way in ways.values():
                way.train(range(first, min(first + TURN, asked.epochs)))

    taken = timed(take_turns, patience=0)
    table = Table("noise drawn", FIGURES)
    for name, way in ways.items():
        table.add(name, *way.figures(data.loader("test", torch.float32)))
    num_train, num_test = map(len, data.datasets.values())
    return [
        f"{num_train:,} utterances of {len(data.classes)} speakers to train on, "
        f"{num_test:,} to test with; "
        f"{asked.epochs} epochs; {Device(str(asked.device)).label}, {asked.threads} threads",
        f"fbank of 24 bins, extracted in {data.extraction.seconds:.1f} s; "
        f"{asked.channels} channels, batches of {asked.batch_size}",
        table,
        "" if asked.device.type == "cuda" else ON_THE_CPU,
        remark(data.extraction.others, taken.others),
    ]


def main() -> None:
    asked = options(
        __doc__, **OPTIONS, epochs=(10, "at least 2"), channels=(128, "512 in the paper")
    )
    if asked.epochs < 2:
        sys.exit("--epochs: the first one is not counted: give at least 2")
    with temporary_folder() as folder:
        present(asked, *measure(asked, folder))


if __name__ == "__main__":
    main()
