"""What happens to an utterance's samples before extraction: rate, speed, noise."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from featcache.audio.decode import to_waveform
from featcache.audio.noise import Noise
from featcache.audio.policy import AudioPolicy, AugmentPolicy
from featcache.manifest.copies import Copies, Copy, copies_of


@dataclass(frozen=True)
class Preparation:
    """Makes waveforms under one audio policy and one choice of copies; equal ones make the same waveforms.

    Its methods may be called from several threads. Clips of any length are taken: limits are the caller's.

    Attributes:
        audio: without its `max_seconds`.
        augment: which copies there are; None for no others than the utterances themselves.
        copies: the same, by their suffixes.
    """

    audio: AudioPolicy
    augment: AugmentPolicy | None
    copies: Copies = field(compare=False)

    @classmethod
    def of(cls, audio: AudioPolicy, augment: AugmentPolicy | None) -> Preparation:
        """What these sections of a config ask for."""
        copies = copies_of({"augment": augment and augment.model_dump()})
        return cls(audio.model_copy(update={"max_seconds": None}), augment, copies)

    def speed(self, id_: str) -> float:
        """How many times as fast as the recording the utterance of an id is."""
        return self._copy(id_).speed

    @property
    def fastest(self) -> float:
        """The highest speed of a copy."""
        return float(self.copies.speeds.max())

    def at_speed(
        self, samples: NDArray[np.float32], source_rate: int, id_: str, channel: int | None
    ) -> NDArray[np.float32]:
        """Mono, at the config's rate and at the copy's speed, but without noise.

        Args:
            samples: float32 `[num_samples, channels]`, of the recording.
            source_rate: theirs, in Hz.
            id_: the copy's.
            channel: the utterance's own, from 0; None for the policy's.

        Returns:
            float32 `[num_samples]`, as `to_waveform` gives it.

        Raises:
            AudioError: RATE_REFUSED or NO_SUCH_CHANNEL.
        """
        return to_waveform(samples, source_rate, self.audio, channel, speed=self.speed(id_))

    def with_noise(self, waveform: NDArray[np.float32], id_: str) -> NDArray[np.float32]:
        """The same clip with its copy's noise; itself, where it is to be clean.

        Raises:
            ConfigError: the noise cannot be decoded, or is not what it was.
        """
        copy = self._copy(id_)
        return waveform if copy.is_clean or self._noise is None else self._noise.add_to(waveform, id_, copy.snr)

    def waveform(
        self, samples: NDArray[np.float32], source_rate: int, id_: str, channel: int | None
    ) -> NDArray[np.float32]:
        """The copy's waveform: `at_speed`, and then `with_noise`."""
        return self.with_noise(self.at_speed(samples, source_rate, id_, channel), id_)

    def _copy(self, id_: str) -> Copy:
        return self.copies.of(id_)

    @cached_property
    def _noise(self) -> Noise | None:
        noise = None if self.augment is None else self.augment.noise
        return None if noise is None else Noise(noise, self.audio)
