"""Kaldi's filter-bank energies and MFCCs.

The formulas are those of Kaldi's `src/feat/`: `feature-window.cc` (frames),
`mel-computations.cc` (the mel bank), `feature-fbank.cc` and `feature-mfcc.cc`; the MFCC
is Davis and Mermelstein's (1980). Parameters have Kaldi's names and, unless they say
otherwise, Kaldi's defaults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from pydantic import Field

from featcache.errors import ConfigError
from featcache.extractors import mel
from featcache.extractors.base import Clip, Params
from featcache.extractors.frames import FrameExtractor, aligned_rows, with_whole_columns
from featcache.extractors.griffin_lim import griffin_lim
from featcache.manifest.strings import hash_of
from featcache.spec import MAIN, FeatureSpec

if TYPE_CHECKING:  # torch is executed when it is used
    from torch import Tensor

_SIXTEEN_BITS = 32768.0

_EPSILON = 2.0**-23


class KaldiParams(Params):
    """The parameters that fbank and MFCC share."""

    added_later: ClassVar[frozenset[str]] = frozenset({"waveform_scale"})

    waveform_scale: float = Field(default=_SIXTEEN_BITS, gt=0)
    """Samples, in [-1, 1], are first multiplied by this. 32768 gives the range of 16-bit
    integers, as in Kaldi and most later tools. 1 keeps [-1, 1], as in Lhotse and icefall:
    log energies are 20.794 (ln 32768²) lower."""
    frame_length: float = Field(default=25.0, gt=0, le=1000)
    """Length in milliseconds, rounded down to whole samples."""
    frame_shift: float = Field(default=10.0, gt=0, le=60_000)
    """Milliseconds between the starts of neighbouring frames, rounded down to whole
    samples."""
    snip_edges: bool = True
    """If true, frames lie inside the clip. If false, round(num_samples / shift) frames,
    each centred on its part of the clip. The clip is reflected at its ends."""
    dither: float = Field(default=0.0, ge=0)
    """Standard deviation, in units of the scaled waveform, of Gaussian noise added to
    every frame. It is seeded by the utterance's id, so a clip always gets the same noise.
    Kaldi's default is 1, with noise that differs between runs."""
    remove_dc_offset: bool = True
    """Subtract each frame's mean."""
    preemphasis_coefficient: float = Field(default=0.97, ge=0, le=1)
    """Subtract this fraction of the preceding sample from each sample. The first sample is
    its own predecessor."""
    window_type: Literal["povey", "hanning", "hamming", "rectangular", "blackman"] = "povey"
    """`povey` is a Hann window to the power of 0.85. All are symmetric."""
    blackman_coeff: float = 0.42
    """The coefficient of the Blackman window."""
    round_to_power_of_two: bool = True
    """Zero-pad frames to a power of two before the Fourier transform."""
    num_mel_bins: int = Field(default=23, ge=3, le=mel.MOST_BINS)
    """Number of triangular filters, equally spaced in mel."""
    low_freq: float = Field(default=20.0, ge=0)
    """Where the first filter begins, in Hz."""
    high_freq: float = 0.0
    """Where the last filter ends, in Hz. 0 or less is an offset from the Nyquist
    frequency."""
    use_energy: bool = False
    """Add the frame's log energy as one more value."""
    raw_energy: bool = True
    """Compute the energy before pre-emphasis and windowing."""
    energy_floor: float = Field(default=0.0, ge=0)
    """Lowest energy before the logarithm, in units of the scaled waveform, squared.
    torchaudio's default is 1."""
    htk_compat: bool = False
    """Put the energy (or the zeroth cepstrum) last."""


class FbankParams(KaldiParams):
    """The parameters of `fbank`."""

    num_mel_bins: int = Field(default=80, ge=3, le=mel.MOST_BINS)
    """Number of triangular filters, equally spaced in mel. Kaldi's default is 23."""
    use_log_fbank: bool = True
    """If true, take the logarithm of each filter's energy; if false, the energy."""
    use_power: bool = True
    """If true, filter the power spectrum; if false, the magnitude spectrum."""


class MfccParams(KaldiParams):
    """The parameters of `mfcc`."""

    num_ceps: int = Field(default=13, ge=1)
    """Number of cepstra, including the zeroth."""
    cepstral_lifter: float = Field(default=22.0, ge=0)
    """Liftering as in HTK, which scales up higher cepstra more. 0 turns it off."""
    use_energy: bool = True
    """Replace the zeroth cepstrum by the frame's log energy. This is Kaldi's default;
    torchaudio and most of Kaldi's recipes use false."""


K = TypeVar("K", bound=KaldiParams)


class _Kaldi(FrameExtractor[K]):
    """The base of fbank and MFCC, which computes windowed frames."""

    def __init__(self, params: K, sample_rate: int, device: torch.device) -> None:
        self._params, self._sample_rate = params, sample_rate
        self._length = _whole_samples("frame_length", params.frame_length, sample_rate, at_least=2)
        self._shift = _whole_samples("frame_shift", params.frame_shift, sample_rate, at_least=1)
        self._before = 0  # samples of the first frame that are before the clip
        if not params.snip_edges:
            self._before = self._length // 2 - self._shift // 2
        self._fft_length = self._length
        if params.round_to_power_of_two:
            self._fft_length = 1 << (self._length - 1).bit_length()
        elif self._length % 2:
            raise ConfigError(
                f"params.frame_length: {params.frame_length:g} ms are {self._length} samples at "
                f"audio.sample_rate {sample_rate}; with round_to_power_of_two: false they must be "
                "even"
            )
        band = mel.frequency_band(params.low_freq, params.high_freq, sample_rate)
        filters = mel.kaldi_filters(params.num_mel_bins, band, self._fft_length, sample_rate)
        self._mel_bank = mel.MelBank(filters, device)
        window = _window(params.window_type, self._length, params.blackman_coeff)
        self._scaled_window = (window * params.waveform_scale).to(device, torch.float32)

    def num_frames(self, num_samples: int) -> int:
        # NumFrames in feature-window.cc
        if self._params.snip_edges:
            return max(0, num_samples - self._length + self._shift) // self._shift
        return (num_samples + self._shift // 2) // self._shift

    def frames(self, clip: Clip) -> Tensor:
        waveform = clip.waveform
        if not self._params.snip_edges:
            # the first frame is centred on sample shift / 2
            before = self._before
            end = (self.num_frames(len(waveform)) - 1) * self._shift + self._length
            waveform = _reflected(waveform, before, end - before - len(waveform))
        frames = waveform.unfold(0, self._length, self._shift)
        if self._params.dither:
            frames = frames + self._noise(clip.id, frames)
        return frames

    def _noise(self, clip_id: str, frames: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(hash_of(clip_id))
        noise = torch.randn(frames.shape, generator=generator, dtype=torch.float32)
        return noise.mul_(self._params.dither / self._params.waveform_scale).to(frames.device)

    def _windowed(self, frames: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return frames `[B, N]`, scaled, windowed and zero-padded; and with `use_energy`
        their log energies `[B]`. Overwrites its argument `[B, L]`. `ProcessWindow` in
        `feature-window.cc`."""
        if self._params.remove_dc_offset:
            frames -= frames.mean(dim=1, keepdim=True)
        preemphasis = self._params.preemphasis_coefficient
        filled = frames.new_empty(len(frames), self._fft_length)
        windowed = filled[:, : self._length]
        torch.sub(frames[:, 1:], frames[:, :-1], alpha=preemphasis, out=windowed[:, 1:])
        torch.sub(frames[:, 0], frames[:, 0], alpha=preemphasis, out=windowed[:, 0])
        windowed *= self._scaled_window
        filled[:, self._length :] = 0
        if not self._params.use_energy:
            return filled, None
        squares = aligned_rows(frames, *frames.shape)
        if self._params.raw_energy:
            torch.mul(frames, self._params.waveform_scale, out=squares)
        else:
            squares.copy_(windowed)
        energies = squares.square_().sum(dim=1)
        floor = max(_EPSILON, self._params.energy_floor)
        return filled, energies.clamp_(min=floor).log_()

    def _spec(self, num_values: int, units: str) -> FeatureSpec:
        scale, rate = self._params.waveform_scale, self._sample_rate
        if scale == _SIXTEEN_BITS:
            units += ", 16-bit scale"
        else:
            units += f", scale [-{scale:g}, {scale:g}]"
        return FeatureSpec((num_values,), "float32", rate / self._shift, self._length, rate, units)


class Fbank(_Kaldi[FbankParams]):
    """Kaldi's log mel filter-bank energies, as `compute-fbank-feats` makes them.

    Features are float32 `[T, num_mel_bins]`; `use_energy` adds one value, the first, or
    with `htk_compat` the last."""

    Params = FbankParams
    revision = 1

    def __init__(self, params: FbankParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        units = "mel energy" if params.use_power else "mel magnitude"
        if params.use_log_fbank:
            units = f"log {units} (natural log)"
        self.spec = self._spec(params.num_mel_bins + int(params.use_energy), units)

    def compute(self, block: Tensor) -> Tensor:
        windowed, log_energy = self._windowed(block)
        spectrum = mel.power_spectrum(windowed, self._fft_length)
        if not self._params.use_power:
            spectrum.sqrt_()
        values = self._mel_bank(spectrum)
        if self._params.use_log_fbank:
            values.clamp_(min=_EPSILON).log_()
        if log_energy is None:
            return values
        columns = [log_energy[:, None], values]
        if self._params.htk_compat:
            columns.reverse()
        return torch.cat(columns, dim=1)

    def synthesize(self, tracks: Mapping[str, Tensor]) -> Tensor:
        """Estimate spectra from the mel energies, undo pre-emphasis in them, and find their
        phases by Griffin-Lim."""
        values = tracks[MAIN].float()
        if self._params.use_energy:
            values = values[:, :-1] if self._params.htk_compat else values[:, 1:]
        if self._params.use_log_fbank:
            values = values.exp()
        spectra = self._mel_bank.spectra_of(values)
        if self._params.use_power:
            spectra = spectra.sqrt()
        delays = torch.arange(spectra.shape[1], device=values.device)
        turns = torch.polar(torch.ones(()), -2 * math.pi / self._fft_length * delays)
        response = (1 - self._params.preemphasis_coefficient * turns).abs()
        spectra = spectra / response.clamp(min=_EPSILON)
        waveform = griffin_lim(spectra, self._scaled_window, self._shift, self._fft_length)
        return waveform[max(self._before, 0) :]


class Mfcc(_Kaldi[MfccParams]):
    """Kaldi's mel-frequency cepstral coefficients, as `compute-mfcc-feats` makes them.

    Features are float32 `[T, num_ceps]`. The first value is the log energy, or without
    `use_energy` the zeroth cepstrum; `htk_compat` puts it last."""

    Params = MfccParams
    revision = 1

    def __init__(self, params: MfccParams, sample_rate: int, device: torch.device) -> None:
        super().__init__(params, sample_rate, device)
        num_ceps, num_bins = params.num_ceps, params.num_mel_bins
        if num_ceps > num_bins:
            raise ConfigError(
                f"params.num_ceps: {num_ceps} cepstra need as many filters; num_mel_bins is "
                f"{num_bins}"
            )
        self.spec = self._spec(num_ceps, "mel-frequency cepstrum")
        # The cosine transform, the lifter and HTK's order are one matrix.
        transform = _cosine_transform(num_ceps, num_bins) * _lifter(params)
        if params.htk_compat:
            transform[:, 0] *= math.sqrt(2)  # HTK's transform is not orthonormal
            transform = transform.roll(-1, dims=1)
        self._transform = with_whole_columns(transform).to(device, torch.float32)

    def compute(self, block: Tensor) -> Tensor:
        windowed, log_energy = self._windowed(block)
        energies = self._mel_bank(mel.power_spectrum(windowed, self._fft_length))
        cepstra = energies.clamp_(min=_EPSILON).log_() @ self._transform
        cepstra = cepstra[:, : self._params.num_ceps]
        if log_energy is not None:
            cepstra[:, -1 if self._params.htk_compat else 0] = log_energy
        return cepstra


def _whole_samples(name: str, milliseconds: float, sample_rate: int, at_least: int) -> int:
    num_samples = int(sample_rate * 0.001 * milliseconds)
    if num_samples < at_least:
        raise ConfigError(
            f"params.{name}: {milliseconds:g} ms are {num_samples} samples at audio.sample_rate "
            f"{sample_rate}; there must be at least {at_least}"
        )
    return num_samples


def _window(window_type: str, length: int, blackman_coeff: float) -> Tensor:
    """Compute the window, float64 `[L]`: `FeatureWindowFunction` in `feature-window.cc`."""
    phase = torch.arange(length, dtype=torch.float64) * (2 * math.pi / (length - 1))
    if window_type == "rectangular":
        return torch.ones_like(phase)
    if window_type == "hamming":
        return 0.54 - 0.46 * phase.cos()
    if window_type == "blackman":
        return blackman_coeff - 0.5 * phase.cos() + (0.5 - blackman_coeff) * (2 * phase).cos()
    hann = 0.5 - 0.5 * phase.cos()
    return hann**0.85 if window_type == "povey" else hann


def _reflected(waveform: Tensor, before: int, after: int) -> Tensor:
    """Add `before` and `after` samples to the ends of a waveform `[S]`, or cut them off if
    the numbers are negative.

    Each end is continued by the waveform backwards (… 1 0 | 0 1 2 … S-1 | S-1 S-2 …), and
    if that is not enough, forwards again: `ExtractWindow` in `feature-window.cc`."""
    num_samples = len(waveform)

    def beyond(first: int, last: int) -> Tensor:
        positions = torch.arange(first, last, device=waveform.device) % (2 * num_samples)
        return waveform[torch.minimum(positions, 2 * num_samples - 1 - positions)]

    left = beyond(min(0, -before), 0)
    inside = waveform[max(0, -before) : num_samples + min(0, after)]
    right = beyond(num_samples, num_samples + max(0, after))
    return torch.cat([left, inside, right])


def _cosine_transform(num_ceps: int, num_bins: int) -> Tensor:
    """Compute the orthonormal DCT-II, float64 `[M, num_ceps]`: `ComputeDctMatrix` in
    `matrix-functions.cc`."""
    centres = torch.arange(num_bins, dtype=torch.float64) + 0.5
    orders = torch.arange(num_ceps, dtype=torch.float64)
    transform = torch.cos(math.pi / num_bins * torch.outer(centres, orders))
    transform *= math.sqrt(2 / num_bins)
    transform[:, 0] = math.sqrt(1 / num_bins)
    return transform


def _lifter(params: MfccParams) -> Tensor:
    """Compute a factor for each cepstrum, float64 `[num_ceps]`: `ComputeLifterCoeffs` in
    `mel-computations.cc`."""
    orders = torch.arange(params.num_ceps, dtype=torch.float64)
    lifter = params.cepstral_lifter
    if not lifter:
        return torch.ones_like(orders)
    return 1 + lifter / 2 * torch.sin(math.pi * orders / lifter)
