"""Sound of an utterance's features, and WAV files of it."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ConfigError, MissingDependencyError
from featcache.spec import MAIN
from featcache.version.version import VersionInfo

Samples = NDArray[np.float32]


def encode_wav(samples: NDArray[np.floating[Any]], rate: int) -> bytes:
    """Encode samples of one channel, nominally in [-1, 1], 16 bits each."""
    levels = np.rint(samples * 32768).clip(-32768, 32767).astype("<i2")
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, rate, len(levels), "NONE", ""))
        file.writeframes(levels.tobytes())
    return data.getvalue()


def synthesize(info: VersionInfo, tracks: Mapping[str, NDArray[Any]]) -> Samples:
    """Make sound of an utterance's tracks by the version's own extractor, on the CPU: samples,
    float32 `[num_samples]`, at `info.spec.sample_rate`. Nothing is downloaded for it. Raises
    ArgumentError if nothing can be heard of such features; ConfigError if the extractor or
    its weights are not here, or others."""
    if info.spec.kind != "frames" or not len(tracks[MAIN]):
        what = "events" if info.spec.axis.has_times else "no frames"
        if info.spec.kind == "clip":
            what = "one vector for each utterance"
        raise ArgumentError(f"{info.name}: {what} cannot be turned into sound")
    try:
        import torch

        from featcache.config import recorded_config
        from featcache.extractors.base import Extractor
    except ImportError as error:
        raise MissingDependencyError(error.name or "torch", "sound of features") from error

    config = recorded_config(info.config, info.name)
    if config.extractor_class.synthesize is Extractor.synthesize:
        raise ArgumentError(f"{info.name}: {info.spec.units}: cannot be turned into sound")
    if config.fingerprint() != info.fingerprint:
        raise ConfigError(
            f"{info.name}: its extractor or weights are not the same here as where it was made"
        )
    sizes = info.spec.codebook_sizes
    with torch.inference_mode():
        extractor = config.build(torch.device("cpu"))
        is_its_own = extractor.spec.item_shape == info.spec.item_shape
        if not is_its_own or (sizes and (tracks[MAIN] >= np.array(sizes)).any()):
            raise ArgumentError(f"{info.name}: these are no features of its extractor")
        tensors = {}
        for name, entries in tracks.items():
            dtype = "float32" if entries.dtype.kind == "f" else "int64"
            tensors[name] = torch.from_numpy(entries.astype(dtype))
        samples: Samples = extractor.synthesize(tensors).float().numpy()
    return samples
