"""How clean a resampler is: what it makes of speech, of a sweep and of tones, against a long sinc in float64."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

PASSBAND = 0.9  # of the lower Nyquist frequency
CLEAN_DB = 90.0
RIPPLE_DB = 0.01
REACH = 1024  # samples of the lower rate, to either side
OUTSIDE = (1.05, 1.1, 1.25, 1.5)  # tones, in lower Nyquist frequencies, that no resampler may let through
INSIDE = (0.5, 0.75, 0.9)  # tones whose mirror images it may not leave
TONES = np.linspace(0.01, 0.99, 99)  # in lower Nyquist frequencies: where the response is measured

Signal = NDArray[np.float64]
Resample = Callable[[Signal], Signal]
"""Of one clip, from one rate to another."""


def ideal(samples: Signal, source: int, target: int) -> Signal:
    """The reference: a windowed sinc at every output's own time, with zeros around the clip."""
    up, down = target // math.gcd(source, target), source // math.gcd(source, target)
    num_out = int(len(samples) * up / down + 0.5)
    band = min(1.0, target / source)  # the lower Nyquist frequency, in the source's
    reach = math.ceil(REACH / band)
    padded = np.concatenate([np.zeros(reach), samples, np.zeros(reach + down)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    made = np.empty(num_out)
    for phase in range(min(up, num_out)):  # output k = phase + j * up lies at k * down / up of the source's samples
        whole, part = divmod(phase * down, up)
        at = np.arange(-reach, reach + 1) - part / up
        kernel = band * np.sinc(band * at) * np.i0(16.0 * np.sqrt(np.clip(1 - (at / reach) ** 2, 0, 1))) / np.i0(16.0)
        made[phase::up] = windows[whole::down][: len(made[phase::up])] @ kernel
    return made


def response(resample: Resample, source: int, target: int) -> Signal:
    """The gain at each of `TONES`."""
    gains = []
    for frequency in TONES * min(source, target) / 2:
        made = resample(np.sin(2 * np.pi * frequency * np.arange(source) / source))
        middle = slice(target // 4, target - target // 4)
        window = np.hanning(target // 2)
        turning = np.exp(-2j * np.pi * frequency * np.arange(len(made))[middle] / target)
        gains.append(abs(2 * np.sum(made[middle] * window * turning) / window.sum()))
    return np.array(gains)


def snr(made: Signal, expected: Signal, rate: int, lower: int, gains: Signal) -> float:
    """dB by which the expected signal, with these gains, is stronger than what differs from it, in the passband."""
    length = min(len(made), len(expected))
    window = np.hanning(length)
    frequencies = np.fft.rfftfreq(length, 1 / rate) / (lower / 2)
    wanted = np.fft.rfft(expected[:length] * window) * np.interp(frequencies, TONES, gains)
    error = np.fft.rfft(made[:length] * window) - wanted
    band = frequencies <= PASSBAND
    return decibels(np.sum(np.abs(wanted[band]) ** 2) / np.sum(np.abs(error[band]) ** 2))


def decibels(power: float) -> float:
    return 10 * math.log10(max(power, 1e-20))


def sweep(rate: int, seconds: float, top: float) -> Signal:
    """A linear sweep from 0 to `top` Hz, at half of full scale."""
    at = np.arange(int(seconds * rate)) / rate
    return 0.5 * np.sin(np.pi * top / seconds * at**2)


def tone(rate: int, frequency: float, seconds: float = 2.0) -> Signal:
    """A sine that fades in and out, so that it has one frequency."""
    at = np.arange(int(seconds * rate)) / rate
    return 0.5 * np.sin(2 * np.pi * frequency * at) * np.hanning(len(at))


def left_over(resample: Resample, source: int, target: int) -> float:
    """dB of the strongest alias, or mirror image, against its tone."""
    lower = min(source, target) / 2
    worst = -math.inf
    if target < source:
        for frequency in (part * lower for part in OUTSIDE if part * lower < source / 2):
            given = tone(source, frequency)
            made = resample(given)
            worst = max(worst, decibels(np.mean(made**2) / np.mean(given**2)))
    else:
        for frequency in (part * lower for part in INSIDE):
            power = np.abs(np.fft.rfft(resample(tone(source, frequency)))) ** 2
            mirrored = power[int(len(power) * source / target) :]
            worst = max(worst, decibels(mirrored.sum() / power.sum()))
    return worst


def quality(resample: Resample, source: int, target: int, voice: Signal) -> dict:
    """What a resampler does to speech, a sweep and tones."""
    lower = min(source, target)
    gains = response(resample, source, target)
    swept = sweep(source, 4.0, PASSBAND * lower / 2)
    made, expected = resample(voice), ideal(voice, source, target)
    return {
        "noise_db": snr(made, expected, target, lower, gains),
        "sweep_db": snr(resample(swept), ideal(swept, source, target), target, lower, gains),
        "ripple_db": float(np.abs(decibels_of(gains[TONES <= PASSBAND + 1e-9])).max()),
        "left_over_db": left_over(resample, source, target),
    }


def decibels_of(gains: Signal) -> Signal:
    return 20 * np.log10(np.maximum(gains, 1e-10))


def is_clean(measured: dict) -> bool:
    loudest = min(measured["noise_db"], measured["sweep_db"], -measured["left_over_db"])
    return loudest >= CLEAN_DB and measured["ripple_db"] <= RIPPLE_DB
