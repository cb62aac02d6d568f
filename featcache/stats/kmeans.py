"""k-means over the frames of a version, for the centroids of the extractor `units`.

A sample of the frames is drawn and clustered in memory, as float32; the rest of the
version is never in memory, so the size of the sample determines the memory needed. The
sample is clustered by Lloyd's algorithm: on features of speech, it ends sooner than
mini-batches do, and at a lower inertia (figures in docs/extractors.md)."""

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
from featcache.format.shard import dequantize_array
from featcache.version.index import Index
from featcache.version.indexing import open_index
from featcache.version.join import by_shard
from featcache.version.version import Version, library_versions

FRAMES_PER_UNIT = 1000
"""The default number of frames in the sample for each unit; more hardly lower the inertia
of other frames."""

MAX_ITERATIONS = 100
TOLERANCE = 1e-4
"""Iterations end after one that lowers the inertia by at most this fraction."""

_SEEDING_FRAMES_PER_UNIT = 40
_BLOCK_FRAMES = 1 << 14

_STRETCH_BYTES = 4 << 20
"""A shard is read by stretches of that size, each from the first frame that is drawn of
it to the last one."""

_Assigned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""The sum of the frames nearest to each centroid, `[k, D]`, float32 of a block and
float64 of all blocks; their number, int64 `[k]`; and the squared distance of each frame
from its centroid, float32 `[N]`."""


@dataclass(frozen=True)
class Fit:
    """The result of clustering."""

    centroids: torch.Tensor
    """The centroids, float32 `[k, D]` on the CPU."""
    sizes: NDArray[np.int64]
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
    """Fit `k` centroids to a sample of a version's frames, `[frames, D]` of floats: of at
    most so many `frames`, or of `FRAMES_PER_UNIT` for each centroid.

    On one device and with the same libraries, the same `seed` gives the same centroids,
    however the version's utterances lie in its shards, and with any number of threads
    (one is enough for a GPU; torch's own should be one).

    Raises ConfigError if the features are no vectors of floats, the sample has fewer
    frames than `k`, or holds NaN or infinity; DamagedError if a shard is damaged."""
    spec = version.info.spec
    if np.dtype(spec.dtype).kind != "f":
        raise ConfigError(
            f"{version.path}: holds {spec.dtype}, {spec.units}; k-means takes float16 or float32"
        )
    if len(spec.item_shape) != 1:
        raise ConfigError(
            f"{version.path}: holds {spec.main.shape_text()}, not [frames, D]: extract one "
            "layer, or a weighted sum"
        )
    index = open_index(version)
    available, wanted = (
        int(index.num_frames.sum()),
        FRAMES_PER_UNIT * k if frames is None else frames,
    )
    if min(available, wanted) < k:
        few = f"it holds {available:,}" if available < k else f"--frames is {wanted:,}"
        raise ConfigError(f"{version.path}: {k:,} units need at least as many frames; {few}")
    generator = np.random.default_rng(seed)
    sample = draw_frames(version, index, min(available, wanted), generator)
    if not np.isfinite(sample).all():
        raise ConfigError(f"{version.path}: holds NaN or infinity: `featcache verify` says where")
    fit = cluster(torch.from_numpy(sample).to(device or "cpu"), k, generator, threads)
    numbers = {
        "seed": seed,
        "frames": len(sample),
        "inertia": fit.inertia,
        "iterations": fit.iterations,
    }
    fitted = {name: repr(number) for name, number in numbers.items()}
    fitted |= {"spec": json.dumps(spec.document()), "featcache": library_versions()["featcache"]}
    return Codebook(
        fit.centroids, version.info.config, version.info.fingerprint, spec.dtype, fitted
    ), fit


def draw_frames(
    version: Version, index: Index, count: int, generator: np.random.Generator
) -> NDArray[np.float32]:
    """Draw different frames of the version, each with the same probability: float32
    `[count, D]`. Frames are numbered in the order of the hashes of their utterances' ids,
    so the draw does not depend on their shards."""
    utterances = index.by_hash.astype(np.int64)
    ends = np.cumsum(index.num_frames[utterances])
    chosen = np.sort(generator.choice(int(ends[-1]), count, replace=False, shuffle=False))
    # the utterance of each frame, by its number in this order
    at = np.searchsorted(ends, chosen, side="right")
    position = utterances[at]
    in_shard = index.first_frame[position] + chosen - (ends[at] - index.num_frames[position])
    sample = np.empty((count, *version.info.spec.item_shape), np.float32)
    for rows, shard, items in by_shard(version, index, position):
        features, order = shard.open_features(), np.argsort(in_shard[rows])
        scales = shard.quantization if version.info.spec.is_quantized else None
        stretches = in_shard[rows[order]] // max(
            1, _STRETCH_BYTES * features.shape[0] // features.num_bytes
        )
        for some in np.split(order, np.flatnonzero(np.diff(stretches)) + 1):
            first, last = in_shard[rows[some[[0, -1]]]].tolist()
            (stretch,) = features.read_ranges([first], [last + 1 - first])
            frames = stretch[in_shard[rows[some]] - first]
            if scales is not None:
                frames = dequantize_array(frames, *scales[items[some]].swapaxes(0, 1))
            sample[rows[some]] = frames
    return sample


def cluster(frames: torch.Tensor, k: int, generator: np.random.Generator, threads: int = 1) -> Fit:
    """Lloyd's algorithm over frames, float32 `[N, D]`, at least `k`, from the centroids
    of k-means++, which `generator` draws. A centroid to which no frame is nearest moves
    to one of the frames that are farthest from their centroids."""
    chosen = generator.choice(
        len(frames), min(len(frames), _SEEDING_FRAMES_PER_UNIT * k), replace=False
    )
    centroids = first_centroids(
        frames[torch.from_numpy(np.sort(chosen)).to(frames.device)], k, generator
    )
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
                centroids[empty] = frames[
                    distances.argsort(descending=True, stable=True)[: len(empty)]
                ]
    return Fit(centroids.cpu(), sizes.cpu().numpy(), inertia / len(frames), iteration)


def _assign(
    frames: torch.Tensor, centroids: torch.Tensor, pool: ThreadPoolExecutor, threads: int
) -> _Assigned:
    """Assign frames to the centroids nearest to them.

    Frames are summed block by block, and the blocks' sums in their order: the number of
    threads changes nothing."""
    k, nearest = len(centroids), Nearest(centroids, frames.device)

    def assign_block(block: torch.Tensor) -> _Assigned:
        codes, distances = nearest(block)
        sizes = codes.bincount(minlength=k)
        starts = sizes.cumsum(0) - sizes
        sums = torch.nn.functional.embedding_bag(
            codes.argsort(stable=True), block, starts, mode="sum"
        )
        return sums, sizes, distances

    sums = torch.zeros_like(centroids, dtype=torch.float64)
    sizes = torch.zeros(k, dtype=torch.int64, device=frames.device)
    distances = frames.new_empty(len(frames))
    step = threads * _BLOCK_FRAMES  # in memory are the sums of one block for each thread
    for first in range(0, len(frames), step):
        part = frames[first : first + step]
        blocks = [
            part[start : start + _BLOCK_FRAMES] for start in range(0, len(part), _BLOCK_FRAMES)
        ]
        done = list(pool.map(assign_block, blocks))
        for block_sums, block_sizes, _ in done:
            sums += block_sums
            sizes += block_sizes
        torch.cat(
            [block_distances for *_, block_distances in done], out=distances[first : first + step]
        )
    return sums, sizes, distances


def first_centroids(frames: torch.Tensor, k: int, generator: np.random.Generator) -> torch.Tensor:
    """Greedy k-means++ (Arthur and Vassilvitskii, 2007), float32 `[k, D]`: each centroid
    is one of the frames `[n, D]`, drawn in proportion to its squared distance from those
    before; of a few draws, that of the least distance left."""
    centred = frames - frames.mean(0)
    squares = centred.square().sum(1)

    def distances_from(candidates: NDArray[np.int64]) -> NDArray[np.float64]:
        at = torch.from_numpy(candidates).to(frames.device)
        squared = (centred[at] * -2) @ centred.T + squares + squares[at, None]
        return squared.clamp_(min=0).cpu().numpy().astype(np.float64)

    chosen = generator.integers(len(frames), size=1)
    (left,) = distances_from(chosen)
    while len(chosen) < k:
        ends = left.cumsum()
        drawn = np.searchsorted(
            ends, generator.random(2 + int(math.log(k))) * ends[-1], side="right"
        )
        # if all distances left are 0, it would be beyond the end
        drawn = drawn.clip(max=len(frames) - 1)
        leaves = np.minimum(left, distances_from(drawn))
        best = leaves.sum(axis=1).argmin()
        left = leaves[best]
        chosen = np.append(chosen, drawn[best])
    return frames[torch.from_numpy(chosen).to(frames.device)]
