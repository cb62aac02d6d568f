"""What Ray costs: the same job on the local engine, on a process for each device, and on Ray, by turns in one run.

    python scripts/scale/ray_overhead.py MANIFEST --hours 1 --threads 2 --rounds 2

The extractor is a small convolutional model with weights drawn from a seed, so that nothing has to be downloaded. The
manifest is repeated until there is as much audio as wanted. Each engine gets the same number of threads: with `cpu,cpu`
and on Ray, each of as many processes has one.

Of each run, two parts are told apart: until the first utterance is done, which is starting processes, importing torch
and building extractors; and the rest, whose ratio to that of the local engine is the overhead. It prints one JSON
document, and fails if the features are not the same, byte for byte.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from harness import options

import featcache
from featcache.extractors import Params
from featcache.extractors.rows import RowExtractor, Rows
from featcache.manifest import read_manifest
from featcache.spec import FeatureSpec

HOP = 320


class Convolutions(RowExtractor[Params]):
    """Four causal convolutions of frames of 20 ms: about as much work as a small codec's encoder."""

    Params = Params
    revision = 1
    batching = "padded"
    granularity = HOP

    def __init__(self, params, sample_rate, device):
        generator = torch.Generator().manual_seed(0)
        self.spec = FeatureSpec((64,), "float32", sample_rate / HOP, HOP, sample_rate, "anything")
        self._layers = []
        for inputs, outputs in ((HOP, 512), (512, 512), (512, 512), (512, 64)):
            layer = nn.Conv1d(inputs, outputs, 3)
            with torch.no_grad():
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / (3 * inputs) ** 0.5)
                layer.bias.zero_()
            self._layers.append(layer.to(device))

    def num_frames(self, num_samples):
        return num_samples // HOP

    def encode(self, waveforms, num_samples):
        x_RCT = waveforms.unflatten(1, (-1, HOP)).mT
        for layer in self._layers:
            x_RCT = torch.tanh(layer(nn.functional.pad(x_RCT, (2, 0))))
        return Rows(x_RCT.mT.contiguous())


def repeated(source: Path, hours: float, folder: Path) -> Path:
    """A manifest of that much audio, made by repeating the rows of another."""
    manifest = read_manifest(source)
    rows = [manifest[number] for number in range(len(manifest))]
    path, seconds, turn = folder / "repeated.csv", 0.0, 0
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "path", "duration"])
        while seconds < hours * 3600:
            for row in rows:
                writer.writerow([f"{row.id}-{turn}", manifest.resolve(row.path), row.duration])
                seconds += row.duration
            turn += 1
    return path


def arrays(cache: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(cache)): path.read_bytes() for path in cache.glob("*/shards/*/*/c/**/*") if path.is_file()
    }


def run(manifest: Path, config: Path, cache: Path, **engine: object) -> dict[str, float]:
    started, first = perf_counter(), []

    def watch(progress) -> None:
        if progress.audio_seconds and not first:
            first.append((perf_counter() - started, progress.audio_seconds))

    summary = featcache.extract(manifest, config, cache, shard_megabytes=1.0, progress=watch, **engine)
    seconds = perf_counter() - started
    at, done = first[0]
    hours = summary.audio_seconds / 3600
    return {"seconds": seconds, "start": at, "seconds_per_hour": (seconds - at) / (hours - done / 3600)}


def main() -> None:
    asked = options(__doc__, "manifest", hours=1.0, threads=2, rounds=2)
    os.environ.setdefault("RAY_ADDRESS", "local")
    several = ",".join(["cpu"] * asked.threads)
    engines = {
        "local": {"device": "cpu", "threads": asked.threads},
        several: {"device": several, "threads": asked.threads},
        "ray": {"engine": "ray", "device": "cpu", "threads": 1},
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = repeated(asked.manifest, asked.hours, folder)
        config = folder / "convolutions.yaml"
        config.write_text("name: convolutions\nextractor: ray_overhead:Convolutions\n")
        for number in range(asked.rounds):
            for engine, how in engines.items():
                cache = folder / f"{engine}-{number}"
                found[engine].append(run(manifest, config, cache, **how))
                if arrays(cache) != arrays(folder / "local-0"):
                    sys.exit(f"{engine}: the features differ")
    parts = ("seconds", "start", "seconds_per_hour")
    medians = {engine: {part: median(one[part] for one in runs) for part in parts} for engine, runs in found.items()}
    base = medians["local"]["seconds_per_hour"]
    for figures in medians.values():
        figures["ratio"] = figures["seconds_per_hour"] / base
    print(json.dumps({"hours": asked.hours, "load": os.getloadavg()[0], "median": medians, "runs": found}, indent=2))


if __name__ == "__main__":
    main()
