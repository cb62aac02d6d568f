"""An utterance to look at and to listen to, as a notebook shows it."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from featcache.errors import FeatcacheError
from featcache.media.pictures import Picture, picture_of
from featcache.spec import MAIN, FeatureSpec
from featcache.version.version import VersionInfo

if TYPE_CHECKING:
    from featcache.media.sound import Samples

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
        from featcache.media.sound import synthesize

        return synthesize(self.info, self.tracks)

    def wav(self, seconds: float | None = None) -> bytes:
        """Return the sound, or its first seconds, as a WAV file of 16 bits. Raises what
        `samples` raises."""
        from featcache.media.sound import encode_wav

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
