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

noise       what it makes of speech, against the reference with the resampler's own response: dB by which that is
            stronger than the difference, which is what no filtering explains
sweep       as `noise`, of a sweep
ripple      the most by which it weakens or strengthens a tone
left over   of tones above the lower Nyquist frequency, or on the way up of the mirror images of tones below it
flat to     the part of the lower Nyquist frequency up to which tones lose no more than 0.1 dB

A resampler is called clean here, if noise and sweep are above 90 dB, what is left over is below -90 dB, and the ripple
is at most 0.01 dB. Rounding to 16 bits by itself leaves -98 dB of a loud sine; 0.01 dB move a log mel energy by 0.002,
which is half of float16's rounding.

Speeds are medians; docs/stories.md has figures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import soxr
import torch
from corpus import speech_at
from harness import Table, available, options, present, quick_turns, remark
from numpy.typing import NDArray
from resample_quality import Signal, is_clean, quality

from featcache.audio.resample import to_waveform
from featcache.config import AudioPolicy

PAIRS = ((8000, 24000), (22050, 16000), (44100, 16000))
SHORT, LONG = 0.43, 10.0  # seconds of a clip: of a spoken digit, of a sentence
BATCH = 16  # clips that torchaudio gets at once
SHIPPED = "featcache"
COLUMNS = (
    (f"× real time, {LONG:g} s", "{:,.0f}", "long"),
    (f"{SHORT:g} s", "{:,.0f}", "short"),
    ("noise", "{:.0f} dB", "noise_db"),
    ("sweep", "{:.0f} dB", "sweep_db"),
    ("ripple", "{:.4f} dB", "ripple_db"),
    ("flat to", "{:.2f}", "flat_to"),
    ("left over", "{:.0f} dB", "left_over_db"),
    ("clean", "{}", "clean"),
)
"""The figures of a table: their names, how they are written, and what they are in a result."""


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
    made = available({"soxr": _soxr, "torchaudio": _torchaudio, "scipy": _scipy}, source, target, device)
    return [candidate for of_package in made.values() for candidate in of_package]


def _each(one: Callable) -> Callable:
    return lambda clips: [one(clip) for clip in clips]


def _soxr(source: int, target: int, device: torch.device) -> list[Candidate]:
    policy = AudioPolicy(sample_rate=target)
    return [
        *(
            Candidate(f"soxr {name}", _each(lambda clip, name=name: soxr.resample(clip, source, target, name)))
            for name in ("LQ", "MQ", "HQ", "VHQ")
        ),
        Candidate(SHIPPED, _each(lambda clip: to_waveform(clip[:, None], source, policy))),
    ]


def _torchaudio(source: int, target: int, device: torch.device) -> list[Candidate]:
    from torchaudio.transforms import Resample

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


def _scipy(source: int, target: int, device: torch.device) -> list[Candidate]:
    from scipy.signal import resample_poly

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
        result |= {"clean": is_clean(result), "others": others}
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


def main() -> None:
    asked = options(__doc__, device=("cpu", "for torchaudio"), rounds=7)
    torch.set_num_threads(1)
    parts, results = [f"torch {torch.__version__}, soxr {soxr.__version__}, 1 thread"], []
    for source, target in PAIRS:
        found = compare(source, target, speech_at(source), torch.device(asked.device), asked.rounds)
        table = Table(f"{source:,} to {target:,} Hz", {head: text for head, text, _ in COLUMNS})
        for each in found:
            table.add(each["name"], *(each[key] for _, _, key in COLUMNS))
        parts.append(table)
        results += found
    for key, seconds in (("long", LONG), ("short", SHORT)):
        name = fastest_clean(results)[key]
        ratio = mean_speed(results, SHIPPED, key) / mean_speed(results, name, key)
        parts.append(f"of {seconds:g} s: the fastest that is clean is {name}; featcache has {ratio:.2f} of its speed")
    present(asked, *parts, remark(*(each["others"] for each in results)))


if __name__ == "__main__":
    main()
