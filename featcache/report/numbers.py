"""Collects what a report shows, as plain values: see docs/json.md.

One pass over the tables of a version's shards gives seconds and sources, some 20 bytes for
each utterance; audio statistics take 32 more. Of features, a bounded sample is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import StoreError
from featcache.loader.cache import Cache
from featcache.manifest.copies import copies_of, expand
from featcache.manifest.strings import Strings, extend_hashes
from featcache.manifest.utterances import Manifest
from featcache.report.charts import Histogram, Scatter, by_decades, by_steps, scatter
from featcache.report.statistics import Floats, Statistics, read_statistics
from featcache.report.voices import compare_speakers, has_voices, nearest_voices
from featcache.spec import Ints
from featcache.stats import moments, usage
from featcache.stats.pieces import parts_of
from featcache.version.join import RowKeys, by_shard, join
from featcache.version.progress import OnShard, no_progress

Document = dict[str, Any]
Hashes = NDArray[np.uint64]

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
_MOST_STATISTICS = 16  # versions
_TEXTS = {"text", "transcript", "transcription", "sentence"}
_SPEAKERS = {"speaker", "speaker_id", "spk", "spk_id"}

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
    statistics: list[Document]
    """The versions that give numbers of each utterance: a histogram of each number."""
    levels: Scatter | None
    """Level against duration, if a version has levels."""
    outliers: list[Document]
    voices: Document | None
    """The speakers and utterances that a version of vectors compares, if there is one."""
    compared: list[str]
    """Lines about how the first two versions differ; empty if they are not compared."""
    duplicates: Document
    """The utterances that were decoded from the same bytes as another."""
    identical_channels: Document
    """The utterances whose features are equal to another channel's of the file."""
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
    report: OnShard = no_progress,
) -> Report:
    """Collect the numbers of versions, at least one, or of the same of a corpus.
    `documents` describe them as `featcache info --json` does, and `path` names the cache.
    The columns of the manifest, if any, are summarised. Lines in `compared` tell how the
    first two versions differ. `report` is called twice for each shard."""
    largest = caches[0] if compared else max(caches, key=len)
    described, statistics = [], list[Statistics]()
    voiced: Cache | None = None
    voices: Document | None = None
    seconds, contents, channels = _read_tables(largest, report)
    for document, cache in zip(documents, caches, strict=True):
        version = _version(document, cache, threads)
        try:
            own_seconds = seconds if cache is largest else _read_tables(cache, report)[0]
            of_version = [read_statistics(cache, own_seconds)]
            if voiced is None and len(cache) and has_voices(cache.spec):
                voiced = cache
                if manifest is not None:
                    of_speakers, voices = _speakers(cache, manifest, own_seconds)
                    of_version.append(of_speakers)
            statistics += filter(None, of_version)
        except StoreError as error:
            version["fault"] = str(error)
        described.append(version)
        for _ in cache.index.shards:
            report(0, 0.0, False)
    statistics = statistics[:_MOST_STATISTICS]
    duplicates = _duplicates(largest, contents)
    outliers = _outliers(statistics, duplicates, largest, seconds)
    shown = _shown(largest, seconds, statistics)
    if voiced is not None:
        with suppress(StoreError):  # damage, which the version's means have met
            near = nearest_voices(voiced, [one["id"] for one in shown])
            voices = {"path": str(voiced.version.path), "neighbours": near} | (voices or {})
    return Report(
        path=str(path),
        largest=str(largest.version.path),
        versions=described,
        durations=by_steps("duration", "s", seconds),
        manifest=None if manifest is None else _manifest(largest, manifest, seconds),
        statistics=[*map(_histograms, statistics)],
        levels=_levels(statistics, outliers),
        outliers=outliers,
        voices=voices,
        compared=[*compared],
        duplicates=duplicates,
        identical_channels=_duplicates(largest, _without_repeats(channels, contents)),
        shown=shown,
    )


def _read_tables(cache: Cache, report: OnShard) -> tuple[Floats, Hashes, Hashes]:
    """Read the seconds of all utterances; hashes of the decoded audio, from the file's
    bytes and the part, 0 if unknown; and hashes of features and file of rows with a
    channel, 0 for others."""
    seconds, contents = [np.zeros(0, np.float32)], [np.zeros(0, np.uint64)]
    channels = [np.zeros(0, np.uint64)]
    copies = copies_of(cache.config)
    for part in parts_of(cache):
        index = part.index
        for number in range(len(index.shards)):
            positions = np.arange(*index.span(number))
            num_samples = 0
            for _, shard, items in by_shard(part.version, index, positions):
                table = shard.table
                samples = table["num_samples"][items].astype(np.float32)
                num_samples += int(table["num_samples"][items].sum())
                seconds.append(samples / np.float32(cache.spec.sample_rate))
                sources = hashes = table["source_hash"][items]
                for name in ("start", "duration", "channel"):
                    hashes = extend_hashes(hashes, np.nan_to_num(table[name][items]))
                if not copies.are_plain:
                    hashes = extend_hashes(hashes, copies.numbers(table.ids.take(items)))
                contents.append(np.where(sources == 0, np.uint64(0), hashes))
                of_file = extend_hashes(sources, np.nan_to_num(table["start"][items]))
                of_features = extend_hashes(of_file, table["item_crc32c"][items])
                is_channel = (sources > 0) & (table["channel"][items] >= 0)
                channels.append(np.where(is_channel, of_features, np.uint64(0)))
            report(len(positions), num_samples / cache.spec.sample_rate, False)
    return np.concatenate(seconds), np.concatenate(contents), np.concatenate(channels)


def _without_repeats(hashes: Hashes, contents: Hashes) -> Hashes:
    """Return hashes with 0 for utterances that were decoded from the same as an earlier
    one."""
    _, firsts = np.unique(contents, return_index=True)
    kept = np.zeros_like(hashes)
    kept[firsts] = hashes[firsts]
    return kept


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
    # the means of times, named values and pitch say nothing
    has_own_meaning = spec.axis.has_times or spec.named_units or spec.is_pitch
    is_float = spec.values_dtype.kind == "f" and not has_own_meaning
    try:
        if len(cache) and spec.codebook_sizes:
            codes = usage(cache, _sample(cache), threads=threads)
            described |= {"sampled_frames": codes.frames, "codebooks": codes.by_codebook()}
        elif len(cache) and is_float:
            stats = moments(cache, _sample(cache), threads=threads)
            described |= {
                "sampled_frames": stats.frames,
                "mean": stats.mean.ravel().tolist(),
                "std": stats.std.ravel().tolist(),
            }
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


def _histograms(of_version: Statistics) -> Document:
    """Summarise the statistics of a version."""
    histograms = []
    for name, unit in of_version.units.items():
        column = of_version.columns[name]
        column = column[np.isfinite(column)]
        if name in _RARE:
            histograms.append(by_decades(name, unit, np.abs(column)))
        else:
            histograms.append(by_steps(name, unit, column))
    version = of_version.cache.version
    return {
        "path": str(version.path),
        "name": version.info.name,
        "utterances": len(of_version.cache),
        "units": of_version.units,
        "histograms": histograms,
    }


def _outliers(
    statistics: Sequence[Statistics], duplicates: Document, cache: Cache, seconds: Floats
) -> list[Document]:
    """List the worst utterances by each rule, then duplicates, with all their statistics."""
    outliers: dict[str, Document] = {}

    def add(id_: str, audio_seconds: Any, rule: str) -> None:
        empty = {"id": id_, "audio_seconds": float(audio_seconds)}
        outlier = outliers.setdefault(id_, {**empty, "rules": [], "statistics": []})
        rules = outlier["rules"]
        if rule not in rules:  # several versions may have it
            rules.append(rule)

    for of_version in statistics:
        for rule, positions in of_version.worst(_WORST):
            for position in positions:
                add(of_version.cache.ids[position], of_version.seconds[position], rule)
    for first, *others in duplicates["examples"][:_WORST]:
        for id_ in others:
            add(id_, seconds[cache.index.find_one(id_)], f"same audio as {first}")
    for id_, outlier in outliers.items():
        for of_version in statistics:
            position = of_version.cache.index.find_one(id_)
            outlier["statistics"].append(None if position < 0 else of_version.of(position))
    return [*outliers.values()]


def _levels(statistics: Sequence[Statistics], outliers: Sequence[Document]) -> Scatter | None:
    """Compare levels with durations, and mark the outliers."""
    for of_version in statistics:
        if "level" in of_version.columns:
            cache = of_version.cache
            places = [cache.index.find_one(outlier["id"]) for outlier in outliers]
            marked = np.array([place for place in places if place >= 0], np.int64)
            levels = np.nan_to_num(of_version.columns["level"])
            return scatter(of_version.seconds, levels, marked, cache.ids, SEED)
    return None


def _speakers(
    cache: Cache, manifest: Manifest, seconds: Floats
) -> tuple[Statistics | None, Document | None]:
    """Compare the voices of a manifest's speakers, if it has a column of speakers."""
    name = next((name for name in manifest.values if name.lower() in _SPEAKERS), None)
    if name is None:
        return None, None
    rows, present, positions = _rows_of(cache, manifest)
    texts = rows.values[name].texts.take(present)
    named = np.flatnonzero(characters_of(texts))
    column = texts.take(named)
    _, firsts, of_rows = np.unique(column.hashes(), return_index=True, return_inverse=True)
    if len(firsts) < 2:
        return None, None
    numbers = np.full(len(cache), -1)
    numbers[positions[named]] = of_rows
    margins, document = compare_speakers(cache, numbers, column.texts(firsts))
    units, columns = {"voice": "difference of cosines"}, {"voice": margins}
    return Statistics(cache, seconds, units, columns), document | {"column": name}


def _rows_of(cache: Cache, manifest: Manifest) -> tuple[Manifest, Ints, Ints]:
    """Return the rows of a manifest, also of copies; the numbers of the rows that the cache
    has; and the positions of these in the cache."""
    rows = expand(manifest, copies_of(cache.config))
    status = join(RowKeys.of(rows), cache.index, {})
    present = np.flatnonzero(status.present)
    return rows, present, status.positions[present]


def _duplicates(cache: Cache, contents: Hashes) -> Document:
    """Find utterances of equal hashes other than 0."""
    known = np.flatnonzero(contents)
    _, groups, sizes = np.unique(contents[known], return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(sizes > 1)
    largest = repeated[np.argsort(-sizes[repeated], kind="stable")][:_DUPLICATES]
    return {
        "compared": len(known),
        "utterances": int(sizes[repeated].sum()),
        "groups": len(repeated),
        "examples": [cache.ids.texts(known[groups == group][:10]) for group in largest],
    }


def _shown(cache: Cache, seconds: Floats, statistics: Sequence[Statistics]) -> list[Document]:
    """Choose the utterances to show: the worst by each rule, then a sample."""
    chosen: dict[int, str] = {}
    for of_version in statistics:
        for rule, positions in of_version.worst(1):
            for position in positions:
                chosen.setdefault(cache.index.find_one(of_version.cache.ids[position]), rule)
    chosen.pop(-1, None)
    if not chosen and len(cache):
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
    rows, present, positions = _rows_of(cache, manifest)
    of_rows = seconds[positions]
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


def characters_of(texts: Strings) -> Ints:
    """Count the characters of each text, int64 `[n]`."""
    offsets = texts.offsets.astype(np.int64)
    begins_character = texts.blob[: offsets[-1]] & 0xC0 != 0x80
    is_filled = np.diff(offsets) > 0
    starts = offsets[:-1][is_filled]
    counts = np.zeros(len(texts), np.int64)
    counts[is_filled] = np.add.reduceat(begins_character, starts, dtype=np.int64)
    return counts
