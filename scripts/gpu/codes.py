"""Compare codes of full-size codecs on a device, at each precision and batching.

Three questions, for EnCodec, DAC and Mimi with random filters and spread codebooks, on
speech-like clips:

against the model alone   the model of transformers, run on each clip alone on the device
against the CPU           featcache on the CPU, on some of the clips
batching                  each policy at each precision, against every clip alone in fp32 on the same device

A mismatch is a code that differs by more than rounding explains; what differs else is a tie.
"""

from step import Step, main

# isort: split
from collections import Counter

import check_codecs
import numpy as np
import small_models
import torch

from featcache.care.compare import ROUNDING, SampledClip, compare_all, extract_results, tied_frames
from featcache.care.probe import Alone, try_batchings
from featcache.device import Device
from featcache.extractors.codec import CodecExtractor

CODECS = {"encodec": "encodec24k", "dac": "dac16k", "mimi": "mimi"}
"""Name -> that of `check_codecs.CODECS`."""
ON_THE_CPU = 3


def run(step: Step) -> None:
    for name in CODECS:
        step.attempt("codes", lambda name=name: check(step, name), codec=name)


def check(step: Step, name: str) -> None:
    rate = step.config(name).audio.sample_rate
    lengths = [0.3, 0.4] if step.small else np.random.default_rng(0).uniform(0.5, 15, 16).tolist()
    waveforms = (
        small_models.speech_like(length, rate, seed=number) for number, length in enumerate(lengths)
    )
    clips = [
        SampledClip(str(number), waveform.numpy()) for number, waveform in enumerate(waveforms)
    ]
    extractor = build(step, name)
    against_model(step, name, extractor, clips)
    against_cpu(step, name, extractor, clips)
    reference: Alone | None = None
    for precision in ("fp32", "tf32", "bf16"):
        if precision == "tf32" and not step.device.is_cuda:
            continue
        trials, alone = try_batchings(
            build(step, name, precision=precision), clips, step.device, precision, reference
        )
        reference = reference or alone
        for trial in trials:
            shown = (
                "mismatch",
                "tied",
                "disturbed",
                "relative",
                "repeatable",
                "times_real_time",
                "error",
            )
            figures = {figure: getattr(trial, figure) for figure in shown}
            step.record("batching", codec=name, precision=precision, policy=trial.policy, **figures)


def build(step: Step, name: str, **params: str) -> CodecExtractor:
    extractor = step.config(name, **params).build(step.device.torch_device)
    assert isinstance(extractor, CodecExtractor)
    return extractor


def against_model(
    step: Step, name: str, extractor: CodecExtractor, clips: list[SampledClip]
) -> None:
    """The model does not tell its latents, so noise of the size of rounding tells whether
    a frame was tied."""
    counts = Counter(codes=0, differing=0, mismatched=0)
    seen: set[int] = set()
    codec, device = check_codecs.CODECS[CODECS[name]], step.device.torch_device
    model = codec.load(step.config(name).params.weights).to(device)
    with step.device.slot():
        found = extract_results(extractor, clips, step.device)
        for clip, ours in zip(clips, found, strict=True):
            theirs = codec.encode(model, torch.from_numpy(clip.waveform).to(device)[None])[0]
            theirs = theirs[:, : ours.features.shape[1]].to(ours.features.device)
            frames = (ours.features != theirs).any(1)
            counts.update(codes=theirs.numel(), differing=int((ours.features != theirs).sum()))
            seen.update(theirs[:, 0].tolist())
            if frames.any():
                given = ours.latents[frames].float(), ours.features[frames], theirs[frames]
                tied = tied_frames(extractor.quantize, *given)
                counts["mismatched"] += int((given[1] != given[2])[~tied].sum())
    step.record("against the model alone", codec=name, **counts, distinct=len(seen))


def against_cpu(step: Step, name: str, extractor: CodecExtractor, clips: list[SampledClip]) -> None:
    some = sorted(clips, key=lambda clip: len(clip.waveform))[:ON_THE_CPU]
    cpu = Device("cpu", 1)
    with cpu.slot():
        expected = extract_results(step.config(name).build(cpu.torch_device), some, cpu)
    with step.device.slot():
        found = [result.cpu() for result in extract_results(extractor, some, step.device)]
    for rounding in (ROUNDING, 1e-4):
        apart = compare_all(found, expected, rounding)
        shown = {
            figure: getattr(apart, figure)
            for figure in ("differing", "mismatched", "disturbed", "relative")
        }
        step.record("against the CPU", codec=name, rounding=rounding, codes=apart.values, **shown)


if __name__ == "__main__":
    main(run, __doc__)
