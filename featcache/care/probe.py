"""A probe: what batching and precision change in the values of some utterances, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from featcache.audio.waveform import WaveformMaker
from featcache.care.clips import SampledClip, read_clip, utterances_by_length
from featcache.care.compare import compare_all
from featcache.care.trials import Alone, Measured, compute_alone, try_batchings, whole_clips
from featcache.config import Config
from featcache.device import Device
from featcache.errors import AudioError, ConfigError, ManifestError, Reason
from featcache.extraction.padded_rows import precision_of
from featcache.extractors import Extractor, Params
from featcache.extractors.rows import RowExtractor
from featcache.manifest import Manifest
from featcache.manifest.copies import expand
from featcache.spec import FeatureSpec
from featcache.version.info import library_versions

UTTERANCES = 32

LONGEST_SECONDS = 30.0
"""Longer utterances are cut to this length, or to three chunks if these are longer."""


@dataclass(frozen=True)
class Chunks:
    """What cutting into chunks changes: each utterance in chunks, alone, in fp32, compared with the whole utterance."""

    exact: bool
    """Whether the overlap covers the model's receptive field, so that nothing may change."""
    utterances: int
    """How many utterances of the sample are longer than a chunk. If there is none, nothing was measured."""
    differing: float
    """The share of codes, or for float features of frames, that differ."""
    mismatch: float
    """The share that differs by more than rounding."""
    relative: float
    """The largest difference of a frame, relative in norm."""


@dataclass(frozen=True)
class Probe:
    """The result of a probe."""

    config: str
    fingerprint: str
    extractor: str
    """The extractor, as the config names it."""
    declared: str
    """The loosest batching that the extractor declares."""
    precision: str
    device: str
    threads: int
    date: str
    """When the probe was made: ISO 8601, in UTC."""
    made_by: dict[str, str]
    utterances: int
    skipped: list[str]
    """The utterances of the sample that could not be measured, each with the reason."""
    shortest: float
    """The length of the shortest utterance, in seconds."""
    longest: float
    """The length of the longest utterance, in seconds."""
    seconds: float
    """The length of all utterances together, in seconds."""
    frames: int
    spec: FeatureSpec
    """What the extractor's features are."""
    rounding: dict[str, float]
    """How much rounding may change a frame, relative in norm, by precision; empty if no bit may differ."""
    measured: list[Measured]
    chunks: Chunks | None
    """What chunks change; None if the config has none."""

    @property
    def fastest(self) -> Measured | None:
        """The fastest of the declared batchings, at any precision, of which no value is mismatched or disturbed."""
        measured = [trial for trial in self.measured if trial.is_declared and trial.error is None]
        clean = [trial for trial in measured if not trial.mismatch and not trial.disturbed]
        return max(clean, key=lambda trial: trial.times_real_time, default=None)

    def document(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {**asdict(self), "fastest": self.fastest and asdict(self.fastest)}


def probe(
    config: Config,
    manifest: Manifest,
    device: Device,
    utterances: int = UTTERANCES,
    report: Callable[[str], object] = lambda what: None,
) -> Probe:
    """Measure what batching and precision do to a config's values, on a device.

    So many of the manifest's utterances are sampled, over the whole range of their lengths. `report` is called with the
    name of each precision, before it is measured. Raises ConfigError if the extractor cannot be built; ManifestError if
    none of the sampled utterances can be extracted."""
    device.configure_torch()
    extractor = _build(config, device, config.params)
    clips, skipped = _sample(config, extractor, manifest, utterances)
    measured: list[Measured] = []
    rounding: dict[str, float] = {}
    chunks = None
    if extractor.as_row_extractor() is None:
        measured = whole_clips(extractor, clips, device)
    else:
        reference: Alone | None = None
        for params in _precisions(config, device):
            precision = precision_of(params)
            report(precision)
            # The weights of one precision at a time: they are freed when those of the next have been loaded.
            extractor = row_extractor = _build_rows(config, device, params)
            found, alone = try_batchings(row_extractor, clips, device, precision, reference)
            measured += found
            rounding[precision] = alone.rounding
            reference = reference or alone
        if getattr(config.params, "chunk", None) and reference:
            report("whole utterances")
            chunks = _chunks(config, clips, device, reference)
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


def _build_rows(config: Config, device: Device, params: Params) -> RowExtractor[Params]:
    """Build an extractor that takes rows with these parameters."""
    extractor = _build(config, device, params).as_row_extractor()
    if extractor is None:
        raise ConfigError(f"config {config.name}: {config.extractor} takes rows only with some parameters")
    return extractor


def _precisions(config: Config, device: Device) -> Iterator[Params]:
    """The config's parameters at each precision, fp32 first; only as they are if they name no precision."""
    if "precision" not in type(config.params).model_fields:
        yield config.params
        return
    for precision in ("fp32", "tf32", "bf16", "fp16"):
        if precision != "tf32" or device.is_cuda:
            yield config.params.model_copy(update={"precision": precision})


def _sample(
    config: Config, extractor: Extractor[Params], manifest: Manifest, count: int
) -> tuple[list[SampledClip], list[str]]:
    """The sampled utterances, and what is wrong with those that cannot be extracted."""
    chunk = getattr(config.params, "chunk", None)
    longest = max(LONGEST_SECONDS, 3 * chunk.seconds if chunk else 0.0)
    longest = min(limit for limit in (longest, config.audio.max_seconds, extractor.max_seconds) if limit)
    row_extractor = extractor.as_row_extractor()
    clips: list[SampledClip] = []
    faults: list[str] = []
    waveform_maker = WaveformMaker.of(config.audio, config.augment)
    for utterance in utterances_by_length(expand(manifest, waveform_maker.copies), count):
        try:
            clip = read_clip(manifest, utterance, waveform_maker, longest)
            if not extractor.num_frames(len(clip.waveform)):
                raise AudioError(Reason.TOO_SHORT, f"{len(clip.waveform)} samples are too few for one frame")
            if row_extractor is not None:
                row_extractor.pieces(len(clip.waveform))
        except AudioError as error:
            faults.append(f"{utterance.id}: {error.reason}: {error}")
        else:
            clips.append(clip)
    if not clips:
        raise ManifestError(f"{manifest.source}: none of the utterances that were tried can be extracted: {faults[0]}")
    return clips, faults


def _chunks(config: Config, clips: Sequence[SampledClip], device: Device, reference: Alone) -> Chunks:
    """Measure what the config's chunks change."""
    params = config.params.model_copy(update={"precision": "fp32"})
    in_chunks = _build_rows(config, device, params)
    numbers = [number for number, clip in enumerate(clips) if len(in_chunks.pieces(len(clip.waveform))) > 1]
    exact = in_chunks.chunks_are_exact
    del in_chunks
    if not numbers:
        return Chunks(exact, 0, 0.0, 0.0, 0.0)
    whole = _build_rows(config, device, params.model_copy(update={"chunk": None}))
    values = compute_alone(whole, [clips[number] for number in numbers], device)
    total = compare_all(values, [reference.results[number] for number in numbers], reference.rounding)
    return Chunks(exact, len(numbers), total.differing / total.values, total.mismatched / total.values, total.relative)
