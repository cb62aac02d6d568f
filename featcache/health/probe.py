"""A probe: some utterances of a manifest, at every precision and under every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from featcache.audio.waveform import WaveformMaker
from featcache.config import Config
from featcache.device import Device
from featcache.errors import AudioError, ManifestError, Reason
from featcache.extract.batching import precision_of
from featcache.extractors import Extractor, Params
from featcache.extractors.model import ModelExtractor
from featcache.extractors.rows import RowExtractor
from featcache.health.compare import compare_all
from featcache.health.probe_result import Chunks, Measured, Probe
from featcache.health.probe_trials import Alone, Trials, whole_clips
from featcache.health.sampling import Sampled, read, sample
from featcache.health.trial import compute, row_batches
from featcache.manifest import Manifest
from featcache.manifest.copies import expand
from featcache.store.version import library_versions

UTTERANCES = 32

LONGEST_SECONDS = 30.0
"""Longer utterances are cut to this; to three chunks, where the config has longer ones."""


def probe(
    config: Config,
    manifest: Manifest,
    device: Device,
    utterances: int = UTTERANCES,
    report: Callable[[str], object] = lambda what: None,
) -> Probe:
    """Measure what batching and precision do to a config's values.

    Args:
        config: as for extraction.
        manifest: whose utterances are sampled, over the whole spread of their lengths.
        device: to measure on.
        utterances: how many.
        report: called with the name of each precision, before it is measured.

    Raises:
        ConfigError: the extractor cannot be built.
        ManifestError: none of the sampled utterances can be extracted.
    """
    device.configure_torch()
    extractor = _build(config, device, config.params)
    clips, skipped = _sample(config, extractor, manifest, utterances)
    measured: list[Measured] = []
    rounding: dict[str, float] = {}
    chunks = None
    if isinstance(extractor, RowExtractor):
        reference: Alone | None = None
        for params in _precisions(config, device):
            report(precision_of(params))
            # One precision's weights at a time: the last one's are freed when the next one's have been loaded.
            extractor = _build(config, device, params)
            assert isinstance(extractor, RowExtractor)
            trials = Trials(extractor, clips, device, reference, precision_of(params))
            measured += trials.run()
            rounding[precision_of(params)] = trials.rounding
            reference = reference or Alone(trials.alone, trials.rounding)
        if getattr(config.params, "chunk", None) and reference:
            report("whole utterances")
            chunks = _chunks(config, clips, device, reference)
    else:
        measured = whole_clips(extractor, clips, device)
    seconds = [len(clip.waveform) / extractor.spec.sample_rate for clip in clips]
    return Probe(
        config=config.name,
        fingerprint=config.fingerprint(),
        extractor=config.extractor,
        declared=extractor.batching,
        precision=precision_of(config.params),
        device=device.label,
        threads=device.threads,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        made_by=library_versions(),
        utterances=len(clips),
        skipped=skipped,
        shortest=min(seconds),
        longest=max(seconds),
        seconds=sum(seconds),
        frames=sum(extractor.num_frames(len(clip.waveform)) for clip in clips),
        spec=extractor.spec,
        rounding=rounding,
        measured=measured,
        chunks=chunks,
    )


def _build(config: Config, device: Device, params: Params) -> Extractor[Params]:
    return replace(config, params=params).build(device.torch_device)


def _precisions(config: Config, device: Device) -> Iterator[Params]:
    """The config's parameters at each precision, fp32 first; as they are, where they name none."""
    if "precision" not in type(config.params).model_fields:
        yield config.params
        return
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        if precision != "tf32" or device.is_cuda:
            yield config.params.model_copy(update={"precision": precision})


def _sample(
    config: Config, extractor: Extractor[Params], manifest: Manifest, count: int
) -> tuple[list[Sampled], list[str]]:
    """The sample's waveforms, and what was wrong with those of it that cannot be extracted."""
    chunk = getattr(config.params, "chunk", None)
    longest = max(LONGEST_SECONDS, 3 * chunk.seconds if chunk else 0.0)
    longest = min(limit for limit in (longest, config.audio.max_seconds, extractor.max_seconds) if limit)
    clips: list[Sampled] = []
    faults: list[str] = []
    waveform_maker = WaveformMaker.of(config.audio, config.augment)
    for utterance in sample(expand(manifest, waveform_maker.copies), count):
        try:
            clip = read(manifest, utterance, waveform_maker, longest)
            if not extractor.num_frames(len(clip.waveform)):
                raise AudioError(Reason.TOO_SHORT, f"{len(clip.waveform)} samples are too few for one frame")
            if (row_extractor := extractor.as_row_extractor()) is not None:
                row_extractor.pieces(len(clip.waveform))
        except AudioError as error:
            faults.append(f"{utterance.id}: {error.reason}: {error}")
        else:
            clips.append(clip)
    if not clips:
        raise ManifestError(f"{manifest.source}: none of the utterances that were tried can be extracted: {faults[0]}")
    return clips, faults


def _chunks(config: Config, clips: Sequence[Sampled], device: Device, reference: Alone) -> Chunks:
    """What the config's chunks change."""
    params = config.params.model_copy(update={"precision": "fp32"})
    in_chunks = _build(config, device, params)
    assert isinstance(in_chunks, ModelExtractor)
    numbers = [number for number, clip in enumerate(clips) if len(in_chunks.pieces(len(clip.waveform))) > 1]
    exact = in_chunks.chunks_are_exact
    del in_chunks
    if not numbers:
        return Chunks(exact, 0, 0.0, 0.0, 0.0)
    whole = _build(config, device, params.model_copy(update={"chunk": None}))
    assert isinstance(whole, ModelExtractor)
    whole.chosen_batching = "single"
    long_clips = [clips[number] for number in numbers]
    values, _ = compute(whole, row_batches(whole, long_clips, device, None), device)
    total = compare_all(values, [reference.values[number] for number in numbers], reference.rounding)
    return Chunks(exact, len(numbers), total.differing / total.values, total.mismatched / total.values, total.relative)
