"""Make EnCodec for 24 kHz at its full size, without a hub: random weights, whose codes
still tell sounds apart.

With the weights that transformers draws, the encoder is all but linear, and its latents
follow a sound's phase: nothing that a classifier learns of them holds for another
recording. Here the filters that lower the rate smooth over time, and the signal is so
large that the ELUs between them rectify it: energies in random bands, as in a scattering
transform (Andén and Mallat, "Deep Scattering Spectrum", 2014). The codebooks are k-means
centroids of the encoder's own latents.

It computes as much as the real one does; what its codes tell is not what the real ones
tell."""

from pathlib import Path

import torch
from small_models import speech_like
from torch import Tensor, nn

SECONDS = 100
"""Of speech-like sound that the codebooks are made for: eight frames to a codeword."""
ROUNDS = 5
"""Of k-means."""
GAIN, FIRST_GAIN = 1.5, 10.0
"""Of each layer, which keep the signal's size; and of the first, beside its own."""


def make_weights(folder: Path) -> Path:
    """The folder of the weights in a folder where such things are kept; made unless they
    are there."""
    home = folder / "encodec-24khz-smooth"
    if not (home / "config.json").exists():
        save_weights(home)
    return home


@torch.inference_mode()
def save_weights(home: Path) -> None:
    """Make the weights, the same ones every time, and save them as transformers does."""
    from transformers import EncodecConfig, EncodecModel

    torch.manual_seed(0)
    model = EncodecModel(EncodecConfig()).eval()
    for name, parameter in model.encoder.named_parameters():
        if "bias" in name.rpartition(".")[2]:
            parameter.zero_()
    convolutions = [module for module in model.encoder.modules() if isinstance(module, nn.Conv1d)]
    for number, convolution in enumerate(convolutions):
        convolution.weight = filters(convolution) * (GAIN if number else GAIN * FIRST_GAIN)
    waveforms = speech_like(SECONDS, model.config.sampling_rate).view(SECONDS // 5, 1, -1)
    latents = torch.cat([model.encoder(waveform[None]) for waveform in waveforms])
    for layer in model.quantizer.layers:
        layer.codebook.embed.copy_(centroids(latents.mT.flatten(0, 1), len(layer.codebook.embed)))
        latents = latents - layer.decode(layer.encode(latents))
    model.save_pretrained(home)


def filters(convolution: nn.Conv1d) -> Tensor:
    """Random weights of a convolution; of one with a stride, random mixes of channels,
    smoothed over time."""
    weight = torch.randn_like(convolution.weight)
    if convolution.stride == (1,):
        return weight / weight[0].numel() ** 0.5
    window = torch.hann_window(weight.shape[2] + 2)[1:-1]
    return weight[:, :, :1] / weight.shape[1] ** 0.5 * window / window.sum()


def centroids(vectors: Tensor, count: int) -> Tensor:
    """k-means: centroids `[count, D]` of vectors `[N, D]`."""
    found = vectors[torch.randperm(len(vectors))[:count]]
    for _ in range(ROUNDS):
        nearest = torch.cdist(vectors, found).argmin(1)
        sizes = nearest.bincount(minlength=count)[:, None]
        sums = torch.zeros_like(found).index_add_(0, nearest, vectors)
        found = torch.where(sizes > 0, sums / sizes.clamp(min=1), found)
    return found
