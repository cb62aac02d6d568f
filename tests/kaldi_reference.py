"""Kaldi's fbank and MFCC three more times: in float64, slow and obvious, by torchaudio, and by kaldi-native-fbank.

Each function takes a waveform in [-1, 1] and featcache's parameters, and returns `[frames, values]`. The
other two have other defaults than Kaldi, so everything is said to them.
"""

import kaldi_native_fbank as knf
import numpy as np
import torch
import torchaudio

from featcache.extractors.kaldi import FbankParams, KaldiParams, MfccParams

EPSILON = float(np.finfo(np.float32).eps)


def exact(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """In float64, one frame after the other, as the Kaldi sources read."""
    samples = waveform.astype(np.float64) * 32768
    length = int(sample_rate * 0.001 * params.frame_length)
    shift = int(sample_rate * 0.001 * params.frame_shift)
    fft_length = length
    if params.round_to_power_of_two:
        fft_length = 1
        while fft_length < length:
            fft_length *= 2
    bank = mel_bank(params, fft_length, sample_rate)
    rows = []
    for first in first_samples(len(samples), length, shift, params.snip_edges):
        frame = np.array([samples[reflect(first + i, len(samples))] for i in range(length)])
        if params.remove_dc_offset:
            frame = frame - frame.mean()
        energy = np.sum(frame**2)
        previous = np.append(frame[0], frame[:-1])
        frame = (frame - params.preemphasis_coefficient * previous) * window(params, length)
        if not params.raw_energy:
            energy = np.sum(frame**2)
        log_energy = np.log(max(energy, EPSILON, params.energy_floor))
        power = np.abs(np.fft.rfft(frame, fft_length)) ** 2
        rows.append(values(params, bank, power, log_energy))
    return np.array(rows)


def values(params, bank, power, log_energy):
    if isinstance(params, MfccParams):
        cepstra = dct(params) @ np.log(np.maximum(bank @ power, EPSILON))
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


def first_samples(num_samples, length, shift, snip_edges):
    if snip_edges:
        return range(0, num_samples - length + 1, shift)
    return [shift * t + shift // 2 - length // 2 for t in range((num_samples + shift // 2) // shift)]


def reflect(i, num_samples):
    while not 0 <= i < num_samples:
        i = -i - 1 if i < 0 else 2 * num_samples - 1 - i
    return i


def window(params, length):
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


def mel_bank(params, fft_length, sample_rate):
    def mel(hertz):
        return 1127 * np.log(1 + hertz / 700)

    high = params.high_freq if params.high_freq > 0 else sample_rate / 2 + params.high_freq
    step = (mel(high) - mel(params.low_freq)) / (params.num_mel_bins + 1)
    bank = np.zeros((params.num_mel_bins, fft_length // 2 + 1))
    for m in range(params.num_mel_bins):
        peak = mel(params.low_freq) + (m + 1) * step
        for k in range(fft_length // 2):
            bank[m, k] = max(0, 1 - abs(mel(k * sample_rate / fft_length) - peak) / step)
    return bank


def dct(params):
    rows = []
    for k in range(params.num_ceps):
        row = np.cos(np.pi / params.num_mel_bins * k * (np.arange(params.num_mel_bins) + 0.5))
        row *= np.sqrt((1 if k == 0 else 2) / params.num_mel_bins)
        if params.cepstral_lifter:
            row *= 1 + params.cepstral_lifter / 2 * np.sin(np.pi * k / params.cepstral_lifter)
        rows.append(row)
    return np.array(rows)


def by_torchaudio(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """`torchaudio.compliance.kaldi`."""
    function = "fbank" if isinstance(params, FbankParams) else "mfcc"
    samples = torch.from_numpy(waveform)[None] * 32768
    kaldi = getattr(torchaudio.compliance.kaldi, function)
    return kaldi(samples, sample_frequency=sample_rate, **params.model_dump()).numpy()


def by_native(waveform: np.ndarray, sample_rate: int, params: KaldiParams) -> np.ndarray:
    """kaldi-native-fbank, Kaldi's own code without Kaldi."""
    is_fbank = isinstance(params, FbankParams)
    options = knf.FbankOptions() if is_fbank else knf.MfccOptions()
    options.frame_opts.samp_freq = sample_rate
    options.frame_opts.frame_length_ms = params.frame_length
    options.frame_opts.frame_shift_ms = params.frame_shift
    options.frame_opts.preemph_coeff = params.preemphasis_coefficient
    options.mel_opts.num_bins = params.num_mel_bins
    same_names = {
        options.frame_opts: "dither remove_dc_offset window_type blackman_coeff snip_edges round_to_power_of_two",
        options.mel_opts: "low_freq high_freq",
        options: "use_energy raw_energy energy_floor htk_compat "
        + ("use_log_fbank use_power" if is_fbank else "num_ceps cepstral_lifter"),
    }
    for part, names in same_names.items():
        for name in names.split():
            setattr(part, name, getattr(params, name))
    online = knf.OnlineFbank(options) if is_fbank else knf.OnlineMfcc(options)
    online.accept_waveform(sample_rate, (waveform * 32768).tolist())
    online.input_finished()
    return np.array([online.get_frame(t) for t in range(online.num_frames_ready)])
