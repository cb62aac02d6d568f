"""Measure how fast resamplers are, and how clean.

    pip install '.[extract,bench]'
    python scripts/bench/resample.py [--rounds 7] [--json]

From 8 to 24 kHz, from 22.05 and from 44.1 to 16 kHz, each of these takes turns, on one
thread:

soxr         LQ, MQ, HQ and VHQ of libsoxr, clip by clip
featcache    `to_waveform` under the default policy: what a run does
torchaudio   `transforms.Resample`, which keeps its filters, on batches of 16 clips: as it comes, and with the settings
             that imitate librosa's kaiser_best
scipy        `signal.resample_poly`, clip by clip

The reference is a sinc under a Kaiser window (beta 16) that reaches 1,024 samples of the
lower rate to either side, in float64. Up to 0.9 of the lower Nyquist frequency, these are
measured:

noise       what it makes of speech, against the reference with the resampler's own response: dB by which that is
            stronger than the difference, which is what no filtering explains
sweep       as `noise`, of a sweep
ripple      the most by which it weakens or strengthens a tone
left over   of tones above the lower Nyquist frequency, or on the way up of the mirror images of tones below it

A resampler is called clean here, if noise and sweep are above 90 dB, what is left over is
below -90 dB, and the ripple is at most 0.01 dB. Rounding to 16 bits by itself leaves -98
dB of a loud sine; 0.01 dB move a log mel energy by 0.002, which is half of float16's
rounding. Speeds are medians.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import geometric_mean
from typing import Any

import numpy as np
import soxr
import torch
from corpus import speech_at
from harness import Table, available, options, present, quick_turns, remark
from numpy.typing import NDArray

from featcache.audio.resample import to_waveform
from featcache.config import AudioPolicy

PAIRS = ((8000, 24000), (22050, 16000), (44100, 16000))
LENGTHS = {"× real time, 10 s": 10.0, "0.43 s": 0.43}
"""Seconds of a clip, by the figure that tells the speed: of a sentence, and of a spoken
digit."""
BATCH = 16
"""Clips that are resampled in a call."""
SHIPPED = "featcache"
PASSBAND = 0.9  # of the lower Nyquist frequency
CLEAN_DB = 90.0
RIPPLE_DB = 0.01
REACH = 1024  # samples of the lower rate, to either side
# tones, in lower Nyquist frequencies, that no resampler may let through
OUTSIDE = (1.05, 1.1, 1.25, 1.5)
INSIDE = (0.5, 0.75, 0.9)  # tones whose mirror images it may not leave
# in lower Nyquist frequencies: where the response is measured
TONES = np.linspace(0.01, 0.99, 99)
FIGURES = {
    **dict.fromkeys(LENGTHS, "{:,.0f}"),
    **dict.fromkeys(("noise", "sweep"), "{:.0f} dB"),
    "ripple": "{:.4f} dB",
    "left over": "{:.0f} dB",
    "clean": "{}",
}
"""The figures of a resampler, and how they are written."""

Signal = NDArray[np.float64]
Resample = Callable[[Signal], Signal]
"""Of one clip, from one rate to another."""
Resampler = Callable[[NDArray[np.float32]], Sequence]
"""Resamples clips `[clips, samples]`, one by one or all at once."""


def resamplers(source: int, target: int) -> dict[str, Resampler]:
    made = available({"soxr": _soxr, "torchaudio": _torchaudio, "scipy": _scipy}, source, target)
    return {name: run for of_package in made.values() for name, run in of_package.items()}


def _each(one: Callable) -> Resampler:
    return lambda clips: [one(clip) for clip in clips]


def _soxr(source: int, target: int) -> dict[str, Resampler]:
    policy = AudioPolicy(sample_rate=target)
    made = {
        f"soxr {name}": _each(lambda clip, name=name: soxr.resample(clip, source, target, name))
        for name in ("LQ", "MQ", "HQ", "VHQ")
    }
    return made | {SHIPPED: _each(lambda clip: to_waveform(clip[:, None], source, policy))}


def _torchaudio(source: int, target: int) -> dict[str, Resampler]:
    from torchaudio.transforms import Resample

    best = {"lowpass_filter_width": 64, "rolloff": 0.9475937167399596, "beta": 14.769656459379492}
    kaiser_best = Resample(source, target, "sinc_interp_kaiser", **best)
    transforms = {"default": Resample(source, target), "kaiser_best": kaiser_best}

    @torch.inference_mode()
    def run(transform: Resample, clips: NDArray[np.float32]) -> torch.Tensor:
        return transform(torch.from_numpy(clips))

    return {f"torchaudio {name}": partial(run, transform) for name, transform in transforms.items()}


def _scipy(source: int, target: int) -> dict[str, Resampler]:
    from scipy.signal import resample_poly

    common = math.gcd(source, target)
    return {"scipy": _each(lambda clip: resample_poly(clip, target // common, source // common))}


def compare(source: int, target: int, rounds: int) -> tuple[dict[str, dict], float]:
    """Quality and speed of every resampler, in turns; and the largest share of the cores
    that others had."""
    found, voice, others = resamplers(source, target), speech_at(source), 0.0

    def one_clip(run: Resampler, samples: Signal) -> Signal:
        return np.asarray(run(samples.astype(np.float32)[None])[0], np.float64)

    results = {
        name: quality(partial(one_clip, run), source, target, voice[: 6 * source])
        for name, run in found.items()
    }
    for length, seconds in LENGTHS.items():
        clips = np.resize(voice, (BATCH, int(seconds * source)))
        runs = {name: partial(run, clips) for name, run in found.items()}
        quick_turns(runs, 1, 1)  # which warms up
        turns = quick_turns(runs, rounds, 1)
        others = max(others, turns.others)
        for name, result in results.items():
            result[length] = BATCH * seconds / turns.median(name)
    return results, others


def against_fastest(results: Sequence[dict[str, dict]], length: str) -> str:
    """The fastest that is clean in all pairs, on clips of a length, by the geometric mean
    of its speeds."""

    def speed(name: str) -> float:
        return geometric_mean(found[name][length] for found in results)

    clean = [
        name
        for name in results[0]
        if all(found[name]["clean"] for found in results) and name != SHIPPED
    ]
    fastest = max(clean, key=speed)
    return (
        f"of {LENGTHS[length]:g} s: the fastest that is clean is {fastest}; "
        f"featcache has {speed(SHIPPED) / speed(fastest):.2f} of its speed"
    )


# How clean


def ideal(samples: Signal, source: int, target: int) -> Signal:
    """The reference: a windowed sinc at every output's own time, with zeros around the
    clip."""
    up, down = target // math.gcd(source, target), source // math.gcd(source, target)
    num_out = int(len(samples) * up / down + 0.5)
    band = min(1.0, target / source)  # the lower Nyquist frequency, in the source's
    reach = math.ceil(REACH / band)
    padded = np.concatenate([np.zeros(reach), samples, np.zeros(reach + down)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1)
    made = np.empty(num_out)
    # output k = phase + j * up lies at k * down / up of the source's samples
    for phase in range(min(up, num_out)):
        whole, part = divmod(phase * down, up)
        at = np.arange(-reach, reach + 1) - part / up
        kernel = (
            band
            * np.sinc(band * at)
            * np.i0(16.0 * np.sqrt(np.clip(1 - (at / reach) ** 2, 0, 1)))
            / np.i0(16.0)
        )
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
    """dB by which the expected signal, with these gains, is stronger than what differs
    from it, in the passband."""
    length = min(len(made), len(expected))
    window = np.hanning(length)
    frequencies = np.fft.rfftfreq(length, 1 / rate) / (lower / 2)
    wanted = np.fft.rfft(expected[:length] * window) * np.interp(frequencies, TONES, gains)
    error = np.fft.rfft(made[:length] * window) - wanted
    band = frequencies <= PASSBAND
    return decibels(np.sum(np.abs(wanted[band]) ** 2) / np.sum(np.abs(error[band]) ** 2))


def decibels(power: Signal | float) -> Any:
    """Of a power, or of each of several."""
    return 10 * np.log10(np.maximum(power, 1e-20))


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
    measured = {
        "noise": snr(resample(voice), ideal(voice, source, target), target, lower, gains),
        "sweep": snr(resample(swept), ideal(swept, source, target), target, lower, gains),
        "ripple": np.abs(decibels(gains[TONES <= PASSBAND + 1e-9] ** 2)).max(),
        "left over": left_over(resample, source, target),
    }
    loudest = min(measured["noise"], measured["sweep"], -measured["left over"])
    return measured | {"clean": bool(loudest >= CLEAN_DB and measured["ripple"] <= RIPPLE_DB)}


def main() -> None:
    asked = options(__doc__, rounds=7)
    torch.set_num_threads(1)
    tables, results, others = [], [], 0.0
    for source, target in PAIRS:
        found, disturbed = compare(source, target, asked.rounds)
        tables.append(Table(f"{source:,} to {target:,} Hz", FIGURES))
        for name, figures in found.items():
            tables[-1].add(name, *map(figures.get, FIGURES))
        results.append(found)
        others = max(others, disturbed)
    about = f"torch {torch.__version__}, soxr {soxr.__version__}, 1 thread"
    said = [against_fastest(results, length) for length in LENGTHS]
    present(asked, about, *tables, *said, remark(others))


if __name__ == "__main__":
    main()
