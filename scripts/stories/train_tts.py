"""Make everything that a text-to-speech recipe needs, with one `extract` and one loader.

    pip install '.[extract,models,analysis]'
    pip install --no-deps Resemblyzer==0.1.4
    python scripts/stories/train_tts.py [--limit 600] [--device cuda]

Recipes like CosyVoice's make tokens of text, then a mel spectrogram of the tokens, of the
speaker and of the pitch. One `featcache extract` makes all of these from spoken digits, and
decodes each file once: codes of EnCodec (with random weights unless --weights are given),
the mel spectrogram of HiFi-GAN, pitch, a vector of the speaker, and the level, by which
quiet recordings are left out.

One `FeatureDataset` joins them, each at its own rate. A small network of convolutions
learns the mel spectrogram from the first codebook and the text, without and with the
speaker's vector and the pitch. The table has its error on speakers' other recordings."""

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from train_keywords import DIGITS, make_config
from training import OPTIONS, SPLITS, extract, split

import featcache

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from harness import KEPT, Table, options, present, temporary_folder

WIDTH = 128
PACKAGED = ("hifigan-mel80", "f0-swift", "speaker-ge2e", "audio-stats")
GIVEN = {
    "text and codes": (),
    "and the speaker": ("speaker",),
    "and the pitch": ("speaker", "pitch"),
}


def joined(folder: Path, name: str, level: float) -> featcache.FeatureDataset:
    """The rows of a split that are loud enough, with the features of five versions."""
    cache = folder / "features"
    return featcache.FeatureDataset(
        {
            "mel": featcache.open(cache / "hifigan-mel80"),
            "codes": featcache.open(cache / "codes"),
            "pitch": featcache.open(cache / "f0-swift"),
        },
        folder / f"{name}.csv",
        columns={"digit": str, "voice": cache / "speaker-ge2e", "stats": cache / "audio-stats"},
        classes={"digit": DIGITS},
        where=f'stats["level"] > {level}',
        skip_missing=True,
    )


class Network(nn.Module):
    """A mel spectrogram from text, codes, and what else is given."""

    def __init__(self, given: tuple[str, ...], codebook_size: int) -> None:
        super().__init__()
        self.given = given
        self.text = nn.Embedding(len(DIGITS), WIDTH)
        self.codes = nn.Embedding(codebook_size, WIDTH)
        self.speaker = nn.Linear(256, WIDTH)
        self.pitch = nn.Linear(2, WIDTH)
        self.layers = nn.Sequential(
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(WIDTH, 80, 1),
        )

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return `[batch, frames, 80]`, with as many frames as the mel has."""
        features, frames = batch["features"], batch["features"]["mel"].shape[1]
        x = self.codes(features["codes"][..., 0].long())
        x = stretched(x, batch, "codes", frames) + self.text(batch["digit"])[:, None]
        if "speaker" in self.given:
            x = x + self.speaker(batch["voice"].float())[:, None]
        if "pitch" in self.given:
            hertz, confidence = features["pitch"].float().unbind(2)
            heard = torch.stack([(hertz / 100).log2() * confidence, confidence], dim=2)
            x = x + self.pitch(stretched(heard.nan_to_num(), batch, "pitch", frames))
        return self.layers(x.mT).mT


def stretched(x_BTD: Tensor, batch: dict[str, Any], name: str, frames: int) -> Tensor:
    """Bring a version's frames to the mel's: of each, the nearest one in time."""
    ratios = batch["lengths"][name] / batch["lengths"]["mel"]
    places = (torch.arange(frames, device=x_BTD.device) + 0.5) * ratios[:, None]
    nearest = places.long().clamp(max=x_BTD.shape[1] - 1)
    return x_BTD.gather(1, nearest[..., None].expand(-1, -1, x_BTD.shape[2]))


def error(network: Network, batch: dict[str, Any]) -> Tensor:
    """The mean difference in nepers, over the frames of the clips."""
    mel, lengths = batch["features"]["mel"].float(), batch["lengths"]["mel"]
    is_inside = torch.arange(mel.shape[1], device=mel.device) < lengths[:, None]
    return (network(batch) - mel).abs().mean(2)[is_inside].mean()


def train(
    given: tuple[str, ...], datasets: dict[str, Any], asked: argparse.Namespace
) -> tuple[float, float]:
    """Return the error on both splits, after the epochs, in dB of power."""
    torch.manual_seed(asked.seed)
    codes = datasets["train"].versions[1].cache.spec
    network = Network(given, max(codes.codebook_sizes)).to(asked.device)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    loaders = {
        name: featcache.DataLoader(
            dataset, batch_size=asked.batch_size, shuffle=True, device=asked.device
        )
        for name, dataset in datasets.items()
    }
    losses: list[float] = []
    for epoch in range(asked.epochs):
        loaders["train"].set_epoch(epoch)
        losses = []
        for batch in loaders["train"]:
            loss = error(network, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    with torch.inference_mode():
        unseen = [float(error(network, batch)) for batch in loaders["test"]]
    decibels = 20 / torch.log(torch.tensor(10.0)).item()
    return fmean(losses) * decibels, fmean(unseen) * decibels


def measure(asked: argparse.Namespace, folder: Path) -> list[Table | str]:
    """Extract once, and train on three sets of inputs."""
    manifests = split(asked.data, folder, asked.limit)
    config = folder / "codes.yaml"
    config.write_text(yaml.safe_dump(make_config(asked) | {"name": "codes"}))
    took = extract(manifests["all"], [config, *PACKAGED], folder / "features", asked)
    datasets = {name: joined(folder, name, asked.level) for name in SPLITS}
    torch.set_num_threads(asked.threads)
    table = Table("given", {"last epoch, dB": "{:.2f}", "test, dB": "{:.2f}"})
    for name, given in GIVEN.items():
        print(f"training: {name}", file=sys.stderr)
        table.add(name, *train(given, datasets, asked))
    counts = " and ".join(f"{len(dataset)} in {name}" for name, dataset in datasets.items())
    return [
        table,
        f"five versions from one pass over the audio, in {took.seconds:.1f} s; {counts} are "
        f"louder than {asked.level:g} dB, of {asked.limit}",
    ]


def main() -> None:
    asked = options(
        __doc__,
        **{**OPTIONS, "limit": (600, "utterances, drawn at random")},
        weights=(str, "a folder, or facebook/encodec_24khz; random ones by default"),
        folder=KEPT,
        epochs=15,
        level=(-45.0, "dB of full scale; quieter recordings are left out"),
    )
    with temporary_folder() as folder:
        present(asked, *measure(asked, folder))


if __name__ == "__main__":
    main()
