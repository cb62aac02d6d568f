"""Checks of extractors that work on rows: padded, cut into pieces, in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from featcache.config import Config
from featcache.errors import ConfigError
from featcache.extraction.batching import declared_batchings
from featcache.extractors.base import Clip, Extractor, Params
from featcache.extractors.rows import RowExtractor, Rows, pad_rows
from featcache.testing.base import Checks, assert_same, check_features, extract, label, largest_error, with_params


class RowChecks(Checks):
    """Checks of extractors that put rows together, which are skipped for others."""

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
