"""Resampling: how fast, how clean, and what share of an extraction it is.

    pip install '.[extract,models,bench]'
    python scripts/bench/resample.py [--rounds 7] [--device cuda] [--no-shares] [--png P] [--json]

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

A share is of the worker threads' time in `run_extraction`, with fbank at the target's rate and with EnCodec for 24 kHz
at its full size with random weights (see `tokenizing.py`); it contains mixing down. Speeds and shares are medians.

Seen on one of 2 cores without a GPU, Python 3.11, torch 2.11, soxr 1.1: HQ is the fastest that is clean, at 13,900 ×
real time from 8 to 24 kHz, 7,270 × from 22.05 and 6,640 × from 44.1 to 16 kHz (clips of 0.43 s: 6,810, 3,250 and 3,090
×), with noise and sweep above 130 dB, -135 dB left over, and 0.008 dB of ripple. featcache ships it, and has 1.00 of
its speed on long clips, 0.97 on short ones. MQ is 5 % faster, and flat to 0.06 dB; VHQ takes 1.4 times as long.
torchaudio as it comes is flat to 2.4 dB, and leaves -10 dB of tones just outside the band; with kaiser_best 0.02 dB
and just 90 dB, at a tenth of HQ's speed upwards and half of it downwards, but 1.1 to 1.3 times it on short clips
downwards. Resampling's share is 0.04 to 0.26 % with EnCodec, and 17 to 39 % with fbank, which on a CPU costs little
more than it.
"""

from __future__ import annotations

import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch
from corpus import SPEECH, buzz, is_speech, speech_at, write_manifest
from harness import CORES, KEPT, columns, median, options, present, pyplot_for, quick_turns, remark
from numpy.typing import NDArray
from resample_quality import CLEAN_DB, RIPPLE_DB, Signal, is_clean, quality
from tokenizing import make_weights

from featcache.audio.resample import to_waveform
from featcache.config import AudioPolicy, Config, config_from
from featcache.engines.local import run_locally
from featcache.extraction.extraction import run_extraction
from featcache.extraction.plan import Options, plan_extraction
from featcache.manifest import read_manifest

PAIRS = ((8000, 24000), (22050, 16000), (44100, 16000))
SHORT, LONG = 0.43, 10.0  # seconds of a clip: of a spoken digit, of a sentence
BATCH = 16  # clips that torchaudio gets at once
ENCODEC_RATE = 24000
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


# What share


def shares(folder: Path, threads: int, rounds: int, seconds: float) -> list[dict]:
    """Resampling's part of the worker threads' time, with fbank and with a tokenizer."""
    weights = make_weights(folder)
    encodec = {"extractor": "encodec", "params": {"weights": str(weights), "bandwidth": 6.0}}
    runs = [(source, target, {"extractor": "fbank"}) for source, target in PAIRS]
    runs += [(source, ENCODEC_RATE, encodec) for source, _ in PAIRS]
    results = []
    for source, target, extractor in runs:
        config = config_from({"name": "share", **extractor, "audio": {"sample_rate": target}})
        length = seconds if extractor is encodec else 20 * seconds
        with tempfile.TemporaryDirectory(dir=folder) as name:
            manifest = _corpus(Path(name), source, length)
            found = [_stages(manifest, config, Path(name) / "cache", threads) for _ in range(rounds)]
        results.append(
            {
                "source": source,
                "target": target,
                "extractor": extractor["extractor"],
                "share": median([stages["resample"] for stages, _ in found]),
                "times_real_time": median([speed for _, speed in found]),
            }
        )
    return results


def _corpus(folder: Path, rate: int, seconds: float) -> Path:
    """16-bit WAV files of 10 s at some rate."""
    voice = np.resize(voice_at(rate), int(seconds * rate))
    rows = []
    for number, first in enumerate(range(0, len(voice), int(LONG * rate))):
        clip = voice[first : first + int(LONG * rate)]
        soundfile.write(folder / f"{number}.wav", clip, rate, subtype="PCM_16")
        rows.append((str(number), f"{number}.wav", f"{len(clip) / rate:.6f}"))
    write_manifest(folder / "manifest.csv", rows)
    return folder / "manifest.csv"


def _stages(manifest: Path, config: Config, cache: Path, threads: int) -> tuple[dict[str, float], float]:
    summary = run_extraction(
        plan_extraction(read_manifest(manifest), [config], cache, Options("cpu", threads)), run_locally
    )
    shutil.rmtree(cache)
    return summary.stages, summary.times_real_time


def voice_at(rate: int) -> NDArray[np.float32]:
    """Real speech, where it is there."""
    return speech_at(SPEECH, rate) if is_speech() else buzz(np.random.default_rng(0), rate)


# What comes of it


def fastest_clean(results: list[dict]) -> dict[str, str]:
    """The fastest that is clean in all pairs, on clips of either length, by the geometric mean of its speeds."""
    names = dict.fromkeys(result["name"] for result in results if result["name"] != SHIPPED)
    clean = [name for name in names if all(result["clean"] for result in results if result["name"] == name)]
    return {key: max(clean, key=lambda name: mean_speed(results, name, key)) for key in ("long", "short")}


def mean_speed(results: list[dict], name: str, key: str) -> float:
    speeds = [result[key] for result in results if result["name"] == name]
    return math.exp(sum(map(math.log, speeds)) / len(speeds))


def show(result: dict) -> str:
    results = result["resamplers"]
    head = [f"× real time, {LONG:g} s", f"{SHORT:g} s", *("speech", "noise", "sweep", "ripple", "flat to", "left over")]
    lines = [f"torch {torch.__version__}, soxr {soxr.__version__}, 1 thread"]
    for source, target in PAIRS:
        rows = [
            (each["name"], *(f"{each[key]:,.0f}" for key in ("long", "short")),
             *(f"{each[f'{what}_db']:.0f} dB" for what in ("speech", "noise", "sweep")),
             f"{each['ripple_db']:.4f} dB", f"{each['flat_to']:.2f}", f"{each['left_over_db']:.0f} dB",
             "clean" * each["clean"])
            for each in of_pair(results, source, target)
        ]  # fmt: skip
        lines.append(columns([f"{source:,} to {target:,} Hz", *head, ""], *rows))
    for key, seconds in (("long", LONG), ("short", SHORT)):
        name = fastest_clean(results)[key]
        ratio = mean_speed(results, SHIPPED, key) / mean_speed(results, name, key)
        lines.append(f"of {seconds:g} s: the fastest that is clean is {name}; featcache has {ratio:.2f} of its speed")
    for share in result["shares"]:
        line = f"{share['share']:7.2%} of {share['extractor']}, {share['source']:,} to {share['target']:,} Hz"
        lines.append(f"{line}, in a run at {share['times_real_time']:,.0f} × real time")
    return "\n".join([*lines, remark(max(each["others"] for each in results))])


def of_pair(results: list[dict], source: int, target: int) -> list[dict]:
    return [each for each in results if (each["source"], each["target"]) == (source, target)]


def draw(results: list[dict], path: Path) -> None:
    """Speed against quality, as a PNG."""
    if (pyplot := pyplot_for(path)) is None:
        return
    figure, all_axes = pyplot.subplots(1, len(PAIRS), figsize=(13, 4.5), sharey=True, layout="constrained")
    for axes, (source, target) in zip(all_axes, PAIRS, strict=True):
        for result in of_pair(results, source, target):
            worst = min(result["noise_db"], result["sweep_db"], -result["left_over_db"])
            axes.scatter(result["long"], worst, marker=_marker(result), label=result["name"])
        axes.axhline(CLEAN_DB, color="grey", linewidth=1, linestyle="--")
        axes.set(xlim=(0, None), xlabel=f"× real time, clips of {LONG:g} s", title=f"{source:,} to {target:,} Hz")
        axes.grid(alpha=0.3)
    all_axes[0].set_ylabel("dB: the worst of noise, sweep, what is left over")
    figure.suptitle("a cross: not flat to 0.01 dB; the dashed line: clean")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    figure.savefig(path, dpi=150)
    print(f"\n{path}", file=sys.stderr)


def _marker(result: dict) -> str:
    return "*" if result["name"] == SHIPPED else "o" if result["ripple_db"] <= RIPPLE_DB else "x"


def main() -> None:
    asked = options(
        __doc__,
        folder=KEPT,
        device=("cpu", "for torchaudio"),
        rounds=7,
        threads=(CORES, "of the runs whose shares are measured"),
        no_shares=(False, "only the resamplers by themselves"),
        share_seconds=(60.0, "of audio for EnCodec; fbank has 20 times it"),
        png=Path("bench_resample.png"),
    )
    asked.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    results = []
    for source, target in PAIRS:
        results += compare(source, target, voice_at(source), torch.device(asked.device), asked.rounds)
    of_runs = [] if asked.no_shares else shares(asked.folder, asked.threads, 3, asked.share_seconds)
    present({"resamplers": results, "shares": of_runs}, show, asked)
    draw(results, asked.png)


if __name__ == "__main__":
    main()
