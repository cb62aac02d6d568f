"""Checks of values: how many frames a clip has, what they are, and that they depend on the clip alone."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from featcache.config import Config
from featcache.errors import AudioError
from featcache.extractors.base import Clip, Extractor, Params
from featcache.testing.base import (
    UNUSUAL,
    Checks,
    assert_same,
    check_features,
    differing_frames,
    extract,
    hop_of,
    label,
    unusual_clip,
)


class ValueChecks(Checks):
    """Checks that clips have the frames that the extractor counts, and the values that it describes."""

    def test_num_frames_counts_up_from_none(self, extractor: Extractor[Params], shortest: int) -> None:
        """The number of frames is a whole number, 0 for no samples, and never smaller for a longer clip."""
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
        """Clips of lengths around the boundaries have the counted frames, with values as `spec` describes them."""
        for clip, found in zip(around, extract(extractor, around), strict=True):
            check_features(extractor, clip, found)

    def test_the_frame_rate_is_that_of_the_frames(self, extractor: Extractor[Params], shortest: int) -> None:
        """Ten seconds more give as many frames more, if clips are long enough not to be padded."""
        expected = 10 * extractor.spec.frame_rate
        unpadded = max(shortest, extractor.spec.padded_to)
        longer = unpadded + 10 * extractor.spec.sample_rate
        found = extractor.num_frames(longer) - extractor.num_frames(unpadded)
        assert abs(found - expected) <= 2 + 0.02 * expected, (
            f"spec.frame_rate: {expected / 10:g} per second, but num_frames grows by {found} in 10 s"
        )

    def test_no_clips(self, extractor: Extractor[Params]) -> None:
        """A call without clips returns an empty list."""
        assert extract(extractor, []) == []

    @pytest.mark.parametrize("kind", UNUSUAL)
    def test_unusual_sound(self, extractor: Extractor[Params], shortest: int, kind: str) -> None:
        """Unusual sound is extracted, or refused by an AudioError, which the failure ledger then shows."""
        for n in (shortest, shortest + hop_of(extractor) // 2 + 1, max(shortest, extractor.spec.sample_rate // 2)):
            clip = unusual_clip(kind, n, self.device)
            try:
                (found,) = extract(extractor, [clip])
            except AudioError:
                continue
            check_features(extractor, clip, found)

    def test_frame_length(self, extractor: Extractor[Params], shortest: int) -> None:
        """A sample changes only the frames within `spec.frame_length` of it."""
        spec, hop = extractor.spec, hop_of(extractor)
        num_samples = max(4 * spec.frame_length + 8 * hop + shortest, spec.padded_to)
        if spec.frame_length == 0 or num_samples > min(20.0, extractor.max_seconds or math.inf) * spec.sample_rate:
            pytest.skip("spec.frame_length is not finite, or too long to look at")
        first, second = (clip.waveform for clip in self._clips([num_samples] * 2))
        middle = num_samples // 2
        end, start = torch.cat([first[:middle], second[middle:]]), torch.cat([second[:middle], first[middle:]])
        clips = [Clip("frame-length", waveform) for waveform in (first, end, start)]
        whole, other_end, other_start = extract(extractor, clips)
        before = np.logical_or.accumulate(differing_frames(other_end, whole, self.tolerance))
        after = np.logical_or.accumulate(differing_frames(other_start, whole, self.tolerance)[::-1])[::-1]
        seen, allowed = int((before & after).sum()), math.ceil(spec.frame_length / hop)
        assert seen <= allowed, (
            f"spec.frame_length: {spec.frame_length} samples, so at most {allowed} frames see a sample, but {seen} "
            f"look at what is on either side of sample {middle}"
        )

    def test_reference(self, extractor: Extractor[Params], around: list[Clip]) -> None:
        """The values are those of the class's `reference`."""
        wanted = [np.asarray(self.reference(clip.waveform.cpu().numpy())) for clip in around]
        self._assert_near(extract(extractor, around), wanted, around, "those of the reference")


class AloneChecks(Checks):
    """Checks that a clip always gives the same bits, and that a call changes nothing but what it returns."""

    def test_neighbours(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """A clip has the same values among longer and shorter clips."""
        assert_same(extract(extractor, clips), alone, clips, "among others than alone")

    def test_order(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """A clip has the same values at any position in a call."""
        for seed in range(2):
            order = np.random.default_rng(seed).permutation(len(clips)).tolist()
            shuffled = [clips[i] for i in order]
            assert_same(extract(extractor, shuffled), [alone[i] for i in order], shuffled, "in another order")

    def test_number_of_clips(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """A clip has the same values however often it is in a call."""
        for count in (2, 3, 19):
            repeated = [clips[0]] * count
            assert_same(extract(extractor, repeated), [alone[0]] * count, repeated, f"{count} times in a call")

    def test_earlier_calls(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """A clip has the same values after other calls, and with other random numbers of torch."""
        for seed, clip, expected in zip(range(len(clips)), reversed(clips), reversed(alone), strict=True):
            torch.manual_seed(seed)
            assert_same(extract(extractor, [clip]), [expected], [clip], "in a later call")

    def test_instances(self, another: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """Another instance of the same config, as another process has, gives the same values."""
        assert_same(extract(another, clips), alone, clips, "from another instance")

    def test_threads(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """A clip has the same values while other threads call `extract` of the same instance."""
        batches = [clips[i % 4 :: 4] for i in range(8)]
        with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = list(pool.map(lambda batch: extract(extractor, batch), batches))
        for i, batch in enumerate(batches):
            assert_same(found[i], alone[i % 4 :: 4], batch, "beside other threads (is a call's state on self?)")

    def test_where_a_waveform_lies(
        self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]
    ) -> None:
        """A waveform may be a part of a longer tensor, or a channel of an interleaved one."""
        for clip, expected in zip(clips[:2], alone[:2], strict=True):
            longer = torch.nn.functional.pad(clip.waveform, (1, 2), value=0.5)
            interleaved = torch.stack([clip.waveform, clip.waveform.flip(0)], dim=1)
            for view in (longer[1:-2], interleaved[:, 0]):
                found = extract(extractor, [Clip(clip.id, view)])
                assert_same(
                    found, [expected], [clip], "where its waveform is a view of a longer tensor (copy it first)"
                )

    def test_the_waveform_is_left_alone(self, extractor: Extractor[Params], clips: list[Clip]) -> None:
        """A call does not change waveforms, which other extractors of the same run get too."""
        before = [clip.waveform.clone() for clip in clips]
        given = [Clip(clip.id, waveform.clone()) for clip, waveform in zip(clips, before, strict=True)]
        extract(extractor, given)
        for clip, waveform in zip(given, before, strict=True):
            assert torch.equal(clip.waveform, waveform), f"extract wrote to the waveform of {label(clip)}"

    def test_features_are_left_alone(self, extractor: Extractor[Params], clips: list[Clip]) -> None:
        """Later calls do not change the features that a call has returned."""
        with torch.inference_mode():
            kept = extractor.extract(clips[:1])[0]
            before = kept.cpu().numpy().tobytes()
            extractor.extract([*clips[1:], clips[1]])
            after = kept.cpu().numpy().tobytes()
        assert after == before, "a call of extract wrote to the features that an earlier one gave: is a buffer reused?"

    def test_torch_is_left_alone(self, loaded: Config, clips: list[Clip]) -> None:
        """An extractor does not change torch's settings, which belong to the whole process."""
        before = _torch_settings()
        extract(self._build(loaded), clips[:1])
        changed = {name: value for name, value in _torch_settings().items() if value != before[name]}
        assert not changed, f"the extractor set {changed}, which belong to the whole process"


def _torch_settings() -> dict[str, object]:
    return {
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.is_grad_enabled": torch.is_grad_enabled(),
    }
