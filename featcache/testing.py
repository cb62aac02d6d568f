"""The suite that every extractor must pass: featcache's own, and yours.

    import featcache.testing

    class TestMine(featcache.testing.ExtractorSuite):
        config = "my.yaml"  # or its content, as a dict

pytest runs each check; a failure names the guarantee and the clip that violates it. The
suite needs pytest and the extra `extract`.
"""

from __future__ import annotations

import json
import math
import shutil
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from featcache.config import Config, as_config, config_from, load_config
from featcache.device import Device
from featcache.errors import AudioError, ConfigError, listing
from featcache.extraction.padded_rows import declared_batchings
from featcache.extractors import Clip, Extractor, FeatureSpec, Params
from featcache.extractors.base import main_track, tracks_by_name
from featcache.extractors.codec import CodecExtractor
from featcache.extractors.rows import RowExtractor, pad_rows

__all__ = ["ExtractorSuite"]

_MOST_SECONDS = 60

UNUSUAL: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silence": lambda numbers: torch.zeros(len(numbers)),
    "full scale": lambda numbers: 1.0 - 2.0 * (numbers % 2),
    "constant": lambda numbers: torch.full((len(numbers),), 0.5),
    "impulse": lambda numbers: (numbers == len(numbers) // 2).float(),
    "quiet": lambda numbers: 1e-7 * torch.sin(numbers / 10),
}
"""Waveforms unlike speech, float32 `[num_samples]`, from the numbers of their samples."""

AnyExtractor = Extractor[Params]
AnyRowExtractor = RowExtractor[Params]
Features = NDArray[Any]


class ExtractorSuite:
    """The guarantees of an extractor, as tests: inherit from it in a class whose name
    begins with `Test`.

    Whether values are correct is checked only if the class defines `reference`.

    Attributes:
        config: A YAML file, the name of a packaged config, or the content of a config as
            a dict. If it is only known when tests run, override the fixture `loaded`
            instead.
        device: The device to run on. On a GPU, torch is configured as in a run (no TF32,
            repeatable kernels), and stays so for the rest of the process.
        tolerance: For floats, how far values may differ by rounding, in batches of other
            shapes and from `reference`, relative to a clip's largest value.
        ties: For codes, the share of frames that may differ there, since rounding decides
            between equally near codewords. Real errors change several per cent.
        seconds: The approximate length of the longest clip. Increase it to reach effects
            in long clips, such as chunks.
        lengths: The lengths of further clips, in samples.
    """

    config: ClassVar[str | Path | Mapping[str, Any]]
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-4
    ties: ClassVar[float] = 1e-3
    seconds: ClassVar[float] = 1.0
    lengths: ClassVar[Sequence[int]] = ()

    def reference(self, waveform: NDArray[np.float32]) -> Features:
        """Compute the features `[frames, *item_shape]` of one waveform `[num_samples]` in a
        slow and obvious way."""
        pytest.skip("the class has no reference")

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
        if isinstance(extractor, RowExtractor):
            padded_by_frames = 32 * extractor.granularity + 1
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

    def test_the_spec_is_coherent(self, loaded: Config, extractor: AnyExtractor) -> None:
        """The spec fits itself and the config; building checks its dtypes, sizes and
        numbers."""
        spec, rate = extractor.spec, loaded.audio.sample_rate
        assert isinstance(spec, FeatureSpec), f"spec is a {type(spec).__name__}, no FeatureSpec"
        spec.require_sound()
        assert spec.sample_rate == rate, (
            f"spec.sample_rate: {spec.sample_rate}, but it was built for {rate}"
        )
        assert spec.units, "spec.units: say what a value means"
        for track in spec.tracks:
            shape = track.item_shape
            assert isinstance(shape, tuple), f"item_shape of {track.name}: {shape!r} is no tuple"

    def test_the_class_declares_what_it_must(self, extractor: AnyExtractor) -> None:
        """`revision` and `max_seconds` are valid; building checks `Params` and `batching`."""
        revision, limit = extractor.revision, extractor.max_seconds
        assert isinstance(revision, int), f"revision: {revision!r} is not a whole number"
        assert limit is None or limit > 0, f"max_seconds: {limit!r} refuses every clip"

    def test_codes_fit_their_dtypes(self, loaded: Config, extractor: AnyExtractor) -> None:
        """Codes are whole numbers, in a column for each codebook; other features are
        floats."""
        spec, sizes = extractor.spec, extractor.spec.codebook_sizes
        if not sizes:
            assert spec.values_dtype.kind == "f", (
                f"spec.dtype: {spec.dtype}, but there are no codebook_sizes, which codes have"
            )
            return
        assert spec.item_shape == (len(sizes),), (
            f"spec.item_shape: {spec.item_shape}, but {len(sizes)} codebook_sizes"
        )
        smallest = np.min_scalar_type(max(sizes) - 1).name
        dtypes = {"spec.dtype": spec.dtype, "stored_dtype": extractor.stored_dtype(loaded.params)}
        for source, dtype in dtypes.items():
            fits = np.dtype(dtype).kind in "iu" and np.iinfo(dtype).max >= max(sizes) - 1
            assert fits, (
                f"{source}: {dtype} does not hold the numbers of {max(sizes)} codewords; "
                f"{smallest} does"
            )

    def test_a_config_survives_being_kept(self, loaded: Config) -> None:
        """The resolved config survives JSON, in which a version keeps it."""
        again = config_from(json.loads(json.dumps(loaded.resolved())))
        assert again == loaded, (
            f"params do not survive JSON: {loaded.params!r} becomes {again.params!r}"
        )

    def test_the_fingerprint_is_stable(self, loaded: Config) -> None:
        """The same config names the same version."""
        again = config_from(loaded.resolved())
        fingerprints = [loaded.fingerprint(), loaded.fingerprint(), again.fingerprint()]
        assert len(set(fingerprints)) == 1, (
            f"the fingerprint differs from one time to the next: {fingerprints}; see weights_digest"
        )

    def test_weights_in_another_place_are_the_same_version(
        self, loaded: Config, tmp_path: Path
    ) -> None:
        """The place of weights does not matter."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        assert moved.fingerprint() == loaded.fingerprint(), (
            "the same weights in another folder are another version"
        )

    def test_other_weights_are_another_version(self, loaded: Config, tmp_path: Path) -> None:
        """The content of weights matters."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        suffixes = (".safetensors", ".onnx")
        files = [path for path in (tmp_path / "moved").rglob("*") if path.suffix in suffixes]
        if not files:
            pytest.skip("the weights are neither in safetensors nor in ONNX")
        for file in files:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        assert moved.fingerprint() != loaded.fingerprint(), (
            "weights_digest does not see that the weights have changed"
        )

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
        if getattr(type(extractor), "prepare", RowExtractor.prepare) is not RowExtractor.prepare:
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

    @pytest.fixture
    def row_extractor(self, another: AnyExtractor) -> Iterator[AnyRowExtractor]:
        """Yield an instance whose batching a check may choose, if the extractor takes
        rows."""
        if not isinstance(another, RowExtractor):
            pytest.skip("the extractor is no RowExtractor")
        before = another.chosen_batching
        yield another
        another.chosen_batching = before

    def test_batching_policies(self, row_extractor: AnyRowExtractor, around: list[Clip]) -> None:
        """Padded rows and rows of equal length have the values of a row alone."""
        features = {}
        for batching in declared_batchings(row_extractor):  # "single" comes first
            row_extractor.chosen_batching = batching
            features[batching] = extract(row_extractor, around)
            whose = f"those of one row alone, batched as {batching}"
            self._assert_near(features[batching], features["single"], around, whose)

    def test_padding_changes_no_latent(
        self, row_extractor: AnyRowExtractor, around: list[Clip]
    ) -> None:
        """Padding does not change the latents of codes, where a small fault still shows."""
        if not isinstance(row_extractor, CodecExtractor) or row_extractor.batching != "padded":
            pytest.skip("the extractor makes no codes from padded rows")
        for clip in around:
            piece = row_extractor.pieces(len(clip.waveform))[0]
            row = clip.waveform[: piece.num_samples]
            frames = piece.skip + piece.num_frames
            padded_length = row_extractor.padded_length(len(row) + 1)
            with torch.inference_mode():
                alone = row_extractor.latents(*pad_rows([row], 1, len(row)))
                padded = row_extractor.latents(*pad_rows([row], 2, padded_length))
            apart = largest_error(padded[0, :frames].cpu().numpy(), alone[0, :frames].cpu().numpy())
            assert apart <= self.tolerance, (
                f"zeros after {label(clip)} change its latents by {apart:.2g} of the largest; "
                f"tolerance: {self.tolerance:.2g}; each layer must pad a row at its own end"
            )

    def test_pieces_cover_a_clip(self, row_extractor: AnyRowExtractor, shortest: int) -> None:
        """Pieces have each frame once, all samples, and no others."""
        rate = row_extractor.spec.sample_rate
        longest = int(min(12.0, row_extractor.max_seconds or math.inf) * rate)
        _check_pieces(row_extractor, range(shortest, max(longest, shortest + 1), rate // 7))

    def test_chunks(self, loaded: Config, row_extractor: AnyRowExtractor, shortest: int) -> None:
        """Chunks have each frame once, and exact chunks have those of the whole clip."""
        whole = row_extractor
        if "chunk" not in type(loaded.params).model_fields:
            pytest.skip("the extractor has no chunks")
        rate, hop, field = whole.spec.sample_rate, whole.granularity, whole.spec.frame_length
        is_short = 0 < field <= rate  # else it takes too long, or chunks are not exact
        overlap = math.ceil(max(field if is_short else 4 * hop, shortest) / hop) * hop
        chunk = {"seconds": 3 * overlap / rate, "overlap": overlap / rate}
        try:
            chunked = as_config(loaded, {"params.chunk": chunk}).build(torch.device(self.device))
        except ConfigError as error:
            pytest.skip(str(error))
        assert isinstance(chunked, RowExtractor)
        longer_by = (-hop, -1, 0, 1, hop, overlap, 2 * overlap + 1, 5 * overlap - 1)
        lengths = [3 * overlap + more for more in longer_by]
        _check_pieces(chunked, [*range(shortest, 12 * overlap, overlap // 5), *lengths])
        clips = self._clips(lengths)
        features = extract(chunked, clips)
        for clip, values in zip(clips, features, strict=True):
            check_features(chunked, clip, values)
        if chunked.chunks_are_exact:
            whose = "those of the clip whole, in chunks that are exact"
            self._assert_near(features, extract(whole, clips), clips, whose)

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

    def test_extract_rows(self, row_extractor: AnyRowExtractor, alone: Alone) -> None:
        """`extract_rows` gives the features that `extract` gives."""
        with torch.inference_mode():
            of_clips = row_extractor.extract_rows(alone.clips)
        features = [rows.features.cpu().numpy() for rows in of_clips]
        assert_same(features, alone.features, alone.clips, "in extract_rows")


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


def extract(extractor: AnyExtractor, clips: Sequence[Clip]) -> list[Features]:
    """Call `extract` as a run does, and copy the features."""
    with torch.inference_mode():
        of_clips = extractor.extract(clips)
    assert isinstance(of_clips, list), f"extract returned a {type(of_clips).__name__}, not a list"
    assert len(of_clips) == len(clips), (
        f"extract returned {len(of_clips)} tensors for {len(clips)} clips"
    )
    as_entries = extractor.spec.axis.as_entries
    return [as_entries(main_track(features)).cpu().numpy().copy() for features in of_clips]


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


def hop_of(extractor: AnyExtractor) -> int:
    """Return about how many samples are between two frames; 10 ms without frames."""
    return max(1, round(extractor.spec.sample_rate / (extractor.spec.frame_rate or 100)))


def make_clip(seed: int, num_samples: int, device: str = "cpu") -> Clip:
    """Make a clip of a tone that swells and fades in noise; each seed, another one."""
    generator = np.random.default_rng(seed)
    seconds = np.arange(num_samples) / 16000
    swell = np.sin(2 * np.pi * (3 + seed % 3) * seconds + 1)
    tone = np.sin(2 * np.pi * (100 + 40 * (seed % 7)) * seconds) * swell
    waveform = 10.0 ** -(seed % 3) * (0.5 * tone + 0.1 * generator.normal(size=num_samples))
    samples = torch.from_numpy(waveform.clip(-1, 1).astype(np.float32))
    return Clip(f"clip-{seed}", samples.to(device))


def label(clip: Clip) -> str:
    """Name a clip in messages."""
    return f"{clip.id} ({len(clip.waveform)} samples)"


def largest_error(values: Features, reference: Features) -> float:
    """Return the largest difference, relative to the largest magnitude of `reference`."""
    largest = float(np.abs(reference).max(initial=0.0))
    absolute = float(_differences(values, reference).max(initial=0.0))
    return absolute / (largest or 1.0)


def differing_frames(values: Features, reference: Features, tolerance: float) -> NDArray[np.bool_]:
    """Find the frames that differ, bool `[frames]`: by more than rounding, or in any code."""
    allowed = 0.0
    if reference.dtype.kind not in "iu":
        allowed = tolerance * float(np.abs(reference).max(initial=0.0))
    return np.asarray(_differences(values, reference) > allowed)


def assert_same(
    features: Sequence[Features], expected: Sequence[Features], clips: Sequence[Clip], how: str
) -> None:
    """Assert that features, extracted as `how` says, are the same bit for bit."""
    for values, reference, clip in zip(features, expected, clips, strict=True):
        is_same = values.shape == reference.shape and values.tobytes() == reference.tobytes()
        assert is_same, (
            f"{label(clip)} has different values {how}: it "
            f"{described_difference(values, reference)}; no bit may depend on that"
        )


def described_difference(values: Features, reference: Features) -> str:
    """Describe where features differ from `reference`, and by how much."""
    if values.shape != reference.shape:
        return f"has shape {values.shape}, and not {reference.shape}"
    frames = np.flatnonzero(_differences(values, reference)).tolist()
    error = largest_error(values, reference)
    return (
        f"differs in frames {listing(map(str, frames), 5)} of {len(values)}, by {error:.2g} of the "
        "largest value"
    )


def _differences(values: Features, reference: Features) -> NDArray[np.float64]:
    apart = np.abs(values.astype(np.float64) - reference.astype(np.float64))
    by_frame = apart.reshape(len(apart), math.prod(apart.shape[1:]))
    return np.asarray(by_frame.max(axis=1, initial=0.0))


def _with_weights_in(folder: Path, config: Config) -> Config:
    """Copy the config and its weights, which go to `folder`. Skip the check without
    weights."""
    weights_param = config.resolved()["params"].get("weights")
    if not weights_param or not Path(weights_param).exists():
        pytest.skip("the config names no weights in a folder or file")
    weights = Path(weights_param)
    source = weights if weights.is_dir() else weights.parent
    shutil.copytree(source, folder)
    return as_config(config, {"params.weights": str(folder / weights.relative_to(source))})


def _torch_settings() -> dict[str, object]:
    return {
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.is_grad_enabled": torch.is_grad_enabled(),
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
    }


def _check_pieces(extractor: AnyRowExtractor, lengths: Sequence[int]) -> None:
    for n in lengths:
        pieces = extractor.pieces(n)
        frames = [piece.num_frames for piece in pieces]
        expected = extractor.num_frames(n)
        assert sum(frames) == expected, (
            f"the pieces of {n} samples give {frames} frames, num_frames says {expected}"
        )
        covered = 0
        for piece in pieces:
            assert piece.start <= covered, (
                f"of {n} samples, {covered} to {piece.start} are in no piece: {pieces}"
            )
            covered = max(covered, piece.start + piece.num_samples)
            has = extractor.num_frames(piece.num_samples)
            assert 0 <= piece.skip <= piece.skip + piece.num_frames <= has, (
                f"{piece}, of {n} samples, has {has} frames"
            )
        assert covered == n, f"the pieces of {n} samples end at {covered}: {pieces}"
