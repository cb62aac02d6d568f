"""k-means over the frames of a version, for the centroids of the extractor `units`.

A sample of the frames is drawn and clustered in memory, as float32; the version itself is never in memory, so the
sample determines the memory needed. It is clustered by Lloyd's algorithm and not in mini-batches: on features of
speech, this ends sooner and at a lower inertia (figures in docs/extractors.md).
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.extractors.codebook import Codebook, Nearest
from featcache.quantize import dequantize_array
from featcache.spec import QUANTIZATION, all_finite
from featcache.store.files import write_file
from featcache.store.index import Index, open_index
from featcache.store.version import Version, library_versions

FRAMES_PER_UNIT = 1000
"""Frames in the sample for each unit, by default; above it, the inertia of other frames hardly falls."""

MAX_ITERATIONS = 100
TOLERANCE = 1e-4
"""Iterations end when one lowers the inertia by no more than this part of it."""

_SEEDING_FRAMES_PER_UNIT = 40
_BLOCK_FRAMES = 1 << 14


@dataclass(frozen=True)
class Fit:
    """What came of clustering.

    Attributes:
        centroids: float32 `[k, D]`, on the CPU.
        sizes: int64 `[k]`, how many frames of the sample are nearest to each.
        inertia: the mean squared distance of a frame of the sample to its centroid.
        iterations: of Lloyd's algorithm.
    """

    centroids: torch.Tensor
    sizes: NDArray[np.int64]
    inertia: float
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
    """Fit `k` centroids to a sample of a version's frames.

    On one device and with the same libraries, the same seed gives the same centroids, however the version's utterances
    lie in its shards, and with any number of threads.

    Args:
        version: of floats, `[frames, D]`.
        k: how many centroids.
        seed: of the sample and of the first centroids.
        frames: in the sample, at most; `FRAMES_PER_UNIT` for each centroid by default.
        device: to cluster on; the CPU by default.
        threads: to compute with; one is enough for a GPU. Torch's own threads should be one.

    Raises:
        ConfigError: the version's features are not vectors of floats, the sample has fewer frames than `k`, or it
            holds NaN or infinity.
        DamagedError: a shard is damaged.
    """
    spec = version.info.spec
    if np.dtype(spec.dtype).kind != "f":
        raise ConfigError(f"{version.path}: holds {spec.dtype}, {spec.units}; k-means takes float16 or float32")
    if len(spec.item_shape) != 1:
        shape = ", ".join(["frames", *map(str, spec.item_shape)])
        raise ConfigError(
            f"{version.path}: holds [{shape}]; k-means takes one vector for each frame: extract one layer, or a "
            "weighted sum of several"
        )
    index = open_index(version)
    there, wanted = int(index.num_frames.sum()), FRAMES_PER_UNIT * k if frames is None else frames
    if min(there, wanted) < k:
        few = f"it holds {there:,}" if there < k else f"--frames is {wanted:,}"
        raise ConfigError(f"{version.path}: {k:,} units need at least as many frames; {few}")
    generator = np.random.default_rng(seed)
    sample = draw(version, index, min(there, wanted), generator)
    if not all_finite(sample):
        raise ConfigError(f"{version.path}: holds NaN or infinity: `featcache verify` says where")
    fit = cluster(torch.from_numpy(sample).to(device or "cpu"), k, generator, threads)
    fitted = {
        "seed": str(seed),
        "frames": str(len(sample)),
        "inertia": repr(fit.inertia),
        "iterations": str(fit.iterations),
        "spec": json.dumps(asdict(spec)),
        "featcache": library_versions()["featcache"],
    }
    return Codebook(fit.centroids, version.info.config, version.info.fingerprint, spec.dtype, fitted), fit


def write_codebook(codebook: Codebook, path: Path) -> None:
    """Write the codebook's file; it appears whole or not at all.

    Raises:
        StoreError: it cannot be written.
    """
    write_file(path, codebook.to_bytes())


def draw(version: Version, index: Index, count: int, generator: np.random.Generator) -> NDArray[np.float32]:
    """Frames of the version, all different, each as likely as any other: float32 `[count, D]`.

    The frames are numbered through the utterances in the order of their ids' hashes, which is the same however they
    lie in shards.
    """
    utterances = index.by_hash.astype(np.int64)
    ends = np.cumsum(index.num_frames[utterances])
    chosen = np.sort(generator.choice(int(ends[-1]), count, replace=False, shuffle=False))
    at = np.searchsorted(ends, chosen, side="right")  # which utterance each is of
    position = utterances[at]
    in_shard = index.first_frame[position] + chosen - (ends[at] - index.num_frames[position])
    shard = index.shard[position]
    sample = np.empty((count, *version.info.spec.item_shape), np.float32)
    for number in np.unique(shard).tolist():
        rows = np.flatnonzero(shard == number)
        rows = rows[np.argsort(in_shard[rows])]  # read from its beginning to its end
        source = version.shard(index.shards[number])
        frames = source.features[in_shard[rows]]
        if version.info.spec.is_quantized:
            parameters = source.side(QUANTIZATION).entries[index.item[position[rows]]]
            frames = dequantize_array(frames, parameters[:, 0], parameters[:, 1])
        sample[rows] = frames
    return sample


def cluster(frames: torch.Tensor, k: int, generator: np.random.Generator, threads: int = 1) -> Fit:
    """Lloyd's algorithm, from the centroids of k-means++.

    A centroid that no frame is nearest to moves to one of the frames that are farthest from theirs.

    Args:
        frames: float32 `[N, D]`, at least `k`.
        k: how many clusters.
        generator: of the first centroids.
        threads: to compute with.
    """
    some = generator.choice(len(frames), min(len(frames), _SEEDING_FRAMES_PER_UNIT * k), replace=False)
    centroids = first_centroids(frames[torch.from_numpy(np.sort(some)).to(frames.device)], k, generator)
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
                centroids[empty] = frames[distances.argsort(descending=True, stable=True)[: len(empty)]]
    return Fit(centroids.cpu(), sizes.cpu().numpy(), inertia / len(frames), iteration)


def _assign(
    frames: torch.Tensor, centroids: torch.Tensor, pool: ThreadPoolExecutor, threads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sum of the frames nearest to each centroid, float64 `[k, D]`; how many they are, int64 `[k]`; and the squared
    distance of each frame, float32 `[N]`.

    Frames are summed block by block, and blocks in their order, so that threads change nothing.
    """
    k, nearest = len(centroids), Nearest(centroids, frames.device)

    def of_block(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, distances = nearest(block)
        sizes = codes.bincount(minlength=k)
        starts = sizes.cumsum(0) - sizes
        sums = torch.nn.functional.embedding_bag(codes.argsort(stable=True), block, starts, mode="sum")
        return sums, sizes, distances

    sums = torch.zeros_like(centroids, dtype=torch.float64)
    sizes = torch.zeros(k, dtype=torch.int64, device=frames.device)
    distances = frames.new_empty(len(frames))
    step = threads * _BLOCK_FRAMES  # as many blocks' sums are held as there are threads
    for first in range(0, len(frames), step):
        part = frames[first : first + step]
        blocks = [part[start : start + _BLOCK_FRAMES] for start in range(0, len(part), _BLOCK_FRAMES)]
        done = list(pool.map(of_block, blocks))
        for of_sums, of_sizes, _ in done:
            sums += of_sums
            sizes += of_sizes
        torch.cat([of_distances for _, _, of_distances in done], out=distances[first : first + step])
    return sums, sizes, distances


def first_centroids(frames: torch.Tensor, k: int, generator: np.random.Generator) -> torch.Tensor:
    """The greedy k-means++ of Arthur and Vassilvitskii (2007): each centroid is a frame, drawn with a probability
    proportional to its squared distance from those before it; of a few draws, the one that leaves the least distance.

    Args:
        frames: float32 `[n, D]`.
        k: how many.
        generator: of the draws.

    Returns:
        float32 `[k, D]`.
    """
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
        drawn = np.searchsorted(ends, generator.random(2 + int(math.log(k))) * ends[-1], side="right")
        drawn = drawn.clip(max=len(frames) - 1)  # beyond it where nothing is left
        leaves = np.minimum(left, distances_from(drawn))
        best = leaves.sum(axis=1).argmin()
        left = leaves[best]
        chosen = np.append(chosen, drawn[best])
    return frames[torch.from_numpy(chosen).to(frames.device)]
