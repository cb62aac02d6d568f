"""The base of the suite's checks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from featcache.config import Config, config_from, load_config
from featcache.device import Device
from featcache.extractors import Clip
from featcache.testing.clips import (
    AnyExtractor,
    Features,
    assert_same,
    described_difference,
    differing_frames,
    extract,
    granularity_of,
    hop_of,
    label,
    make_clip,
)

_MOST_SECONDS = 60


@dataclass(frozen=True)
class Alone:
    """Clips, and the features that an extractor gives for each in a call of its own."""

    extractor: AnyExtractor
    clips: list[Clip]
    features: list[Features]

    def assert_same(self, numbers: Sequence[int], how: str) -> None:
        """Assert that a call with the clips of these numbers gives the same features."""
        clips = [self.clips[number] for number in numbers]
        expected = [self.features[number] for number in numbers]
        assert_same(extract(self.extractor, clips), expected, clips, how)


class Checks:
    """The base of all checks: the config, the fixtures, and the clips that checks share."""

    config: ClassVar[str | Path | Mapping[str, Any]]
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-4
    ties: ClassVar[float] = 1e-3
    seconds: ClassVar[float] = 1.0
    lengths: ClassVar[Sequence[int]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> Config:
        """Validate the config."""
        if isinstance(cls.config, Mapping):
            return config_from(dict(cls.config))
        return load_config(cls.config)

    @pytest.fixture(scope="class")
    @classmethod
    def extractor(cls, loaded: Config) -> AnyExtractor:
        """Build the instance that most checks share."""
        return loaded.build(torch.device(cls.device))

    @pytest.fixture(scope="class")
    @classmethod
    def another(cls, loaded: Config) -> AnyExtractor:
        """Build a second instance, independent of the first."""
        torch.manual_seed(1)
        return loaded.build(torch.device(cls.device))

    @pytest.fixture(scope="class")
    @classmethod
    def shortest(cls, extractor: AnyExtractor) -> int:
        """Find the number of samples of the shortest clip that has a frame."""
        most = _MOST_SECONDS * extractor.spec.sample_rate
        num_samples = bisect_left(range(most), 1, key=extractor.num_frames)
        assert num_samples < most, f"num_frames gives no frame to a clip of {_MOST_SECONDS} s"
        return num_samples

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, extractor: AnyExtractor, shortest: int) -> Alone:
        """Extract ten clips, each in a call of its own. Neighbours differ in length."""
        longest = max(shortest, int(cls.seconds * extractor.spec.sample_rate))
        lengths = np.random.default_rng(0).integers(shortest, longest, 6, endpoint=True).tolist()
        clips = cls._clips([*lengths, shortest, longest, shortest + 1, shortest])
        return Alone(extractor, clips, [extract(extractor, [clip])[0] for clip in clips])

    @pytest.fixture(scope="class")
    @classmethod
    def around(cls, extractor: AnyExtractor, shortest: int) -> list[Clip]:
        """Make clips of lengths around which the number of frames changes, and of some other
        lengths. All have a frame."""
        hop, field = hop_of(extractor), extractor.spec.frame_length
        longest = max(shortest + 3 * hop, int(cls.seconds * extractor.spec.sample_rate))
        changes = {
            bisect_left(range(longest), count, key=extractor.num_frames) for count in (1, 2, 3, 10)
        }
        changes |= {1, hop, 2 * hop, field}
        near = {n + more for n in changes for more in (-1, 0, 1)}
        lengths = {n for n in near if shortest <= n <= longest} | {*cls.lengths}
        lengths.update(
            np.random.default_rng(2).integers(shortest, longest, 4, endpoint=True).tolist()
        )
        padded_by_frames = 32 * granularity_of(extractor) + 1
        lengths.add(max(shortest, padded_by_frames))
        return cls._clips(sorted(lengths))

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _torch_as_in_a_run(cls) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        if torch.device(cls.device).type == "cuda":
            Device(cls.device).configure_torch()
        yield
        torch.set_num_threads(before)

    @classmethod
    def _clips(cls, lengths: Sequence[int]) -> list[Clip]:
        return [make_clip(seed, length, cls.device) for seed, length in enumerate(lengths)]

    def _assert_near(
        self, features: list[Features], expected: list[Features], clips: list[Clip], whose: str
    ) -> None:
        """Assert that features are the same up to rounding and ties. `whose` describes
        `expected`."""
        num_wrong, faults = 0, []
        for values, reference, clip in zip(features, expected, clips, strict=True):
            fault = f"{label(clip)} {described_difference(values, reference)}"
            assert values.shape == reference.shape, f"{fault}, which are {whose}"
            wrong = differing_frames(values, reference, self.tolerance)
            if wrong.any():
                faults.append(fault)
                num_wrong += int(wrong.sum())
                assert reference.dtype.kind in "iu", (
                    f"{fault}: they differ from {whose}; tolerance: {self.tolerance:.2g}"
                )
        frames = sum(map(len, features))
        assert num_wrong <= math.ceil(self.ties * frames), (
            f"codes of {num_wrong} of {frames} frames differ from {whose}; ties: "
            f"{self.ties:.2g}; first {faults[0]}"
        )
