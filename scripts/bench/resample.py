"""Resampling: how fast, and how clean.

    pip install '.[extract,bench]'
    python scripts/bench/resample.py [--rounds 7] [--device cuda] [--json]

From 8 to 24 kHz, from 22.05 and from 44.1 to 16 kHz, each of these takes turns, on one thread:

soxr         LQ, MQ, HQ and VHQ of libsoxr, clip by clip
featcache    `to_waveform` under the default policy: what a run does
torchaudio   `transforms.Resample`, which keeps its filters, on batches of 16 clips: as it comes, and with the settings
             that imitate librosa's kaiser_best; with --device cuda also there, waveforms and results on the GPU
scipy        `signal.resample_poly`, clip by clip

The reference is a sinc under a Kaiser window (beta 16) that reaches 1,024 samples of the lower rate to either side, in
float64. Up to 0.9 of the lower Nyquist frequency, these are measured:

speech      what it makes of speech, against the reference: dB by which that is stronger than the difference
noise       the same, but that the reference first gets the resampler's own response: what is no filtering is left
sweep       as `noise`, of a sweep
ripple      the most by which it weakens or strengthens a tone
left over   of tones above the lower Nyquist frequency, or on the way up of the mirror images of tones below it
flat to     the part of the lower Nyquist frequency up to which tones lose no more than 0.1 dB

A resampler is called clean here, if noise and sweep are above 90 dB, what is left over is below -90 dB, and the ripple
is at most 0.01 dB. Rounding to 16 bits by itself leaves -98 dB of a loud sine; 0.01 dB move a log mel energy by 0.002,
which is half of float16's rounding.

Speeds are medians.

Seen on one of 2 cores without a GPU, Python 3.11, torch 2.11, soxr 1.1: HQ is the fastest that is clean, at 13,900 ×
real time from 8 to 24 kHz, 7,270 × from 22.05 and 6,640 × from 44.1 to 16 kHz (clips of 0.43 s: 6,810, 3,250 and 3,090
×), with noise and sweep above 130 dB, -135 dB left over, and 0.008 dB of ripple. featcache ships it, and has 1.00 of
its speed on long clips, 0.97 on short ones. MQ is 5 % faster, and flat to 0.06 dB; VHQ takes 1.4 times as long.
torchaudio as it comes is flat to 2.4 dB, and leaves -10 dB of tones just outside the band; with kaiser_best 0.02 dB
and just 90 dB, at a tenth of HQ's speed upwards and half of it downwards, but 1.1 to 1.3 times it on short clips
downwards.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import soxr
import torch
from corpus import SPEECH, buzz, is_speech, speech_at
from harness import columns, options, present, quick_turns, remark
from numpy.typing import NDArray
from resample_quality import Signal, is_clean, quality

from featcache.audio.resample import to_waveform
from featcache.config import AudioPolicy

PAIRS = ((8000, 24000), (22050, 16000), (44100, 16000))
SHORT, LONG = 0.43, 10.0  # seconds of a clip: of a spoken digit, of a sentence
BATCH = 16  # clips that torchaudio gets at once
SHIPPED = "featcache"


@dataclass(frozen=True)
class Candidate:
    """A resampler for one pair of rates."""

    name: str
    clips: Callable
    """Resamples float32 `[clips, samples]`, which may lie on a GPU; this is what is timed."""
    prepare: Callable = lambda clips: clips
    """Makes the input of `clips` from a float32 array on the CPU."""
    back: Callable = lambda clips: clips
    """Brings the output back to the CPU."""

    def __call__(self, samples: NDArray[np.floating]) -> Signal:
        """One clip."""
        made = self.back(self.clips(self.prepare(samples.astype(np.float32)[None])))
        return np.asarray(made[0], np.float64)


def candidates(source: int, target: int, device: torch.device) -> list[Candidate]:
    """Every resampler that there is here."""
    policy = AudioPolicy(sample_rate=target)
    found = [
        Candidate(f"soxr {quality}", _each(lambda clip, quality=quality: soxr.resample(clip, source, target, quality)))
        for quality in ("LQ", "MQ", "HQ", "VHQ")
    ]
    found.append(Candidate(SHIPPED, _each(lambda clip: to_waveform(clip[:, None], source, policy))))
    return found + _torchaudio(source, target, device) + _scipy(source, target)


def _each(one: Callable) -> Callable:
    return lambda clips: [one(clip) for clip in clips]


def _torchaudio(source: int, target: int, device: torch.device) -> list[Candidate]:
    try:
        from torchaudio.transforms import Resample
    except ImportError as error:
        print(f"left out: {error}", file=sys.stderr)
        return []
    best = {
        "lowpass_filter_width": 64,
        "rolloff": 0.9475937167399596,
        "resampling_method": "sinc_interp_kaiser",
        "beta": 14.769656459379492,
    }
    found = []
    for where in dict.fromkeys(["cpu", device.type]):
        for name, settings in (("default", {}), ("kaiser_best", best)):
            transform = Resample(source, target, **settings).to(where)

            def run(clips: torch.Tensor, transform: Resample = transform) -> torch.Tensor:
                with torch.inference_mode():
                    made = transform(clips)
                if clips.is_cuda:
                    torch.cuda.synchronize()
                return made

            label = f"torchaudio {name}" + ("" if where == "cpu" else f", {where}")
            to = lambda clips, where=where: torch.from_numpy(clips).to(where)  # noqa: E731
            found.append(Candidate(label, run, to, lambda made: made.cpu().numpy()))
    return found


def _scipy(source: int, target: int) -> list[Candidate]:
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        print(f"left out: {error}", file=sys.stderr)
        return []
    common = math.gcd(source, target)
    return [Candidate("scipy", _each(lambda clip: resample_poly(clip, target // common, source // common)))]


# How fast


def compare(source: int, target: int, voice: NDArray[np.float32], device: torch.device, rounds: int) -> list[dict]:
    """Quality and speed of every resampler, in turns."""
    found = candidates(source, target, device)
    speech = voice[: 6 * source]
    results = [{"name": resampler.name, **quality(resampler, source, target, speech)} for resampler in found]
    others = 0.0
    for key, seconds in (("long", LONG), ("short", SHORT)):
        clips = np.resize(voice, (BATCH, int(seconds * source)))
        runs = {resampler.name: partial(resampler.clips, resampler.prepare(clips)) for resampler in found}
        quick_turns(runs, 1, 1)  # which warms up
        turns = quick_turns(runs, rounds, 1)
        others = max(others, turns.others)
        for result in results:
            result[key] = BATCH * seconds / turns.median(result["name"])
    for result in results:
        result |= {"source": source, "target": target, "clean": is_clean(result), "others": others}
    return results


# What comes of it


def fastest_clean(results: list[dict]) -> dict[str, str]:
    """The fastest that is clean in all pairs, on clips of either length, by the geometric mean of its speeds."""
    names = dict.fromkeys(result["name"] for result in results if result["name"] != SHIPPED)
    clean = [name for name in names if all(result["clean"] for result in results if result["name"] == name)]
    return {key: max(clean, key=lambda name: mean_speed(results, name, key)) for key in ("long", "short")}


def mean_speed(results: list[dict], name: str, key: str) -> float:
    speeds = [result[key] for result in results if result["name"] == name]
    return math.exp(sum(map(math.log, speeds)) / len(speeds))


def show(results: list[dict]) -> str:
    head = [f"× real time, {LONG:g} s", f"{SHORT:g} s", *("speech", "noise", "sweep", "ripple", "flat to", "left over")]
    lines = [f"torch {torch.__version__}, soxr {soxr.__version__}, 1 thread"]
    for source, target in PAIRS:
        rows = [
            (each["name"], *(f"{each[key]:,.0f}" for key in ("long", "short")),
             *(f"{each[f'{what}_db']:.0f} dB" for what in ("speech", "noise", "sweep")),
             f"{each['ripple_db']:.4f} dB", f"{each['flat_to']:.2f}", f"{each['left_over_db']:.0f} dB",
             "clean" * each["clean"])
            for each in results
            if (each["source"], each["target"]) == (source, target)
        ]  # fmt: skip
        lines.append(columns([f"{source:,} to {target:,} Hz", *head, ""], *rows))
    for key, seconds in (("long", LONG), ("short", SHORT)):
        name = fastest_clean(results)[key]
        ratio = mean_speed(results, SHIPPED, key) / mean_speed(results, name, key)
        lines.append(f"of {seconds:g} s: the fastest that is clean is {name}; featcache has {ratio:.2f} of its speed")
    return "\n".join([*lines, remark(max(each["others"] for each in results))])


def main() -> None:
    asked = options(__doc__, device=("cpu", "for torchaudio"), rounds=7)
    torch.set_num_threads(1)
    results = []
    for source, target in PAIRS:
        voice = speech_at(SPEECH, source) if is_speech() else buzz(np.random.default_rng(0), source)
        results += compare(source, target, voice, torch.device(asked.device), asked.rounds)
    present(results, show, asked)


if __name__ == "__main__":
    main()
