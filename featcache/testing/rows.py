"""Checks of extractors that compute padded rows: batching, pieces and chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from featcache.config import Config, load_config
from featcache.errors import ConfigError
from featcache.extractors import Clip
from featcache.extractors.base import Batching, declared_batchings
from featcache.testing.checks import Alone, Checks
from featcache.testing.clips import (
    AnyExtractor,
    Features,
    extract,
    granularity_of,
    label,
    largest_error,
)
from featcache.testing.values import check_features


class RowChecks(Checks):
    """Checks of batching, pieces, chunks and latents; skipped without rows."""

    @pytest.fixture
    def row_extractor(self, another: AnyExtractor) -> Iterator[AnyExtractor]:
        """Yield an instance whose batching a check may choose, if the extractor takes
        rows."""
        if not another.takes_rows:
            pytest.skip("the extractor takes no rows")
        before = another.chosen_batching
        yield another
        another.chosen_batching = before

    def test_batching_policies(self, row_extractor: AnyExtractor, around: list[Clip]) -> None:
        """Padded rows and rows of equal length have the values of a row alone."""
        features = {}
        for batching in declared_batchings(row_extractor):  # "single" comes first
            row_extractor.chosen_batching = batching
            features[batching] = extract(row_extractor, around)
            whose = f"those of one row alone, batched as {batching}"
            self._assert_near(features[batching], features["single"], around, whose)

    def test_padding_changes_no_latent(
        self, row_extractor: AnyExtractor, around: list[Clip]
    ) -> None:
        """Padding does not change the latents of codes, where a small fault still shows."""
        if not row_extractor.quantizes_latents or row_extractor.batching != "padded":
            pytest.skip("the extractor makes no codes from padded rows")
        for clip in around:
            alone = _latents(row_extractor, "single", clip)
            apart = largest_error(_latents(row_extractor, "padded", clip), alone)
            assert apart <= self.tolerance, (
                f"zeros after {label(clip)} change its latents by {apart:.2g} of the largest; "
                f"tolerance: {self.tolerance:.2g}; each layer must pad a row at its own end"
            )

    def test_pieces_cover_a_clip(self, row_extractor: AnyExtractor, shortest: int) -> None:
        """Pieces have each frame once, all samples, and no others."""
        rate = row_extractor.spec.sample_rate
        longest = int(min(12.0, row_extractor.max_seconds or math.inf) * rate)
        _check_pieces(row_extractor, range(shortest, max(longest, shortest + 1), rate // 7))

    def test_chunks(self, loaded: Config, row_extractor: AnyExtractor, shortest: int) -> None:
        """Chunks have each frame once, and exact chunks have those of the whole clip."""
        whole = row_extractor
        if "chunk" not in type(loaded.params).model_fields:
            pytest.skip("the extractor has no chunks")
        rate, hop, field = whole.spec.sample_rate, granularity_of(whole), whole.spec.frame_length
        is_short = 0 < field <= rate  # else it takes too long, or chunks are not exact
        overlap = math.ceil(max(field if is_short else 4 * hop, shortest) / hop) * hop
        chunk = {"seconds": 3 * overlap / rate, "overlap": overlap / rate}
        try:
            chunked = load_config(loaded, {"params.chunk": chunk}).build(torch.device(self.device))
        except ConfigError as error:
            pytest.skip(str(error))
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

    def test_codes_of_latents(self, row_extractor: AnyExtractor, alone: Alone) -> None:
        """`codes_and_latents` gives the codes that `extract` gives."""
        if not row_extractor.quantizes_latents:
            pytest.skip("the extractor makes no codes of latents")
        with torch.inference_mode():
            pairs = row_extractor.codes_and_latents(alone.clips)
        for (codes, _), expected, clip in zip(pairs, alone.features, alone.clips, strict=True):
            # further tracks follow the main one
            main = codes[:, : expected.shape[1]].cpu().numpy()
            assert np.array_equal(main, expected), (
                f"codes_and_latents gives {label(clip)} other codes than extract"
            )


def _latents(extractor: AnyExtractor, batching: Batching, clip: Clip) -> Features:
    extractor.chosen_batching = batching
    with torch.inference_mode():
        ((_, latents),) = extractor.codes_and_latents([clip])
    return latents.cpu().numpy()


def _check_pieces(extractor: AnyExtractor, lengths: Sequence[int]) -> None:
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
