"""Measure the CPU time of one model pass for several configs, compared with a pass for
each: HuBERT base, layers 6, 9 and 12; Mimi, codes and latents. The weights are random,
at the real sizes.

    python scripts/bench/shared_pass.py
"""

import os
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import transformers

from featcache.config import config_from

SECONDS, ROWS, REPEATS = 4, 4, 3


def save(name: str, folder: Path) -> str:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")())
    model.eval().save_pretrained(folder)
    return str(folder)


def extractors(kind: str, weights: str, rate: int, key: str, values: tuple):
    for value in values:
        params = {"weights": weights, key: value}
        config = {"name": "a", "extractor": kind, "params": params, "audio": {"sample_rate": rate}}
        yield config_from(config).build(torch.device("cpu"))


def cpu_seconds(work) -> float:
    taken = []
    for _ in range(REPEATS + 1):  # the first warms up
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken[1:])


@torch.inference_mode()
def measure(kind: str, name: str, rate: int, key: str, values: tuple) -> None:
    with tempfile.TemporaryDirectory() as folder:
        takers = [*extractors(kind, save(name, Path(folder)), rate, key, values)]
    batch = torch.randn(ROWS, SECONDS * rate) * 0.1, torch.full((ROWS,), SECONDS * rate)
    apart = [cpu_seconds(partial(taker.run, *batch)) for taker in takers]
    together = cpu_seconds(partial(takers[0].run_for, takers, *batch))
    each = ", ".join(f"{seconds:.2f}" for seconds in apart)
    print(f"{name} {values}: {each}: {sum(apart):.2f} s apart, {together:.2f} s together")


def main() -> None:
    torch.set_num_threads(1)
    measure("ssl", "Hubert", 16000, "layer", (6, 9, 12))
    measure("mimi", "Mimi", 24000, "output", ("codes", "latents"))
    print(f"CPU seconds for {ROWS * SECONDS} s of audio, one thread; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
