"""Checks that values depend on the clip alone, bit for bit, and that a call does not modify its inputs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.config import Config
from featcache.extractors.base import Clip, Extractor, Params
from featcache.testing.compare import assert_same
from featcache.testing.setting import Setting, extract
from featcache.testing.signals import what


class AloneChecks(Setting):
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
            assert torch.equal(one.waveform, waveform), f"extract wrote to the waveform of {what(one)}"

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
