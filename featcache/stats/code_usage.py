"""Counts how often each code of a version occurs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from featcache.errors import StoreError
from featcache.loader.cache import Cache
from featcache.manifest.utterances import Manifest
from featcache.spec import Ints
from featcache.stats.pieces import ShardPieces, select, stretches


@dataclass(frozen=True, eq=False)
class Usage:
    """The occurrences of each code of a version."""

    version: str
    """The name of the version's folder."""
    fingerprint: str
    frames: int
    utterances: int
    counts: list[Ints]
    """The occurrences of each code: for each codebook, int64 `[size]`."""

    @property
    def used(self) -> list[int]:
        """The number of codes of each codebook that occur at all."""
        return [int((counts > 0).sum()) for counts in self.counts]

    @property
    def entropy(self) -> list[float]:
        """The entropy of each codebook in bits: the size of a code, ideally compressed."""
        shares = (counts[counts > 0] / self.frames for counts in self.counts)
        return [float(-(share * np.log2(share)).sum()) + 0.0 for share in shares]

    @property
    def perplexity(self) -> list[float]:
        """The number of equally frequent codes that would have each codebook's entropy."""
        return [2.0**bits for bits in self.entropy]

    def by_codebook(self) -> list[dict[str, Any]]:
        """Describe each codebook as JSON: see docs/json.md."""
        names = ("size", "used", "entropy", "perplexity")
        columns = (map(len, self.counts), self.used, self.entropy, self.perplexity)
        return [dict(zip(names, book, strict=True)) for book in zip(*columns, strict=True)]


def usage(
    cache: Cache,
    manifest: str | Path | Manifest | Ints | None = None,
    *,
    threads: int = 1,
    report: Callable[[int], object] = lambda frames: None,
) -> Usage:
    """Count the codes of a version.

    Args:
        cache: A cache of codes, or a corpus of them.
        manifest, threads, report: As for `featcache.stats.moments`.

    Raises StoreError if the cache holds no codes, no utterances, or a code beyond the
    size of its codebook; and, as `moments` does, ArgumentError, ManifestError,
    MissingItemError and DamagedError."""
    spec, path = cache.spec, cache.version.path
    if not spec.codebook_sizes:
        raise StoreError(f"{path}: holds {spec.units}, {spec.dtype}: only codes are counted")
    chosen = select(cache, manifest, None)
    counts = [np.zeros(size, np.int64) for size in spec.codebook_sizes]
    adding = Lock()

    def count(pieces: ShardPieces) -> None:
        codes = pieces.read()[stretches(pieces.starts - pieces.first, pieces.counts)]
        for number, (column, size) in enumerate(zip(codes.T, spec.codebook_sizes, strict=True)):
            for code in (column.min(initial=0), column.max(initial=0)):
                # else counting would need memory for all codes up to it
                if not 0 <= code < size:
                    what = f"holds code {code} of codebook {number}, which has {size}"
                    raise StoreError(f"{path}: {what}: `featcache verify` says where")
            of_column = np.bincount(column, minlength=size)
            with adding:
                counts[number] += of_column

    chosen.for_each(count, threads, report)
    frames, utterances = (int(number.sum()) for number in chosen.frames_and_utterances())
    return Usage(path.name, cache.version.info.fingerprint, frames, utterances, counts)
