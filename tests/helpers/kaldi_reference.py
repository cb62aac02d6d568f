"""Kaldi's fbank and MFCC three more times: in float64, slow and obvious; by torchaudio; by kaldi-native-fbank.

Each of the three takes a waveform in [-1, 1], its rate and featcache's parameters, and returns
`[frames, values]`. Torchaudio and kaldi-native-fbank have defaults of their own, so everything is said to them.
"""

import kaldi_native_fbank as knf
import numpy as np
import torch
import torchaudio

from featcache.extractors import Clip, find
from featcache.extractors.kaldi import FbankParams, KaldiParams, MfccParams

EPSILON = float(np.finfo(np.float32).eps)


def by_featcache(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """What is tested."""
    extractor = find(_name(params))(params, sample_rate, torch.device("cpu"))
    return extractor.extract([Clip("an id", torch.from_numpy(waveform))])[0].numpy()


def exact(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """In float64, one frame after the other, as the Kaldi sources read."""
    samples = waveform.astype(np.float64) * params.waveform_scale
    length = int(sample_rate * 0.001 * params.frame_length)
    shift = int(sample_rate * 0.001 * params.frame_shift)
    fft_length = length
    if params.round_to_power_of_two:
        fft_length = 1
        while fft_length < length:
            fft_length *= 2
    window = _window(params, length)
    bank = _mel_bank(params, fft_length, sample_rate)
    firsts = first_samples(len(samples), length, shift, params.snip_edges)
    if not firsts:
        return np.empty((0, 0))
    seen = range(firsts[0], firsts[-1] + length)
    continued = samples[[_reflected(i, len(samples)) for i in seen]]
    rows = []
    for first in firsts:
        frame = continued[first - firsts[0] :][:length]
        if params.remove_dc_offset:
            frame = frame - frame.mean()
        energy = np.sum(frame**2)
        previous = np.append(frame[0], frame[:-1])
        frame = (frame - params.preemphasis_coefficient * previous) * window
        if not params.raw_energy:
            energy = np.sum(frame**2)
        log_energy = np.log(max(energy, EPSILON, params.energy_floor))
        power = np.abs(np.fft.rfft(frame, fft_length)) ** 2
        rows.append(_values(params, bank, power, log_energy))
    return np.array(rows)


def by_torchaudio(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """`torchaudio.compliance.kaldi`."""
    function = getattr(torchaudio.compliance.kaldi, _name(params))
    samples = torch.from_numpy(waveform)[None] * params.waveform_scale
    options = params.model_dump(exclude={"waveform_scale"})
    return function(samples, sample_frequency=sample_rate, **options).numpy()


def by_native(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """kaldi-native-fbank: Kaldi's own code, without Kaldi."""
    is_fbank = isinstance(params, FbankParams)
    options = knf.FbankOptions() if is_fbank else knf.MfccOptions()
    frame, mel = options.frame_opts, options.mel_opts
    frame.samp_freq = sample_rate
    frame.frame_length_ms = params.frame_length
    frame.frame_shift_ms = params.frame_shift
    frame.preemph_coeff = params.preemphasis_coefficient
    mel.num_bins = params.num_mel_bins
    for part, same_names in [
        (frame, "dither remove_dc_offset window_type blackman_coeff snip_edges round_to_power_of_two"),
        (mel, "low_freq high_freq"),
        (options, "use_energy raw_energy energy_floor htk_compat"),
        (options, "use_log_fbank use_power" if is_fbank else "num_ceps cepstral_lifter"),
    ]:
        for name in same_names.split():
            setattr(part, name, getattr(params, name))
    online = knf.OnlineFbank(options) if is_fbank else knf.OnlineMfcc(options)
    online.accept_waveform(sample_rate, (waveform * params.waveform_scale).tolist())
    online.input_finished()
    return np.array([online.get_frame(t) for t in range(online.num_frames_ready)])


def first_samples(num_samples: int, length: int, shift: int, snip_edges: bool) -> list[int]:
    """Where each frame begins."""
    if snip_edges:
        return [first for first in range(0, num_samples, shift) if first + length <= num_samples]
    return [shift * t + shift // 2 - length // 2 for t in range((num_samples + shift // 2) // shift)]


def max_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


def rms_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((found - expected) ** 2)))


def assert_as_close_as_they_are(
    waveform: np.ndarray, sample_rate: int, params: KaldiParams, max_factor: float = 4, rms_factor: float = 2
) -> None:
    """Hold featcache to all three.

    The logarithm of a nearly empty bin magnifies the rounding of the Fourier transform before it, by how
    much depends on the audio: torchaudio and kaldi-native-fbank differ by 1e-5 here and by 1e-2 there. What
    they differ by on the same audio is the measure: featcache may be `max_factor` times that from either,
    and `rms_factor` times as far from the exact values as the worse of them. A wrong formula is off by orders
    of magnitude more. (An error's maximum over few frames is a matter of luck: over 250 random cases it was
    up to 6 times theirs, their root mean square up to 2.1 times.)
    """
    ours = by_featcache(waveform, sample_rate, params)
    theirs = by_torchaudio(waveform, sample_rate, params), by_native(waveform, sample_rate, params)
    truth = exact(waveform, sample_rate, params)
    assert ours.shape == truth.shape == theirs[0].shape == theirs[1].shape
    scale = max(1, np.abs(truth).max()) * EPSILON
    apart = max_error(*theirs) + 4 * scale
    assert max(max_error(ours, reference) for reference in theirs) <= max_factor * apart
    off = max(rms_error(reference, truth) for reference in theirs) + scale
    assert rms_error(ours, truth) <= rms_factor * off


def _name(params: KaldiParams) -> str:
    return "fbank" if isinstance(params, FbankParams) else "mfcc"


def _values(params, bank, power, log_energy):
    if isinstance(params, MfccParams):
        cepstra = _cosine_transform(params) @ np.log(np.maximum(bank @ power, EPSILON))
        if params.use_energy:
            cepstra[0] = log_energy
        elif params.htk_compat:
            cepstra[0] *= np.sqrt(2)
        return np.append(cepstra[1:], cepstra[0]) if params.htk_compat else cepstra
    energies = bank @ (power if params.use_power else np.sqrt(power))
    if params.use_log_fbank:
        energies = np.log(np.maximum(energies, EPSILON))
    if not params.use_energy:
        return energies
    return np.append(energies, log_energy) if params.htk_compat else np.append(log_energy, energies)


def _reflected(i, num_samples):
    while not 0 <= i < num_samples:
        i = -i - 1 if i < 0 else 2 * num_samples - 1 - i
    return i


def _window(params, length):
    phase = 2 * np.pi * np.arange(length) / (length - 1)
    hann = 0.5 - 0.5 * np.cos(phase)
    a = params.blackman_coeff
    return {
        "povey": hann**0.85,
        "hanning": hann,
        "hamming": 0.54 - 0.46 * np.cos(phase),
        "rectangular": np.ones(length),
        "blackman": a - 0.5 * np.cos(phase) + (0.5 - a) * np.cos(2 * phase),
    }[params.window_type]


def _mel_bank(params, fft_length, sample_rate):
    def mel(hertz):
        return 1127 * np.log(1 + hertz / 700)

    high = params.high_freq if params.high_freq > 0 else sample_rate / 2 + params.high_freq
    step = (mel(high) - mel(params.low_freq)) / (params.num_mel_bins + 1)
    positions = mel(np.arange(fft_length // 2 + 1) * sample_rate / fft_length)
    peaks = [mel(params.low_freq) + (m + 1) * step for m in range(params.num_mel_bins)]
    return np.array([np.maximum(0, 1 - np.abs(positions - peak) / step) for peak in peaks])


def _cosine_transform(params):
    rows = []
    for k in range(params.num_ceps):
        row = np.cos(np.pi / params.num_mel_bins * k * (np.arange(params.num_mel_bins) + 0.5))
        row *= np.sqrt((1 if k == 0 else 2) / params.num_mel_bins)
        if params.cepstral_lifter:
            row *= 1 + params.cepstral_lifter / 2 * np.sin(np.pi * k / params.cepstral_lifter)
        rows.append(row)
    return np.array(rows)
