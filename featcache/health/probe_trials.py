"""Every policy at one precision, compared with each utterance alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch

from featcache.device import Device
from featcache.errors import ExtractorError, FeatcacheError
from featcache.extract.batching import BATCHINGS, declared_batchings
from featcache.extractors import Extractor, Params
from featcache.extractors.base import Batching
from featcache.extractors.rows import RowExtractor
from featcache.health.differences import ROUNDING, Difference, Values, difference
from featcache.health.probe_result import Measured
from featcache.health.sampling import Sampled
from featcache.health.trial import Batch, clips_in_batch, compute, row_batches

_ROUNDING = {"fp32": ROUNDING, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""At least: below fp32, half a unit in the last place."""

_LARGEST_ROUNDING = 1e-3
"""In fp32. What differs by more among copies of itself does not round."""


@dataclass(frozen=True)
class Alone:
    """Each clip's values, alone at one precision, and what rounding may do to them."""

    values: list[Values]
    rounding: float


class Trials:
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
        reference: Alone | None,
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
        can_stand = declared_batchings(self._extractor)
        for policy in can_stand if self._reference else BATCHINGS:
            is_declared = policy in can_stand
            self._extractor.chosen_batching = policy
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
        reference = self._reference or Alone(self.alone, self.rounding)
        found = [*first, *second]
        total = total_difference(reference.values, found, reference.rounding)
        if not math.isfinite(total.relative):
            raise ExtractorError(f"values at {self._precision} are NaN or infinite")
        by_batching = total_difference(self.alone, found, self.rounding)
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
            measured = 4 * total_difference(self.alone, among_copies, math.inf).relative
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


def whole_clips(extractor: Extractor[Params], clips: Sequence[Sampled], device: Device) -> list[Measured]:
    """Of an extractor that takes clips as they are: alone, all at once, and in the opposite order in two batches.

    It promises the same bits: none may differ.
    """
    every = range(len(clips))
    alone, alone_speed = _compute_clips(extractor, clips, [[number] for number in every], device)
    together, _ = _compute_clips(extractor, clips, [list(every)], device)
    halves = [list(every)[::-1][first::2] for first in range(min(2, len(clips)))]
    reordered, speed = _compute_clips(extractor, clips, halves, device)
    total = total_difference(alone, [*together, *reordered], 0.0)
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


def total_difference(reference: Sequence[Values], found: Sequence[Values], rounding: float) -> Difference:
    """Over all clips; `found` may hold them several times over."""
    pairs = zip(found, cycle(reference), strict=False)
    return sum((difference(one, other, rounding) for one, other in pairs), Difference())


def _same_bits(one: Sequence[Values], other: Sequence[Values]) -> bool:
    return all(torch.equal(a.features, b.features) for a, b in zip(one, other, strict=True))
