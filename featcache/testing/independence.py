"""Checks that features depend on the clip alone, and that a call changes nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from featcache.config import Config
from featcache.extractors import Clip
from featcache.extractors.base import main_track
from featcache.testing.checks import Alone, Checks
from featcache.testing.clips import AnyExtractor, assert_same, extract, label


class Independence(Checks):
    """Checks that no bit depends on other clips, other calls, threads or memory."""

    def test_neighbours(self, alone: Alone) -> None:
        """A clip has the same values among longer and shorter clips."""
        alone.assert_same(range(len(alone.clips)), "among others than alone")

    def test_order(self, alone: Alone) -> None:
        """A clip has the same values at any position in a call."""
        for seed in range(2):
            order = np.random.default_rng(seed).permutation(len(alone.clips))
            alone.assert_same(order.tolist(), "in another order")

    def test_number_of_clips(self, alone: Alone) -> None:
        """A clip has the same values however often it is in a call."""
        for count in (2, 3, 19):
            alone.assert_same([0] * count, f"{count} times in a call")

    def test_earlier_calls(self, alone: Alone) -> None:
        """A clip has the same values after other calls, whatever torch's random numbers."""
        for number in reversed(range(len(alone.clips))):
            torch.manual_seed(number)
            alone.assert_same([number], "in a later call")

    def test_instances(self, another: AnyExtractor, alone: Alone) -> None:
        """Another instance, as another process has, gives the same values."""
        replace(alone, extractor=another).assert_same(
            range(len(alone.clips)), "from another instance"
        )

    def test_threads(self, alone: Alone) -> None:
        """Threads may call the same instance at once."""
        how = "beside other threads (is a call's state on self?)"
        batches = [range(first, len(alone.clips), 4) for first in (0, 1, 2, 3)] * 2
        with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(lambda numbers: alone.assert_same(numbers, how), batches))

    def test_where_a_waveform_lies(self, alone: Alone) -> None:
        """A waveform may be a part of a longer tensor, or a channel of an interleaved one."""
        how = "where its waveform is a view of a longer tensor (copy it first)"
        for clip, expected in zip(alone.clips[:2], alone.features[:2], strict=True):
            longer = torch.nn.functional.pad(clip.waveform, (1, 2), value=0.5)
            interleaved = torch.stack([clip.waveform, clip.waveform.flip(0)], dim=1)
            for view in (longer[1:-2], interleaved[:, 0]):
                values = extract(alone.extractor, [Clip(clip.id, view)])
                assert_same(values, [expected], [clip], how)

    def test_the_waveform_is_left_alone(self, alone: Alone) -> None:
        """A call does not change waveforms, which other extractors get too."""
        cloned = [Clip(clip.id, clip.waveform.clone()) for clip in alone.clips]
        extract(alone.extractor, cloned)
        for clip, after in zip(alone.clips, cloned, strict=True):
            assert torch.equal(after.waveform, clip.waveform), (
                f"extract wrote to the waveform of {label(clip)}"
            )

    def test_features_are_left_alone(self, alone: Alone) -> None:
        """Later calls do not change the features that a call has returned."""
        first, *others = alone.clips
        with torch.inference_mode():
            features = main_track(alone.extractor.extract([first])[0])
            before = features.cpu().numpy().tobytes()
            alone.extractor.extract([*others, others[0]])
            after = features.cpu().numpy().tobytes()
        assert after == before, (
            "a call of extract wrote to the features that an earlier one gave: is a buffer reused?"
        )

    def test_torch_is_left_alone(self, loaded: Config, alone: Alone) -> None:
        """Settings of the whole process do not change."""
        before = _torch_settings()
        extract(loaded.build(torch.device(self.device)), alone.clips[:1])
        changed = dict(_torch_settings().items() - before.items())
        assert not changed, f"the extractor set {changed}, which belong to the whole process"


def _torch_settings() -> dict[str, object]:
    return {
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.is_grad_enabled": torch.is_grad_enabled(),
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
    }
