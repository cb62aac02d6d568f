"""Checks of the number of frames of a clip, and of their values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from featcache.errors import AudioError
from featcache.extractors.base import Clip, Extractor, Params
from featcache.testing.compare import differing
from featcache.testing.setting import Setting, check, extract, hop_of
from featcache.testing.signals import UNUSUAL, unusual


class ValueChecks(Setting):
    """Frames as the extractor counts them, and values as it describes them."""

    def test_num_frames_counts_up_from_none(self, extractor: Extractor[Params], shortest: int) -> None:
        """A whole number, 0 for no samples, never less for more."""
        dense = min(shortest + 2 * hop_of(extractor) + 2, 20_000)
        longer = np.random.default_rng(1).integers(dense, dense + 10 * extractor.spec.sample_rate, 200)
        before = 0
        for n in [*range(dense), *sorted(longer.tolist())]:
            count = extractor.num_frames(n)
            assert type(count) is int, f"num_frames({n}) is {count!r}, and not an int"
            assert count == 0 or n > 0, f"num_frames(0) is {count}, and must be 0"
            assert count >= before, f"num_frames({n}) is {count}, though fewer samples have {before}"
            before = count

    def test_num_frames_is_what_extract_gives(self, extractor: Extractor[Params], around: list[Clip]) -> None:
        """At every length around the boundaries, and the values are such as `spec` says."""
        for one, found in zip(around, extract(extractor, around), strict=True):
            check(extractor, one, found)

    def test_the_frame_rate_is_that_of_the_frames(self, extractor: Extractor[Params], shortest: int) -> None:
        """Ten seconds more are as many frames more, where clips are long enough not to be padded."""
        expected = 10 * extractor.spec.frame_rate
        unpadded = max(shortest, extractor.spec.padded_to)
        longer = unpadded + 10 * extractor.spec.sample_rate
        found = extractor.num_frames(longer) - extractor.num_frames(unpadded)
        assert abs(found - expected) <= 2 + 0.02 * expected, (
            f"spec.frame_rate: {expected / 10:g} per second, but num_frames grows by {found} in 10 s"
        )

    def test_no_clips(self, extractor: Extractor[Params]) -> None:
        """None in, none out."""
        assert extract(extractor, []) == []

    @pytest.mark.parametrize("kind", UNUSUAL)
    def test_unusual_sound(self, extractor: Extractor[Params], shortest: int, kind: str) -> None:
        """Is extracted, or refused by an AudioError, which says why in the failure ledger."""
        for n in (shortest, shortest + hop_of(extractor) // 2 + 1, max(shortest, extractor.spec.sample_rate // 2)):
            one = unusual(kind, n, self.device)
            try:
                (found,) = extract(extractor, [one])
            except AudioError:
                continue
            check(extractor, one, found)

    def test_frame_length(self, extractor: Extractor[Params], shortest: int) -> None:
        """A sample is seen by the frames within `spec.frame_length` of it, and by no others."""
        spec, hop = extractor.spec, hop_of(extractor)
        num_samples = max(4 * spec.frame_length + 8 * hop + shortest, spec.padded_to)
        if spec.frame_length == 0 or num_samples > min(20.0, extractor.max_seconds or math.inf) * spec.sample_rate:
            pytest.skip("spec.frame_length is not finite, or too long to look at")
        one, other = (tensor.waveform for tensor in self._clips([num_samples] * 2))
        middle = num_samples // 2
        end, start = torch.cat([one[:middle], other[middle:]]), torch.cat([other[:middle], one[middle:]])
        clips = [Clip("frame-length", waveform) for waveform in (one, end, start)]
        whole, other_end, other_start = extract(extractor, clips)
        before = np.logical_or.accumulate(differing(other_end, whole, self.tolerance))
        after = np.logical_or.accumulate(differing(other_start, whole, self.tolerance)[::-1])[::-1]
        seen, allowed = int((before & after).sum()), math.ceil(spec.frame_length / hop)
        assert seen <= allowed, (
            f"spec.frame_length: {spec.frame_length} samples, so at most {allowed} frames see a sample, but {seen} "
            f"look at what is on either side of sample {middle}"
        )

    def test_reference(self, extractor: Extractor[Params], around: list[Clip]) -> None:
        """The values are those of the class's `reference`."""
        wanted = [np.asarray(self.reference(one.waveform.cpu().numpy())) for one in around]
        self._assert_near(extract(extractor, around), wanted, around, "those of the reference")
