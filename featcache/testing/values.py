"""Checks of the features of a clip: how many, in which form, and which values."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from featcache.errors import AudioError
from featcache.extractors import Clip, Extractor
from featcache.extractors.base import tracks_by_name
from featcache.testing.checks import Alone, Checks
from featcache.testing.clips import (
    UNUSUAL,
    AnyExtractor,
    Features,
    differing_frames,
    extract,
    hop_of,
    label,
)


class Values(Checks):
    """Checks of the number of frames, their form and their values."""

    def reference(self, waveform: NDArray[np.float32]) -> Features:
        """Compute the features `[frames, *item_shape]` of one waveform `[num_samples]` in a
        slow and obvious way."""
        pytest.skip("the class has no reference")

    def test_num_frames_counts_up_from_none(self, extractor: AnyExtractor, shortest: int) -> None:
        """The number of frames is a whole number, 0 for no samples, and never falls."""
        dense = min(shortest + 2 * hop_of(extractor) + 2, 20_000)
        longest = dense + 10 * extractor.spec.sample_rate
        longer = np.random.default_rng(1).integers(dense, longest, 200)
        before = 0
        for n in [*range(dense), *sorted(longer.tolist())]:
            count = extractor.num_frames(n)
            assert type(count) is int, f"num_frames({n}) is {count!r}, and not an int"
            assert count == 0 or n > 0, f"num_frames(0) is {count}, and must be 0"
            assert count >= before, f"num_frames({n}) is {count}; fewer samples have {before}"
            before = count

    def test_num_frames_is_what_extract_gives(
        self, extractor: AnyExtractor, around: list[Clip]
    ) -> None:
        """Clips have the counted frames, with values as `spec` describes them."""
        for clip, values in zip(around, extract(extractor, around), strict=True):
            check_features(extractor, clip, values)

    def test_the_frame_rate_is_that_of_the_frames(
        self, extractor: AnyExtractor, shortest: int
    ) -> None:
        """The frames of ten more seconds fit the rate, in clips that need no padding."""
        if not extractor.spec.axis.exact_rate:
            pytest.skip("the main track is not along time")
        expected = 10 * extractor.spec.frame_rate
        unpadded = max(shortest, extractor.spec.padded_to)
        longer = unpadded + 10 * extractor.spec.sample_rate
        growth = extractor.num_frames(longer) - extractor.num_frames(unpadded)
        assert abs(growth - expected) <= 2 + 0.02 * expected, (
            f"spec.frame_rate: {expected / 10:g} per second, but num_frames grows by "
            f"{growth} in 10 s"
        )

    def test_no_clips(self, extractor: AnyExtractor) -> None:
        """Without clips, the list is empty."""
        assert extract(extractor, []) == []

    @pytest.mark.parametrize("kind", UNUSUAL)
    def test_unusual_sound(self, extractor: AnyExtractor, shortest: int, kind: str) -> None:
        """Unusual sound is extracted, or refused by an AudioError."""
        odd_length = shortest + hop_of(extractor) // 2 + 1
        half_second = max(shortest, extractor.spec.sample_rate // 2)
        for n in (shortest, odd_length, half_second):
            clip = Clip(kind.replace(" ", "-"), UNUSUAL[kind](torch.arange(n)).to(self.device))
            with suppress(AudioError):
                check_features(extractor, clip, extract(extractor, [clip])[0])

    def test_frame_length(self, extractor: AnyExtractor, shortest: int) -> None:
        """A sample changes only the frames within `spec.frame_length` of it."""
        spec, hop = extractor.spec, hop_of(extractor)
        num_samples = max(4 * spec.frame_length + 8 * hop + shortest, spec.padded_to)
        longest = min(20.0, extractor.max_seconds or math.inf) * spec.sample_rate
        if spec.frame_length == 0 or num_samples > longest:
            pytest.skip("spec.frame_length is not finite, or too long to look at")
        if type(extractor).prepare is not Extractor.prepare:
            pytest.skip("every frame depends on what `prepare` takes from the whole clip")
        first, second = (clip.waveform for clip in self._clips([num_samples] * 2))
        middle = num_samples // 2
        end = torch.cat([first[:middle], second[middle:]])
        start = torch.cat([second[:middle], first[middle:]])
        clips = [Clip("cut", waveform) for waveform in (first, end, start)]
        whole, other_end, other_start = extract(extractor, clips)
        wrong_end = differing_frames(other_end, whole, self.tolerance)
        wrong_start = differing_frames(other_start, whole, self.tolerance)
        before = np.logical_or.accumulate(wrong_end)
        after = np.logical_or.accumulate(wrong_start[::-1])[::-1]
        seen, allowed = int((before & after).sum()), math.ceil(spec.frame_length / hop)
        assert seen <= allowed, (
            f"spec.frame_length: {spec.frame_length} samples, so at most {allowed} frames "
            f"see a sample, but {seen} look to both sides of sample {middle}"
        )

    def test_reference(self, extractor: AnyExtractor, around: list[Clip]) -> None:
        """The values are those of the class's `reference`."""
        as_entries = extractor.spec.axis.as_entries
        references = [self.reference(clip.waveform.cpu().numpy()) for clip in around]
        expected = [as_entries(np.asarray(reference)) for reference in references]
        self._assert_near(extract(extractor, around), expected, around, "those of the reference")

    def test_tracks(self, alone: Alone) -> None:
        """`extract` gives each track of the spec, the same for a clip alone and among
        others."""
        extractor, clips = alone.extractor, alone.clips
        with torch.inference_mode():
            together = extractor.extract(clips)
            one_by_one = [extractor.extract([clip])[0] for clip in clips]
        names = {track.name for track in extractor.spec.tracks}
        for clip, extracted, expected in zip(clips, together, one_by_one, strict=True):
            tracks, others = tracks_by_name(extracted), tracks_by_name(expected)
            assert {*tracks} == names, (
                f"extract gives {sorted(tracks)}, the spec has {sorted(names)}"
            )
            for track in extractor.spec.outputs:
                what = f"{track.name} of {label(clip)}"
                as_entries = track.axis.as_entries
                array = as_entries(tracks[track.name]).cpu().numpy()
                other = as_entries(others[track.name]).cpu().numpy()
                assert (array.dtype, array.shape[1:]) == (track.dtype, track.item_shape), (
                    f"{what} is {array.dtype} {array.shape}, the spec says {track}"
                )
                assert len(array) >= track.axis.fewest, f"{what} is empty"
                assert np.isfinite(array).all(), f"{what} is not finite"
                assert array.tobytes() == other.tobytes(), f"{what} differ among other clips"


def check_features(extractor: AnyExtractor, clip: Clip, values: Features) -> None:
    """Assert that features fit the extractor's spec."""
    spec = extractor.spec
    expected = (extractor.num_frames(len(clip.waveform)), *spec.item_shape)
    if spec.axis.has_times:  # any number of them
        expected = (len(values), *spec.item_shape)
        is_sorted = sorted(values.tolist()) == values.tolist()
        assert is_sorted, f"the events of {label(clip)} are not in the order of their starts"
        begins_first = (values[:, 0] <= values[:, 1]).all()
        assert begins_first, f"an event of {label(clip)} ends before it starts"
    gave = f"extract gave {values.dtype} {list(values.shape)} for {label(clip)}"
    assert values.shape == expected, f"{gave}; num_frames and spec.item_shape say {list(expected)}"
    assert values.dtype == spec.dtype, f"{gave}; spec.dtype says {spec.dtype}"
    finite = np.isfinite(values)
    assert finite.all(), (
        f"{(~finite).sum()} of {finite.size} values of {label(clip)} are NaN or infinite"
    )
    sizes = spec.codebook_sizes
    if sizes:
        is_code = (values >= 0) & (values < np.array(sizes))
        assert is_code.all(), (
            f"{label(clip)} has codes {values.min()} to {values.max()}; codebook_sizes: {sizes}"
        )
