"""Finds what is damaged, missing, changed or surplus in a version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np

from featcache.audio.formats import OLD_FFMPEG
from featcache.audio.remote import StoppedError
from featcache.care.diverged import VALUE_COLUMNS, are_alike
from featcache.care.report import Problem, Report
from featcache.care.sources import SourceCheck, check_sources
from featcache.errors import DamagedError, FeatcacheError, counted, listing
from featcache.format.group import TABLE_PATHS, WRONG_CHECKSUM
from featcache.format.shard import Shard
from featcache.manifest.label_files import rows_of
from featcache.manifest.utterances import Manifest
from featcache.spec import all_finite, as_values
from featcache.storage.base import MARK, in_parallel
from featcache.version.index import Index, index_name, load_index
from featcache.version.indexing import index_of
from featcache.version.join import RowKeys, columns_of, join
from featcache.version.ledger import RowFailures, failures_by_row
from featcache.version.progress import OnShard, no_progress
from featcache.version.records import probe_names, read_probes, read_run, run_names
from featcache.version.tags import tags_to_show
from featcache.version.version import Version, renamed_note
from featcache.version.wanted import find_lacking, wanted_failures

_MOST_MAPPED = 8192
"""The number of checked shards whose tables stay mapped. A process may map some 65,000
files."""
_LACKING = {"unfinished", "record", "missing"}
"""The kinds of problems that a run in progress may end by adding a shard."""


class CheckedShard(NamedTuple):
    """A shard, if its document can be read, and its problems."""

    shard: Shard | None
    problems: list[Problem]


def verify(
    version: Version,
    *,
    data: bool = True,
    values: bool = False,
    manifest: Manifest | None = None,
    sources: SourceCheck | None = None,
    threads: int = 1,
    report: OnShard = no_progress,
    stop: threading.Event | None = None,
) -> Report:
    """Check a version, and compare it with a manifest.

    Args:
        data: True to read every byte of the features, too.
        values: True to look for NaN and infinity also where a shard says that it has none,
            and to compute the hashes of rows and shards.
        sources: How to compare the audio files with what they were; None to skip them.
        report: Called after each shard, and again after its audio files.
        stop: Ends the verification once it is set.
    """
    stop = stop or threading.Event()
    checked: dict[str, CheckedShard] = {}

    def check_new() -> tuple[list[str], Report, Index | None]:
        names = version.shard_names()
        unchecked = [name for name in names if name not in checked]
        checked.update(_check_shards(version, unchecked, data, values, threads, report, stop))
        present = {name: checked[name] for name in names if name in checked}
        return names, *_report(version, names, present, data, manifest, stop.is_set())

    names, result, index = version.reading(check_new)
    names_now = version.shard_names()
    is_lacking = any(problem.kind in _LACKING for problem in result.problems)
    is_replaced = not {*names} <= {*names_now}
    if names_now != names and (is_lacking or is_replaced):
        _, result, index = version.reading(check_new)
    if sources is not None and index is not None:
        sound = {name for name, shard in checked.items() if not shard.problems}
        problems, notes = check_sources(
            version, index, sound, sources, threads, report, stop.is_set
        )
        result.problems.extend(problems)
        result.notes.extend(notes)
    # A late stop counts too: the caller must not go on.
    result.interrupted = stop.is_set()
    return result


def _report(
    version: Version,
    names: list[str],
    checked: dict[str, CheckedShard],
    data: bool,
    manifest: Manifest | None,
    interrupted: bool,
) -> tuple[Report, Index | None]:
    """Summarise the shards checked so far. Returns also the index of the sound items, or
    None if interrupted."""
    sound = [shard for shard, problems in checked.values() if shard is not None and not problems]
    damaged = {name: shard for name, (shard, problems) in checked.items() if problems}
    problems = []
    if not Version.has_group(version.store):  # Zarr libraries look for it
        what = f"{version.path}/shards/{MARK}: damaged: not the metadata of a Zarr group"
        problems.append(Problem("metadata", what))
    for checked_shard in checked.values():
        problems += checked_shard.problems
    kept = None if interrupted else load_index(version, names)
    result = Report(
        path=str(version.path),
        shards=len(checked),
        utterances=sum(shard.info.items for shard in sound),
        frames=sum(shard.info.frames for shard in sound),
        num_bytes=sum(shard.num_bytes for shard in sound),
        data=data,
        problems=problems,
        shards_left_out=len(names) - len(checked),
        damaged_utterances=_count_items(damaged, kept),
        kind=version.info.spec.kind,
    )
    if interrupted:
        return result, None
    notes = result.notes
    notes += [*_notes(version), *_notes_on_records(version)]
    own_name = index_name(version, names)
    if kept is None and own_name in version.store.names("index"):
        what = "damaged: this index is built anew when the version is opened next"
        notes.append(f"{version.path}/index/{own_name}: {what}")
    index = kept
    if index is None or damaged:
        index = index_of(sound, are_checked=True)
    result.utterances, result.frames = len(index), int(index.num_frames.sum())
    notes += _notes_on_decoders(version, index, sound)
    _compare_repeated(version, index, sound, result)
    problems += _problems_of_records(version, index, damaged)
    result.failed = len(wanted_failures(version, index))
    if manifest is not None:
        rows = rows_of(manifest, version.info.config)
        failures, before = failures_by_row(version, index), None
        if damaged:
            before = kept or index_of([*sound, *_with_tables(damaged.values())], are_checked=True)
        _compare_rows(rows, index, before, failures, result)
    return result, index


def _count_items(damaged: Mapping[str, Shard | None], index: Index | None) -> int | None:
    """Count the items of damaged shards, by their documents, else by the index; None if
    neither tells them."""
    items = {} if index is None else {shard.name: shard.items for shard in index.summaries}
    items |= {name: shard.info.items for name, shard in damaged.items() if shard is not None}
    if damaged.keys() <= items.keys():
        return sum(items[name] for name in damaged)
    return None


def _problems_of_records(
    version: Version, index: Index, damaged: Collection[str]
) -> Iterator[Problem]:
    for finding in find_lacking(version, index):
        if isinstance(finding, str):
            yield Problem("record", f"{version.path}: {finding}")
        elif not damaged:  # the damaged shards may hold what is missing
            yield Problem("unfinished", f"{version.path}: {finding}")
    undamaged = [name for name in version.store.names("shards") if name not in damaged]
    for tag in tags_to_show(version, undamaged):
        if tag["fault"]:
            yield Problem("tag", tag["fault"])


def _check_shards(
    version: Version,
    names: list[str],
    data: bool,
    values: bool,
    threads: int,
    report: OnShard,
    stop: threading.Event,
) -> dict[str, CheckedShard]:
    """Check shards in threads. Returns the shards that were checked before `stop` was
    set."""
    checked: dict[str, CheckedShard] = {}
    ended = threading.Event()

    def check(name: str, number: int) -> CheckedShard:
        result = examine_shard(
            version, name, data, lambda: stop.is_set() or ended.is_set(), values=values
        )
        if result.shard is not None and number >= _MOST_MAPPED:
            result.shard.unmap_table()
        return result

    with ThreadPoolExecutor(threads) as pool, suppress(StoppedError):
        try:
            for name, result in zip(names, pool.map(check, names, range(len(names))), strict=True):
                if stop.is_set():
                    break
                checked[name] = result
                items, seconds = 0, 0.0
                if result.shard is not None:
                    items, seconds = result.shard.info.items, result.shard.info.seconds
                report(items, seconds, bool(result.problems))
        finally:
            ended.set()  # after an error, the pool waits for the threads that still check
    return checked


def _compare_repeated(
    version: Version, index: Index, shards: Sequence[Shard], result: Report
) -> None:
    """Compare items with the current items of the same row and generation. Adds the number
    of equal ones to the result, and a note if some are of different audio."""
    if sum(shard.info.items for shard in shards) == len(index):
        return
    equal_items = 0
    unlike_ids = set[str]()
    for shard in shards:
        table = shard.table
        positions = index.find_hashes(table["id_hash"])
        is_rival = (positions >= 0) & (table["generation"] == index.generation[positions])
        is_rival &= table["row_hash"] == index.row_hash[positions]
        rivals = np.flatnonzero(is_rival)
        values = np.stack([table[name][rivals] for name in VALUE_COLUMNS])
        counting = columns_of(version, index, positions[rivals], VALUE_COLUMNS)
        equal_items += int((values[1] == counting[1]).sum())
        is_unlike = ~are_alike(values, counting)
        unlike_ids |= {table.ids[number] for number in rivals[is_unlike].tolist()}
    result.repeated = equal_items - len(index)  # each current item equals itself
    if unlike_ids:
        what = "features of several files are there, and nothing tells which are right, for"
        remedy = "`featcache extract --check-sources` with the manifest, and then `featcache prune`"
        result.notes.append(f"{what} {listing(sorted(unlike_ids))}: {remedy}")


def _notes(version: Version) -> Iterator[str]:
    """List changes of the folder's name and of the config's fingerprint."""
    if version.original_name is not None:
        yield renamed_note(version.original_name)
    try:
        from featcache.config import recorded_config
    except ImportError:
        return
    try:
        fingerprint = recorded_config(version.info.config, str(version.path)).fingerprint()
    except FeatcacheError as error:
        yield f"its config does not load here, and was not compared: {error}"
        return
    if fingerprint != version.info.fingerprint:
        yield (
            "its extractor's revision or weights have changed: extracting would fill "
            f"another version, {fingerprint[:12]}"
        )


def _notes_on_records(version: Version) -> Iterator[str]:
    """List damaged records of runs and probes, on which nothing depends."""
    runs = in_parallel(partial(read_run, version.store), run_names(version.store))
    num_probes = len(probe_names(version))
    counts = {
        "runs": (runs.count(None), len(runs)),
        "probes": (num_probes - len(read_probes(version)), num_probes),
    }
    for folder, (damaged, total) in counts.items():
        if damaged:
            what = f"damaged: {damaged} of {counted(total, 'record')}: they count for nothing"
            yield f"{version.path}/{folder}: {what}"


def _notes_on_decoders(version: Version, index: Index, sound: Sequence[Shard]) -> Iterator[str]:
    if not any((shard.table["decoder"] == OLD_FFMPEG).any() for shard in sound):
        return
    (decoders,) = columns_of(version, index, np.arange(len(index)), ["decoder"])
    num_old = int((decoders == OLD_FFMPEG).sum())
    if num_old:
        yield (
            f"{counted(num_old, 'utterance')} decoded by FFmpeg as older versions of "
            "featcache did: `featcache extract … --check-sources` extracts them again"
        )


def _with_tables(damaged: Iterable[Shard | None]) -> Iterator[Shard]:
    """Yield the damaged shards whose tables are undamaged."""
    for shard in damaged:
        with suppress(DamagedError):
            if shard is not None:
                shard.check_table()
                yield shard


def _compare_rows(
    manifest: Manifest, index: Index, before: Index | None, failures: RowFailures, result: Report
) -> None:
    """Compare a version with a manifest, and add the differences to the result. If shards
    are damaged, `before` is an index that has also their items, as far as they are known."""
    keys = RowKeys.of(manifest)
    status = join(keys, index, failures)
    result.failed = int(status.failed.sum())
    result.surplus = len(index) - int((status.positions >= 0).sum())
    is_damaged, where = np.zeros(len(manifest), bool), "shard"
    if before is not None:
        undamaged = join(keys, before, failures)
        is_damaged = undamaged.present & ~status.present
        for row in np.flatnonzero(is_damaged).tolist():
            id_, name = manifest.ids[row], before.place(int(undamaged.positions[row]))[0]
            result.problems.append(Problem("missing", f"{id_}: its shard is damaged", name, id_))
        if not {*result.damaged_shards} <= {*before.shards}:
            where = "undamaged shard"
    for id_ in manifest.ids.take(np.flatnonzero(status.missing & ~status.changed & ~is_damaged)):
        result.problems.append(Problem("missing", f"{id_}: is in no {where}", id=id_))
    for row in np.flatnonzero(status.changed & ~is_damaged).tolist():
        id_, what = manifest.ids[row], "its row is not the one that was extracted"
        failure = status.failures.get(row)
        if failure is not None:
            why = f"extracting {failure.path} failed: {failure.reason}: {failure.message}"
            what = f"what is there is older: {why}"
        result.problems.append(Problem("changed", f"{id_}: {what}", id=id_))


def examine_shard(
    version: Version,
    name: str,
    data: bool,
    stopped: Callable[[], bool] = lambda: False,
    *,
    values: bool = False,
) -> CheckedShard:
    """Check a shard; the bytes of its features only with `data`; see `verify` for `values`.
    Raises ShardGoneError if the shard was removed; StoppedError once `stopped` returns
    True."""
    try:
        shard = version.shard(name)
    except DamagedError as error:
        return CheckedShard(None, [Problem("metadata", error.what, name)])
    try:
        return CheckedShard(shard, [*_problems(shard, data, values, stopped)])
    except DamagedError as error:
        return CheckedShard(shard, [Problem("structure", error.what, name)])


def _problems(
    shard: Shard, data: bool, values: bool, stopped: Callable[[], bool]
) -> Iterator[Problem]:
    read_below = {shard.features_path, *TABLE_PATHS}
    files = [path for path in shard.info.files if path not in read_below]
    faults = [*filter(None, map(shard.file_fault, files))]
    try:
        shard.table  # noqa: B018 (compares its files with their checksums)
    except DamagedError as error:
        faults.append(error.what)
    looks_again = values or not shard.info.finite
    if not faults:
        faults = [f"{shard}: damaged: {fault}" for fault in shard.faults(has_hashes=looks_again)]
    for fault in faults:
        kind = "checksum" if fault.endswith(WRONG_CHECKSUM) else "structure"
        yield Problem(kind, fault, shard.name)
    if faults:
        return
    yield from _item_problems(shard)
    if data:
        yield from _feature_problems(shard, looks_again, stopped)
    else:
        shard.open_features()  # checks its size, and the checksum at its end


def _item_problems(shard: Shard) -> Iterator[Problem]:
    """List items that cannot be dequantised, or whose number of frames does not fit their
    audio."""
    table, spec, ids = shard.table, shard.spec, shard.table.ids
    if spec.is_quantized:
        parameters = shard.quantization.reshape(len(ids), -1)
        for item in np.flatnonzero(~np.isfinite(parameters).all(axis=1)).tolist():
            message = f"{ids[item]}: its scale or offset is NaN or infinite"
            yield Problem("non_finite", message, shard.name, ids[item])
    num_frames, num_samples = np.diff(table.offsets("frame")), table["num_samples"]
    fits = spec.axis.fits(num_frames, num_samples, spec.sample_rate)
    for item in np.flatnonzero(~fits).tolist():
        seconds = int(num_samples[item]) / spec.sample_rate
        message = f"{ids[item]}: {num_frames[item]} frames for {seconds:.3f} s of audio"
        yield Problem("frames", message, shard.name, ids[item])


def _feature_problems(
    shard: Shard, looks_at_values: bool, stopped: Callable[[], bool]
) -> Iterator[Problem]:
    """List items whose features are not what was written, or not finite."""
    dtype = np.dtype(shard.spec.stored_dtype).newbyteorder("<")
    left = shard.spec.num_bytes(shard.info.frames)
    rest, fault, is_finite = b"", "", True
    try:
        for block in shard.feature_blocks():
            if stopped():
                raise StoppedError
            if not looks_at_values:
                continue
            values, left = block[:left], max(0, left - len(block))
            if rest:  # blocks of a stream have any size
                values = memoryview(rest + values)
            end = len(values) // dtype.itemsize * dtype.itemsize
            is_finite = is_finite and all_finite(
                as_values(np.frombuffer(values[:end], dtype), shard.spec.dtype)
            )
            rest = bytes(values[end:])
    except DamagedError as error:
        fault = error.what
    if not fault and is_finite:
        return
    kind, what = "non_finite", "features are NaN or infinite"
    if fault:
        kind, what = "checksum", "the checksum of its features does not match"
    ids, num_items = shard.table.ids, len(shard.table)
    sound = {number for number, _ in shard.sound_items(range(num_items))}
    for item in sorted({*range(num_items)} - sound):
        yield Problem(kind, f"{ids[item]}: {what}", shard.name, ids[item])
    # a bad disk, for example
    if fault and (not fault.endswith(WRONG_CHECKSUM) or len(sound) == num_items):
        yield Problem("checksum", fault, shard.name)
