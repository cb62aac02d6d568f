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
from featcache.testing.base import Checks, check_features, extract, hop_of
from featcache.testing.clips import UNUSUAL, assert_same, differing_frames, label, unusual_clip


class ValueChecks(Checks):
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
            check_features(extractor, one, found)

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
            one = unusual_clip(kind, n, self.device)
            try:
                (found,) = extract(extractor, [one])
            except AudioError:
                continue
            check_features(extractor, one, found)

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
        before = np.logical_or.accumulate(differing_frames(other_end, whole, self.tolerance))
        after = np.logical_or.accumulate(differing_frames(other_start, whole, self.tolerance)[::-1])[::-1]
        seen, allowed = int((before & after).sum()), math.ceil(spec.frame_length / hop)
        assert seen <= allowed, (
            f"spec.frame_length: {spec.frame_length} samples, so at most {allowed} frames see a sample, but {seen} "
            f"look at what is on either side of sample {middle}"
        )

    def test_reference(self, extractor: Extractor[Params], around: list[Clip]) -> None:
        """The values are those of the class's `reference`."""
        wanted = [np.asarray(self.reference(one.waveform.cpu().numpy())) for one in around]
        self._assert_near(extract(extractor, around), wanted, around, "those of the reference")


class AloneChecks(Checks):
    """The same clip gives the same bits, whatever is around it; and a call changes nothing but what it returns."""

    def test_neighbours(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """A clip is the same among others, longer and shorter ones."""
        assert_same(extract(extractor, clips), alone, clips, "among others than alone")

    def test_order(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """Wherever among them it is."""
        for seed in range(2):
            order = np.random.default_rng(seed).permutation(len(clips)).tolist()
            shuffled = [clips[i] for i in order]
            assert_same(extract(extractor, shuffled), [alone[i] for i in order], shuffled, "in another order")

    def test_number_of_clips(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """However often it is there."""
        for count in (2, 3, 19):
            repeated = [clips[0]] * count
            assert_same(extract(extractor, repeated), [alone[0]] * count, repeated, f"{count} times in a call")

    def test_earlier_calls(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """Whatever was extracted before, and whatever torch's random numbers are."""
        for seed, one, expected in zip(range(len(clips)), reversed(clips), reversed(alone), strict=True):
            torch.manual_seed(seed)
            assert_same(extract(extractor, [one]), [expected], [one], "in a later call")

    def test_instances(self, another: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """From another instance of the same config, as another process has."""
        assert_same(extract(another, clips), alone, clips, "from another instance")

    def test_threads(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """While other threads are in `extract` of the same instance."""
        batches = [clips[i % 4 :: 4] for i in range(8)]
        with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = list(pool.map(lambda batch: extract(extractor, batch), batches))
        for i, batch in enumerate(batches):
            assert_same(found[i], alone[i % 4 :: 4], batch, "beside other threads (is a call's state on self?)")

    def test_where_a_waveform_lies(
        self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]
    ) -> None:
        """As a part of a longer tensor, or as a channel of an interleaved one."""
        for one, expected in zip(clips[:2], alone[:2], strict=True):
            longer = torch.nn.functional.pad(one.waveform, (1, 2), value=0.5)
            interleaved = torch.stack([one.waveform, one.waveform.flip(0)], dim=1)
            for view in (longer[1:-2], interleaved[:, 0]):
                found = extract(extractor, [Clip(one.id, view)])
                assert_same(found, [expected], [one], "where its waveform is a view of a longer tensor (copy it first)")

    def test_the_waveform_is_left_alone(self, extractor: Extractor[Params], clips: list[Clip]) -> None:
        """Other extractors of the same run get it too."""
        before = [one.waveform.clone() for one in clips]
        copies = [Clip(one.id, waveform.clone()) for one, waveform in zip(clips, before, strict=True)]
        extract(extractor, copies)
        for one, waveform in zip(copies, before, strict=True):
            assert torch.equal(one.waveform, waveform), f"extract wrote to the waveform of {label(one)}"

    def test_features_are_left_alone(self, extractor: Extractor[Params], clips: list[Clip]) -> None:
        """What a call gave stays as it is in the calls after it."""
        with torch.inference_mode():
            kept = extractor.extract(clips[:1])[0]
            before = kept.cpu().numpy().tobytes()
            extractor.extract([*clips[1:], clips[1]])
            after = kept.cpu().numpy().tobytes()
        assert after == before, "a call of extract wrote to the features that an earlier one gave: is a buffer reused?"

    def test_torch_is_left_alone(self, loaded: Config, clips: list[Clip]) -> None:
        """Its settings are the whole process's."""
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
