"""Log mel spectrograms of Whisper, and of vocoders.

They differ from Kaldi's: samples stay in [-1, 1], frames are windowed and nothing else,
the window is a periodic Hann window, and filters are triangles over Hz, as in librosa.
Sources: OpenAI's `whisper/audio.py` (`log_mel_spectrogram`) and HiFi-GAN's
`meldataset.py` (`mel_spectrogram`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field

from featcache.errors import ConfigError
from featcache.extractors import mel
from featcache.extractors.base import Clip, Params
from featcache.extractors.frames import FrameExtractor
from featcache.extractors.griffin_lim import griffin_lim
from featcache.spec import MAIN, FeatureSpec

if TYPE_CHECKING:
    from torch import Tensor


class LogMelParams(Params):
    """The parameters of `log_mel`. The defaults are Whisper's, but for `pad_to_seconds`."""

    added_later: ClassVar[frozenset[str]] = frozenset({"pad_to_seconds"})

    pad_to_seconds: float | None = Field(default=None, gt=0, le=3600)
    """First pad clips with zeros to this length, as Whisper does to 30 s. Longer clips
    fail. Default: no padding."""
    n_fft: int = Field(default=400, ge=2, le=1 << 16)
    """Length of the Fourier transform, in samples."""
    win_length: int | None = Field(default=None, ge=2)
    """Length of the window in samples, centred in `n_fft`. Default: `n_fft`."""
    hop_length: int = Field(default=160, ge=1, le=1 << 24)
    """Samples between the starts of neighbouring frames."""
    padding: Literal["center", "same", "none"] = "center"
    """Number of samples added at each end, by reflection, before frames are cut. `center`:
    n_fft / 2; frame t is centred on sample t * hop_length. `same`: (n_fft - hop_length) /
    2, as in HiFi-GAN; each whole hop has one frame. `none`: 0. A clip must be longer than
    the added samples."""
    drop_last_frame: bool = True
    """Drop the last frame, as Whisper does. Then, with `center`, each whole hop has one
    frame."""
    power: Literal[1, 2] = 2
    """1 filters the magnitude spectrum, 2 the power spectrum."""
    power_offset: float = Field(default=0.0, ge=0)
    """Added to the power spectrum; with `power: 1`, before the square root. HiFi-GAN adds
    1e-9."""
    num_mel_bins: int = Field(default=80, ge=1, le=mel.MOST_BINS)
    """Number of triangular filters, equally spaced in mel."""
    mel_scale: mel.MelScale = "slaney"
    """`slaney`, librosa's default, is linear up to 1 kHz. `htk` is 2595 log10(1 + f /
    700)."""
    mel_norm: mel.MelNorm = "slaney"
    """`slaney` divides each filter by its area in Hz. With `none`, each filter has a peak
    of 1."""
    low_freq: float = Field(default=0.0, ge=0)
    """Where the first filter begins, in Hz."""
    high_freq: float = 0.0
    """Where the last filter ends, in Hz. 0 or less is an offset from the Nyquist
    frequency."""
    floor: float = Field(default=1e-10, gt=0)
    """Smaller values are raised to this before the logarithm."""
    log: Literal["natural", "log10", "whisper"] = "whisper"
    """`whisper` takes log10, raises values to at least the clip's maximum minus 8, adds 4
    and divides by 4."""


_LOGARITHMS = {"natural": "natural log", "log10": "log10", "whisper": "log10, scaled as Whisper's"}


class LogMel(FrameExtractor[LogMelParams]):
    """The logarithm of a mel spectrogram: float32 `[T, num_mel_bins]`, by default what
    Whisper's formula gives for the clip alone.

    With `pad_to_seconds: 30` it is Whisper's input: 3,000 frames. The clip's last frame,
    and up to three after it, see both the clip's end and zeros."""

    Params = LogMelParams
    revision = 1

    def __init__(self, params: LogMelParams, sample_rate: int, device: torch.device) -> None:
        self._params = params
        n_fft, hop_length, num_bins = params.n_fft, params.hop_length, params.num_mel_bins
        length = params.win_length or n_fft
        if length > n_fft:
            raise ConfigError(f"params.win_length: {length} samples do not fit into n_fft, {n_fft}")
        if params.padding == "same" and hop_length > n_fft:
            raise ConfigError(
                f"params.padding: same needs n_fft, {n_fft}, to be at least hop_length, "
                f"{hop_length}"
            )
        both_ends = {"center": n_fft, "same": n_fft - hop_length, "none": 0}
        self._padding = both_ends[params.padding] // 2
        self.max_seconds = params.pad_to_seconds
        padded_to = round((params.pad_to_seconds or 0) * sample_rate)
        band = mel.frequency_band(params.low_freq, params.high_freq, sample_rate)
        filters = mel.hertz_filters(
            num_bins, n_fft, sample_rate, band, params.mel_scale, params.mel_norm
        )
        self._mel_bank = mel.MelBank(filters, device)
        self._window = torch.hann_window(length, dtype=torch.float64).to(device, torch.float32)
        quantity = "energy" if params.power == 2 else "magnitude"
        units = f"log mel {quantity} ({_LOGARITHMS[params.log]})"
        frame_rate = sample_rate / hop_length
        self.spec = FeatureSpec(
            (num_bins,), "float32", frame_rate, length, sample_rate, units, padded_to=padded_to
        )

    def num_frames(self, num_samples: int) -> int:
        if num_samples:
            num_samples = max(num_samples, self.spec.padded_to)
        beyond_first = num_samples + 2 * self._padding - self._params.n_fft
        if num_samples <= self._padding or beyond_first < 0:  # too few to be reflected
            return 0
        num_frames = 1 + beyond_first // self._params.hop_length
        return num_frames - 1 if self._params.drop_last_frame else num_frames

    def frames(self, clip: Clip) -> Tensor:
        waveform = clip.waveform
        if len(waveform) < self.spec.padded_to:
            waveform = torch.nn.functional.pad(waveform, (0, self.spec.padded_to - len(waveform)))
        if self._padding:
            waveform = torch.nn.functional.pad(
                waveform[None], (self._padding, self._padding), mode="reflect"
            )[0]
        # A shorter window lies in the transform's middle. Its position does not change
        # magnitudes, so a frame is the samples under the window, padded with zeros later.
        length = self.spec.frame_length
        windows = waveform[(self._params.n_fft - length) // 2 :]
        frames = windows.unfold(0, length, self._params.hop_length)
        return frames[: self.num_frames(len(clip.waveform))]

    def compute(self, block: Tensor) -> Tensor:
        block *= self._window
        spectrum = mel.power_spectrum(block, self._params.n_fft)
        if self._params.power_offset:
            spectrum += self._params.power_offset
        if self._params.power == 1:
            spectrum.sqrt_()
        energies = self._mel_bank(spectrum).clamp_(min=self._params.floor)
        return energies.log_() if self._params.log == "natural" else energies.log10_()

    def finish(self, features: Tensor) -> None:
        if self._params.log == "whisper":
            torch.maximum(features, features.amax() - 8, out=features)
            features += 4
            features /= 4

    def synthesize(self, tracks: Mapping[str, Tensor]) -> Tensor:
        """Estimate spectra from the mel energies, and find their phases by Griffin-Lim."""
        values = tracks[MAIN].float()
        if self._params.log == "whisper":
            values = values * 4 - 4
        energies = values.exp() if self._params.log == "natural" else 10**values
        spectra = self._mel_bank.spectra_of(energies)
        if self._params.power == 2:
            spectra = spectra.sqrt()
        hop, n_fft = self._params.hop_length, self._params.n_fft
        waveform = griffin_lim(spectra, self._window, hop, n_fft)
        before = self._padding - (n_fft - len(self._window)) // 2
        return waveform[max(before, 0) :]
