"""k-means over a sample of the frames of a version, for the centroids of the extractor
`units`. docs/extractors.md describes it, and has figures."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.extractors.units import Codebook, Nearest
from featcache.spec import Ints, as_values, dequantize_array
from featcache.version.index import Index
from featcache.version.indexing import open_index
from featcache.version.join import by_shard
from featcache.version.records import library_versions
from featcache.version.version import Version

FRAMES_PER_UNIT = 1000
"""The default number of frames in the sample for each unit; more hardly lower the inertia
of other frames."""

MAX_ITERATIONS = 100
TOLERANCE = 1e-4
"""Iterations end after one that lowers the inertia by at most this fraction."""

_SEEDING_FRAMES_PER_UNIT = 40
_BLOCK_FRAMES = 1 << 14
_STRETCH_BYTES = 4 << 20  # by which a shard is read, from the first drawn frame to the last

_Assigned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The sum of the frames nearest to each centroid, `[k, D]` (float32 of a block, float64 of
all); their number, int64 `[k]`; each frame's squared distance, float32 `[N]`."""


@dataclass(frozen=True)
class Fit:
    """The result of clustering."""

    centroids: torch.Tensor
    """Float32 `[k, D]` on the CPU."""
    sizes: Ints
    """The number of frames of the sample that are nearest to each centroid, int64 `[k]`."""
    inertia: float
    """The mean squared distance of the sample's frames to their centroids."""
    iterations: int


def fit_version(
    version: Version,
    k: int,
    *,
    seed: int = 0,
    frames: int | None = None,
    device: torch.device | None = None,
    threads: int = 1,
) -> tuple[Codebook, Fit]:
    """Fit `k` centroids to a sample of a version's frames, `[frames, D]` of floats. The
    sample has at most `frames` frames, by default `FRAMES_PER_UNIT` for each centroid.

    On one device and with the same libraries, the same `seed` gives the same centroids, in
    any order of the utterances, and with any number of threads.

    Raises ConfigError if the features are no vectors of floats, or the sample has fewer
    frames than `k`, NaN or infinity; DamagedError if a shard is damaged."""
    path, info, spec = version.path, version.info, version.info.spec
    if spec.kind != "frames":
        what = f"holds {spec.main.shape_text()}, {spec.axis}"
        raise ConfigError(f"{path}: {what}; k-means takes frames, [frames, D]")
    if spec.values_dtype.kind != "f":
        what = f"holds {spec.dtype}, {spec.units}"
        raise ConfigError(f"{path}: {what}; k-means takes floats")
    if len(spec.item_shape) != 1:
        what = f"holds {spec.main.shape_text()}, not [frames, D]"
        raise ConfigError(f"{path}: {what}: extract one layer, or a weighted sum")
    index = open_index(version)
    available = int(index.num_frames.sum())
    if frames is None:
        frames = FRAMES_PER_UNIT * k
    if min(available, frames) < k:
        few = f"it holds {available:,}" if available < k else f"--frames is {frames:,}"
        raise ConfigError(f"{path}: {k:,} units need at least as many frames; {few}")
    generator = np.random.default_rng(seed)
    sample = draw_frames(version, index, min(available, frames), generator)
    if not np.isfinite(sample).all():
        raise ConfigError(f"{path}: holds NaN or infinity: `featcache verify` says where")
    fit = cluster(torch.from_numpy(sample).to(device or "cpu"), k, generator, threads)
    fitted = {
        "seed": repr(seed),
        "frames": repr(len(sample)),
        "inertia": repr(fit.inertia),
        "iterations": repr(fit.iterations),
        "spec": json.dumps(spec.document()),
        "featcache": library_versions()["featcache"],
    }
    codebook = Codebook(fit.centroids, info.config, info.fingerprint, spec.dtype, fitted)
    return codebook, fit


def draw_frames(
    version: Version, index: Index, count: int, generator: np.random.Generator
) -> NDArray[np.float32]:
    """Draw different frames of the version, float32 `[count, D]`. They are numbered in the
    order of the hashes of their utterances' ids, so the draw does not depend on shards."""
    utterances = index.by_hash.astype(np.int64)
    ends = np.cumsum(index.num_frames[utterances])
    chosen = np.sort(generator.choice(int(ends[-1]), count, replace=False, shuffle=False))
    numbers = np.searchsorted(ends, chosen, side="right")
    positions = utterances[numbers]
    in_utterance = chosen - (ends[numbers] - index.num_frames[positions])
    in_shard = index.first_frame[positions] + in_utterance
    sample = np.empty((count, *version.info.spec.item_shape), np.float32)
    for rows, shard, items in by_shard(version, index, positions):
        features, order = shard.open_features(), np.argsort(in_shard[rows])
        scales = shard.quantization if version.info.spec.is_quantized else None
        stretch_frames = max(1, _STRETCH_BYTES * features.shape[0] // features.num_bytes)
        stretches = in_shard[rows[order]] // stretch_frames
        for drawn in np.split(order, np.flatnonzero(np.diff(stretches)) + 1):
            first, last = in_shard[rows[drawn[[0, -1]]]].tolist()
            (stretch,) = features.read_ranges([first], [last + 1 - first])
            frames = stretch[in_shard[rows[drawn]] - first]
            if scales is not None:
                frames = dequantize_array(frames, *scales[items[drawn]].swapaxes(0, 1))
            sample[rows[drawn]] = as_values(frames, version.info.spec.dtype)
    return sample


def cluster(frames: torch.Tensor, k: int, generator: np.random.Generator, threads: int = 1) -> Fit:
    """Cluster at least `k` frames, float32 `[N, D]`, by Lloyd's algorithm from
    `first_centroids`. A centroid without frames moves to one of the frames that are
    farthest from their centroids."""
    num_seeding = min(len(frames), _SEEDING_FRAMES_PER_UNIT * k)
    chosen = np.sort(generator.choice(len(frames), num_seeding, replace=False))
    seeding = frames[torch.from_numpy(chosen).to(frames.device)]
    centroids = first_centroids(seeding, k, generator)
    before = math.inf
    with ThreadPoolExecutor(threads) as pool:
        for iteration in range(MAX_ITERATIONS + 1):
            sums, sizes, distances = _assign(frames, centroids, pool, threads)
            inertia = float(distances.sum(dtype=torch.float64))
            if iteration == MAX_ITERATIONS or before - inertia <= TOLERANCE * inertia:
                break
            centroids, before = (sums / sizes[:, None]).float(), inertia
            empty = (sizes == 0).nonzero().flatten()
            if len(empty):
                farthest = distances.argsort(descending=True, stable=True)
                centroids[empty] = frames[farthest[: len(empty)]]
    return Fit(centroids.cpu(), sizes.cpu().numpy(), inertia / len(frames), iteration)


def _assign(
    frames: torch.Tensor, centroids: torch.Tensor, pool: ThreadPoolExecutor, threads: int
) -> _Assigned:
    """Assign frames to their nearest centroids. The blocks' sums are added in order, so the
    number of threads changes nothing."""
    k, nearest = len(centroids), Nearest(centroids, frames.device)

    def assign_block(block: torch.Tensor) -> _Assigned:
        codes, distances = nearest(block)
        sizes = codes.bincount(minlength=k)
        starts, order = sizes.cumsum(0) - sizes, codes.argsort(stable=True)
        sums = torch.nn.functional.embedding_bag(order, block, starts, mode="sum")
        return sums, sizes, distances

    sums = torch.zeros_like(centroids, dtype=torch.float64)
    sizes = torch.zeros(k, dtype=torch.int64, device=frames.device)
    distances = frames.new_empty(len(frames))
    step = threads * _BLOCK_FRAMES  # in memory are the sums of one block for each thread
    for first in range(0, len(frames), step):
        blocks = torch.split(frames[first : first + step], _BLOCK_FRAMES)
        of_blocks = []
        for block_sums, block_sizes, block_distances in pool.map(assign_block, blocks):
            sums += block_sums
            sizes += block_sizes
            of_blocks.append(block_distances)
        torch.cat(of_blocks, out=distances[first : first + step])
    return sums, sizes, distances


def first_centroids(frames: torch.Tensor, k: int, generator: np.random.Generator) -> torch.Tensor:
    """Draw centroids from frames `[n, D]` by greedy k-means++ (Arthur and Vassilvitskii,
    2007), float32 `[k, D]`: each in proportion to its squared distance from those before,
    and of a few draws the one that leaves the least distance."""
    centred = frames - frames.mean(0)
    squares = centred.square().sum(1)

    def distances_from(candidates: Ints) -> NDArray[np.float64]:
        numbers = torch.from_numpy(candidates).to(frames.device)
        squared = (centred[numbers] * -2) @ centred.T + squares + squares[numbers, None]
        return squared.clamp_(min=0).cpu().numpy().astype(np.float64)

    chosen = generator.integers(len(frames), size=1)
    (left,) = distances_from(chosen)
    while len(chosen) < k:
        ends = left.cumsum()
        shares = generator.random(2 + int(math.log(k)))
        drawn = np.searchsorted(ends, shares * ends[-1], side="right")
        # if all distances left are 0, the draw is beyond the end
        drawn = drawn.clip(max=len(frames) - 1)
        leaves = np.minimum(left, distances_from(drawn))
        best = leaves.sum(axis=1).argmin()
        left = leaves[best]
        chosen = np.append(chosen, drawn[best])
    return frames[torch.from_numpy(chosen).to(frames.device)]
