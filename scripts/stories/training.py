"""Share between the training stories: splits of a manifest, a training loop, and its
cost to the CPU and the GPU."""

import argparse
import csv
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

import featcache

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from corpus import make_digits, write_manifest
from harness import CORES, Timed, timed

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "fsdd" / "manifest.csv"
SPLITS = ("train", "test")


# The data


OPTIONS: dict[str, Any] = {
    "data": (Path, "manifest with id, path, split, digit and speaker"),
    "limit": (int, "utterances, drawn at random"),
    "device": (torch.device("cpu"), "cpu, cuda, cuda:1"),
    "threads": (CORES, "of the CPU, for everything"),
    "batch_size": (32, "utterances"),
    "seed": 0,
}
"""The options that the stories have in common."""


def split(manifest: Path | None, folder: Path, limit: int | None) -> dict[str, Path]:
    """Write the manifests `all`, `train` and `test` into a folder: by the column `split`,
    with absolute paths.

    Without a manifest, of the Free Spoken Digit Dataset in ../shared/data; where it is
    not found, of tones. Exits with a message where there is no such manifest, or nothing
    to train on or to test with."""
    if manifest is None and not (manifest := DATA).is_file():
        print(
            f"no {DATA}, and no --data: tones stand for spoken digits; accuracies say nothing",
            file=sys.stderr,
        )
        manifest = make_digits(folder / "digits")
    if not manifest.is_file():
        sys.exit(
            f"{manifest}: there is none; --data takes a manifest with id, path, split "
            "(train or test), digit and speaker, as of the Free Spoken Digit Dataset, "
            "github.com/Jakobovski/free-spoken-digit-dataset"
        )
    with manifest.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if missing := {"id", "path", "split", "digit", "speaker"} - set(rows[0] if rows else ()):
        sys.exit(f"{manifest}: lacks {', '.join(sorted(missing))}, or has no rows")
    if limit is not None:
        rows = [
            rows[row] for row in sorted(np.random.default_rng(0).permutation(len(rows))[:limit])
        ]
    rows = [{**row, "path": str((manifest.parent / row["path"]).absolute())} for row in rows]
    chosen = {
        "all": rows,
        **{name: [row for row in rows if row["split"] == name] for name in SPLITS},
    }
    paths = {}
    for name, some in chosen.items():
        if len(some) < 2:
            sys.exit(
                f"{manifest}: of its {len(rows)} rows, {len(some)} are in split {name!r}: "
                "that is too few"
            )
        paths[name] = write_manifest(
            folder / f"{name}.csv", (row.values() for row in some), [*some[0]]
        )
    return paths


class Data:
    """What a story trains on: features of the splits of a manifest, extracted once.

    Args:
        asked: The options of the story.
        manifests: What `split` gave.
        config: What is extracted.
        classes: The column that is learnt, or its name with its labels in order.
    """

    def __init__(
        self,
        asked: argparse.Namespace,
        manifests: dict[str, Path],
        config: dict,
        classes: str | dict[str, list[str]],
    ) -> None:
        self.manifests, folder = manifests, manifests["all"].parent
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(config))
        self.extraction = extract(self.manifests["all"], [self.config], folder / "features", asked)
        self.cache = featcache.open(folder / "features")
        self.column = classes if isinstance(classes, str) else next(iter(classes))
        self.datasets: dict[str, featcache.FeatureDataset] = {}
        for name in SPLITS:
            dataset = featcache.FeatureDataset(
                self.cache, self.manifests[name], columns=[self.column], classes=classes
            )
            self.datasets[name], classes = dataset, dataset.classes
        self.classes: list[str] = dataset.classes[self.column]
        self._asked = asked

    def sampler(self, name: str) -> featcache.BucketBatchSampler:
        """Batches of a split: the same ones for everyone."""
        size, seed = self._asked.batch_size, self._asked.seed
        lengths = self.datasets[name].lengths
        return featcache.BucketBatchSampler(
            lengths, batch_size=size, shuffle=name == "train", seed=seed
        )

    def loader(self, name: str, dtype: torch.dtype) -> featcache.DataLoader:
        return featcache.DataLoader(
            self.datasets[name], self.sampler(name), device=self._asked.device, dtype=dtype
        )


def extract(
    manifest: Path, configs: Iterable[Path | str], cache: Path, asked: argparse.Namespace
) -> Timed:
    """Run the command, in a process of its own; what it says goes to stderr."""
    options = ["-o", cache, "--device", asked.device, "--threads", asked.threads]
    for config in configs:
        options += ["-c", config]
    command = [sys.executable, "-m", "featcache", "extract", manifest, *options]

    def run() -> None:
        code = subprocess.run([str(part) for part in command], stdout=sys.stderr).returncode
        if code:
            sys.exit(f"featcache extract ended with {code}: see above")

    return timed(run, patience=0)


# Time


class Watch:
    """Moments on a device: of a GPU, events in its stream, which hold nothing up; of the
    CPU, the time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Now: when all that was given to the device so far is done."""
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait until the device has nothing to do; before that no `seconds` can be asked
        for."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def seconds(self, first: Any, second: Any) -> float:
        """From one moment to a later one."""
        return second - first if isinstance(first, float) else first.elapsed_time(second) / 1000


@dataclass
class Pass:
    """What an epoch took."""

    seconds: float
    """Seconds by the clock on the wall."""
    cpu_seconds: float
    """CPU seconds of this process's threads."""
    steps: list[float]
    """The seconds of each step, with the wait for its batch."""
    waited: float
    """Seconds waited for batches, as the loader says."""
    fetched: float
    """Seconds that the loop was in the loader, for whatever reason."""
    busy: float
    """Seconds from each step's beginning to its end on the device: no less than a GPU was
    at work."""


class GpuUse:
    """How much of the time a GPU was busy, while blocks run; NVML tells, where
    nvidia-ml-py is installed.

    Args:
        device: The device; on a CPU there is nothing to tell.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[int] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look ten times a second, while a block runs: NVML tells how it was since about
        the last look."""
        over = threading.Event()
        looking = threading.Thread(target=self._look, args=[over])
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()

    @property
    def share(self) -> float | None:
        """The share of the time; None where nobody tells."""
        return sum(self._samples) / len(self._samples) / 100 if self._samples else None

    @property
    def quarters(self) -> list[float]:
        """That of each quarter of the time: a short run may do nothing but write in the
        last one."""
        return [
            round(float(part.mean()) / 100, 2)
            for part in np.array_split(self._samples, 4)
            if len(part)
        ]

    def text(self, passes: Sequence[Pass]) -> str:
        """The share, for people; without NVML what the steps of these passes took, with
        gaps between kernels."""
        if self._device.type != "cuda":
            return "–"
        if self.share is not None:
            return f"{self.share:.0%}"
        return (
            "at most "
            f"{sum(epoch.busy for epoch in passes) / sum(epoch.seconds for epoch in passes):.0%}"
        )

    def _look(self, over: threading.Event) -> None:
        # on a CPU; without pynvml, of nvidia-ml-py, or without its permission
        with suppress(Exception):
            while not over.wait(0.1):
                self._samples.append(torch.cuda.utilization(self._device))


# Training


class Trainer:
    """A model that learns to tell one column of numbers, by Adam and cross-entropy.

    Loaders give batches, and have `set_epoch` and `waited`, as `featcache.DataLoader` has.

    Args:
        model: A function of features, lengths and the number of the step.
        column: The column of the classes.
        device: Where the model is to be.
    """

    def __init__(self, model: nn.Module, column: str, device: torch.device) -> None:
        self.model, self.column, self.device = model.to(device), column, device
        self.steps = 0
        self._optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def epoch(self, loader: Any, number: int) -> Pass:
        watch = Watch(self.device)
        self.model.train()
        loader.set_epoch(number)
        watch.settle()
        begins, ends = [], [watch.mark()]
        cpu, start = process_time(), perf_counter()
        asked, fetched = start, 0.0
        for batch in loader:
            fetched += perf_counter() - asked
            begins.append(watch.mark())
            scores = self.model(batch["features"], batch["lengths"], self.steps)
            loss = nn.functional.cross_entropy(scores, batch[self.column])
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            self.steps += 1
            ends.append(watch.mark())
            asked = perf_counter()
        watch.settle()
        return Pass(
            seconds=perf_counter() - start,
            cpu_seconds=process_time() - cpu,
            steps=[watch.seconds(*pair) for pair in pairwise(ends)],
            waited=loader.waited,
            fetched=fetched,
            busy=sum(watch.seconds(*pair) for pair in zip(begins, ends[1:], strict=True)),
        )

    @torch.inference_mode()
    def accuracy(self, loader: Iterable[dict[str, Any]]) -> float:
        """The share of utterances whose class it tells."""
        self.model.eval()
        right, count = 0, 0
        for batch in loader:
            labels = batch[self.column]
            right += int(
                (self.model(batch["features"], batch["lengths"]).argmax(1) == labels).sum()
            )
            count += len(labels)
        return right / count
