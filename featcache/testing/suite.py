"""The checks of an extractor: what it declares, what values it gives, and that they depend on the clip alone."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from featcache.config import Config, config_from
from featcache.errors import AudioError, ConfigError
from featcache.extraction.padded_rows import BATCHINGS, declared_batchings
from featcache.extractors import FeatureSpec
from featcache.extractors.base import Clip, Extractor, Params
from featcache.extractors.rows import RowExtractor, Rows, pad_rows
from featcache.testing.base import (
    UNUSUAL,
    Checks,
    assert_same,
    check_features,
    differing_frames,
    extract,
    hop_of,
    label,
    largest_error,
    unusual_clip,
    with_params,
)


class ExtractorSuite(Checks):
    """The guarantees of an extractor, as tests: inherit from it in a class whose name begins with `Test`.

    Whether values are correct is checked only if the class defines `reference`.

    Attributes:
        config: A YAML file, the name of a packaged config, or the content of a config as a dict. If it is only known
            when tests run, override the fixture `loaded` instead.
        device: The device to run on.
        tolerance: For floats, how far values may differ by rounding, in batches of other shapes and from `reference`,
            relative to a clip's largest value.
        ties: For codes, the share of frames that may differ there, since rounding decides between equally near
            codewords. Real errors change several per cent.
        seconds: The approximate length of the longest clip. Increase it to reach effects in long clips, such as chunks.
        lengths: The lengths of further clips, in samples.
    """

    def test_the_spec_is_coherent(self, loaded: Config, extractor: Extractor[Params]) -> None:
        """Shapes, rates and dtypes make sense."""
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
        """`Params`, `revision`, `batching` and `max_seconds` are valid."""
        assert issubclass(extractor.Params, Params), "Params does not inherit featcache.extractors.Params"
        assert isinstance(extractor.revision, int), f"revision: {extractor.revision!r} is not a whole number"
        known = ["frames", *BATCHINGS]
        assert extractor.batching in known, f"batching: {extractor.batching!r} is none of {', '.join(known)}"
        limit = extractor.max_seconds
        assert limit is None or limit > 0, f"max_seconds: {limit!r} refuses every clip"

    def test_codes_fit_their_dtypes(self, loaded: Config, extractor: Extractor[Params]) -> None:
        """Codes are whole numbers, in one column for each codebook; features without codebooks are floats."""
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

    def test_a_config_survives_being_kept(self, loaded: Config) -> None:
        """The resolved config survives JSON, in which a version keeps it to be recomputed and repaired."""
        again = config_from(json.loads(json.dumps(loaded.resolved())))
        assert again == loaded, f"params do not survive JSON: {loaded.params!r} becomes {again.params!r}"

    def test_the_fingerprint_is_stable(self, loaded: Config) -> None:
        """If the same config is loaded again, it names the same version."""
        found = [loaded.fingerprint(), loaded.fingerprint(), config_from(loaded.resolved()).fingerprint()]
        assert len(set(found)) == 1, f"the fingerprint differs from one time to the next: {found}; see weights_digest"

    def test_weights_in_another_place_are_the_same_version(self, loaded: Config, tmp_path: Path) -> None:
        """The fingerprint includes the content of weights, not their place."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        assert moved.fingerprint() == loaded.fingerprint(), "the same weights in another folder are another version"

    def test_other_weights_are_another_version(self, loaded: Config, tmp_path: Path) -> None:
        """The fingerprint notices other weights of the same name in the same place."""
        moved = _with_weights_in(tmp_path / "moved", loaded)
        files = sorted((tmp_path / "moved").rglob("*.safetensors"))
        if not files:
            pytest.skip("the weights are not in safetensors")
        for file in files:
            _change_last_byte(file)
        assert moved.fingerprint() != loaded.fingerprint(), "weights_digest does not see that the weights have changed"

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

    @pytest.fixture
    def row_extractor(self, another: Extractor[Params]) -> Iterator[RowExtractor[Params]]:
        """An instance whose batching a check may choose. The check is skipped if the extractor takes no rows."""
        row_extractor = _as_row_extractor(another)
        before = row_extractor.chosen_batching
        yield row_extractor
        row_extractor.chosen_batching = before

    def test_batching_policies(self, row_extractor: RowExtractor[Params], around: list[Clip]) -> None:
        """Padded rows and rows of equal length have the values of a row alone."""
        found = {}
        for batching in declared_batchings(row_extractor):
            row_extractor.chosen_batching = batching
            found[batching] = extract(row_extractor, around)
        for batching, features in found.items():
            self._assert_near(features, found["single"], around, f"those of one row alone, batched as {batching}")

    def test_padding_changes_no_latent(self, row_extractor: RowExtractor[Params], around: list[Clip]) -> None:
        """Padding does not change the latents of codes, in which a small fault is not yet rounded away."""
        extractor = row_extractor.as_codec_extractor()
        if extractor is None or extractor.batching != "padded":
            pytest.skip("the extractor makes no codes from padded rows")
        for clip in around:
            piece = extractor.pieces(len(clip.waveform))[0]
            row, frames = clip.waveform[: piece.num_samples], piece.skip + piece.num_frames
            with torch.inference_mode():
                alone = extractor.latents(*pad_rows([row], 1, len(row)))[0, :frames].cpu().numpy()
                padded = extractor.latents(*pad_rows([row], 2, extractor.padded_length(len(row) + 1)))
            apart = largest_error(padded[0, :frames].cpu().numpy(), alone)
            assert apart <= self.tolerance, (
                f"latents of {label(clip)} change by {apart:.2g} of the largest where zeros follow the clip; "
                f"tolerance: {self.tolerance:.2g}; each layer must pad a row at its own end"
            )

    def test_pieces_cover_a_clip(self, row_extractor: RowExtractor[Params], shortest: int) -> None:
        """Every frame comes from one piece, every sample is in a piece, and no piece goes beyond the clip."""
        rate = row_extractor.spec.sample_rate
        longest = int(min(12.0, row_extractor.max_seconds or math.inf) * rate)
        _check_pieces(row_extractor, range(shortest, max(longest, shortest + 1), rate // 7))

    def test_chunks(self, loaded: Config, row_extractor: RowExtractor[Params], shortest: int) -> None:
        """With chunks, every frame comes from one chunk; if chunks are exact, it is that of the whole clip."""
        whole = row_extractor
        if "chunk" not in type(loaded.params).model_fields:
            pytest.skip("the extractor has no chunks")
        rate, hop, field = whole.spec.sample_rate, whole.granularity, whole.spec.frame_length
        is_short = 0 < field <= rate  # else it takes too long, or chunks are not exact
        overlap = math.ceil(max(field if is_short else 4 * hop, shortest) / hop) * hop
        chunk = {"seconds": 3 * overlap / rate, "overlap": overlap / rate}
        try:
            chunked = _as_row_extractor(self._build(with_params(loaded, chunk=chunk)))
        except ConfigError as error:
            pytest.skip(str(error))
        lengths = [3 * overlap + more for more in (-hop, -1, 0, 1, hop, overlap, 2 * overlap + 1, 5 * overlap - 1)]
        _check_pieces(chunked, [*range(shortest, 12 * overlap, overlap // 5), *lengths])
        clips = self._clips(lengths)
        found = extract(chunked, clips)
        for clip, features in zip(clips, found, strict=True):
            check_features(chunked, clip, features)
        if chunked.chunks_are_exact:
            self._assert_near(found, extract(whole, clips), clips, "those of the clip whole, in chunks that are exact")

    def test_side_arrays(
        self, row_extractor: RowExtractor[Params], clips: list[Clip], alone: list[NDArray[Any]]
    ) -> None:
        """`extract_rows` gives the arrays that `spec.side` names, and the features that `extract` gives."""
        with torch.inference_mode():
            found: list[Rows] = row_extractor.extract_rows(clips)
        for clip, rows in zip(clips, found, strict=True):
            named = {side.name for side in row_extractor.spec.side}
            assert set(rows.side) == named, f"extract_rows gives {sorted(rows.side)}, spec.side names {sorted(named)}"
            for side in row_extractor.spec.side:
                array = rows.side[side.name].cpu().numpy()
                is_right = array.dtype == side.dtype and array.shape[1:] == side.item_shape and len(array) > 0
                assert is_right, f"{side.name} of {label(clip)} is {array.dtype} {array.shape}, spec.side says {side}"
                assert np.isfinite(array).all(), f"{side.name} of {label(clip)} is NaN or infinite"
        features = [rows.features.cpu().numpy() for rows in found]
        assert_same(features, alone, clips, "in extract_rows")


def _with_weights_in(folder: Path, config: Config) -> Config:
    """The config with a copy of its weights in `folder`. The check is skipped if the weights are not on disk."""
    named = config.resolved()["params"].get("weights")
    if not named or not (weights := Path(named)).exists():
        pytest.skip("the config names no weights in a folder or file")
    shutil.copytree(weights if weights.is_dir() else weights.parent, folder)
    return with_params(config, weights=str(folder if weights.is_dir() else folder / weights.name))


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(isinstance(size, int) and size > 0 for size in shape)


def _is_dtype(name: object) -> bool:
    return isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype) and hasattr(np, name)


def _change_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _torch_settings() -> dict[str, object]:
    return {
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.is_grad_enabled": torch.is_grad_enabled(),
    }


def _as_row_extractor(extractor: Extractor[Params]) -> RowExtractor[Params]:
    """The extractor if it takes rows; the check is skipped if it does not."""
    row_extractor = extractor.as_row_extractor()
    if row_extractor is None:
        pytest.skip("the extractor is no RowExtractor")
    return row_extractor


def _check_pieces(extractor: RowExtractor[Params], lengths: Sequence[int]) -> None:
    """Assert that the pieces of clips of these lengths give each frame once."""
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
