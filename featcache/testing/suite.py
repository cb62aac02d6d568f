"""What must hold of an extractor, as a class of pytest's tests."""

from __future__ import annotations

import json
import math
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from featcache.config import Config, config_from, load_config
from featcache.errors import AudioError, ConfigError
from featcache.extractors.base import Batching, Clip, Extractor, Params
from featcache.extractors.model import CodecExtractor, ModelExtractor
from featcache.extractors.rows import RowExtractor, Rows, pad_rows
from featcache.spec import FeatureSpec
from featcache.testing.compare import assert_near, assert_same, difference, differing
from featcache.testing.signals import UNUSUAL, clip, unusual, what

_ALLOWED: dict[Batching, list[Batching]] = {
    "padded": ["padded", "equal_length", "single"],
    "equal_length": ["equal_length", "single"],
    "single": ["single"],
}
"""The policies that a declared one allows."""

_MOST_SECONDS = 60
"""In which a clip gets its first frame, or never."""


class ExtractorSuite:
    """Inherit it, in a class whose name begins with `Test`, and say which config.

    What cannot be checked of any extractor, that its values are the right ones, is checked where the class has
    a `reference`.

    Attributes:
        config: a YAML file, a packaged config's name, or what is in such a file. Where it is only known when
            tests run, override the fixture `loaded` instead.
        device: to run on.
        tolerance: of floats, in parts of a clip's largest: how far two ways to compute them may lie apart where
            they round differently, in batches of other shapes and in `reference`.
        ties: of codes, the share of frames that may differ there. Of two codewords that are equally near, rounding
            chooses. Where anything else is wrong, it is some per cent.
        seconds: the longest clip's, about. Give more where something begins later: chunks, say.
        lengths: of further clips, in samples.
    """

    config: ClassVar[str | Path | Mapping[str, Any]]
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-4
    ties: ClassVar[float] = 1e-3
    seconds: ClassVar[float] = 1.0
    lengths: ClassVar[Sequence[int]] = ()

    def reference(self, waveform: NDArray[np.float32]) -> NDArray[Any]:
        """The features `[frames, *item_shape]` of one waveform `[num_samples]`, by a slow and obvious way."""
        pytest.skip("the class has no reference")

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> Config:
        """The config, validated."""
        return config_from(dict(cls.config)) if isinstance(cls.config, Mapping) else load_config(cls.config)

    @pytest.fixture(scope="class")
    @classmethod
    def extractor(cls, loaded: Config) -> Extractor[Params]:
        """One instance, which most checks share."""
        return cls._build(loaded)

    @pytest.fixture(scope="class")
    @classmethod
    def another(cls, loaded: Config) -> Extractor[Params]:
        """A second instance, which the first knows nothing of."""
        torch.manual_seed(1)
        return cls._build(loaded)

    @pytest.fixture
    def row_extractor(self, another: Extractor[Params]) -> Iterator[RowExtractor[Params]]:
        """That instance, whose policy a check may set; the check is skipped where the extractor is of another kind."""
        if not isinstance(another, RowExtractor):
            pytest.skip("the extractor is no RowExtractor")
        before = another.policy
        yield another
        another.policy = before

    @pytest.fixture(scope="class")
    @classmethod
    def shortest(cls, extractor: Extractor[Params]) -> int:
        """Samples of the shortest clip that has a frame."""
        most = _MOST_SECONDS * extractor.spec.sample_rate
        found = bisect_left(range(most), 1, key=extractor.num_frames)
        assert found < most, f"num_frames gives no frame to a clip of {_MOST_SECONDS} s"
        return found

    @pytest.fixture(scope="class")
    @classmethod
    def clips(cls, extractor: Extractor[Params], shortest: int) -> list[Clip]:
        """Ten clips of several lengths; neighbours differ."""
        longest = max(shortest, int(cls.seconds * extractor.spec.sample_rate))
        lengths = np.random.default_rng(0).integers(shortest, longest, 6, endpoint=True).tolist()
        return cls._clips([*lengths, shortest, longest, shortest + 1, shortest])

    @pytest.fixture(scope="class")
    @classmethod
    def around(cls, extractor: Extractor[Params], shortest: int) -> list[Clip]:
        """Clips of every length around which the number of frames changes, and of some others; all have a frame."""
        hop, field = _hop(extractor), extractor.spec.frame_length
        longest = max(shortest + 3 * hop, int(cls.seconds * extractor.spec.sample_rate))
        changes = {bisect_left(range(longest), count, key=extractor.num_frames) for count in (1, 2, 3, 10)}
        changes |= {1, hop, 2 * hop, field}
        near = {n + more for n in changes for more in (-1, 0, 1)}
        found = {n for n in near if shortest <= n <= longest} | {*cls.lengths}
        found.update(np.random.default_rng(2).integers(shortest, longest, 4, endpoint=True).tolist())
        if isinstance(extractor, RowExtractor):
            found.add(max(shortest, 32 * extractor.granularity + 1))  # which is padded by some frames
        return cls._clips(sorted(found))

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, extractor: Extractor[Params], clips: list[Clip]) -> list[NDArray[Any]]:
        """The features of each of the clips, extracted in a call of its own."""
        return [_extract(extractor, [clip])[0] for clip in clips]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _torch_as_in_a_run(cls) -> Iterator[None]:
        """Torch has one thread of its own, as in a run, and afterwards what it had before."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    # What it says of itself

    def test_the_spec_is_coherent(self, loaded: Config, extractor: Extractor[Params]) -> None:
        """Shapes, rates and dtypes that can be meant."""
        spec, rate = extractor.spec, loaded.audio.sample_rate
        assert isinstance(spec, FeatureSpec), f"spec is {spec!r}, and not a featcache.extractors.FeatureSpec"
        assert _is_shape(spec.item_shape), f"spec.item_shape: {spec.item_shape!r} is not a tuple of sizes"
        assert spec.frame_rate > 0, f"spec.frame_rate: {spec.frame_rate!r} frames per second"
        assert spec.frame_length >= 0, f"spec.frame_length: {spec.frame_length!r} samples; 0 is for not finite"
        assert spec.sample_rate == rate, f"spec.sample_rate: {spec.sample_rate}, but it was built for {rate}"
        assert spec.units, "spec.units: say what a value means"
        assert _is_dtype(spec.dtype), f"spec.dtype: {spec.dtype!r} is not the name of a dtype of numpy and torch"
        names = [side.name for side in spec.side]
        assert len(set(names)) == len(names), f"spec.side: names are given twice: {names}"
        for side in spec.side:
            assert _is_shape(side.item_shape), f"spec.side, {side.name}: {side.item_shape!r} is not a tuple of sizes"
            assert _is_dtype(side.dtype), f"spec.side, {side.name}: {side.dtype!r} is not a dtype of numpy and torch"

    def test_the_class_declares_what_it_must(self, extractor: Extractor[Params]) -> None:
        """`Params`, `revision`, `batching`, `max_seconds`."""
        assert issubclass(extractor.Params, Params), "Params does not inherit featcache.extractors.Params"
        assert isinstance(extractor.revision, int), f"revision: {extractor.revision!r} is not a whole number"
        known = ["frames", *_ALLOWED]
        assert extractor.batching in known, f"batching: {extractor.batching!r} is none of {', '.join(known)}"
        limit = extractor.max_seconds
        assert limit is None or limit > 0, f"max_seconds: {limit!r} refuses every clip"

    def test_codes_fit_their_dtypes(self, loaded: Config, extractor: Extractor[Params]) -> None:
        """Whole numbers, in one column for each codebook; floats where there are no codebooks."""
        spec, sizes = extractor.spec, extractor.spec.codebook_sizes
        if not sizes:
            kind = np.dtype(spec.dtype).kind
            assert kind == "f", f"spec.dtype: {spec.dtype}, but there are no codebook_sizes, which codes have"
            return
        assert min(sizes) > 0, f"spec.codebook_sizes: {sizes}"
        assert spec.item_shape == (len(sizes),), f"spec.item_shape: {spec.item_shape}, but {len(sizes)} codebook_sizes"
        smallest = np.min_scalar_type(max(sizes) - 1).name
        for source, dtype in (("spec.dtype", spec.dtype), ("stored_dtype", extractor.stored_dtype(loaded.params))):
            fits = np.dtype(dtype).kind in "iu" and np.iinfo(dtype).max >= max(sizes) - 1
            assert fits, f"{source}: {dtype} does not hold the numbers of {max(sizes)} codewords; {smallest} does"

    # Its config

    def test_a_config_survives_being_kept(self, loaded: Config) -> None:
        """A version keeps the resolved config as JSON, and is recomputed and repaired from it."""
        again = config_from(json.loads(json.dumps(loaded.resolved())))
        assert again == loaded, f"params do not survive JSON: {loaded.params!r} becomes {again.params!r}"

    def test_the_fingerprint_is_stable(self, loaded: Config) -> None:
        """Loaded again, the same config names the same version."""
        found = [loaded.fingerprint(), loaded.fingerprint(), config_from(loaded.resolved()).fingerprint()]
        assert len(set(found)) == 1, f"the fingerprint differs from one time to the next: {found}; see weights_digest"

    def test_weights_in_another_place_are_the_same_version(self, loaded: Config, tmp_path: Path) -> None:
        """What counts is what is in their files."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        assert moved.fingerprint() == loaded.fingerprint(), "the same weights in another folder are another version"

    def test_other_weights_are_another_version(self, loaded: Config, tmp_path: Path) -> None:
        """Under the same name, in the same place."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        files = sorted((tmp_path / "moved").rglob("*.safetensors"))
        if not files:
            pytest.skip("the weights are not in safetensors")
        for file in files:
            _change_last_byte(file)
        assert moved.fingerprint() != loaded.fingerprint(), "weights_digest does not see that the weights have changed"

    # How many frames there are

    def test_num_frames_counts_up_from_none(self, extractor: Extractor[Params], shortest: int) -> None:
        """A whole number, 0 for no samples, never less for more."""
        dense = min(shortest + 2 * _hop(extractor) + 2, 20_000)
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
        for one, found in zip(around, _extract(extractor, around), strict=True):
            _check(extractor, one, found)

    def test_the_frame_rate_is_that_of_the_frames(self, extractor: Extractor[Params], shortest: int) -> None:
        """Ten seconds more are as many frames more."""
        expected = 10 * extractor.spec.frame_rate
        longer = shortest + 10 * extractor.spec.sample_rate
        found = extractor.num_frames(longer) - extractor.num_frames(shortest)
        assert abs(found - expected) <= 2 + 0.02 * expected, (
            f"spec.frame_rate: {expected / 10:g} per second, but num_frames grows by {found} in 10 s"
        )

    # What a value depends on: every bit of it, on the clip alone

    def test_neighbours(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """A clip is the same among others, longer and shorter ones."""
        assert_same(_extract(extractor, clips), alone, clips, "among others than alone")

    def test_order(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """Wherever among them it is."""
        for seed in range(2):
            order = np.random.default_rng(seed).permutation(len(clips)).tolist()
            shuffled = [clips[i] for i in order]
            assert_same(_extract(extractor, shuffled), [alone[i] for i in order], shuffled, "in another order")

    def test_number_of_clips(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """However often it is there."""
        for count in (2, 3, 19):
            repeated = [clips[0]] * count
            assert_same(_extract(extractor, repeated), [alone[0]] * count, repeated, f"{count} times in a call")

    def test_earlier_calls(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """Whatever was extracted before, and whatever torch's random numbers are."""
        for seed, one, expected in zip(range(len(clips)), reversed(clips), reversed(alone), strict=True):
            torch.manual_seed(seed)
            assert_same(_extract(extractor, [one]), [expected], [one], "in a later call")

    def test_instances(self, another: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """From another instance of the same config, as another process has."""
        assert_same(_extract(another, clips), alone, clips, "from another instance")

    def test_threads(self, extractor: Extractor[Params], clips: list[Clip], alone: list[NDArray[Any]]) -> None:
        """While other threads are in `extract` of the same instance."""
        batches = [clips[i % 4 :: 4] for i in range(8)]
        with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = list(pool.map(lambda batch: _extract(extractor, batch), batches))
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
                found = _extract(extractor, [Clip(one.id, view)])
                assert_same(found, [expected], [one], "where its waveform is a view of a longer tensor (copy it first)")

    def test_the_waveform_is_left_alone(self, extractor: Extractor[Params], clips: list[Clip]) -> None:
        """Other extractors of the same run get it too."""
        before = [one.waveform.clone() for one in clips]
        copies = [Clip(one.id, waveform.clone()) for one, waveform in zip(clips, before, strict=True)]
        _extract(extractor, copies)
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
        _extract(self._build(loaded), clips[:1])
        changed = {name: value for name, value in _torch_settings().items() if value != before[name]}
        assert not changed, f"the extractor set {changed}, which belong to the whole process"

    # What the values are

    def test_no_clips(self, extractor: Extractor[Params]) -> None:
        """None in, none out."""
        assert _extract(extractor, []) == []

    @pytest.mark.parametrize("kind", UNUSUAL)
    def test_unusual_sound(self, extractor: Extractor[Params], shortest: int, kind: str) -> None:
        """Is extracted, or refused by an AudioError, which says why in the failure ledger."""
        for n in (shortest, shortest + _hop(extractor) // 2 + 1, max(shortest, extractor.spec.sample_rate // 2)):
            one = unusual(kind, n, self.device)
            try:
                (found,) = _extract(extractor, [one])
            except AudioError:
                continue
            _check(extractor, one, found)

    def test_frame_length(self, extractor: Extractor[Params], shortest: int) -> None:
        """A sample is seen by the frames within `spec.frame_length` of it, and by no others."""
        spec, hop = extractor.spec, _hop(extractor)
        num_samples = 4 * spec.frame_length + 8 * hop + shortest
        if spec.frame_length == 0 or num_samples > min(20.0, extractor.max_seconds or math.inf) * spec.sample_rate:
            pytest.skip("spec.frame_length is not finite, or too long to look at")
        one, other = (tensor.waveform for tensor in self._clips([num_samples] * 2))
        middle = num_samples // 2
        end, start = torch.cat([one[:middle], other[middle:]]), torch.cat([other[:middle], one[middle:]])
        clips = [Clip("frame-length", waveform) for waveform in (one, end, start)]
        whole, other_end, other_start = _extract(extractor, clips)
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
        self._assert_near(_extract(extractor, around), wanted, around, "those of the reference")

    # Extractors that work on rows

    def test_batching_policies(self, row_extractor: RowExtractor[Params], around: list[Clip]) -> None:
        """Rows that are padded, and rows of equal length, give what a row alone gives."""
        found = {}
        for policy in _ALLOWED[row_extractor.batching]:
            row_extractor.policy = policy
            found[policy] = _extract(row_extractor, around)
        for policy, features in found.items():
            self._assert_near(features, found["single"], around, f"those of one row alone, batched as {policy}")

    def test_padding_changes_no_latent(self, row_extractor: RowExtractor[Params], around: list[Clip]) -> None:
        """The same of what codes are made from, where a small fault is not yet rounded away."""
        extractor = row_extractor
        if not isinstance(extractor, CodecExtractor) or extractor.batching != "padded":
            pytest.skip("the extractor makes no codes from padded rows")
        for one in around:
            piece = extractor.pieces(len(one.waveform))[0]
            row, frames = one.waveform[: piece.num_samples], piece.skip + piece.num_frames
            with torch.inference_mode():
                alone = extractor.latents(*pad_rows([row], 1, len(row)))[0, :frames].cpu().numpy()
                padded = extractor.latents(*pad_rows([row], 2, extractor.padded_length(len(row) + 1)))
            apart = difference(padded[0, :frames].cpu().numpy(), alone)
            assert apart <= self.tolerance, (
                f"latents of {what(one)} change by {apart:.2g} of the largest where zeros follow the clip; tolerance: "
                f"{self.tolerance:.2g}; each layer must pad a row at its own end"
            )

    def test_pieces_cover_a_clip(self, row_extractor: RowExtractor[Params], shortest: int) -> None:
        """Every frame comes from one piece, every sample is in one, and none goes beyond the clip."""
        rate = row_extractor.spec.sample_rate
        longest = int(min(12.0, row_extractor.max_seconds or math.inf) * rate)
        _check_pieces(row_extractor, range(shortest, max(longest, shortest + 1), rate // 7))

    def test_chunks(self, loaded: Config, row_extractor: RowExtractor[Params], shortest: int) -> None:
        """With chunks, every frame comes from one of them; and where they are exact, it is the whole clip's."""
        whole = row_extractor
        if not isinstance(whole, ModelExtractor):
            pytest.skip("the extractor has no chunks")
        rate, hop, field = whole.spec.sample_rate, whole.granularity, whole.spec.frame_length
        is_short = 0 < field <= rate  # else it takes too long, or chunks are not exact
        overlap = math.ceil(max(field if is_short else 4 * hop, shortest) / hop) * hop
        chunk = {"seconds": 3 * overlap / rate, "overlap": overlap / rate}
        try:
            chunked = self._build(_with_params(loaded, chunk=chunk))
        except ConfigError as error:
            pytest.skip(str(error))
        assert isinstance(chunked, ModelExtractor)
        lengths = [3 * overlap + more for more in (-hop, -1, 0, 1, hop, overlap, 2 * overlap + 1, 5 * overlap - 1)]
        _check_pieces(chunked, [*range(shortest, 12 * overlap, overlap // 5), *lengths])
        clips = self._clips(lengths)
        found = _extract(chunked, clips)
        for one, features in zip(clips, found, strict=True):
            _check(chunked, one, features)
        if chunked.chunks_are_exact:
            self._assert_near(found, _extract(whole, clips), clips, "those of the clip whole, in chunks that are exact")

    def test_side_arrays(
        self, row_extractor: RowExtractor[Params], clips: list[Clip], alone: list[NDArray[Any]]
    ) -> None:
        """`extract_rows` gives the arrays that `spec.side` names, and the features that `extract` gives."""
        with torch.inference_mode():
            found: list[Rows] = row_extractor.extract_rows(clips)
        for one, rows in zip(clips, found, strict=True):
            named = {side.name for side in row_extractor.spec.side}
            assert set(rows.side) == named, f"extract_rows gives {sorted(rows.side)}, spec.side names {sorted(named)}"
            for side in row_extractor.spec.side:
                array = rows.side[side.name].cpu().numpy()
                is_right = array.dtype == side.dtype and array.shape[1:] == side.item_shape and len(array) > 0
                assert is_right, f"{side.name} of {what(one)} is {array.dtype} {array.shape}, spec.side says {side}"
                assert np.isfinite(array).all(), f"{side.name} of {what(one)} is NaN or infinite"
        features = [rows.features.cpu().numpy() for rows in found]
        assert_same(features, alone, clips, "in extract_rows")

    @classmethod
    def _build(cls, config: Config) -> Extractor[Params]:
        return config.build(torch.device(cls.device))

    @classmethod
    def _clips(cls, lengths: Sequence[int]) -> list[Clip]:
        return [clip(seed, num_samples, cls.device) for seed, num_samples in enumerate(lengths)]

    def _assert_near(
        self, found: list[NDArray[Any]], wanted: list[NDArray[Any]], clips: Sequence[Clip], whose: str
    ) -> None:
        assert_near(found, wanted, clips, whose, tolerance=self.tolerance, ties=self.ties)


def _extract(extractor: Extractor[Params], clips: Sequence[Clip]) -> list[NDArray[Any]]:
    """A call as a run makes it, and copies of what comes back."""
    with torch.inference_mode():
        found = extractor.extract(clips)
    assert isinstance(found, list), f"extract returned a {type(found).__name__}, and not a list"
    assert len(found) == len(clips), f"extract returned {len(found)} tensors for {len(clips)} clips"
    return [features.cpu().numpy().copy() for features in found]


def _check(extractor: Extractor[Params], clip: Clip, found: NDArray[Any]) -> None:
    """What must hold of any clip's features."""
    spec = extractor.spec
    expected = (extractor.num_frames(len(clip.waveform)), *spec.item_shape)
    assert found.shape == expected, (
        f"extract gave {list(found.shape)} for {what(clip)}; num_frames and spec.item_shape say {list(expected)}"
    )
    assert found.dtype == spec.dtype, f"extract gave {found.dtype} for {what(clip)}; spec.dtype says {spec.dtype}"
    finite = np.isfinite(found)
    assert finite.all(), f"{(~finite).sum()} of {finite.size} values of {what(clip)} are NaN or infinite"
    if spec.codebook_sizes:
        codes = found.astype(np.int64)
        assert ((codes >= 0) & (codes < np.array(spec.codebook_sizes))).all(), (
            f"codes of {what(clip)} go from {codes.min()} to {codes.max()}; codebook_sizes: {spec.codebook_sizes}"
        )


def _check_pieces(extractor: RowExtractor[Params], lengths: Sequence[int]) -> None:
    """That the pieces of clips of these lengths give each frame once."""
    for n in lengths:
        pieces = extractor.pieces(n)
        frames, expected = [piece.num_frames for piece in pieces], extractor.num_frames(n)
        assert sum(frames) == expected, f"the pieces of {n} samples give {frames} frames, num_frames says {expected}"
        covered = 0
        for piece in pieces:
            assert piece.start <= covered, f"of {n} samples, {covered} to {piece.start} are in no piece: {pieces}"
            covered = max(covered, piece.start + piece.num_samples)
            has = extractor.num_frames(piece.num_samples)
            fits = 0 <= piece.skip <= piece.skip + piece.num_frames <= has
            assert fits, f"{piece}, of {n} samples, has {has} frames"
        assert covered == n, f"the pieces of {n} samples end at {covered}: {pieces}"


def _with_params(config: Config, **params: object) -> Config:
    document = config.resolved()
    return config_from({**document, "params": {**document["params"], **params}})


def _with_weights_in(folder: Path, config: Config) -> Config:
    """The config with a copy of its weights; the check is skipped where they are not on disk."""
    named = config.resolved()["params"].get("weights")
    if not named or not (weights := Path(named)).exists():
        pytest.skip("the config names no weights in a folder or file")
    shutil.copytree(weights if weights.is_dir() else weights.parent, folder)
    return _with_params(config, weights=str(folder if weights.is_dir() else folder / weights.name))


def _hop(extractor: Extractor[Params]) -> int:
    """Samples from one frame to the next, about."""
    return max(1, round(extractor.spec.sample_rate / extractor.spec.frame_rate))


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)


def _is_dtype(name: object) -> bool:
    return isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype) and hasattr(np, name)


def _torch_settings() -> dict[str, object]:
    return {
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.is_grad_enabled": torch.is_grad_enabled(),
    }


def _change_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
