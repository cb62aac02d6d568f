"""What all checks of an extractor share: the settings of a test class, its clips, and a call as in extraction."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from featcache.config import Config, config_from, load_config
from featcache.extractors.base import Clip, Extractor, Params
from featcache.testing.clips import assert_near, label, make_clip

_MOST_SECONDS = 60
"""A clip of this length must have a frame."""


class Checks:
    """The base of all checks: the settings that `ExtractorSuite` describes, and the fixtures that follow from them."""

    config: ClassVar[str | Path | Mapping[str, Any]]
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-4
    ties: ClassVar[float] = 1e-3
    seconds: ClassVar[float] = 1.0
    lengths: ClassVar[Sequence[int]] = ()

    def reference(self, waveform: NDArray[np.float32]) -> NDArray[Any]:
        """The features `[frames, *item_shape]` of one waveform `[num_samples]`, computed in a slow and obvious way."""
        pytest.skip("the class has no reference")

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> Config:
        """The config, validated."""
        return config_from(dict(cls.config)) if isinstance(cls.config, Mapping) else load_config(cls.config)

    @pytest.fixture(scope="class")
    @classmethod
    def extractor(cls, loaded: Config) -> Extractor[Params]:
        """The instance that most checks share."""
        return cls._build(loaded)

    @pytest.fixture(scope="class")
    @classmethod
    def another(cls, loaded: Config) -> Extractor[Params]:
        """A second instance, independent of the first."""
        torch.manual_seed(1)
        return cls._build(loaded)

    @pytest.fixture(scope="class")
    @classmethod
    def shortest(cls, extractor: Extractor[Params]) -> int:
        """The number of samples of the shortest clip that has a frame."""
        most = _MOST_SECONDS * extractor.spec.sample_rate
        found = bisect_left(range(most), 1, key=extractor.num_frames)
        assert found < most, f"num_frames gives no frame to a clip of {_MOST_SECONDS} s"
        return found

    @pytest.fixture(scope="class")
    @classmethod
    def clips(cls, extractor: Extractor[Params], shortest: int) -> list[Clip]:
        """Ten clips of several lengths. Neighbours differ in length."""
        longest = max(shortest, int(cls.seconds * extractor.spec.sample_rate))
        lengths = np.random.default_rng(0).integers(shortest, longest, 6, endpoint=True).tolist()
        return cls._clips([*lengths, shortest, longest, shortest + 1, shortest])

    @pytest.fixture(scope="class")
    @classmethod
    def around(cls, extractor: Extractor[Params], shortest: int) -> list[Clip]:
        """Clips of the lengths around which the number of frames changes, and of some others. All have a frame."""
        hop, field = hop_of(extractor), extractor.spec.frame_length
        longest = max(shortest + 3 * hop, int(cls.seconds * extractor.spec.sample_rate))
        changes = {bisect_left(range(longest), count, key=extractor.num_frames) for count in (1, 2, 3, 10)}
        changes |= {1, hop, 2 * hop, field}
        near = {n + more for n in changes for more in (-1, 0, 1)}
        found = {n for n in near if shortest <= n <= longest} | {*cls.lengths}
        found.update(np.random.default_rng(2).integers(shortest, longest, 4, endpoint=True).tolist())
        if (row_extractor := extractor.as_row_extractor()) is not None:
            found.add(max(shortest, 32 * row_extractor.granularity + 1))  # padded by some frames
        return cls._clips(sorted(found))

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, extractor: Extractor[Params], clips: list[Clip]) -> list[NDArray[Any]]:
        """The features of each of the clips, extracted in a call of its own."""
        return [extract(extractor, [clip])[0] for clip in clips]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _torch_as_in_a_run(cls) -> Iterator[None]:
        """During the checks, torch uses one thread of its own, as in a run."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    @classmethod
    def _build(cls, config: Config) -> Extractor[Params]:
        return config.build(torch.device(cls.device))

    @classmethod
    def _clips(cls, lengths: Sequence[int]) -> list[Clip]:
        return [make_clip(seed, num_samples, cls.device) for seed, num_samples in enumerate(lengths)]

    def _assert_near(
        self, found: list[NDArray[Any]], wanted: list[NDArray[Any]], clips: Sequence[Clip], whose: str
    ) -> None:
        assert_near(found, wanted, clips, whose, tolerance=self.tolerance, ties=self.ties)


def extract(extractor: Extractor[Params], clips: Sequence[Clip]) -> list[NDArray[Any]]:
    """Call `extract` as a run does, and copy the features."""
    with torch.inference_mode():
        found = extractor.extract(clips)
    assert isinstance(found, list), f"extract returned a {type(found).__name__}, and not a list"
    assert len(found) == len(clips), f"extract returned {len(found)} tensors for {len(clips)} clips"
    return [features.cpu().numpy().copy() for features in found]


def check_features(extractor: Extractor[Params], clip: Clip, found: NDArray[Any]) -> None:
    """Assert what must hold for the features of any clip."""
    spec = extractor.spec
    expected = (extractor.num_frames(len(clip.waveform)), *spec.item_shape)
    assert found.shape == expected, (
        f"extract gave {list(found.shape)} for {label(clip)}; num_frames and spec.item_shape say {list(expected)}"
    )
    assert found.dtype == spec.dtype, f"extract gave {found.dtype} for {label(clip)}; spec.dtype says {spec.dtype}"
    finite = np.isfinite(found)
    assert finite.all(), f"{(~finite).sum()} of {finite.size} values of {label(clip)} are NaN or infinite"
    if spec.codebook_sizes:
        codes = found.astype(np.int64)
        assert ((codes >= 0) & (codes < np.array(spec.codebook_sizes))).all(), (
            f"codes of {label(clip)} go from {codes.min()} to {codes.max()}; codebook_sizes: {spec.codebook_sizes}"
        )


def hop_of(extractor: Extractor[Params]) -> int:
    """The approximate number of samples from one frame to the next."""
    return max(1, round(extractor.spec.sample_rate / extractor.spec.frame_rate))


def with_params(config: Config, **params: object) -> Config:
    """The config with some parameters changed."""
    document = config.resolved()
    return config_from({**document, "params": {**document["params"], **params}})
