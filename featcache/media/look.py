"""An utterance to look at and to listen to, as a notebook shows it; sound of its features,
and WAV files of it."""

from __future__ import annotations

import io
import wave
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ConfigError, FeatcacheError, MissingDependencyError
from featcache.media.pictures import Picture, picture_of
from featcache.spec import MAIN, FeatureSpec
from featcache.version.version import VersionInfo

Samples = NDArray[np.float32]

_MOST_SECONDS = 60
"""The longest sound in a notebook, which keeps all that it shows."""


@dataclass(frozen=True)
class Shown:
    """An utterance as a picture and a sound, each made when it is asked for. A notebook
    shows both."""

    info: VersionInfo
    spec: FeatureSpec
    """The spec of the main track."""
    id: str
    tracks: Mapping[str, Any]
    """The utterance's tracks by name, as a cache returns them."""

    def __repr__(self) -> str:
        return f"Shown({self.picture.title})"

    @cached_property
    def picture(self) -> Picture:
        """The picture, with axes: `picture.encode(".svg")` is a file of it."""
        return self.draw()

    def draw(self, columns: int = 1200, rows: int = 320) -> Picture:
        """Draw the picture with at most so many columns and rows."""
        item = self.tracks[MAIN]
        return picture_of(f"{self.info.name}: {self.id}", self.spec, item, columns, rows)

    @cached_property
    def samples(self) -> Samples:
        """The sound of the features, float32 `[num_samples]`, at `spec.sample_rate`. Raises
        FeatcacheError if there is none."""
        return synthesize(self.info, self.tracks)

    def wav(self, seconds: float | None = None) -> bytes:
        """Return the sound, or its first seconds, as a WAV file of 16 bits. Raises what
        `samples` raises."""
        rate, count = self.spec.sample_rate, len(self.samples)
        if seconds is not None:
            count = min(count, round(seconds * rate))
        return encode_wav(self.samples[:count], rate)

    def _repr_html_(self) -> str:
        try:
            source = f"data:audio/wav;base64,{b64encode(self.wav(_MOST_SECONDS)).decode()}"
            player = f'<audio controls src="{source}"></audio>'
        except FeatcacheError as error:
            player = escape(f"no sound: {error}")
        return f"<div>{self.picture.as_svg()}<br>{player}</div>"


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
    except ImportError as error:
        raise MissingDependencyError(error.name or "torch", "sound of features") from error

    config = recorded_config(info.config, info.name)
    if not config.makes_sound:
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
