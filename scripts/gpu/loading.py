"""Measure the loader into a GPU's memory, compared with copies of the same bytes from
pinned memory; and how long training waits.

    copy       batches' bytes that lie in pinned memory, copied one after the other: the limit
    loader     featcache.DataLoader on log mel features, stored as float16 and as uint8
    training   a step of a small network on each batch; `waited` is the share of the time

On a CPU, the limit copies from memory to memory.
"""

from step import Step, main

# isort: split
from time import perf_counter

import torch
from harness import temporary_folder
from load import BATCH, shuffled
from made_up import BINS, make_features, make_version
from torch import nn

import featcache

BATCHES = 150
LAYERS = {"small": 2, "large": 12}
"""Transformer layers of what is trained: a step of the small one takes a few milliseconds."""


def run(step: Step) -> None:
    utterances = make_features(*((40, 0.5) if step.small else (3000,)))
    batches = shuffled(len(utterances), 4 if step.small else BATCHES)
    longest = max(map(len, utterances))
    num_bytes = sum(
        BATCH * max(len(utterances[row]) for row in rows) * BINS * 2 for rows in batches
    )
    limit = copy(step, num_bytes // len(batches), len(batches))
    with temporary_folder(step.work) as folder:
        for stored, is_quantized in (("float16", False), ("uint8", True)):
            make_version(folder / stored, utterances, quantized=is_quantized)
            dataset = featcache.FeatureDataset(featcache.open(folder / stored))
            size = num_bytes // (2 if is_quantized else 1)
            for prefetch in (2, 4) if step.small else (2, 4, 8):
                loader = featcache.DataLoader(
                    dataset, batches, device=step.device.torch_device, prefetch=prefetch
                )
                seconds = min(epoch(step, loader) for _ in range(3))
                speed = size / seconds / 1e9
                step.record(
                    "loader",
                    stored=stored,
                    prefetch=prefetch,
                    GB_per_s=speed,
                    of_limit=speed / limit,
                )
        dataset = featcache.FeatureDataset(featcache.open(folder / "float16"))
        loader = featcache.DataLoader(
            dataset, batches, device=step.device.torch_device, dtype=torch.float32
        )
        for name, layers in LAYERS.items():
            train(step, loader, name, 1 if step.small else layers, longest)


def copy(step: Step, num_bytes: int, count: int) -> float:
    """GB/s of copies from a few pinned buffers, which the processor's cache does not hold."""
    pinned = [
        torch.ones(num_bytes, dtype=torch.uint8, pin_memory=step.device.is_cuda) for _ in range(4)
    ]
    target = torch.empty(num_bytes, dtype=torch.uint8, device=step.device.torch_device)

    def copy_all() -> None:
        for number in range(count):
            target.copy_(pinned[number % len(pinned)], non_blocking=True)

    speed = num_bytes * count / step.time(copy_all) / 1e9
    step.record("copy", MB=num_bytes / 1e6, GB_per_s=speed)
    return speed


def epoch(step: Step, loader: featcache.DataLoader) -> float:
    start = perf_counter()
    for batch in loader:
        del batch
    step.wait()
    return perf_counter() - start


def train(step: Step, loader: featcache.DataLoader, name: str, layers: int, longest: int) -> None:
    """Steps of a transformer over the frames, subsampled by four, in bf16."""
    device = step.device.torch_device
    with torch.inference_mode(False), torch.enable_grad():
        subsample = nn.Conv1d(BINS, 256, 4, 4).to(device)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        transformer = nn.TransformerEncoder(layer, layers).to(device)
        optimizer = torch.optim.AdamW([*subsample.parameters(), *transformer.parameters()])
        for _ in range(2):  # the first epoch is not counted
            start = perf_counter()
            for number, batch in enumerate(loader):
                if number == (2 if step.small else 100):
                    break
                with torch.autocast(device.type, torch.bfloat16):
                    loss = transformer(subsample(batch["features"].mT).mT).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del batch
            step.wait()
            seconds = perf_counter() - start
    shown = {"ms_per_step": 1e3 * seconds / (number or 1), "waited": loader.waited / seconds}
    step.record("training", model=name, longest=longest, **shown)


if __name__ == "__main__":
    main(run, __doc__)
