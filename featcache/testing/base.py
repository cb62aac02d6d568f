"""What all checks of an extractor share: the settings of a test class; clips, some like speech and some as unlike it as
real files can be; a call as in extraction; and how features compare."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from featcache.care.compare import frame_differences
from featcache.config import Config, config_from, load_config
from featcache.extractors.base import Clip, Extractor, Params

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
        """Assert that features of clips are the same up to rounding and ties. `whose` says what `wanted` is."""
        num_wrong, frames, first = 0, 0, ""
        for ours, theirs, clip in zip(found, wanted, clips, strict=True):
            assert ours.shape == theirs.shape, f"{label(clip)} has shape {ours.shape}, and not {theirs.shape}, {whose}"
            frames += len(ours)
            wrong = differing_frames(ours, theirs, self.tolerance)
            if not wrong.any():
                continue
            assert theirs.dtype.kind in "iu", (
                f"{label(clip)}: frames {_listed(wrong)} of {len(ours)} differ from {whose}, by "
                f"{largest_error(ours, theirs):.2g} of the largest value; tolerance: {self.tolerance:.2g}"
            )
            num_wrong += int(wrong.sum())
            first = first or f"{label(clip)}, frames {_listed(wrong)} of {len(ours)}"
        assert num_wrong <= math.ceil(self.ties * frames), (
            f"codes of {num_wrong} of {frames} frames differ from {whose}; ties: {self.ties:.2g}; "
            f"the first are in {first}"
        )


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


UNUSUAL = ("silence", "full scale", "constant", "impulse", "quiet")
"""The kinds of clips that `unusual_clip` makes."""


def make_clip(seed: int, num_samples: int, device: str = "cpu") -> Clip:
    """A clip of a tone that swells and fades in noise. Each seed gives another tone and level; none is clipped."""
    generator = np.random.default_rng(seed)
    at = np.arange(num_samples) / 16000
    tone = np.sin(2 * np.pi * (100 + 40 * (seed % 7)) * at) * np.sin(2 * np.pi * (3 + seed % 3) * at + 1)
    waveform = 10.0 ** -(seed % 3) * (0.5 * tone + 0.1 * generator.normal(size=num_samples))
    return Clip(f"clip-{seed}", torch.from_numpy(waveform.clip(-1, 1).astype(np.float32)).to(device))


def unusual_clip(kind: str, num_samples: int, device: str = "cpu") -> Clip:
    """A clip of one of the kinds `UNUSUAL`."""
    waveform = torch.zeros(num_samples)
    if kind == "full scale":
        waveform[0::2], waveform[1::2] = 1.0, -1.0
    elif kind == "constant":
        waveform += 0.5
    elif kind == "impulse":
        waveform[num_samples // 2] = 1.0
    elif kind == "quiet":
        waveform += 1e-7 * torch.sin(torch.arange(num_samples) / 10)
    return Clip(kind.replace(" ", "-"), waveform.to(device))


def label(clip: Clip) -> str:
    """The name of a clip in messages."""
    return f"{clip.id} ({len(clip.waveform)} samples)"


def largest_error(found: NDArray[Any], reference: NDArray[Any]) -> float:
    """The largest difference of two arrays of features, in parts of the largest magnitude of `reference`."""
    largest = float(np.abs(reference).max(initial=0.0))
    absolute = float(_absolute(found, reference).max(initial=0.0))
    return absolute / largest if largest else absolute


def differing_frames(found: NDArray[Any], reference: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    """Which frames of a clip differ, bool `[frames]`: by more than rounding, or in any code."""
    allowed = 0.0 if reference.dtype.kind in "iu" else tolerance * float(np.abs(reference).max(initial=0.0))
    return np.asarray(_absolute(found, reference) > allowed)


def assert_same(found: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]], clips: Sequence[Clip], how: str) -> None:
    """Assert that features of clips are the same, bit for bit. `how` says how `found` was extracted."""
    for ours, theirs, clip in zip(found, wanted, clips, strict=True):
        if ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes():
            continue
        assert ours.shape == theirs.shape, f"{label(clip)} has {len(ours)} frames {how}, and {len(theirs)} else"
        wrong = (ours != theirs).reshape(len(ours), -1).any(axis=1)
        raise AssertionError(
            f"{label(clip)} has different values {how}: frames {_listed(wrong)} of {len(ours)}, by "
            f"{largest_error(ours, theirs):.2g} of the largest; no bit may depend on that"
        )


def _listed(wrong: NDArray[np.bool_]) -> str:
    numbers = np.flatnonzero(wrong).tolist()
    return ", ".join(map(str, numbers[:5])) + (" …" if len(numbers) > 5 else "")


def _absolute(found: NDArray[Any], reference: NDArray[Any]) -> NDArray[np.float64]:
    """The largest difference in each frame, float64 `[frames]`."""
    tensors = (torch.from_numpy(np.array(array, np.float64)) for array in (found, reference))
    return np.asarray(frame_differences(*tensors)[1])
