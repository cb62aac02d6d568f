"""Batches of EnCodec's codes, tokenised when training asks for them: the usual recipe, as well as it can be done.

Worker processes of torch's DataLoader load and resample. On the CPU, where clips are tokenised one by one, they do that
as well, with one thread each: two threads in one call are no faster on a clip of half a second, and two processes are.
On a GPU, and where a padded batch is tokenised at once, the training process does it.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import soundfile
import soxr
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import featcache
from featcache.device import Device
from featcache.manifest import Manifest

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from tokenizing import RATE, Model

HOP = 320
"""Samples to a frame."""


def one_by_one(model: Model, waveforms: Tensor, num_samples: Tensor) -> Tensor:
    """Codes `[B, F, Q]` of waveforms `[B, n]` with `num_samples` `[B]` on the CPU; each as if alone."""
    clips = zip(waveforms, num_samples.tolist(), strict=True)
    return pad_sequence([model.encode(clip[None, :count])[0].T for clip, count in clips], batch_first=True)


def at_once(model: Model, waveforms: Tensor, num_samples: Tensor) -> Tensor:
    """The same, but for what padding changes."""
    return model.encode(waveforms).mT.clone()  # which, unlike what inference mode gives, can be trained on


Tokenise = Callable[[Tensor, Tensor], Tensor]
CodesOfBatch = tuple[list[int], Tensor, Tensor]
"""The rows of a batch, their codes `[B, F, Q]` and lengths `[B]`."""


def collate(tokenise: Tokenise | None, items: list[tuple[int, Tensor]]) -> tuple[list[int], Tensor, Tensor]:
    """The rows of a batch, `num_samples` `[B]`, and the waveforms or codes, padded."""
    waveforms = pad_sequence([waveform for _, waveform in items], batch_first=True)
    num_samples = torch.tensor([len(waveform) for _, waveform in items])
    padded = waveforms if tokenise is None else tokenise(waveforms, num_samples)
    return [row for row, _ in items], num_samples, padded


class Waveforms(Dataset[tuple[int, Tensor]]):
    """The clips of a manifest, mono, loaded and resampled when they are asked for: their rows and `[num_samples]`."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def __len__(self) -> int:
        return len(self._manifest)

    def __getitem__(self, row: int) -> tuple[int, Tensor]:
        path = self._manifest.resolve(self._manifest[row].path)
        samples, rate = soundfile.read(path, dtype="float32")
        return row, torch.from_numpy(soxr.resample(samples, rate, RATE, "HQ"))


class OnTheFly:
    """Batches like those of `featcache.DataLoader`.

    Args:
        manifest: The manifest of the clips, with a column `digit`.
        sampler: Gives lists of the manifest's rows.
        model: EnCodec.
        device: The device of the model, and of the batches.
        padded: Whether the model gets a batch at once, padded with zeros, instead of clip by clip.

    Attributes:
        waited: Seconds spent waiting for batches in the last pass; on a GPU, without what is still being computed.
        codes: The codes of each batch of the last pass.
    """

    def __init__(
        self, manifest: Manifest, sampler: featcache.BucketBatchSampler, model: Model, device: Device, *, padded: bool
    ) -> None:
        self.waited = 0.0
        self.codes: list[CodesOfBatch] = []
        self._sampler = sampler
        self._digits = torch.tensor([int(digit) for digit in manifest.columns["digit"]])
        self._device = device.torch_device
        self._threads = device.threads
        tokenise = partial(at_once if padded else one_by_one, model)
        in_workers = not padded and not device.is_cuda
        self._tokenise: Tokenise | None = None if in_workers else tokenise
        self._loader = DataLoader(
            Waveforms(manifest),
            batch_sampler=sampler,
            collate_fn=partial(collate, tokenise if in_workers else None),
            num_workers=device.threads,
            persistent_workers=True,
            pin_memory=device.is_cuda,
        )

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.waited, self.codes = 0.0, []
        start = perf_counter()
        for rows, num_samples, padded in self._loader:
            codes = padded
            if self._tokenise is not None:
                torch.set_num_threads(self._threads)
                codes = self._tokenise(padded.to(self._device, non_blocking=True), num_samples)
                torch.set_num_threads(1)
            lengths = (-(-num_samples // HOP)).to(self._device, non_blocking=True)
            digits = self._digits[rows].to(self._device, non_blocking=True)
            self.codes.append((rows, codes, lengths))
            self.waited += perf_counter() - start
            yield {"features": codes, "lengths": lengths, "digit": digits}
            start = perf_counter()
