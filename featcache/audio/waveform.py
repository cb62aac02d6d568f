"""An utterance's waveform as its config wants it: resampled, at the speed of its copy, with the noise of its copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from featcache.audio.noise import Noise
from featcache.audio.resample import to_waveform
from featcache.audio.sections import AudioPolicy, AugmentPolicy
from featcache.manifest.copies import Copies, copies_of


@dataclass(frozen=True)
class WaveformMaker:
    """Makes the waveforms of one config from decoded samples. Equal makers make the same waveforms.

    Its methods may be called from several threads. It takes clips of any length: limits are the caller's.
    """

    audio: AudioPolicy
    """The config's `audio` section, without its `max_seconds`."""
    augment: AugmentPolicy | None
    """The config's `augment` section; None if there are no copies."""
    copies: Copies = field(compare=False)
    """The copies that `augment` makes of every utterance."""

    @classmethod
    def of(cls, audio: AudioPolicy, augment: AugmentPolicy | None) -> WaveformMaker:
        """The maker for these two sections of a config."""
        copies = copies_of({"augment": augment and augment.model_dump()})
        return cls(audio.model_copy(update={"max_seconds": None}), augment, copies)

    def speed(self, id_: str) -> float:
        """How many times as fast as its recording a copy is, by its id."""
        return self.copies.copy_of(id_).speed

    @property
    def fastest(self) -> float:
        """The highest speed of a copy."""
        return float(self.copies.speeds.max())

    def at_speed(
        self, samples: NDArray[np.float32], source_rate: int, id_: str, channel: int | None
    ) -> NDArray[np.float32]:
        """A copy's waveform without its noise, float32 `[num_samples]` at the config's rate: `to_waveform` of the
        recording's samples, `[num_samples, channels]`, at the speed of the copy `id_`. `channel` is the utterance's
        own; None for the policy's."""
        return to_waveform(samples, source_rate, self.audio, channel, speed=self.speed(id_))

    def with_noise(self, waveform: NDArray[np.float32], id_: str) -> NDArray[np.float32]:
        """Add a copy's noise to its waveform; that of a clean copy is returned as it is. Raises ConfigError if the
        noise cannot be decoded, or has changed."""
        copy = self.copies.copy_of(id_)
        return waveform if copy.is_clean or self._noise is None else self._noise.add_to(waveform, id_, copy.snr)

    def waveform(
        self, samples: NDArray[np.float32], source_rate: int, id_: str, channel: int | None
    ) -> NDArray[np.float32]:
        """A copy's waveform: `at_speed`, then `with_noise`."""
        return self.with_noise(self.at_speed(samples, source_rate, id_, channel), id_)

    @cached_property
    def _noise(self) -> Noise | None:
        noise = None if self.augment is None else self.augment.noise
        return None if noise is None else Noise(noise, self.audio)
