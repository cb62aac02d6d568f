"""Removes what no reader needs from a version, bit for bit nothing else; or a whole
version.

Needed items of a shard are written to another shard before it is removed. Shards that a tag
names stay. If such a shard has an older item of an utterance, the current item stays too."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from featcache.errors import (
    ArgumentError,
    DamagedError,
    ManifestError,
    StoreError,
    counted,
    listing,
)
from featcache.format.shard import Shard
from featcache.format.writing import ShardBuilder
from featcache.manifest.label_files import rows_of
from featcache.manifest.strings import Hashes
from featcache.manifest.utterances import Manifest
from featcache.storage.base import in_parallel
from featcache.version.index import Index
from featcache.version.indexing import open_index
from featcache.version.join import (
    RowKeys,
    are_few,
    describe_changed,
    join,
    refuse_paths,
    with_other_files,
)
from featcache.version.ledger import read_failures, rewrite_failures
from featcache.version.progress import OnShard, no_progress
from featcache.version.records import Run
from featcache.version.tags import read_tag, tag_names
from featcache.version.version import Version
from featcache.version.wanted import find_missing, read_all_wanted, read_wanted

_Needed = dict[str, list[int]]
"""The shards to remove, in this order: for each, the rising numbers of the items to keep."""


@dataclass(frozen=True)
class PrunePlan:
    """A plan of `prune`: see docs/json.md."""

    path: str
    removed: tuple[str, ...] = ()
    rewritten: tuple[str, ...] = ()
    """The names of the shards whose needed items are written to another."""
    older: int = 0
    unwanted: int = 0
    bound: int = 0
    """The number of other items that stay because a tag names their shard, or a shard
    with an older item of theirs."""
    tags: tuple[str, ...] = ()
    num_bytes: int = 0
    copied_bytes: int = 0
    leftovers: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if nothing is to be removed."""
        return not (self.removed or self.rewritten or self.leftovers)


@dataclass(frozen=True)
class Pruned:
    """The result of `prune`."""

    path: str
    removed: int = 0
    rewritten: int = 0
    damaged: tuple[str, ...] = ()
    """The names of shards that stay because they, or shards whose items they have
    replaced, are damaged."""
    interrupted: bool = False


def ids_to_keep(version: Version, manifest: Manifest, *, force: bool = False) -> Hashes:
    """Return the hashes of the ids that `prune` is to keep for a manifest. Raises
    ManifestError if it has none of the version's utterances; or, without `force`, names
    other files for them, or lacks more than a few."""
    manifest = rows_of(manifest, version.info.config)
    hashes, index = manifest.ids.hashes(), open_index(version)
    lacking = int((~np.isin(index.id_hash, hashes)).sum())
    whose = (
        f"of the {counted(len(index), 'utterance')} of {version.path}: is it the right manifest?"
    )
    if len(index) and lacking == len(index):
        raise ManifestError(
            f"{manifest.source}: has none {whose} `featcache rm` removes a whole version"
        )
    if force:
        return hashes
    keys = RowKeys.of(manifest)
    status = join(keys, index, {})
    remedy = "name another cache. If it is this one's, --force removes what it lacks"
    refuse_paths(manifest, status, version, index, remedy)
    checked = with_other_files(status, manifest, version, index)
    if (checked.present != status.present).any():
        raise ManifestError(describe_changed(manifest, keys, version, index, checked))
    if not are_few(lacking, len(index)):
        raise ManifestError(f"{manifest.source}: lacks {lacking:,} {whose} --force removes them")
    return hashes


def plan_prune(version: Version, wanted_ids: Hashes | None = None) -> PrunePlan:
    """List what readers do not need of a version: with `wanted_ids`, also all other ids.
    Raises DamagedError if a tag or a table is damaged."""
    return _plan(version, wanted_ids)[0]


def _plan(
    version: Version, wanted_ids: Hashes | None, staying: Sequence[str] = ()
) -> tuple[PrunePlan, _Needed]:
    """Plan to prune a version. Shards that are `staying` stay, as tagged shards do."""
    index = open_index(version, keep=False)
    tags = [read_tag(version, name) for name in tag_names(version)]
    tagged = {name for tag in tags for name in tag.shards} | {*staying}
    is_needed = np.ones(len(index), bool)
    num_bound = 0
    if wanted_ids is not None:
        is_needed[index.by_hash] = np.isin(index.id_hash, wanted_ids)
        num_wanted = int(is_needed.sum())
        # Where an older item stays, the current item must stay too, or the older item
        # would become current again.
        tagged_here = sorted(tagged & {*index.shards})
        for hashes in in_parallel(
            lambda name: version.shard(name).table["id_hash"].copy(), tagged_here
        ):
            positions = index.find_hashes(hashes)
            is_needed[positions[positions >= 0]] = True
        num_bound = int(is_needed.sum()) - num_wanted
    # the latest generation that is removed of each shard
    generation = np.zeros(len(index.shards), np.uint64)
    np.maximum.at(generation, index.shard[~is_needed], index.generation[~is_needed])
    surplus = np.array([shard.items for shard in index.summaries], np.int64)
    surplus -= np.bincount(index.shard[is_needed], minlength=len(surplus))
    is_tagged = np.array([name in tagged for name in index.shards], bool)
    is_removed = (surplus > 0) & ~is_tagged
    by_generation = np.argsort(generation, kind="stable")
    goes = by_generation[is_removed[by_generation]].tolist()
    inside = np.isin(index.shard, goes)
    stays = inside & is_needed
    needed = {}
    for number in goes:
        span = slice(*index.span(number))
        needed[index.shards[number]] = index.item[span][is_needed[span]].tolist()
    copied_frames = int(index.num_frames[stays].sum())
    all_frames = sum(index.summaries[number].frames for number in goes)
    num_bytes = version.info.spec.num_bytes
    plan = PrunePlan(
        path=str(version.path),
        removed=tuple(sorted(name for name, numbers in needed.items() if not numbers)),
        rewritten=tuple(sorted(name for name, numbers in needed.items() if numbers)),
        older=sum(index.summaries[number].items for number in goes) - int(inside.sum()),
        unwanted=int((inside & ~is_needed).sum()),
        bound=int(surplus[is_tagged].sum()) + num_bound,
        tags=tuple(tag.name for tag in tags),
        num_bytes=num_bytes(all_frames - copied_frames),
        copied_bytes=num_bytes(copied_frames),
        leftovers=tuple(version.store.sweep(remove=False)),
    )
    return plan, needed


def prune(
    version: Version,
    plan: PrunePlan,
    wanted_ids: Hashes | None = None,
    *,
    report: OnShard = no_progress,
    stop: threading.Event | None = None,
) -> Pruned:
    """Carry out a plan of `plan_prune` for the same ids, until `stop` is set; `report` is
    called after each shard. Raises LockedError if another command is at work; StoreError if
    the version has changed since the plan."""
    with version.at_work("prune"):
        now, needed = _plan(version, wanted_ids)
        if replace(now, leftovers=plan.leftovers) != plan:
            raise StoreError(
                f"{version.path}: has changed meanwhile; nothing has been removed: run this again"
            )
        version.store.sweep()
        if not needed and wanted_ids is None:
            return Pruned(plan.path)
        run = Run(version, {"config": version.info.config})
        if wanted_ids is not None:
            forget_rows(version, wanted_ids, open_index(version))
        pruned = _take_away(version, needed, wanted_ids, report, stop or threading.Event())
        _forget_failures(version, open_index(version), run.id)
        run.finish({"extracted": 0, "failed": 0, "interrupted": pruned.interrupted})
        return pruned


def _take_away(
    version: Version,
    needed: _Needed,
    wanted_ids: Hashes | None,
    report: OnShard,
    stop: threading.Event,
) -> Pruned:
    goes = [*needed]
    made, damaged = set[str](), list[str]()
    for name in goes:
        if needed[name] and not stop.is_set():
            try:
                shard = version.shard(name)
                made.add(rewrite(version, shard, needed[name]))
            except DamagedError:
                damaged.append(name)
                report(0, 0.0, True)
                continue
            samples = int(shard.table["num_samples"][needed[name]].sum())
            report(len(needed[name]), samples / version.info.spec.sample_rate, False)
    if damaged:  # shards that have replaced their items stay too
        _, still_needed = _plan(version, wanted_ids, damaged)
        goes = [name for name in still_needed if name in needed]
    removed = rewritten = 0
    for name in goes:
        if name in made:  # left by an interrupted prune; now it has the items of another shard
            continue
        if stop.is_set():
            break
        version.store.remove(f"shards/{name}")
        removed += 1
        if needed[name]:
            rewritten += 1
        report(0, 0.0, False)
    staying = tuple(sorted({*needed} - {*goes}))
    return Pruned(str(version.path), removed, rewritten, staying, stop.is_set())


def rewrite(version: Version, shard: Shard, numbers: Sequence[int]) -> str:
    """Publish some items of a shard, by their rising numbers, as a new shard, or write its
    files again. Returns its name. Raises DamagedError if one of the items, the table or a
    side array is not what was written."""
    shard.check_table()
    builder = ShardBuilder(shard.spec)
    sides = {side.name: shard.side(side.name, check=True) for side in shard.spec.side}
    sound = shard.sound_items(numbers)
    for number, item in zip(numbers, shard.items(numbers), strict=True):
        sound_number, features = next(sound, (None, None))
        if sound_number != number or features is None:
            raise DamagedError(f"{shard}: damaged: the features of {item.id}", version.path)
        builder.append(item, features, {name: side.item(number) for name, side in sides.items()})
    info = shard.info
    name, files = builder.files(
        fingerprint=info.fingerprint,
        row=info.row,
        manifest=info.manifest,
        made_by=info.made_by,
        where=version.path,
    )
    if version.store.exists(f"shards/{name}"):  # which may be damaged
        for path, data in files.items():
            version.store.put(f"shards/{name}/{path}", data)
    else:
        version.store.publish(files, f"shards/{name}")
    return name


def _forget_failures(version: Version, index: Index, run: str) -> None:
    """Remove failures that do not stand from an undamaged ledger: they would stand again
    once an item is removed."""
    names, damaged = version.store.names("failures"), list[str]()
    failures = read_failures(version, damaged)
    missing = find_missing([*read_all_wanted(version, damaged)], index, failures)
    standing = [*dict.fromkeys(failure for _, _, of_rows in missing for failure in of_rows)]
    if len(standing) < len(failures) and not damaged:
        with suppress(StoreError):
            rewrite_failures(version, names, f"{run}.000000", standing)


_OWN_FILE = re.compile(
    r"(shards/)?zarr\.json|lock"
    r"|(shards|index|aside)/[0-9a-f]{16}/.+"
    r"|(tags|wanted|failures|runs|probes)/[^/]+"
    r"|work/.+"
)


def what_is_kept(version: Version, *, force: bool) -> list[str]:
    """List the tags of a version, and the user's files in its folder. Raises ArgumentError
    if there are any, without `force`."""
    contents = []
    tags = tag_names(version)
    if tags:
        contents.append(f"the tags {listing(tags)}")
    files = sorted(key for key, _ in version.store.walk() if not _OWN_FILE.fullmatch(key))
    if files:
        contents.append(f"files that are not featcache's: {listing(files)}")
    if contents and not force:
        raise ArgumentError(
            f"{version.path}: holds {'; '.join(contents)}: move it away, or give --force to "
            "remove it too"
        )
    return contents


def remove_version(version: Version, *, force: bool = False) -> None:
    """Remove a version with its folder. After a kill, the next sweep removes the rest,
    except in buckets. Raises what `what_is_kept` raises; LockedError if another command is
    at work; StoreError if its folder is a link."""
    what_is_kept(version, force=force)
    with version.at_work("rm"):
        version.store.destroy()


def forget_rows(version: Version, wanted_ids: Hashes, index: Index) -> None:
    """Remove rows from all wanted sets, but those of ids with these hashes."""
    # saving removes some
    before = [read_wanted(version, name) for name in version.store.names("wanted")]
    goes = ~np.isin(index.id_hash, wanted_ids)
    forgotten = int(index.generation[index.by_hash[goes]].max(initial=0))
    for wanted_set in before:
        goes = ~np.isin(wanted_set.rows[0], wanted_ids)
        forgotten = max(forgotten, int(wanted_set.rows[2, goes].max(initial=0)))
    if before and forgotten > max(wanted_set.forgotten for wanted_set in before):
        replace(before[0], forgotten=forgotten).save(version)
    for wanted_set in before:
        stays = np.isin(wanted_set.rows[0], wanted_ids)
        if not stays.all():
            replace(wanted_set, rows=wanted_set.rows[:, stays]).save(version)
