"""What is damaged, missing, changed or surplus in a version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, FeatcacheError, StoreError, counted
from featcache.extraction.tasks import compare
from featcache.health.records import LACKING, check_records
from featcache.health.sources import SourceCheck, check_sources, notes_on_sources
from featcache.manifest import Manifest
from featcache.manifest.copies import copies_of, expand
from featcache.storage.objects import read_ahead
from featcache.storage.store import store_of
from featcache.store import zarr3
from featcache.store.check import Problem, examine_shard
from featcache.store.columns import COLUMNS
from featcache.store.index import Index, build_index, index_folder, index_of, load_index, take_seen_for_whole
from featcache.store.ledger import Failure, standing_failures
from featcache.store.shard import Shard
from featcache.store.shard_items import DuplicateItem, ShardItems, find_duplicates
from featcache.store.version import Version


@dataclass(frozen=True)
class Report:
    """What `verify` found in a version."""

    path: str
    """The folder of the version."""
    shards: int
    """The number of shards."""
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
    """The number of utterances whose failure stands: no shard has them, or only an older item of them. With a manifest,
    only its utterances count."""
    surplus: int = 0
    """The number of utterances in the version that are not in the manifest."""
    repeated: int = 0
    """The number of utterances that two runs have extracted alike. They cost space and do no harm."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing and no damage."""
    interrupted: bool = False
    """Whether the verification was stopped. Then `problems` has those found before, and the counts are 0."""
    shards_left_out: int = 0
    """The number of shards that were not looked at, because they are not in the subset."""
    damaged_utterances: int | None = 0
    """The number of utterances in damaged shards, which `utterances` does not count; None if a shard does not say how
    many it holds."""

    @property
    def damaged_shards(self) -> list[str]:
        """The names of shards with a problem in them."""
        return sorted({problem.shard for problem in self.problems if problem.shard})


@dataclass(frozen=True)
class Subset:
    """Some of a version's shards, by their names: one of several subsets of about the same size.

    A shard stays in its subset when others are added, so all subsets, one after the other, cover a version that grows.
    """

    number: int
    """Which subset it is, from 0."""
    of: int
    """The number of subsets."""

    def has(self, shard: str) -> bool:
        """Whether the shard of that name, which is a hash, is in the subset."""
        return int(shard, 16) % self.of == self.number


def verify(
    version: Version,
    *,
    data: bool = True,
    manifest: Manifest | None = None,
    sources: SourceCheck | None = None,
    subset: Subset | None = None,
    threads: int = 1,
    report: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
) -> Report:
    """Check a version.

    Args:
        version: The version to check.
        data: Whether to read every byte of the features, or only structure, metadata and columns.
        manifest: A manifest to compare the version with; None for none.
        sources: How to compare the audio files with what they were; None to leave them alone.
        subset: The shards to look at; None for all.
        threads: The number of threads that read shards.
        report: Called after each shard; again if its audio files have been looked at.
        stop: If it is set, the verification ends where it is.

    Raises:
        StoreError: A shard may not be read.
    """
    checked: dict[str, _CheckedShard] = {}
    stop = stop or threading.Event()
    is_second_look = False
    take_seen_for_whole(version)
    while True:
        there = version.shard_folders()
        names = [name for name in there if subset is None or subset.has(name)]
        new = [name for name in names if name not in checked]
        checked |= _check_shards(version, new, data, threads, report, stop)
        if stop.is_set():
            problems = [*_check_version(version), *(problem for one in checked.values() for problem in one.problems)]
            return Report(str(version.path), len(names), 0, 0, 0, data, problems, interrupted=True)
        try:
            result, index = _report(version, list(there), [checked[name] for name in names], data, manifest, subset)
        except DamagedError:
            if there.items() <= version.shard_folders().items():
                raise
        else:
            lacking = not is_second_look and any(problem.kind in LACKING for problem in result.problems)
            now = version.shard_folders()
            if now == there or (not lacking and there.items() <= now.items()):
                break
            is_second_look = lacking
        # A repair has taken shards away, and has put what was sound in them into others: these are checked as well. Or
        # something seems to be lacking, and shards have been added meanwhile.
        now = version.shard_folders()
        checked = {name: one for name, one in checked.items() if (name, there.get(name)) in now.items()}
    if sources is None or index is None:
        return result
    sound = [name for name in names if not checked[name].problems]
    of_sources = check_sources(version, index, sound, sources, threads, report, stop.is_set)
    return replace(
        result,
        problems=[*result.problems, *of_sources.problems],
        notes=[*result.notes, *notes_on_sources(of_sources)],
        interrupted=stop.is_set(),
    )


class _CheckedShard(NamedTuple):
    """A shard, what is wrong with it, and its items if that is nothing."""

    shard: Shard
    problems: list[Problem]
    items: ShardItems | None


def _report(
    version: Version,
    there: list[str],
    checked: list[_CheckedShard],
    data: bool,
    manifest: Manifest | None,
    subset: Subset | None,
) -> tuple[Report, Index | None]:
    """What checked shards come to: the shards of the subset, of all that are there. And the index of the items that
    count; None if it cannot be built.
    """
    problems = [*_check_version(version), *(problem for one in checked for problem in one.problems)]
    items = [one.items for one in checked if one.items is not None]
    sound = [one.shard for one in items]
    notes = [*_notes(version), *_notes_on_shards(sound)]
    index: Index | None = None
    repeats: list[DuplicateItem] = []
    if subset is None:
        index = index_of(items)
        if sum(shard.info.items for shard in sound) > len(index):  # some are superseded or repeated
            repeats = find_duplicates(items)
            problems += _check_repeats(repeats)
    else:
        notes += _notes_on_subset(subset, len(checked), len(there))
        try:
            index = load_index(version, there)
            if index is None:
                index = build_index(map(version.shard, there))
        except DamagedError as error:
            problems.append(Problem("metadata", error.what))
            notes.append("without that shard, it was not looked at what is missing, changed or failed")
    if index is not None:
        of_records, notes_on_records = check_records(
            version, index, has_damaged_shards=len(sound) < len(checked), has_manifest=manifest is not None
        )
        problems += of_records
        notes += notes_on_records
    failures = {} if index is None else standing_failures(version, index)
    failed, surplus = len(failures), 0
    if manifest is not None and index is not None:
        lacking, failed, surplus = _against(expand(manifest, copies_of(version.info.config)), index, failures)
        problems += lacking
    inside = {shard.name for shard in sound}
    result = Report(
        path=str(version.path),
        shards=len(checked),
        utterances=sum(shard.info.items for shard in sound) if index is None else _count_inside(index, inside),
        frames=sum(shard.info.frames for shard in sound),
        num_bytes=sum(shard.num_bytes(version.info.spec) for shard in sound),
        data=data,
        problems=problems,
        failed=failed,
        surplus=surplus,
        repeated=sum(repeat.same_row for repeat in repeats),
        notes=[*notes, *_notes_on_index(version, there), *_notes_on_probes(version)],
        damaged_utterances=_count_items(one.shard for one in checked if one.problems),
        shards_left_out=len(there) - len(checked),
    )
    return result, index


def _check_shards(
    version: Version,
    names: list[str],
    data: bool,
    threads: int,
    report: Callable[[], object],
    stop: threading.Event,
) -> dict[str, _CheckedShard]:
    """What is wrong in each shard, by name. Shards that were not checked before `stop` was set are left out."""
    checked: dict[str, _CheckedShard] = {}
    ended = threading.Event()

    def stopped() -> bool:
        return stop.is_set() or ended.is_set()

    def check(name: str) -> _CheckedShard:
        shard = version.shard(name)
        if stopped():
            return _CheckedShard(shard, [], None)
        with read_ahead(shard.files(COLUMNS)):
            return _CheckedShard(shard, *examine_shard(shard, version.info.spec, data, stopped))

    with ThreadPoolExecutor(threads) as pool:
        try:
            for one in pool.map(check, names):
                if stop.is_set():
                    break
                checked[one.shard.name] = one
                report()
        finally:
            ended.set()  # after an error or an interrupt, the pool waits for threads that are still checking
    return checked


def _count_inside(index: Index, shards: Collection[str]) -> int:
    """The number of an index's items that are in some shards."""
    numbers = [number for number, name in enumerate(index.shards) if name in shards]
    return int(np.isin(index.shard, np.array(numbers, np.int64)).sum())


def _notes_on_subset(subset: Subset, looked_at: int, shards: int) -> Iterator[str]:
    yield (
        f"subset {subset.number}/{subset.of}: {looked_at:,} of {counted(shards, 'shard')}; utterances that are in two "
        "shards were not looked for"
    )


def _count_items(shards: Iterable[Shard]) -> int | None:
    """The number of utterances in some shards; None if a shard does not say it."""
    try:
        return sum(shard.info.items for shard in shards)
    except (StoreError, OSError):
        return None


def _check_version(version: Version) -> Iterator[Problem]:
    group = version.path / "shards" / "zarr.json"
    if not zarr3.is_plain_group(version.path / "shards"):
        yield Problem("metadata", f"{group}: damaged: not the metadata of a Zarr group")


def _notes(version: Version) -> Iterator[str]:
    """Whether the version's folder has its name; and its config still its fingerprint, if extraction is installed."""
    if (name := version.original_name) is not None:
        yield f"its folder is a copy of {name}, or was renamed: extract adds to a version only under that name"
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
            f"its config now has the fingerprint {now[:12]}: the extractor's revision or weights have changed since, "
            "and extracting would fill another version"
        )


def _check_repeats(repeats: list[DuplicateItem]) -> Iterator[Problem]:
    for repeat in repeats:
        if not repeat.same_row:
            first, second = repeat.shards
            message = f"{repeat.id}: is in two shards, from different rows: {first} and {second}"
            yield Problem("duplicate", message, first, repeat.id)


def _notes_on_shards(shards: list[Shard]) -> Iterator[str]:
    unmarked = sum("fingerprint" not in shard.info.made_by for shard in shards)
    if unmarked:
        yield (
            f"written by an earlier featcache, without their version's fingerprint: {unmarked:,} of "
            f"{counted(len(shards), 'shard')}; whether any was exchanged with another version's cannot be told"
        )


def _notes_on_index(version: Version, names: list[str]) -> Iterator[str]:
    """What is wrong with the index. Opening the version repairs it, which only takes time."""
    folder = index_folder(version, names)
    for path in (folder.parent, folder):
        if isinstance(path, Path) and path.is_symlink():
            yield f"{path}: is a symbolic link, which is not followed: the index is built in memory at every opening"
            return
    if store_of(folder).exists(folder) and load_index(version, names) is None:
        yield f"{folder}: damaged: this index is built anew when the version is opened next"


def _notes_on_probes(version: Version) -> Iterator[str]:
    """That measurements cannot be read, which costs no more than to measure again."""
    there = len(version.probe_files())
    if damaged := there - len(version.probes()):
        yield f"{version.path / 'probes'}: damaged: {damaged} of {counted(there, 'record')}: they count for nothing"


def _against(manifest: Manifest, index: Index, failures: Mapping[str, Failure]) -> tuple[list[Problem], int, int]:
    """What a version lacks of a manifest, how many of its utterances have failed, and how many are not in it."""
    todo = compare(manifest, index, failures)
    is_older = todo.replaces >= 0
    problems = [
        *_lacking(manifest, todo.missing & ~is_older, "missing", "is in no shard"),
        *_lacking(manifest, is_older & ~todo.failed, "changed", "its row is not the one that was extracted"),
        *_failed(manifest, is_older & todo.failed, failures),
    ]
    return problems, int(todo.failed.sum()), len(index) - int((todo.present | is_older).sum())


def _lacking(manifest: Manifest, rows: NDArray[np.bool_], kind: str, what: str) -> Iterator[Problem]:
    for row in np.flatnonzero(rows).tolist():
        yield Problem(kind, f"{manifest.ids[row]}: {what}", id=manifest.ids[row])


def _failed(manifest: Manifest, rows: NDArray[np.bool_], failures: Mapping[str, Failure]) -> Iterator[Problem]:
    """Problems of rows that have failed, of which there is only an older item."""
    for row in np.flatnonzero(rows).tolist():
        failure = failures[manifest.ids[row]]
        message = f"{failure.id}: what is there of it is older: extracting {failure.path} failed: {failure.reason}: "
        yield Problem("changed", message + failure.message, id=failure.id)
