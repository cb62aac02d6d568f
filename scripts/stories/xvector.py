"""The x-vector network, as the training stories use it.

Snyder, Garcia-Romero, Sell, Povey and Khudanpur, "X-Vectors: Robust DNN Embeddings for
Speaker Recognition" (ICASSP 2018), table 1: five layers over time, which see 5, 9, 15, 15
and 15 frames; mean and standard deviation over time; two more layers; classes. Ours pads
in time, since the shortest spoken digits have fewer than 15 frames.

Shapes: `B` rows of a batch, `T` frames of the longest, `D` dimensions of a frame, `C`
channels, `Q` codebooks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from featcache import masks

POOLED = 1500 / 512
"""Channels that are pooled, to one of the others."""
CONTEXTS = ((5, 1), (3, 2), (3, 3), (1, 1), (1, 1))
"""Of each layer: how many frames it looks at, and how far apart they are."""
LEAST_VARIANCE = 1e-5

Noise = Callable[[Tensor, Tensor, int], Tensor]
"""What is pooled, with noise: of float `[B, T, C]`, lengths `[B]` and the number of the
step."""


class XVector(nn.Module):
    """Classes of utterances.

    A row's scores do not depend on what it shares a batch with, but for the statistics of
    batch norm in training.

    Args:
        dims: The dimensions of a frame.
        classes: The number of classes.
        channels: The channels of a layer; 512 in the paper.
        noise: Noise that is added before the pooling, in training.
    """

    def __init__(self, dims: int, classes: int, channels: int, noise: Noise | None = None) -> None:
        super().__init__()
        pooled = round(channels * POOLED)
        self.normalise = nn.BatchNorm1d(dims, affine=False)
        sizes = [dims, *[channels] * (len(CONTEXTS) - 1), pooled]
        self.frames = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(ins, outs, width, dilation=apart, padding=(width - 1) // 2 * apart),
                nn.ReLU(),
                nn.BatchNorm1d(outs),
            )
            for ins, outs, (width, apart) in zip(sizes, sizes[1:], CONTEXTS, strict=False)
        )
        self.utterances = nn.Sequential(
            *(nn.Linear(2 * pooled, channels), nn.ReLU(), nn.BatchNorm1d(channels)),
            *(nn.Linear(channels, channels), nn.ReLU(), nn.BatchNorm1d(channels)),
            nn.Linear(channels, classes),
        )
        self.noise = noise

    def forward(self, features: Tensor, lengths: Tensor, step: int = 0) -> Tensor:
        """Scores, float `[B, classes]`, of features float `[B, T, D]` with int64 lengths
        `[B]`, on one device."""
        mask = masks.padding_mask(lengths, features.shape[1])[:, None]
        x = self.normalise(features.mT) * mask
        for layer in self.frames:
            x = layer(x) * mask
        if self.training and self.noise is not None:
            x = self.noise(x.mT, lengths, step).mT
        return self.utterances(statistics(x, mask, lengths))


def statistics(x: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Mean and standard deviation over each row's frames: `[B, 2 C]` of `[B, C, T]`, a
    mask `[B, 1, T]`, lengths."""
    count = lengths[:, None]
    mean = (x * mask).sum(2) / count
    variance = ((x - mean[:, :, None]) * mask).square().sum(2) / count
    return torch.cat([mean, (variance + LEAST_VARIANCE).sqrt()], 1)


class EmbeddedCodes(nn.Module):
    """A classifier of codes: their embeddings, added up over the codebooks, are what its
    network sees.

    The embeddings begin as the codec's own codewords, whose sum is the latent vector that
    was coded.

    Args:
        codebooks: float `[K, D]` each.
        network: A network that takes float `[B, T, D]`, lengths and the step.
    """

    def __init__(self, codebooks: Sequence[Tensor], network: nn.Module) -> None:
        super().__init__()
        sizes = [len(codebook) for codebook in codebooks]
        self.embed = nn.Embedding.from_pretrained(
            torch.cat(list(codebooks)) / codebooks[0].std(), freeze=False
        )
        self.register_buffer("first", torch.tensor([0, *sizes[:-1]]).cumsum(0))
        self.network = network

    def forward(self, codes: Tensor, lengths: Tensor, step: int = 0) -> Tensor:
        """Scores, float `[B, classes]`, of codes int64 `[B, T, Q]`."""
        return self.network(self.embed(codes + self.first).sum(2), lengths, step)
