"""Train a network that spots spoken digits in EnCodec's codes: tokenised again in every
epoch, and once.

    pip install '.[extract,models]'
    python scripts/stories/train_keywords.py [--limit 1200] [--epochs 2]
                                             [--more-epochs 30] [--device cuda]
    python scripts/stories/train_keywords.py --weights facebook/encodec_24khz
                        the real weights, from the hub

The same classifier is trained on the same batches of the same clips in three ways:

one by one  every epoch loads, resamples and tokenises each clip alone: exact codes
padded      every epoch tokenises padded batches, as most people do: other codes in the
            last frames of clips
featcache   `featcache extract` once, and a `featcache.DataLoader`

`OnTheFly` does the first two as well as they can be done. The classifier is an x-vector
network (`xvector.py`) over the sum of the codes' embeddings. EnCodec is the 24 kHz model
at 6 kbps, in fp32. Without --weights it has its full size, random weights, and codebooks
made from its own latents (`random_encodec.py`): it computes as much as the real one, but
its accuracies say nothing of that one's.

All three train for --epochs from the same seed; featcache goes on until --more-epochs. An
epoch's time is the median of them, without the test. The extraction is the whole command,
from the start of Python on, of both splits. The codes of the first way are held against
featcache's; one that differs is a tie where the latents agree to rounding.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import soundfile
import soxr
import torch
import yaml
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from training import OPTIONS, Data, GpuUse, Pass, Trainer, split
from xvector import EmbeddedCodes, XVector

import featcache
from featcache import weights
from featcache.config import Config, load_config, packaged_configs
from featcache.device import Device
from featcache.extractors.codec import CodecExtractor
from featcache.manifest.read import read_manifest
from featcache.manifest.utterances import Manifest

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from harness import (
    CORES,
    KEPT,
    Table,
    Timed,
    median,
    options,
    present,
    remark,
    temporary_folder,
    timed,
)
from random_encodec import make_weights
from ties import differences
from tokenizing import RATE, Model

ALONE, PADDED, CACHED = "one by one", "padded", "featcache"
HOP = 320
"""Samples to a frame."""
DIGITS = [str(digit) for digit in range(10)]


# Codes that are made when training asks for them


def one_by_one(model: Model, waveforms: Tensor, num_samples: Tensor) -> Tensor:
    """Codes `[B, F, Q]` of waveforms `[B, n]` with `num_samples` `[B]` on the CPU; each
    as if alone."""
    clips = zip(waveforms, num_samples.tolist(), strict=True)
    return pad_sequence(
        [model.encode(clip[None, :count])[0].T for clip, count in clips], batch_first=True
    )


def at_once(model: Model, waveforms: Tensor, num_samples: Tensor) -> Tensor:
    """The same, but for what padding changes."""
    # which, unlike what inference mode gives, can be trained on
    return model.encode(waveforms).mT.clone()


Tokenise = Callable[[Tensor, Tensor], Tensor]


def collate(
    tokenise: Tokenise | None, items: list[tuple[int, Tensor]]
) -> tuple[list[int], Tensor, Tensor]:
    """The rows of a batch, `num_samples` `[B]`, and the waveforms or codes, padded."""
    waveforms = pad_sequence([waveform for _, waveform in items], batch_first=True)
    num_samples = torch.tensor([len(waveform) for _, waveform in items])
    padded = waveforms if tokenise is None else tokenise(waveforms, num_samples)
    return [row for row, _ in items], num_samples, padded


class Waveforms(Dataset[tuple[int, Tensor]]):
    """The clips of a manifest, mono, loaded and resampled when they are asked for: their
    rows and `[num_samples]`."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def __getitem__(self, row: int) -> tuple[int, Tensor]:
        path = self._manifest.resolve(self._manifest[row].path)
        samples, rate = soundfile.read(path, dtype="float32")
        return row, torch.from_numpy(soxr.resample(samples, rate, RATE, "HQ"))


class OnTheFly:
    """Batches like those of `featcache.DataLoader`, tokenised in every epoch: the usual
    recipe.

    Worker processes of torch's DataLoader load and resample. On the CPU, where clips are
    tokenised one by one, they do that as well, with one thread each: two threads in one
    call are no faster on a clip of half a second, and two processes are. On a GPU, and
    where a padded batch is tokenised at once, the training process does it.

    Args:
        manifest: The manifest of the clips, with a column `digit`.
        sampler: Gives lists of the manifest's rows.
        model: EnCodec.
        device: The device of the model, and of the batches.
        padded: Whether the model gets a batch at once, padded with zeros, instead of clip
            by clip.

    Attributes:
        waited: Seconds spent waiting for batches in the last pass; on a GPU, without what
            is still being computed.
        codes: The codes `[F, Q]` of each row in the last pass, on the device.
    """

    def __init__(
        self,
        manifest: Manifest,
        sampler: featcache.BucketBatchSampler,
        model: Model,
        device: Device,
        *,
        padded: bool,
    ) -> None:
        self.waited = 0.0
        self.codes: dict[int, Tensor] = {}
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
        self.waited, self.codes = 0.0, {}
        start = perf_counter()
        for rows, num_samples, padded in self._loader:
            codes = padded
            if self._tokenise is not None:
                torch.set_num_threads(self._threads)
                codes = self._tokenise(padded.to(self._device, non_blocking=True), num_samples)
                torch.set_num_threads(1)
            counts = -(-num_samples // HOP)
            self.codes |= {
                row: one[:count]
                for row, one, count in zip(rows, codes, counts.tolist(), strict=True)
            }
            lengths, digits = (
                one.to(self._device, non_blocking=True) for one in (counts, self._digits[rows])
            )
            self.waited += perf_counter() - start
            yield {"features": codes, "lengths": lengths, "digit": digits}
            start = perf_counter()


# The story


def make_config(asked: argparse.Namespace) -> dict:
    """The packaged config of EnCodec on the hub, with the weights asked for."""
    document = yaml.safe_load(packaged_configs()["encodec24k-6kbps"])
    params = document["params"]
    if asked.weights != params["weights"]:
        chosen = asked.weights or make_weights(asked.folder)
        params |= {"weights": str(Path(chosen).resolve()), "revision": None}
    return document


@dataclass
class Outcome:
    """What became of one way."""

    accuracy: float = 0.0
    """The accuracy on the test split, after the epochs that all ways have."""
    passes: list[Pass] = field(default_factory=list)
    """Its epochs."""
    parts: list[Timed] = field(default_factory=list)
    """What the epochs took in all, with starting and ending workers."""
    gpu: str = ""
    """How busy the GPU was."""
    codes: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    """The codes that it trained and was tested on, by split, as in `OnTheFly.codes`;
    empty for featcache."""
    later: float | None = None
    """The accuracy after --more-epochs; for featcache alone."""

    @property
    def epoch_seconds(self) -> float:
        return median([epoch.seconds for epoch in self.passes])


class Story:
    """The three, over one extraction into a folder."""

    def __init__(self, asked: argparse.Namespace, folder: Path) -> None:
        self.asked = asked
        manifests = split(asked.data, folder, asked.limit)
        self.data = Data(asked, manifests, make_config(asked), {"digit": DIGITS})
        self.config: Config = load_config(self.data.config)
        self.device = Device(str(asked.device), asked.threads)
        self.device.configure_torch()
        params = self.config.params
        self.model = Model(weights.locate(params.weights, params.revision).folder, self.device)

    def loader(self, way: str, name: str) -> featcache.DataLoader | OnTheFly:
        """Of a split: the same batches in each way."""
        if way == CACHED:
            return self.data.loader(name, torch.long)
        manifest = read_manifest(self.data.manifests[name])
        return OnTheFly(
            manifest, self.data.sampler(name), self.model, self.device, padded=way == PADDED
        )

    def run(self, way: str) -> Outcome:
        print(f"training: {way}", file=sys.stderr)
        # which is no slower for a network so small, and leaves the cores to workers
        torch.set_num_threads(1)
        torch.manual_seed(self.asked.seed)
        codebooks = self.model.codebooks[: self.data.cache.spec.item_shape[0]]
        network = XVector(codebooks[0].shape[1], len(DIGITS), self.asked.channels)
        trainer = Trainer(EmbeddedCodes(codebooks, network), self.data.column, self.asked.device)
        outcome, gpu = Outcome(), GpuUse(self.asked.device)
        with gpu.watched():
            self._epochs(trainer, way, range(self.asked.epochs), outcome)
        outcome.accuracy = self._test(trainer, way, outcome)
        if way == CACHED:
            with gpu.watched():
                self._epochs(
                    trainer, way, range(self.asked.epochs, self.asked.more_epochs), outcome
                )
            outcome.later = self._test(trainer, way, outcome)
        outcome.gpu = gpu.text(outcome.passes)
        return outcome

    def compare(self, outcome: Outcome, *, ties: bool) -> Counter[str]:
        """Hold the codes that a way had against featcache's; `ties`: count ties too."""
        counts: Counter[str] = Counter()
        extractor = self.config.build(self.asked.device)
        assert isinstance(extractor, CodecExtractor)
        for name, found in outcome.codes.items():
            waveforms, ids = (
                Waveforms(read_manifest(self.data.manifests[name])),
                self.data.datasets[name].ids,
            )
            for row, on_device in found.items():
                codes, expected = on_device.cpu().numpy(), self.data.cache[ids[row]]
                if ties:
                    counts += differences(
                        codes, expected, extractor, waveforms[row][1].to(self.asked.device)
                    )
                else:
                    counts += Counter(codes=codes.size, different=int((codes != expected).sum()))
        return counts

    def _epochs(self, trainer: Trainer, way: str, numbers: range, outcome: Outcome) -> None:
        def work() -> None:
            loader = self.loader(way, "train")
            outcome.passes += [trainer.epoch(loader, number) for number in numbers]
            outcome.codes["train"] = getattr(loader, "codes", {})

        outcome.parts.append(timed(work, patience=0))

    def _test(self, trainer: Trainer, way: str, outcome: Outcome) -> float:
        loader = self.loader(way, "test")
        accuracy = trainer.accuracy(loader)
        outcome.codes["test"] = getattr(loader, "codes", {})
        return accuracy


def measure(asked: argparse.Namespace, folder: Path) -> list[Table | str]:
    story = Story(asked, folder)
    data = story.data
    num_train, num_test = map(len, data.datasets.values())
    outcomes = {way: story.run(way) for way in (ALONE, PADDED, CACHED)}
    table = Table(
        "tokens",
        {
            "an epoch": "{:.2f} s",
            "of it, fetching batches": "{:.1%}",
            f"CPU, of {CORES} cores": "{:.2f}",
            "GPU busy": "{}",
            f"accuracy after {asked.epochs} epochs": "{:.1%}",
        },
    )
    for way, outcome in outcomes.items():
        fetching = median([epoch.fetched / epoch.seconds for epoch in outcome.passes])
        cpu = sum(part.cpu_seconds for part in outcome.parts) / sum(
            part.seconds for part in outcome.parts
        )
        table.add(way, outcome.epoch_seconds, fetching, cpu, outcome.gpu, outcome.accuracy)
    cached, extraction = outcomes[CACHED], data.extraction.seconds
    waited = median([epoch.waited / epoch.seconds for epoch in cached.passes])
    in_all = extraction + sum(epoch.seconds for epoch in cached.passes)
    fastest = min(outcomes[way].epoch_seconds for way in (ALONE, PADDED))
    gained = fastest - cached.epoch_seconds
    paid = f"after {math.ceil(extraction / gained)} epochs" if gained > 0 else "never"
    alone, padded = (
        story.compare(outcomes[ALONE], ties=True),
        story.compare(outcomes[PADDED], ties=False),
    )
    parts = [data.extraction, *(part for outcome in outcomes.values() for part in outcome.parts)]
    weights = (
        asked.weights or "random ones, of the full size, with codebooks made from its own latents"
    )
    return [
        f"{num_train:,} digits to train on, {num_test:,} to test with; "
        f"{story.device.label}, {asked.threads} threads; EnCodec 24 kHz, 6 kbps; "
        f"weights: {weights}",
        table,
        f"epochs from featcache are {gained / fastest:.1%} shorter than in the faster "
        "of the other two",
        f"loader.waited of featcache's: {waited:.2%} of the epoch",
        f"the one extraction took {extraction:.1f} s, which is paid for {paid}",
        f"featcache after {asked.more_epochs} epochs: accuracy {cached.later:.1%}, "
        f"{in_all:.0f} s after the extraction began",
        f"{alone['codes']:,} codes one by one: {alone['different']} differ from "
        f"featcache's, {alone['ties']} of them "
        f"ties; of padded batches {padded['different'] / padded['codes']:.2%} differ",
        remark(*(part.others for part in parts)),
    ]


def main() -> None:
    asked = options(
        __doc__,
        **{**OPTIONS, "limit": (1200, "utterances, drawn at random")},
        weights=(str, "a folder, or facebook/encodec_24khz; random ones by default"),
        folder=KEPT,
        epochs=(2, "in all three ways"),
        more_epochs=(30, "from featcache"),
        channels=(64, "of the classifier's layers"),
    )
    with temporary_folder() as folder:
        present(asked, *measure(asked, folder))


if __name__ == "__main__":
    main()
