"""Resampling: how fast, and how clean.

    pip install '.[extract,bench]'
    python scripts/bench/resample.py [--rounds 7] [--json]

From 8 to 24 kHz, from 22.05 and from 44.1 to 16 kHz, each of these takes turns, on one thread:

soxr         LQ, MQ, HQ and VHQ of libsoxr, clip by clip
featcache    `to_waveform` under the default policy: what a run does
torchaudio   `transforms.Resample`, which keeps its filters, on batches of 16 clips: as it comes, and with the settings
             that imitate librosa's kaiser_best
scipy        `signal.resample_poly`, clip by clip

The reference is a sinc under a Kaiser window (beta 16) that reaches 1,024 samples of the lower rate to either side, in
float64. Up to 0.9 of the lower Nyquist frequency, these are measured:

noise       what it makes of speech, against the reference with the resampler's own response: dB by which that is
            stronger than the difference, which is what no filtering explains
sweep       as `noise`, of a sweep
ripple      the most by which it weakens or strengthens a tone
left over   of tones above the lower Nyquist frequency, or on the way up of the mirror images of tones below it

A resampler is called clean here, if noise and sweep are above 90 dB, what is left over is below -90 dB, and the ripple
is at most 0.01 dB. Rounding to 16 bits by itself leaves -98 dB of a loud sine; 0.01 dB move a log mel energy by 0.002,
which is half of float16's rounding. Speeds are medians.
"""

import math
from collections.abc import Callable, Sequence
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
LENGTHS = {"long": 10.0, "short": 0.43}
"""Seconds of a clip: of a sentence, and of a spoken digit."""
BATCH = 16
"""Clips that are resampled in a call."""
SHIPPED = "featcache"
COLUMNS = (
    ("× real time, 10 s", "{:,.0f}", "long"),
    ("0.43 s", "{:,.0f}", "short"),
    ("noise", "{:.0f} dB", "noise_db"),
    ("sweep", "{:.0f} dB", "sweep_db"),
    ("ripple", "{:.4f} dB", "ripple_db"),
    ("left over", "{:.0f} dB", "left_over_db"),
    ("clean", "{}", "clean"),
)
"""The figures of a table: their names, how they are written, and what they are in a result."""

Resampler = Callable[[NDArray[np.float32]], Sequence]
"""Resamples clips `[clips, samples]`, one by one or all at once."""


def resamplers(source: int, target: int) -> dict[str, Resampler]:
    """Every resampler that there is here."""
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

    best = {
        "lowpass_filter_width": 64,
        "rolloff": 0.9475937167399596,
        "resampling_method": "sinc_interp_kaiser",
        "beta": 14.769656459379492,
    }
    transforms = {"default": Resample(source, target), "kaiser_best": Resample(source, target, **best)}

    @torch.inference_mode()
    def run(transform: Resample, clips: NDArray[np.float32]) -> torch.Tensor:
        return transform(torch.from_numpy(clips))

    return {f"torchaudio {name}": partial(run, transform) for name, transform in transforms.items()}


def _scipy(source: int, target: int) -> dict[str, Resampler]:
    from scipy.signal import resample_poly

    common = math.gcd(source, target)
    return {"scipy": _each(lambda clip: resample_poly(clip, target // common, source // common))}


def compare(source: int, target: int, rounds: int) -> list[dict]:
    """Quality and speed of every resampler, in turns."""
    found, voice = resamplers(source, target), speech_at(source)

    def one_clip(run: Resampler, samples: Signal) -> Signal:
        return np.asarray(run(samples.astype(np.float32)[None])[0], np.float64)

    results = [
        {"name": name, **quality(partial(one_clip, run), source, target, voice[: 6 * source])}
        for name, run in found.items()
    ]
    others = 0.0
    for length, seconds in LENGTHS.items():
        clips = np.resize(voice, (BATCH, int(seconds * source)))
        runs = {name: partial(run, clips) for name, run in found.items()}
        quick_turns(runs, 1, 1)  # which warms up
        turns = quick_turns(runs, rounds, 1)
        others = max(others, turns.others)
        for result in results:
            result[length] = BATCH * seconds / turns.median(result["name"])
    return [result | {"clean": is_clean(result), "others": others} for result in results]


def against_fastest(results: list[dict], length: str) -> str:
    """The fastest that is clean in all pairs, on clips of a length, by the geometric mean of its speeds."""

    def speed(name: str) -> float:
        return math.exp(np.mean([math.log(result[length]) for result in results if result["name"] == name]))

    unclean = {result["name"] for result in results if not result["clean"]}
    clean = {result["name"] for result in results} - unclean - {SHIPPED}
    fastest = max(clean, key=speed)
    return (
        f"of {LENGTHS[length]:g} s: the fastest that is clean is {fastest}; "
        f"featcache has {speed(SHIPPED) / speed(fastest):.2f} of its speed"
    )


def main() -> None:
    asked = options(__doc__, rounds=7)
    torch.set_num_threads(1)
    tables, results = [], []
    for source, target in PAIRS:
        found = compare(source, target, asked.rounds)
        table = Table(f"{source:,} to {target:,} Hz", {head: text for head, text, _ in COLUMNS})
        for each in found:
            table.add(each["name"], *(each[key] for _, _, key in COLUMNS))
        tables.append(table)
        results += found
    about = f"torch {torch.__version__}, soxr {soxr.__version__}, 1 thread"
    said = [against_fastest(results, length) for length in LENGTHS]
    present(asked, about, *tables, *said, remark(*(each["others"] for each in results)))


if __name__ == "__main__":
    main()
