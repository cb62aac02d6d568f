"""Noise added to a waveform at a signal-to-noise ratio: which noise and where in it, by the seed and the copy's id.

SHA-256 of `<seed> <id>` decides: its first eight bytes, little-endian, modulo the number of noises are the noise's
place in the manifest; its next eight, modulo the number of places where the cut can begin, where it does. So it depends
neither on the order of utterances, nor on numpy's generators, which may change.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from featcache.audio.decode import Cut, decode, to_waveform
from featcache.audio.noise_manifest import NoiseClip, noise_content, read_noise
from featcache.audio.noise_memory import Span, shared_memory
from featcache.errors import AudioError, ConfigError

if TYPE_CHECKING:
    from featcache.audio.policy import AudioPolicy, NoisePolicy


class Noise:
    """The noise of a config. Its methods may be called from several threads.

    Args:
        policy: which noise.
        audio: how it becomes a waveform, as utterances do.

    Raises:
        ConfigError: it is not what it was when the config was read.
    """

    def __init__(self, policy: NoisePolicy, audio: AudioPolicy) -> None:
        self._audio = audio.model_copy(update={"max_seconds": None})
        self._seed = policy.seed
        self._memory = shared_memory((policy.content, audio.channel))
        try:
            self._clips = read_noise(policy.manifest)
            is_same = noise_content(self._clips) == policy.content
        except ValueError as error:
            raise ConfigError(f"augment.noise.manifest: {error}") from error
        if not is_same:
            raise ConfigError(f"augment.noise.manifest: {policy.manifest}: has changed since the config was read")

    def add_to(self, waveform: NDArray[np.float32], id_: str, snr: float) -> NDArray[np.float32]:
        """A clip with noise `snr` dB below it, by the mean powers of both over the clip; neither is clipped.

        A clip that is silent stays so, and one whose cut of noise is silent stays clean.

        Args:
            waveform: float32 `[num_samples]`, at the config's rate.
            id_: the copy's.
            snr: in dB.

        Returns:
            float32 `[num_samples]`; a new array, but where nothing is added.

        Raises:
            ConfigError: the noise cannot be decoded.
        """
        noise = self.cut(len(waveform), id_)
        speech_power, noise_power = _power(waveform), _power(noise)
        if not speech_power or not noise_power:
            return waveform
        gain = math.sqrt(speech_power / noise_power) * 10 ** (-snr / 20)
        mixed: NDArray[np.float32] = (waveform.astype(np.float64) + gain * noise).astype(np.float32)
        return mixed

    def cut(self, num_samples: int, id_: str) -> NDArray[np.float32]:
        """A copy's noise before it is scaled, float32 `[num_samples]` at the config's rate.

        A noise that is long enough is cut anywhere where all of the cut lies inside it. A shorter one begins anywhere,
        and again from its start where it ends.
        """
        digest = hashlib.sha256(f"{self._seed} {id_}".encode()).digest()
        draw, place = (int.from_bytes(digest[first : first + 8], "little") for first in (0, 8))
        number = draw % len(self._clips)
        clip = self._clips[number]
        needed = -(-num_samples * clip.sample_rate // self._audio.sample_rate)
        if needed <= clip.num_samples:
            first = place % (clip.num_samples - needed + 1)
            return self._waveform(number, (first, first + needed))[:num_samples]
        whole = self._waveform(number, (0, clip.num_samples))
        if not len(whole):
            return np.zeros(num_samples, np.float32)
        return np.resize(np.roll(whole, -(place % len(whole))), num_samples)

    def _waveform(self, number: int, span: Span) -> NDArray[np.float32]:
        """Samples of a noise at the config's rate, resampled by themselves."""
        clip = self._clips[number]
        try:
            mono = self._memory.cut(number, clip.num_samples, span, partial(self._decode, clip))
            return to_waveform(mono[:, None], clip.sample_rate, self._audio, 0)
        except AudioError as error:
            raise ConfigError(
                f"augment.noise.manifest: {clip.path}: {error}: repair the file, or leave it out"
            ) from error

    def _decode(self, clip: NoiseClip, spans: Sequence[Span]) -> list[NDArray[np.float32]]:
        """Spans of a noise, mono, at the file's rate."""
        rate = clip.sample_rate
        at_own_rate = self._audio.model_copy(update={"sample_rate": rate})
        segments = [Cut((clip.first + first) / rate, (stop - first) / rate) for first, stop in spans]
        decoded = []
        for result in list(decode(clip.path, segments)):  # to its end, so that the file is closed
            if isinstance(result, AudioError):
                raise result
            decoded.append(to_waveform(result[0], rate, at_own_rate, clip.channel))
        return decoded


def _power(waveform: NDArray[np.float32]) -> float:
    """Mean square, in float64, summed in one order whatever the number of threads."""
    return float(np.square(waveform, dtype=np.float64).mean()) if len(waveform) else 0.0
