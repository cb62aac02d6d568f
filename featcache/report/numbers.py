"""Collects what a report shows, as plain dataclasses.

One pass over the tables of a version's shards gives seconds and sources: some 20 bytes of
memory for each utterance, and 32 more for its audio statistics. Features are read of a
bounded sample only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import StoreError
from featcache.loader.cache import Cache
from featcache.manifest.copies import copies_of, expand
from featcache.manifest.utterances import Manifest
from featcache.report.values import Histogram, Scatter, by_decades, by_steps, characters_of, scatter
from featcache.spec import FeatureSpec
from featcache.stats import moments, usage
from featcache.strings import Strings, extend_hashes
from featcache.version.join import RowKeys, by_shard, join
from featcache.version.version import Version

SEED = 0
"""The seed of everything that is drawn at random."""

SAMPLE_BYTES = 128_000_000
"""The most bytes of stored features that are read of a version, about."""

_SAMPLE_SHARDS = 16
_WORST = 8
"""The number of outliers by each rule."""
_SHOWN = 12
"""The number of utterances whose features are shown, besides outliers."""
_MOST_COLUMNS = 8
_MOST_VALUES = 10_000
_GROUPS = 40
_DUPLICATES = 50
_TEXTS = {"text", "transcript", "transcription", "sentence"}

Ints = NDArray[np.int64]
Values = NDArray[Any]


def _as_is(values: Values) -> Values:
    return values


RULES: dict[str, tuple[str, Callable[[Values], Values], bool]] = {
    "clipped": ("most clipped", _as_is, True),
    "level": ("quietest", np.negative, False),
    "dc": ("largest DC", np.abs, True),
    "silence": ("most silence", _as_is, True),
    "silent_start": ("longest silent start", _as_is, True),
    "silent_end": ("longest silent end", _as_is, True),
    "bandwidth": ("narrowest band", np.negative, False),
}
"""The rules of outliers, by the statistic: the name of the rule; how bad a value is; and
whether only values above zero are bad."""


@dataclass(frozen=True)
class Codebook:
    """The use of a codebook in the sample."""

    size: int
    used: int
    """The number of codes that occur."""
    entropy: float
    """In bits."""
    perplexity: float


@dataclass(frozen=True)
class VersionNumbers:
    """A version of the cache; see docs/json.md."""

    path: str
    name: str
    fingerprint: str
    extractor: str
    config: dict[str, Any]
    features: str
    """Dtype, shape and axis of the features."""
    units: str
    utterances: int
    frames: int
    audio_seconds: float
    num_bytes: int
    bytes_on_disk: int
    shards: int
    first_run: str | None
    last_run: str | None
    tags: list[str]
    unfinished: list[str]
    """What it lacks, a message each."""
    failed: int
    failed_by_reason: dict[str, int]
    failures: list[dict[str, Any]]
    """The failures, of which the page shows a few."""
    sampled_frames: int = 0
    """The number of frames that the next fields describe."""
    codebooks: list[Codebook] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    """The mean of each dimension, in C order; empty for codes."""
    std: list[float] = field(default_factory=list)
    fault: str | None = None
    """The reason why its features could not be summarised."""


@dataclass(frozen=True)
class Group:
    """The utterances with one value of a column."""

    value: str
    utterances: int
    audio_seconds: float


@dataclass(frozen=True)
class Column:
    """A column of the manifest with few values."""

    name: str
    distinct: int
    """The number of its values."""
    groups: list[Group]
    """The values with most audio first, at most 40."""


@dataclass(frozen=True)
class Text:
    """The length of texts against duration."""

    column: str
    utterances: int
    lengths: Scatter
    """Seconds and characters; the slowest and fastest utterances are marked."""


@dataclass(frozen=True)
class ManifestNumbers:
    """A manifest, as far as the largest version has its rows."""

    source: str
    utterances: int
    missing: int
    """The rows that the version does not have, or has from another file."""
    columns: list[Column]
    text: Text | None


@dataclass(frozen=True)
class Outlier:
    """An utterance that is extreme by some rules."""

    id: str
    audio_seconds: float
    statistics: dict[str, float]
    rules: list[str]


@dataclass(frozen=True)
class Audio:
    """The statistics of the waveforms, from a version of `audio_stats`."""

    path: str
    utterances: int
    units: dict[str, str]
    histograms: list[Histogram]
    levels: Scatter
    """Seconds and dB of full scale; the outliers are marked."""
    outliers: list[Outlier]


@dataclass(frozen=True)
class Duplicates:
    """Utterances with the same audio: equal bytes of the file, start, duration and channel."""

    compared: int
    """The utterances whose file's hash is known."""
    utterances: int
    """The utterances whose audio another utterance has too."""
    groups: int
    examples: list[list[str]]
    """The ids of some groups, the largest first."""


@dataclass(frozen=True)
class Shown:
    """An utterance whose features the page shows."""

    id: str
    why: str
    """The rule of an outlier, or `sample`."""
    audio_seconds: float


@dataclass(frozen=True)
class Report:
    """Everything that a report shows, but pictures and sound."""

    path: str
    largest: str
    """The path of the version with most utterances, which the next fields describe."""
    versions: list[VersionNumbers]
    durations: Histogram
    manifest: ManifestNumbers | None
    audio: Audio | None
    duplicates: Duplicates
    shown: list[Shown]


@dataclass(frozen=True)
class _Tables:
    """Columns of the current items of a version, `[items]`."""

    seconds: NDArray[np.float32]
    contents: NDArray[np.uint64]
    """Hashes of what was decoded: of the file's bytes and the part of it; 0 if unknown."""


def collect(
    path: str,
    documents: Sequence[dict[str, Any]],
    versions: Sequence[Version],
    manifest: Manifest | None = None,
    *,
    threads: int = 1,
    report: Callable[[int], object] = lambda shards: None,
) -> Report:
    """Collect the numbers of some versions of a cache.

    Args:
        path: The name of the cache, for people.
        documents: The versions as `featcache info --json` describes them.
        versions: The same versions, at least one.
        manifest: The manifest whose columns are summarised, if there is one.
        threads: The number of threads that compute.
        report: Called with the number of shards done since the last call; each shard of
            each version is done twice.
    """
    caches = [Cache(version) for version in versions]
    numbers = []
    tables: dict[int, _Tables] = {}
    largest = max(range(len(caches)), key=lambda number: (len(caches[number]), -number))
    audio: Audio | None = None
    for number, (document, cache) in enumerate(zip(documents, caches, strict=True)):
        shards = len(cache.index.shards)
        units = statistics_of(cache.version)
        is_audio = units is not None and audio is None and len(cache) > 0
        if number == largest or is_audio:
            tables[number] = _read_tables(cache, report)
        else:
            report(shards)
        if units is not None and is_audio:
            audio = _audio(cache, units, tables[number].seconds)
        summary: dict[str, Any] = {}
        if units is None and len(cache):
            summary = _summarise(cache, threads)
        numbers.append(_version(document, cache.spec, summary))
        report(shards)
    cache, of_largest = caches[largest], tables[largest]
    of_manifest = None
    if manifest is not None:
        of_manifest = _manifest(cache, manifest, of_largest.seconds)
    return Report(
        path=path,
        largest=str(cache.version.path),
        versions=numbers,
        durations=by_steps("duration", "s", of_largest.seconds),
        manifest=of_manifest,
        audio=audio,
        duplicates=_duplicates(cache, of_largest.contents),
        shown=_shown(cache, of_largest.seconds, audio),
    )


def statistics_of(version: Version) -> dict[str, str] | None:
    """Return the names and units of a version's audio statistics, in their order; None if
    it holds other features."""
    info = version.info
    if info.config.get("extractor") != "audio_stats" or info.spec.kind != "clip":
        return None
    units = dict(re.findall(r"(\w+) \(([^()]*)\)", info.spec.units))
    if info.spec.item_shape != (len(units),) or not {"peak", *RULES} <= units.keys():
        return None
    return units


def _version(
    document: dict[str, Any], spec: FeatureSpec, summary: dict[str, Any]
) -> VersionNumbers:
    failures = document["failures"]
    reasons = Counter(failure["reason"] for failure in failures)
    names = "path name fingerprint config utterances frames audio_seconds bytes_on_disk shards"
    copied = [*names.split(), "first_run", "last_run", "failed"]
    return VersionNumbers(
        **{name: document[name] for name in copied},
        extractor=str(document["config"].get("extractor")),
        features=f"{spec.stored_dtype} {spec.main.shape_text()}, {spec.axis}",
        units=spec.units,
        num_bytes=int(document["bytes"]),
        tags=[tag["name"] for tag in document["tags"]],
        unfinished=[lack["message"] for lack in document["unfinished"]],
        failed_by_reason=dict(reasons.most_common()),
        failures=failures,
        **summary,
    )


def _read_tables(cache: Cache, report: Callable[[int], object]) -> _Tables:
    """Read the tables of a version's shards, one after the other."""
    version, index = cache.version, cache.index
    copies = copies_of(cache.config)
    seconds = np.zeros(len(index), np.float32)
    contents = np.zeros(len(index), np.uint64)
    for number in range(len(index.shards)):
        begin, end = index.span(number)
        for _, shard, items in by_shard(version, index, np.arange(begin, end)):
            table = shard.table
            seconds[begin:end] = table["num_samples"][items] / cache.spec.sample_rate
            sources = table["source_hash"][items]
            hashes = sources
            for name in ("start", "duration", "channel"):
                hashes = extend_hashes(hashes, np.nan_to_num(table[name][items]))
            if not copies.are_plain:
                numbers = copies.numbers(table.ids.take(items))
                hashes = extend_hashes(hashes, numbers)
            contents[begin:end] = np.where(sources == 0, 0, hashes)
        report(1)
    return _Tables(seconds, contents)


def _sample(cache: Cache) -> Ints | None:
    """Choose runs of utterances in shards that are drawn at random; None for all."""
    spec, index = cache.spec, cache.index
    frame_bytes = int(spec.num_bytes(1))
    if int(index.num_frames.sum()) * frame_bytes <= SAMPLE_BYTES:
        return None
    count = min(len(index.shards), _SAMPLE_SHARDS)
    drawn = np.random.default_rng(SEED).choice(len(index.shards), count, replace=False)
    most_frames = SAMPLE_BYTES // (count * frame_bytes)
    runs = []
    for number in np.sort(drawn).tolist():
        begin, end = index.span(number)
        total = index.num_frames[begin:end].cumsum()
        runs.append(np.arange(begin, begin + int((total <= most_frames).sum())))
    positions = np.concatenate(runs)
    # at least one, if each is larger than a run
    return positions if len(positions) else np.arange(1)


def _summarise(cache: Cache, threads: int) -> dict[str, Any]:
    """Summarise a sample of features: codebooks, or mean and standard deviation."""
    spec = cache.spec
    is_float = np.dtype(spec.dtype).kind == "f"
    if not (spec.codebook_sizes or is_float):
        return {}
    try:
        if not spec.codebook_sizes:
            stats = moments(cache, _sample(cache), threads=threads)
            return {
                "sampled_frames": stats.frames,
                "mean": stats.mean.ravel().tolist(),
                "std": stats.std.ravel().tolist(),
            }
        used = usage(cache, _sample(cache), threads=threads)
    except StoreError as error:
        return {"fault": str(error)}
    sizes = map(len, used.counts)
    columns = zip(sizes, used.used, used.entropy, used.perplexity, strict=True)
    codebooks = [Codebook(*column) for column in columns]
    return {"sampled_frames": used.frames, "codebooks": codebooks}


def _audio(cache: Cache, units: dict[str, str], seconds: NDArray[np.float32]) -> Audio:
    """Summarise a version of audio statistics."""
    index = cache.index
    rows = np.empty((len(index), len(units)), np.float32)
    for number in range(len(index.shards)):
        begin, end = index.span(number)
        if end == begin:
            continue
        firsts = index.first_frame[begin:end]
        first = int(firsts.min())
        frames = cache.shard_frames(number, first, int(firsts.max()) - first + 1)
        rows[begin:end] = frames[firsts - first]
    columns = dict(zip(units, np.nan_to_num(rows).T, strict=True))
    rules: dict[int, list[str]] = {}
    for name, (rule, badness, above_zero) in RULES.items():
        bad = badness(columns[name])
        worst = np.argsort(-bad, kind="stable")[:_WORST]
        for position in worst.tolist():
            if bad[position] > 0 or not above_zero:
                rules.setdefault(position, []).append(rule)
    outliers = [
        Outlier(
            id=cache.ids[position],
            audio_seconds=float(seconds[position]),
            statistics={name: float(column[position]) for name, column in columns.items()},
            rules=of_position,
        )
        for position, of_position in rules.items()
    ]
    histograms = []
    for name, unit in units.items():
        is_rare = RULES[name][2] and name != "silence" if name in RULES else False
        if is_rare:
            histograms.append(by_decades(name, unit, np.abs(columns[name])))
        else:
            histograms.append(by_steps(name, unit, columns[name]))
    marked = np.array([*rules], np.int64)
    levels = scatter(seconds, columns["level"], marked, cache.ids, SEED)
    return Audio(str(cache.version.path), len(index), units, histograms, levels, outliers)


def _duplicates(cache: Cache, contents: NDArray[np.uint64]) -> Duplicates:
    """Find utterances that were decoded from the same bytes."""
    order = np.argsort(contents, kind="stable")
    ordered = contents[order]
    num_unknown = int(np.searchsorted(ordered, 1))
    order, ordered = order[num_unknown:], ordered[num_unknown:]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] + np.uint64(1)))
    sizes = np.diff(starts, append=len(ordered))
    repeated = np.flatnonzero(sizes > 1)
    largest = repeated[np.argsort(-sizes[repeated], kind="stable")][:_DUPLICATES]
    examples = []
    for group in largest.tolist():
        places = order[starts[group] : starts[group] + min(int(sizes[group]), 10)]
        examples.append(cache.ids.texts(places))
    total = int(sizes[repeated].sum())
    return Duplicates(len(order), total, len(repeated), examples)


def _shown(cache: Cache, seconds: NDArray[np.float32], audio: Audio | None) -> list[Shown]:
    """Choose the utterances to show: the worst by each rule, then a sample."""
    chosen: dict[int, str] = {}
    first_of_rule: dict[str, str] = {}
    for outlier in audio.outliers if audio else []:
        for rule in outlier.rules:
            first_of_rule.setdefault(rule, outlier.id)
    for rule, id_ in first_of_rule.items():
        position = cache.index.find_one(id_)
        if position >= 0:
            chosen.setdefault(position, rule)
    if audio is None and len(cache):
        chosen[int(seconds.argmax())] = "longest"
        chosen.setdefault(int(seconds.argmin()), "shortest")
    count = min(len(cache), _SHOWN)
    drawn = np.random.default_rng(SEED).choice(len(cache), count, replace=False)
    for position in np.sort(drawn).tolist():
        chosen.setdefault(position, "sample")
    return [Shown(cache.ids[at], why, float(seconds[at])) for at, why in chosen.items()]


def _manifest(cache: Cache, manifest: Manifest, seconds: NDArray[np.float32]) -> ManifestNumbers:
    """Summarise the columns of a manifest, of the rows that the cache has."""
    rows = expand(manifest, copies_of(cache.config))
    status = join(RowKeys.of(rows), cache.index, {})
    present = np.flatnonzero(status.present)
    of_rows = seconds[status.positions[present]]
    columns: list[Column] = []
    text: Text | None = None
    for name, values in manifest.values.items():
        column = rows.values[name].texts.take(present)
        if name.lower() in _TEXTS:
            text = text or _text(name, column, of_rows, rows.ids.take(present))
        elif len(columns) < _MOST_COLUMNS and len(values):
            columns += _groups(name, column, of_rows)
    missing = len(rows) - len(present)
    return ManifestNumbers(manifest.source, len(rows), missing, columns, text)


def _groups(name: str, column: Strings, seconds: NDArray[np.float32]) -> list[Column]:
    """Group utterances by a column; empty if it has too many values."""
    _, firsts, numbers = np.unique(column.hashes(), return_index=True, return_inverse=True)
    if not 0 < len(firsts) <= min(_MOST_VALUES, max(1, len(column) // 2)):
        return []
    counts = np.bincount(numbers)
    totals = np.bincount(numbers, seconds)
    largest = np.argsort(-totals, kind="stable")[:_GROUPS]
    names = column.texts(firsts[largest])
    amounts = zip(names, counts[largest].tolist(), totals[largest].tolist(), strict=True)
    return [Column(name, len(firsts), [Group(*amount) for amount in amounts])]


def _text(name: str, column: Strings, seconds: NDArray[np.float32], ids: Strings) -> Text | None:
    """Compare the length of texts with durations."""
    if not len(column):
        return None
    characters = characters_of(column)
    pace = characters / np.maximum(seconds, 1e-3)
    order = np.argsort(pace, kind="stable")
    ends = np.unique(np.concatenate([order[:_WORST], order[-_WORST:]]))
    return Text(name, len(column), scatter(seconds, characters, ends, ids, SEED))
