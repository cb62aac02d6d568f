"""Collects what a report shows, as plain values: see docs/json.md.

One pass over the tables of a version's shards gives seconds and sources, some 20 bytes for
each utterance; audio statistics take 32 more. Of features, a bounded sample is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import StoreError
from featcache.loader.cache import Cache
from featcache.loader.corpus import Corpus
from featcache.manifest.copies import copies_of, expand
from featcache.manifest.utterances import Manifest
from featcache.report.values import Histogram, by_decades, by_steps, characters_of, scatter
from featcache.spec import Ints
from featcache.stats import moments, usage
from featcache.strings import Strings, extend_hashes
from featcache.version.join import RowKeys, by_shard, join
from featcache.version.version import Version

Document = dict[str, Any]
Floats = NDArray[np.float32]

SEED = 0
"""The seed of everything that is drawn at random."""

SAMPLE_BYTES = 64_000_000
"""The most bytes of stored features that are read of a version, about."""

_SAMPLE_SHARDS = 16
_SHOWN = 12  # utterances whose features are shown, besides outliers
_WORST = 8  # outliers by each rule
_MOST_COLUMNS = 8
_MOST_VALUES = 10_000
_GROUPS = 40
_DUPLICATES = 50
_TEXTS = {"text", "transcript", "transcription", "sentence"}

RULES: dict[str, tuple[str, Callable[[Floats], Floats]]] = {
    "clipped": ("most clipped", np.positive),
    "level": ("quietest", np.negative),
    "dc": ("largest DC", np.abs),
    "silence": ("most silence", np.positive),
    "silent_start": ("longest silent start", np.positive),
    "silent_end": ("longest silent end", np.positive),
    "bandwidth": ("narrowest band", np.negative),
}
"""The rules of outliers by the statistic: the name of a rule, and how bad a value is."""

_RARE = {"clipped", "dc", "silent_start", "silent_end"}
"""The statistics that are next to zero for most utterances."""

_COPIED = "path name fingerprint config utterances frames audio_seconds bytes bytes_on_disk shards"
_COPIED += " first_run last_run tags unfinished failed"


@dataclass(frozen=True)
class Report:
    """Everything that a report shows, but pictures and sound."""

    path: str
    largest: str
    """The path of the version with most utterances, which most fields describe."""
    versions: list[Document]
    durations: Histogram
    manifest: Document | None
    audio: Document | None
    """The statistics of a version of `audio_stats`, if there is one."""
    compared: list[str]
    """Lines about how the first two versions differ; empty if they are not compared."""
    duplicates: Document
    shown: list[Document]
    """The utterances whose features are shown: outliers and a sample."""


def collect(
    path: str,
    documents: Sequence[Document],
    caches: Sequence[Cache],
    manifest: Manifest | None = None,
    compared: Sequence[str] = (),
    *,
    threads: int = 1,
    report: Callable[[int], object] = lambda shards: None,
) -> Report:
    """Collect the numbers of versions, at least one.

    Args:
        path: The name of the cache, for people.
        documents: The versions as `featcache info --json` describes them.
        caches: The same versions, opened; or the same of a corpus.
        manifest: The manifest whose columns are summarised, if there is one.
        compared: Lines about how the first two versions differ, to show them side by side.
        threads: The number of threads that compute.
        report: Called with the number of shards done since the last call; each shard
            counts twice.
    """
    largest = caches[0] if compared else max(caches, key=len)
    audio, seconds, contents = None, np.zeros(0, np.float32), np.zeros(0, np.uint64)
    described = []
    for document, cache in zip(documents, caches, strict=True):
        units = statistics_of(cache.version)
        is_audio = units is not None and audio is None and len(cache) > 0
        if cache is largest or is_audio:
            own_seconds, own_contents = _read_tables(cache, report)
        else:
            report(len(cache.index.shards))
        if cache is largest:
            seconds, contents = own_seconds, own_contents
        if units is not None and is_audio:
            audio = _audio(cache, units, own_seconds)
        described.append(_version(document, cache, threads))
        report(len(cache.index.shards))
    of_manifest = None
    if manifest is not None:
        of_manifest = _manifest(largest, manifest, seconds)
    return Report(
        path=path,
        largest=str(largest.version.path),
        versions=described,
        durations=by_steps("duration", "s", seconds),
        manifest=of_manifest,
        audio=audio,
        compared=[*compared],
        duplicates=_duplicates(largest, contents),
        shown=_shown(largest, seconds, audio),
    )


def statistics_of(version: Version) -> dict[str, str] | None:
    """Return the names and units of a version's audio statistics, in their order; None if
    it holds other features."""
    info = version.info
    units = info.spec.named_units
    if info.config.get("extractor") == "audio_stats" and RULES.keys() <= units.keys():
        return units
    return None


def _parts(cache: Cache) -> list[Cache]:
    """List the caches of a corpus's parts, or the cache alone."""
    if isinstance(cache, Corpus):
        return [cache.part(name) for name in cache.parts]
    return [cache]


def _read_tables(cache: Cache, report: Callable[[int], object]) -> tuple[Floats, NDArray[Any]]:
    """Read the seconds of all utterances, and hashes of what was decoded: of the file's
    bytes and the part of it; 0 if unknown."""
    seconds, contents = [np.zeros(0, np.float32)], [np.zeros(0, np.uint64)]
    copies = copies_of(cache.config)
    for part in _parts(cache):
        index = part.index
        for number in range(len(index.shards)):
            positions = np.arange(*index.span(number))
            for _, shard, items in by_shard(part.version, index, positions):
                table = shard.table
                samples = table["num_samples"][items].astype(np.float32)
                seconds.append(samples / np.float32(cache.spec.sample_rate))
                sources = hashes = table["source_hash"][items]
                for name in ("start", "duration", "channel"):
                    hashes = extend_hashes(hashes, np.nan_to_num(table[name][items]))
                if not copies.are_plain:
                    hashes = extend_hashes(hashes, copies.numbers(table.ids.take(items)))
                contents.append(np.where(sources == 0, np.uint64(0), hashes))
            report(1)
    return np.concatenate(seconds), np.concatenate(contents)


def _version(document: Document, cache: Cache, threads: int) -> Document:
    """Describe a version, and summarise a sample of its features."""
    spec = cache.spec
    reasons = Counter(failure["reason"] for failure in document["failures"])
    stored_dtype = spec.stored_dtype if spec.is_quantized else spec.dtype
    described = {name: document[name] for name in _COPIED.split()} | {
        "features": f"{stored_dtype} {spec.main.shape_text()}, {spec.axis}",
        "units": spec.units,
        "failed_by_reason": dict(reasons.most_common()),
        "failures": document["failures"],
        "sampled_frames": 0,
        "codebooks": [],
        "mean": [],
        "std": [],
        "fault": None,
    }
    is_float = spec.values_dtype.kind == "f" and statistics_of(cache.version) is None
    try:
        if len(cache) and spec.codebook_sizes:
            codes = usage(cache, _sample(cache), threads=threads)
            columns = zip(
                map(len, codes.counts), codes.used, codes.entropy, codes.perplexity, strict=True
            )
            names = ("size", "used", "entropy", "perplexity")
            described["sampled_frames"] = codes.frames
            described["codebooks"] = [dict(zip(names, book, strict=True)) for book in columns]
        elif len(cache) and is_float:
            stats = moments(cache, _sample(cache), threads=threads)
            described["sampled_frames"] = stats.frames
            described |= {"mean": stats.mean.ravel().tolist(), "std": stats.std.ravel().tolist()}
    except (StoreError, ValueError) as error:  # NaN; a spec that contradicts itself
        described["fault"] = str(error)
    return described


def _sample(cache: Cache) -> Ints | None:
    """Choose runs of utterances in shards that are drawn at random; None for all."""
    index, frame_bytes = cache.index, int(cache.spec.num_bytes(1))
    if int(cache.lengths.sum()) * frame_bytes <= SAMPLE_BYTES:
        return None
    count = min(len(index.shards), _SAMPLE_SHARDS)
    drawn = np.random.default_rng(SEED).choice(len(index.shards), count, replace=False)
    runs = []
    for number in np.sort(drawn).tolist():
        begin, end = index.span(number)
        total = cache.lengths[begin:end].cumsum()
        within = int((total <= SAMPLE_BYTES // (count * frame_bytes)).sum())
        runs.append(np.arange(begin, min(begin + max(within, 1), end)))
    return np.concatenate(runs)


def _audio(cache: Cache, units: dict[str, str], seconds: Floats) -> Document:
    """Summarise a version of audio statistics."""
    blocks = []
    for part in _parts(cache):
        for number in range(len(part.index.shards)):
            firsts = part.index.first_frame[slice(*part.index.span(number))]
            if len(firsts):
                first = int(firsts.min())
                frames = part.shard_frames(number, first, int(firsts.max()) - first + 1)
                blocks.append(np.nan_to_num(frames[firsts - first]).astype(np.float32))
    rows = np.concatenate(blocks)
    columns = dict(zip(units, rows.T, strict=True))
    rules: dict[int, list[str]] = {}
    for name, (rule, badness) in RULES.items():
        bad = badness(columns[name])
        for position in np.argsort(-bad, kind="stable")[:_WORST].tolist():
            if bad[position] > 0 or badness is np.negative:
                rules.setdefault(position, []).append(rule)
    outliers = []
    for position, of_position in rules.items():
        statistics = {name: float(column[position]) for name, column in columns.items()}
        outlier = {"id": cache.ids[position], "audio_seconds": float(seconds[position])}
        outliers.append(outlier | {"rules": of_position, "statistics": statistics})
    histograms = []
    for name, column in columns.items():
        if name in _RARE:
            histograms.append(by_decades(name, units[name], np.abs(column)))
        else:
            histograms.append(by_steps(name, units[name], column))
    marked = np.array([*rules], np.int64)
    return {
        "path": str(cache.version.path),
        "utterances": len(cache),
        "units": units,
        "histograms": histograms,
        "levels": scatter(seconds, columns["level"], marked, cache.ids, SEED),
        "outliers": outliers,
    }


def _duplicates(cache: Cache, contents: NDArray[np.uint64]) -> Document:
    """Find utterances that were decoded from the same bytes."""
    order = np.argsort(contents, kind="stable")
    order = order[np.searchsorted(contents[order], 1) :]
    is_first = np.diff(contents[order], prepend=0) != 0
    starts = np.flatnonzero(is_first)
    sizes = np.diff(starts, append=len(order))
    repeated = np.flatnonzero(sizes > 1)
    examples = []
    for group in repeated[np.argsort(-sizes[repeated], kind="stable")][:_DUPLICATES].tolist():
        places = order[starts[group] : starts[group] + min(int(sizes[group]), 10)]
        examples.append(cache.ids.texts(places))
    return {
        "compared": len(order),
        "utterances": int(sizes[repeated].sum()),
        "groups": len(repeated),
        "examples": examples,
    }


def _shown(cache: Cache, seconds: Floats, audio: Document | None) -> list[Document]:
    """Choose the utterances to show: the worst by each rule, then a sample."""
    chosen: dict[int, str] = {}
    for name, (rule, badness) in RULES.items():
        outliers = [one for one in audio["outliers"] if rule in one["rules"]] if audio else []
        for one in sorted(outliers, key=lambda one: -badness(one["statistics"][name]))[:1]:
            chosen.setdefault(cache.index.find_one(one["id"]), rule)
    chosen.pop(-1, None)
    if audio is None and len(cache):
        chosen = {int(seconds.argmin()): "shortest", int(seconds.argmax()): "longest"}
    count = min(len(cache), _SHOWN)
    drawn = np.random.default_rng(SEED).choice(len(cache), count, replace=False)
    for position in np.sort(drawn).tolist():
        chosen.setdefault(position, "sample")
    return [
        {"id": cache.ids[position], "why": why, "audio_seconds": float(seconds[position])}
        for position, why in chosen.items()
    ]


def _manifest(cache: Cache, manifest: Manifest, seconds: Floats) -> Document:
    """Summarise the columns of a manifest, of the rows that the cache has."""
    rows = expand(manifest, copies_of(cache.config))
    status = join(RowKeys.of(rows), cache.index, {})
    present = np.flatnonzero(status.present)
    of_rows = seconds[status.positions[present]]
    columns: list[Document] = []
    text: Document | None = None
    for name, values in rows.values.items():
        column = values.texts.take(present)
        if name.lower() not in _TEXTS:
            columns += _groups(name, column, of_rows)
        elif text is None:
            text = _text(name, column, of_rows, rows.ids.take(present))
    return {
        "source": manifest.source,
        "utterances": len(rows),
        "missing": len(rows) - len(present),
        "columns": columns[:_MOST_COLUMNS],
        "text": text,
    }


def _groups(name: str, column: Strings, seconds: Floats) -> list[Document]:
    """Group utterances by a column; empty if it has too many values."""
    _, firsts, numbers = np.unique(column.hashes(), return_index=True, return_inverse=True)
    if not 0 < len(firsts) <= min(_MOST_VALUES, max(1, len(column) // 2)):
        return []
    counts, totals = np.bincount(numbers), np.bincount(numbers, seconds)
    groups = [
        {
            "value": column[int(firsts[number])],
            "utterances": int(counts[number]),
            "audio_seconds": float(totals[number]),
        }
        for number in np.argsort(-totals, kind="stable")[:_GROUPS].tolist()
    ]
    return [{"name": name, "distinct": len(firsts), "groups": groups}]


def _text(name: str, column: Strings, seconds: Floats, ids: Strings) -> Document | None:
    """Compare the length of texts with durations, and mark the slowest and fastest. Returns
    None if all texts are empty."""
    characters = characters_of(column)
    filled = np.flatnonzero(characters)
    if not len(filled):
        return None
    characters, seconds, ids = characters[filled], seconds[filled], ids.take(filled)
    order = np.argsort(characters / np.maximum(seconds, 1e-3), kind="stable")
    ends = np.unique(np.concatenate([order[:_WORST], order[-_WORST:]]))
    lengths = scatter(seconds, characters, ends, ids, SEED)
    return {"column": name, "utterances": len(filled), "lengths": lengths}
