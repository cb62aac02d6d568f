"""What batching and precision do to an extractor's values, measured on this device with some utterances.

The reference is each utterance alone, at its own length, in fp32: how a model is run by hand. Every policy and
precision is held to it. So that batches are as full as a corpus makes them, though the sample is small, an utterance
is computed among strangers: cuts of the other utterances, as long as the policy lets the rows of a batch be. Each is
computed twice: once to warm up, and once for the time, among other strangers.

Rounding is measured, too: what becomes of an utterance among copies of itself, in the shape of a batch and with nothing
beside it that could disturb it. Four times the largest difference that this makes, and at least `_ROUNDING`, is taken
for rounding at that precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import cycle
from typing import Any

import torch

from featcache.config import Config
from featcache.device import Device
from featcache.differences import ROUNDING, Difference, Values, difference
from featcache.errors import AudioError, ExtractorError, FeatcacheError, ManifestError, Reason
from featcache.extractors import Extractor, Params
from featcache.extractors.base import Batching
from featcache.extractors.model import ModelExtractor
from featcache.extractors.rows import RowExtractor
from featcache.manifest import Manifest
from featcache.policy import POLICIES, declared, precision_of
from featcache.provenance import library_versions
from featcache.sampling import Sampled, read, sample
from featcache.spec import FeatureSpec
from featcache.trial import Batch, clips_in_batch, compute, row_batches

UTTERANCES = 32

LONGEST_SECONDS = 30.0
"""Longer utterances are cut to this; to three chunks, where the config has longer ones."""

_ROUNDING = {"fp32": ROUNDING, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""At least: below fp32, half a unit in the last place."""

_LARGEST_ROUNDING = 1e-3
"""In fp32. What differs by more among copies of itself does not round."""


@dataclass(frozen=True)
class Measured:
    """How one policy fared at one precision. Shares are of codes; for float features, of frames.

    Attributes:
        policy: `single`, `equal_length`, `padded`; of extractors without rows, `single` and their `batching`.
        precision: `fp32`, `tf32`, `bf16`, `fp16`.
        is_declared: whether the extractor declares that it can stand the policy.
        error: why it could not be measured; None where it was.
        differing: the share that differs from the reference.
        tied: of it, what rounding accounts for.
        mismatch: of it, what rounding does not account for.
        disturbed: the share of frames whose latents or features batching moves by more than rounding: held to each
            utterance alone at this same precision. Of codes without known latents, those in which a code differs. A
            code may stay what it is though its frame is disturbed, as in the silence at the end of a clip; in another
            clip it will not.
        relative: the largest difference of a frame from the reference, relative in norm: of its latents, where codes
            have them, or its features.
        absolute: the largest difference of any number in them.
        first: disturbed frames are within so many frames of their utterance's beginning.
        last: and within so many of its end.
        repeatable: whether other strangers left every bit alone; None of utterances alone.
        times_real_time: seconds of audio in a second.
    """

    policy: str
    precision: str
    is_declared: bool
    error: str | None = None
    differing: float = 0.0
    tied: float = 0.0
    mismatch: float = 0.0
    disturbed: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0
    first: int = 0
    last: int = 0
    repeatable: bool | None = None
    times_real_time: float = 0.0


@dataclass(frozen=True)
class Chunks:
    """What cutting into chunks changes: each utterance in chunks, alone, in fp32, against the whole of it.

    Attributes:
        exact: whether the overlap holds the model's receptive field, so that nothing may change.
        utterances: of the sample that are longer than a chunk; without any, nothing was measured.
        differing: the share of codes, or frames, that differs.
        mismatch: of it, what rounding does not account for.
        relative: the largest difference of a frame, relative in norm.
    """

    exact: bool
    utterances: int
    differing: float
    mismatch: float
    relative: float


@dataclass(frozen=True)
class Probe:
    """What a probe found.

    Attributes:
        config: its name.
        fingerprint: of the version that it fills.
        extractor: as the config names it.
        declared: the loosest policy that the extractor declares.
        precision: the config's.
        device: its name.
        threads: that computed.
        date: ISO 8601, in UTC.
        made_by: the versions of featcache and of the libraries.
        utterances: how many were measured.
        skipped: those of the sample that could not be, each with the reason.
        shortest: seconds.
        longest: seconds.
        seconds: of audio.
        frames: of all utterances.
        spec: of the extractor's features.
        rounding: what it may do to a frame, relative in norm, by precision; empty where no bit may differ.
        measured: one entry for each policy and precision.
        chunks: what chunks change; None where the config has none.
    """

    config: str
    fingerprint: str
    extractor: str
    declared: str
    precision: str
    device: str
    threads: int
    date: str
    made_by: dict[str, str]
    utterances: int
    skipped: list[str]
    shortest: float
    longest: float
    seconds: float
    frames: int
    spec: FeatureSpec
    rounding: dict[str, float]
    measured: list[Measured]
    chunks: Chunks | None

    @property
    def fastest(self) -> Measured | None:
        """The fastest of the declared policies, at any precision, under which nothing is mismatched or disturbed."""
        able = [one for one in self.measured if one.is_declared and one.error is None]
        clean = [one for one in able if not one.mismatch and not one.disturbed]
        return max(clean, key=lambda one: one.times_real_time, default=None)

    def document(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {**asdict(self), "fastest": self.fastest and asdict(self.fastest)}


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
    extractor = _build(config, device, config.params)
    clips, skipped = _sample(config, extractor, manifest, utterances)
    measured: list[Measured] = []
    rounding: dict[str, float] = {}
    chunks = None
    if isinstance(extractor, RowExtractor):
        reference: _Alone | None = None
        for params in _precisions(config, device):
            report(precision_of(params))
            # One precision's weights at a time: the last one's are freed when the next one's have been loaded.
            extractor = _build(config, device, params)
            assert isinstance(extractor, RowExtractor)
            trials = _Trials(extractor, clips, device, reference, precision_of(params))
            measured += trials.run()
            rounding[precision_of(params)] = trials.rounding
            reference = reference or _Alone(trials.alone, trials.rounding)
        if getattr(config.params, "chunk", None) and reference:
            report("whole utterances")
            chunks = _chunks(config, clips, device, reference)
    else:
        measured = _whole_clips(extractor, clips, device)
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
    for utterance in sample(manifest, count):
        try:
            clip = read(manifest, utterance, config.audio, longest)
            if not extractor.num_frames(len(clip.waveform)):
                raise AudioError(Reason.TOO_SHORT, f"{len(clip.waveform)} samples are too few for one frame")
            if isinstance(extractor, RowExtractor):
                extractor.pieces(len(clip.waveform))
        except AudioError as error:
            faults.append(f"{utterance.id}: {error.reason}: {error}")
        else:
            clips.append(clip)
    if not clips:
        raise ManifestError(f"{manifest.source}: none of the utterances that were tried can be extracted: {faults[0]}")
    return clips, faults


@dataclass(frozen=True)
class _Alone:
    """Each clip's values, alone at one precision, and what rounding may do to them."""

    values: list[Values]
    rounding: float


class _Trials:
    """Every policy at one precision.

    Args:
        extractor: at the precision.
        clips: the sample.
        device: to measure on.
        reference: in fp32; None where this makes it.
        precision: its name.

    Attributes:
        alone: each clip's values, alone at this precision.
        rounding: what it may do to a frame, relative in norm.
    """

    def __init__(
        self,
        extractor: RowExtractor[Params],
        clips: Sequence[Sampled],
        device: Device,
        reference: _Alone | None,
        precision: str,
    ) -> None:
        self.alone: list[Values] = []
        self.rounding = _ROUNDING[precision]
        self._extractor = extractor
        self._clips = clips
        self._device = device
        self._reference = reference
        self._precision = precision

    def run(self) -> Iterator[Measured]:
        """Yield how each policy fares: the declared ones, and in fp32 the others, too."""
        can_stand = declared(self._extractor)
        for policy in can_stand if self._reference else POLICIES:
            is_declared = policy in can_stand
            self._extractor.policy = policy
            try:
                yield self._measure(policy, is_declared)
            except (RuntimeError, FeatcacheError) as error:  # no device can do everything at every precision
                if is_declared and not self._reference:
                    raise
                yield Measured(policy, self._precision, is_declared, error=str(error).partition("\n")[0])
                if policy == "single":
                    return  # there is nothing to hold the others to

    def _measure(self, policy: Batching, is_declared: bool) -> Measured:
        first, _ = self._compute(None if policy == "equal_length" else 1)
        second, times_real_time = self._compute(2)
        if policy == "single":
            self.alone = first
        if policy == "equal_length":
            self._set_rounding(first)
        reference = self._reference or _Alone(self.alone, self.rounding)
        found = [*first, *second]
        total = _total(reference.values, found, reference.rounding)
        if not math.isfinite(total.relative):
            raise ExtractorError(f"values at {self._precision} are NaN or infinite")
        by_batching = _total(self.alone, found, self.rounding)
        return Measured(
            policy=policy,
            precision=self._precision,
            is_declared=is_declared,
            differing=total.differing / total.values,
            tied=(total.differing - total.mismatched) / total.values,
            mismatch=total.mismatched / total.values,
            disturbed=by_batching.disturbed / by_batching.frames,
            relative=total.relative,
            absolute=total.absolute,
            first=by_batching.first,
            last=by_batching.last,
            repeatable=None if policy == "single" else _same_bits(first, second),
            times_real_time=times_real_time,
        )

    def _set_rounding(self, among_copies: Sequence[Values]) -> None:
        if self.alone[0].compared.is_floating_point():
            measured = 4 * _total(self.alone, among_copies, math.inf).relative
            self.rounding = max(self.rounding, min(measured, math.inf if self._reference else _LARGEST_ROUNDING))

    def _compute(self, seed: int | None) -> tuple[list[Values], float]:
        """Each clip's values in its batch, and × real time; in smaller batches where they do not fit on the device."""
        try:
            batches = row_batches(self._extractor, self._clips, self._device, seed)
            return compute(self._extractor, batches, self._device)
        except torch.OutOfMemoryError:
            longest = max(len(clip.waveform) for clip in self._clips)
            rows = max(clips_in_batch(self._extractor, len(clip.waveform), self._device) for clip in self._clips)
            length = self._extractor.padded_length(longest)
            if rows == 1 or not self._extractor.shrink(rows, length, self._device.torch_device):
                raise
        torch.cuda.empty_cache()
        return self._compute(seed)


def _chunks(config: Config, clips: Sequence[Sampled], device: Device, reference: _Alone) -> Chunks:
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
    whole.policy = "single"
    long_clips = [clips[number] for number in numbers]
    values, _ = compute(whole, row_batches(whole, long_clips, device, None), device)
    total = _total(values, [reference.values[number] for number in numbers], reference.rounding)
    return Chunks(exact, len(numbers), total.differing / total.values, total.mismatched / total.values, total.relative)


def _whole_clips(extractor: Extractor[Params], clips: Sequence[Sampled], device: Device) -> list[Measured]:
    """Of an extractor that takes clips as they are: alone, all at once, and in the opposite order in two batches.

    It promises the same bits: none may differ.
    """
    every = range(len(clips))
    alone, alone_speed = _compute_clips(extractor, clips, [[number] for number in every], device)
    together, _ = _compute_clips(extractor, clips, [list(every)], device)
    halves = [list(every)[::-1][first::2] for first in range(min(2, len(clips)))]
    reordered, speed = _compute_clips(extractor, clips, halves, device)
    total = _total(alone, [*together, *reordered], 0.0)
    share = total.differing / total.values
    batched = Measured(
        policy=extractor.batching,
        precision="fp32",
        is_declared=True,
        differing=share,
        mismatch=share,
        disturbed=share,
        relative=total.relative,
        absolute=total.absolute,
        first=total.first,
        last=total.last,
        repeatable=_same_bits(together, reordered),
        times_real_time=speed,
    )
    return [Measured("single", "fp32", is_declared=True, times_real_time=alone_speed), batched]


def _compute_clips(
    extractor: Extractor[Params], clips: Sequence[Sampled], groups: Sequence[Sequence[int]], device: Device
) -> tuple[list[Values], float]:
    rate = extractor.spec.sample_rate
    batches = [
        Batch(
            clips=[clips[number] for number in group],
            wanted=dict(enumerate(group)),
            seconds=sum(len(clips[number].waveform) for number in group) / rate,
        )
        for group in groups
    ]
    return compute(extractor, batches, device)


def _total(reference: Sequence[Values], found: Sequence[Values], rounding: float) -> Difference:
    """Over all clips; `found` may hold them several times over."""
    pairs = zip(found, cycle(reference), strict=False)
    return sum((difference(one, other, rounding) for one, other in pairs), Difference())


def _same_bits(one: Sequence[Values], other: Sequence[Values]) -> bool:
    return all(torch.equal(a.features, b.features) for a, b in zip(one, other, strict=True))
