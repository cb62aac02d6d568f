"""What is damaged, missing, changed or surplus in a version: whether each shard is what
was written, byte for byte, and makes sense; and whether all that is wanted is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from featcache.audio.formats import OLD_FFMPEG
from featcache.audio.remote import StoppedError
from featcache.care.diverged import VALUE_COLUMNS, are_alike
from featcache.care.sources import SourceCheck, check_sources
from featcache.errors import DamagedError, FeatcacheError, counted, listing
from featcache.format.group import WRONG_CHECKSUM
from featcache.format.shard import Shard
from featcache.manifest.copies import copies_of, expand
from featcache.manifest.utterances import Manifest
from featcache.spec import all_finite
from featcache.storage.base import MARK, in_parallel
from featcache.version.index import Index, index_name, load_index
from featcache.version.indexing import index_of
from featcache.version.join import RowKeys, columns_of, join
from featcache.version.ledger import RowFailures, failures_by_row
from featcache.version.records import probe_names, read_probes, read_run, run_names
from featcache.version.tags import tags_to_show
from featcache.version.version import Version
from featcache.version.wanted import find_lacking, wanted_failures

if TYPE_CHECKING:
    from featcache.care.recompute import Recomputed

_MOST_MAPPED = 8192
"""How many checked shards keep their tables mapped, also if a repair or prune takes them
away meanwhile: a process may map some 65,000 files. Others are mapped anew."""
_LACKING = frozenset({"unfinished", "record", "missing"})
"""The kinds of problems that may be over as soon as a run that is going on has added
another shard."""


@dataclass(frozen=True)
class Problem:
    """Something that is not as it should be."""

    kind: str
    """What kind of fault: `metadata`, `structure`, `checksum`, `non_finite`, `frames`,
    `missing` …"""
    message: str
    shard: str | None = None
    """The damaged shard; None if the fault is in none."""
    id: str | None = None
    """The utterance; None if the fault is not of a single one."""


class CheckedShard(NamedTuple):
    """A shard, if its document can be read, and what is wrong with it."""

    shard: Shard | None
    problems: list[Problem]


_Checked = dict[str, CheckedShard]


@dataclass(frozen=True)
class Report:
    """What `verify` found in a version."""

    path: str
    shards: int
    utterances: int
    """The number of utterances in sound shards."""
    frames: int
    """The number of frames in sound shards."""
    num_bytes: int
    """The bytes of features and side arrays in sound shards, as they are stored."""
    data: bool
    """Whether the bytes of the features were read."""
    problems: list[Problem] = field(default_factory=list)
    """Damage; with a manifest, also what the version lacks of it."""
    failed: int = 0
    """How many utterances (of the manifest, if given) stand failed: no shard has them, or
    only an older item."""
    surplus: int = 0
    """The number of utterances in the version that are not in the manifest."""
    repeated: int = 0
    """The number of items that do not count, since an equal one of their utterance does:
    they only cost space."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and no damage."""
    interrupted: bool = False
    """Whether the verification was stopped. Then it tells of the shards that were looked
    at before."""
    shards_left_out: int = 0
    """The number of shards that were not looked at, because it was stopped before."""
    damaged_utterances: int | None = 0
    """The number of utterances in damaged shards, which are not in `utterances`; None if
    a shard does not tell."""
    recomputed: Recomputed | None = None
    """How some utterances that were extracted again compare; None if none were, which
    `verify` itself never does."""

    @property
    def damaged_shards(self) -> list[str]:
        """The names of shards with a problem in them."""
        return sorted({problem.shard for problem in self.problems if problem.shard})


def verify(
    version: Version,
    *,
    data: bool = True,
    manifest: Manifest | None = None,
    sources: SourceCheck | None = None,
    threads: int = 1,
    report: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
) -> Report:
    """Check a version.

    Args:
        data: Whether to read every byte of the features, or only structure, metadata and
            columns.
        manifest: A manifest to compare the version with; None for none.
        sources: How to compare the audio files with what they were; None to leave them alone.
        report: Called after each shard; again if its audio files have been looked at.
        stop: If it is set, the verification ends where it is.

    Raises StoreError if a shard may not be read."""
    stop, checked = stop or threading.Event(), _Checked()

    def look() -> tuple[list[str], Report, Index | None]:
        """Check the shards that are there and have not been checked; what there is, and
        what it comes to."""
        there = version.shard_names()
        unchecked = [name for name in there if name not in checked]
        checked.update(_check_shards(version, unchecked, data, threads, report, stop))
        looked_at = {name: checked[name] for name in there if name in checked}
        return there, *_report(version, there, looked_at, data, manifest, stop.is_set())

    there, result, index = version.reading(look)
    now = version.shard_names()
    is_lacking = any(problem.kind in _LACKING for problem in result.problems)
    # a run has added some, or a repair replaced some
    if now != there and (is_lacking or not {*there} <= {*now}):
        _, result, index = version.reading(look)
    problems, notes = result.problems, result.notes
    if sources is not None and index is not None:
        sound = {name for name, one in checked.items() if not one.problems}
        faulty, source_notes = check_sources(
            version, index, sound, sources, threads, report, stop.is_set
        )
        problems = [
            *problems,
            *(_source_problem(file, fault, ids) for (file, fault), ids in faulty.items()),
        ]
        notes = [*notes, *source_notes]
    # A stop counts also if it came late: whoever asked is to go no further.
    return replace(result, problems=problems, notes=notes, interrupted=stop.is_set())


def _source_problem(file: object, fault: str, ids: list[str]) -> Problem:
    """What is wrong with the audio file of some utterances: it is in no shard, so none is
    damaged."""
    more = f" and {counted(len(ids) - 1, 'other', 'others')}" if len(ids) > 1 else ""
    return Problem(
        "source", f"{ids[0]}{more}: {file}: {fault}", id=ids[0] if len(ids) == 1 else None
    )


def _report(
    version: Version,
    there: list[str],
    checked: _Checked,
    data: bool,
    manifest: Manifest | None,
    interrupted: bool,
) -> tuple[Report, Index | None]:
    """What all checked shards that are there come to; and the index of the sound items
    that count, None if stopped."""
    sound = [one.shard for one in checked.values() if one.shard is not None and not one.problems]
    damaged = {name: one.shard for name, one in checked.items() if one.problems}
    problems = []
    if not Version.has_group(version.store):  # which Zarr libraries look for
        problems.append(
            Problem(
                "metadata",
                f"{version.path}/shards/{MARK}: damaged: not the metadata of a Zarr group",
            )
        )
    problems += [problem for one in checked.values() for problem in one.problems]
    result = Report(
        path=str(version.path),
        shards=len(checked),
        utterances=sum(shard.info.items for shard in sound),
        frames=sum(shard.info.frames for shard in sound),
        num_bytes=sum(shard.num_bytes for shard in sound),
        data=data,
        problems=problems,
        interrupted=interrupted,
        shards_left_out=len(there) - len(checked),
        damaged_utterances=None
        if None in damaged.values()
        else sum(one.info.items for one in damaged.values() if one),
    )
    if interrupted:
        return result, None
    kept_at, notes = (
        f"index/{index_name(version, there)}",
        [*_notes(version), *_notes_on_records(version)],
    )
    is_kept = version.store.exists(kept_at)
    index = load_index(version, there)
    if is_kept and index is None:
        notes.append(
            f"{version.path}/{kept_at}: damaged: this index is built anew when the version "
            "is opened next"
        )
    if index is None or len(sound) < len(there):
        index = index_of(sound)  # their tables have just been checked, and are not read again
    num_old = 0
    if any((shard.table["decoder"] == OLD_FFMPEG).any() for shard in sound):
        (decoders,) = columns_of(version, index, np.arange(len(index)), ["decoder"])
        num_old = int((decoders == OLD_FFMPEG).sum())
    if num_old:
        notes.append(
            f"{counted(num_old, 'utterance')} decoded by FFmpeg as older versions of "
            "featcache did: `featcache extract … --check-sources` extracts them again"
        )
    repeated, notes_on_items = _compare_repeated(version, index, sound)
    lacking, failed, surplus = list[Problem](), len(wanted_failures(version, index)), 0
    if manifest is not None:
        rows = expand(manifest, copies_of(version.info.config))
        lacking, failed, surplus = _against(rows, index, failures_by_row(version, index))
    return replace(
        result,
        utterances=len(index),
        problems=[*problems, *_of_records(version, index, damaged), *lacking],
        failed=failed,
        surplus=surplus,
        repeated=repeated,
        notes=[*notes, *notes_on_items],
    ), index


def _of_records(version: Version, index: Index, damaged: Collection[str]) -> Iterator[Problem]:
    """What is lacking of what runs were to extract, and of tags, and which records of
    that cannot be read."""
    for finding in find_lacking(version, index):
        is_record = isinstance(finding, str)
        if is_record or not damaged:  # of what is missing, the damaged shards may have some
            yield Problem("record" if is_record else "unfinished", f"{version.path}: {finding}")
    undamaged = [name for name in version.store.names("shards") if name not in damaged]
    yield from (
        Problem("tag", tag["fault"]) for tag in tags_to_show(version, undamaged) if tag["fault"]
    )


def _check_shards(
    version: Version,
    names: list[str],
    data: bool,
    threads: int,
    report: Callable[[], object],
    stop: threading.Event,
) -> _Checked:
    """What is wrong in each shard, by name. Shards that were not checked before `stop`
    was set are left out."""
    checked: _Checked = {}
    ended = threading.Event()

    def check(name: str, number: int) -> CheckedShard:
        one = examine_shard(version, name, data, lambda: stop.is_set() or ended.is_set())
        if one.shard is not None and number >= _MOST_MAPPED:
            one.shard.unmap_table()
        return one

    with ThreadPoolExecutor(threads) as pool, suppress(StoppedError):
        try:
            for name, one in zip(names, pool.map(check, names, range(len(names))), strict=True):
                if stop.is_set():
                    break
                checked[name] = one
                report()
        finally:
            # after an error or an interrupt, the pool waits for threads that are still
            # checking
            ended.set()
    return checked


def _compare_repeated(
    version: Version, index: Index, shards: Sequence[Shard]
) -> tuple[int, list[str]]:
    """Compare items with those that count, if row and generation are the same: how many are
    equal; and a note, if some are of other audio."""
    if sum(shard.info.items for shard in shards) == len(index):
        return 0, []
    repeated, unlike = 0, set[str]()
    for shard in shards:
        table = shard.table
        at = index.find_hashes(table["id_hash"])
        is_rival = (at >= 0) & (table["generation"] == index.generation[at])
        is_rival &= table["row_hash"] == index.row_hash[at]
        rivals = np.flatnonzero(is_rival)
        own = np.stack([table[name][rivals] for name in VALUE_COLUMNS])
        counting = columns_of(version, index, at[rivals], VALUE_COLUMNS)
        repeated += int((own[1] == counting[1]).sum())
        unlike |= {table.ids[number] for number in rivals[~are_alike(own, counting)].tolist()}
    what = "features of several files are there, and nothing tells which are right, for"
    remedy = "`featcache extract --check-sources` with the manifest, and then `featcache prune`"
    notes = [f"{what} {listing(sorted(unlike))}: {remedy}"] if unlike else []
    return repeated - len(index), notes


def _notes(version: Version) -> Iterator[str]:
    """Whether the version's folder has its name; and its config still its fingerprint, if
    extraction is installed."""
    if (name := version.original_name) is not None:
        yield (
            f"its folder is a copy of {name}, or was renamed: extract adds to a version "
            "only under that name"
        )
    try:
        from featcache.config import recorded_config
    except ImportError:
        return
    try:
        now = recorded_config(version.info.config, str(version.path)).fingerprint()
    except FeatcacheError as error:
        yield f"its config does not load here, and was not compared: {error}"
        return
    if now != version.info.fingerprint:
        yield (
            "its extractor's revision or weights have changed: extracting would fill "
            f"another version, {now[:12]}"
        )


def _notes_on_records(version: Version) -> Iterator[str]:
    """That records of what was done or measured cannot be read, on which nothing depends."""
    runs, probes = (
        in_parallel(partial(read_run, version.store), run_names(version.store)),
        probe_names(version),
    )
    counts = {
        "runs": (runs.count(None), len(runs)),
        "probes": (len(probes) - len(read_probes(version)), len(probes)),
    }
    for folder, (damaged, there) in counts.items():
        if damaged:
            yield (
                f"{version.path}/{folder}: damaged: {damaged} of "
                f"{counted(there, 'record')}: they count for nothing"
            )


def _against(
    manifest: Manifest, index: Index, failures: RowFailures
) -> tuple[list[Problem], int, int]:
    """What a version lacks of a manifest, how many of its utterances have failed, and how
    many are not in it."""
    status = join(RowKeys.of(manifest), index, failures)
    missing = manifest.ids.take(np.flatnonzero(status.missing & ~status.changed))
    problems = [Problem("missing", f"{id_}: is in no shard", id=id_) for id_ in missing]
    for row in np.flatnonzero(status.changed).tolist():
        id_, what = manifest.ids[row], "its row is not the one that was extracted"
        failure = status.failures.get(row)
        if failure is not None:
            what = (
                f"what is there is older: extracting {failure.path} failed: "
                f"{failure.reason}: {failure.message}"
            )
        problems.append(Problem("changed", f"{id_}: {what}", id=id_))
    return problems, int(status.failed.sum()), len(index) - int((status.positions >= 0).sum())


# A shard


def examine_shard(
    version: Version, name: str, data: bool, stopped: Callable[[], bool] = lambda: False
) -> CheckedShard:
    """Check a shard. With `data`, every byte of its features is read, else only
    everything else. Raises ShardGoneError if there is no such shard any more; StoreError
    if it cannot be read now; StoppedError if `stopped` said so."""
    shard = None
    try:
        shard = version.shard(name)
        return CheckedShard(shard, [*_problems(shard, data, stopped)])
    except DamagedError as error:
        return CheckedShard(
            shard, [Problem("metadata" if shard is None else "structure", error.what, name)]
        )


def _problems(shard: Shard, data: bool, stopped: Callable[[], bool]) -> Iterator[Problem]:
    paths = [path for path in shard.info.files if path != shard.features_path]
    faults = [fault for path in paths if (fault := shard.file_fault(path))]
    faults = faults or [f"{shard}: damaged: {fault}" for fault in shard.faults()]
    if faults:
        for fault in faults:
            yield Problem(
                "checksum" if fault.endswith(WRONG_CHECKSUM) else "structure", fault, shard.name
            )
        return
    yield from _item_problems(shard)
    if data:
        yield from _feature_problems(shard, stopped)
    else:
        shard.open_features()  # which compares its size, and the checksum at its end


def _item_problems(shard: Shard) -> Iterator[Problem]:
    """Whether each item can be dequantised, and has as many frames as its audio should
    give."""
    table, spec, ids = shard.table, shard.spec, shard.table.ids
    if spec.is_quantized:
        parameters = shard.quantization.reshape(len(ids), -1)
        for item in np.flatnonzero(~np.isfinite(parameters).all(axis=1)).tolist():
            yield Problem(
                "non_finite",
                f"{ids[item]}: its scale or offset is NaN or infinite",
                shard.name,
                ids[item],
            )
    num_frames, num_samples = np.diff(table.offsets("frame")), table["num_samples"]
    fits = spec.axis.fits(num_frames, num_samples, spec.sample_rate)
    for item in np.flatnonzero(~fits).tolist():
        seconds = int(num_samples[item]) / spec.sample_rate
        message = f"{ids[item]}: {num_frames[item]} frames for {seconds:.3f} s of audio"
        yield Problem("frames", message, shard.name, ids[item])


def _feature_problems(shard: Shard, stopped: Callable[[], bool]) -> Iterator[Problem]:
    """Whether the features are what was written, and finite; read once if so."""
    dtype, rest, is_finite, fault = (
        np.dtype(shard.spec.stored_dtype).newbyteorder("<"),
        b"",
        True,
        "",
    )
    left = shard.spec.num_bytes(shard.info.frames)
    try:
        for block in shard.feature_blocks():
            if stopped():
                raise StoppedError
            whole, left = block[:left], max(0, left - len(block))
            if rest or len(whole) % dtype.itemsize:  # of a stream, blocks have any size
                joined = rest + whole
                end = len(joined) // dtype.itemsize * dtype.itemsize
                whole, rest = memoryview(joined)[:end], joined[end:]
            is_finite = is_finite and all_finite(np.frombuffer(whole, dtype))
    except DamagedError as error:
        fault = error.what
    if not fault and is_finite:
        return
    ids, num_items = shard.table.ids, len(shard.table)
    sound = {number for number, _ in shard.sound_items(range(num_items))}
    for item in sorted({*range(num_items)} - sound):
        what = (
            "the checksum of its features does not match"
            if fault
            else "features are NaN or infinite"
        )
        yield Problem(
            "checksum" if fault else "non_finite", f"{ids[item]}: {what}", shard.name, ids[item]
        )
    # a bad disk, for example
    if fault and (not fault.endswith(WRONG_CHECKSUM) or len(sound) == num_items):
        yield Problem("checksum", fault, shard.name)
