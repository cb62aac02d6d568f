"""Prune: takes away what no reader needs, and keeps everything else bit for bit.

A shard of which nothing counts is removed. One of which some items count is written again with these alone, as repair
does it, and then removed: so at every moment, each item that counts is in a shard. Shards that a tag names stay as they
are. So do those without which an older item, in a shard that stays, would count again.

The order follows from that: whatever a shard replaces goes before the shard does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, ManifestError, StoreError, counted
from featcache.manifest import Manifest
from featcache.manifest.copies import copies_of, expand
from featcache.storage.objects import require_put_if_absent
from featcache.store.damaged import DamagedShard, copy_sound_items
from featcache.store.files import WRITTEN, is_being_made, is_being_written, refuse_links
from featcache.store.index import Index, open_index
from featcache.store.join import RowKeys, are_few, describe_changed, join, refuse_paths, with_other_files
from featcache.store.ledger import WITHDRAWN, latest_failures
from featcache.store.leftovers import leftovers
from featcache.store.removing import claim_shards, forget_indexes, prune_claim, refuse_beside_runs, remove_shard
from featcache.store.run_records import ShardEvent, run_names
from featcache.store.runs import Run
from featcache.store.shard import ShardInfo
from featcache.store.tags import read_tags
from featcache.store.version import Version, sweep_cache
from featcache.store.version_info import library_versions


@dataclass(frozen=True)
class PrunePlan:
    """What is to be taken away of a version."""

    path: str
    """The folder of the version."""
    removed: tuple[str, ...] = ()
    """The names of the shards of which nothing stays."""
    rewritten: tuple[str, ...] = ()
    """The names of the shards of which some items stay: they are written again, with these alone."""
    older: int = 0
    """The number of items that go because a later run has extracted their utterance again."""
    unwanted: int = 0
    """The number of utterances that go because the manifest does not have them."""
    bound: int = 0
    """The number of items that would go, and stay because a tag names their shard, or one that they replace."""
    tags: tuple[str, ...] = ()
    """The names of the version's tags."""
    num_bytes: int = 0
    """The bytes of features that go."""
    copied_bytes: int = 0
    """The bytes of features that are written again."""
    leftovers: tuple[str, ...] = ()
    """What killed processes have left, in the version and beside it."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take away."""
        return not (self.removed or self.rewritten or self.leftovers)


@dataclass(frozen=True)
class Pruned:
    """What was taken away of a version."""

    path: str
    """The folder of the version."""
    removed: int = 0
    """The number of shards that are gone."""
    rewritten: int = 0
    """The number of those whose other items are now in a shard of their own."""
    damaged: tuple[str, ...] = ()
    """The names of shards that stay as they are: they are damaged, or replace items of one that is."""
    interrupted: bool = False
    """Whether it was stopped before it had done all."""


def plan_prune(version: Version, manifest: Manifest | None = None, *, force: bool = False) -> PrunePlan:
    """What of a version no reader needs. With a manifest, readers need no utterances but its own, and their copies.

    Raises:
        StoreError: A folder of the version is a link.
        DamagedError: A shard's metadata or columns, or a tag, are damaged.
        ManifestError: None of the version's utterances is in the manifest; or, without `force`, it names other files
            for them, or lacks more than a few.
    """
    contents = _look(version, manifest)
    plan = contents.plan(version)
    if manifest is not None and not force:
        _refuse_another_corpus(version, contents.index, manifest)
        if not are_few(plan.unwanted, utterances := len(contents.index)):
            raise ManifestError(
                f"{manifest.source}: lacks {plan.unwanted:,} of the {utterances:,} utterances in {version.path}: is it "
                "the right manifest? --force removes them"
            )
    return plan


def _refuse_another_corpus(version: Version, index: Index, manifest: Manifest) -> None:
    copies = copies_of(version.info.config)
    manifest = expand(manifest, copies)
    keys = RowKeys.of(manifest)
    joined = with_other_files(join(index, keys, {}), keys, manifest, version, index)
    rows = np.flatnonzero(joined.is_another)
    remedy = "name another cache. If it is this one's, --force removes what it lacks"
    refuse_paths(manifest, rows, joined.positions[rows], version, index, len(copies), remedy)
    if joined.other_files:
        raise ManifestError(describe_changed(manifest, keys, version, index, joined))


@dataclass(frozen=True)
class _Contents:
    """What is in a version, and what of it goes."""

    index: Index
    """Its items that count."""
    is_wanted: NDArray[np.bool_]
    """Which of them the manifest has, or keep an older one from counting again, bool `[items]`."""
    infos: Mapping[str, ShardInfo]
    """What each shard says of itself."""
    inside: Mapping[str, NDArray[np.int64]]
    """Of each shard, the positions of the items that count."""
    numbers: Mapping[str, list[int]]
    """Of each shard, the numbers of the items that count and are wanted, rising."""
    goes: list[str]
    """The shards that are removed, some after they have been written again; each behind those of which it replaces
    items."""
    tags: tuple[str, ...]
    """The names of the version's tags."""

    def plan(self, version: Version) -> PrunePlan:
        """What this comes to."""
        older = unwanted = frames = copied = 0
        for name in self.goes:
            at = self.inside[name]
            is_wanted = self.is_wanted[at]
            kept = int(self.index.num_frames[at[is_wanted]].sum())
            older, unwanted = older + self.infos[name].items - len(at), unwanted + int((~is_wanted).sum())
            frames, copied = frames + self.infos[name].frames - kept, copied + kept
        each = version.info.spec.bytes_per_frame
        return PrunePlan(
            path=str(version.path),
            removed=tuple(name for name in self.goes if not self.numbers[name]),
            rewritten=tuple(name for name in self.goes if self.numbers[name]),
            older=older,
            unwanted=unwanted,
            bound=sum(self.infos[name].items - len(self.numbers[name]) for name in self.infos.keys() - {*self.goes}),
            tags=self.tags,
            num_bytes=frames * each,
            copied_bytes=copied * each,
            leftovers=tuple(_left_over(version)),
        )


def _look(version: Version, manifest: Manifest | None) -> _Contents:
    if isinstance(version.path, Path):
        refuse_links(version.path, *WRITTEN)
    index = open_index(version)
    is_wanted = np.ones(len(index), bool) if manifest is None else _is_wanted(version, index, manifest)
    order = np.argsort(index.shard, kind="stable")
    ends = np.searchsorted(index.shard[order], np.arange(1, len(index.shards)))
    inside = dict(zip(index.shards, np.split(order, ends), strict=True)) if index.shards else {}
    infos = {name: version.shard(name).info for name in index.shards}
    tags = [*read_tags(version)]
    tagged = {name for tag in tags for name in tag.shards}
    older: dict[str, NDArray[np.int64]] = {}
    while True:
        numbers = {name: sorted(index.item[at[is_wanted[at]]].tolist()) for name, at in inside.items()}
        goes = _shards_that_go(infos, numbers, tagged)
        # If an older item stays, of the same utterance, it would count again without this one.
        stays = infos.keys() - {*goes} if manifest is not None else ()
        bound = [name for name in stays if len(inside[name]) < infos[name].items]
        older |= {name: index.find(version.shard(name).ids) for name in bound if name not in older}
        at = np.concatenate([np.empty(0, np.int64), *(older[name] for name in bound)])
        at = at[at >= 0]
        if is_wanted[at].all():
            return _Contents(index, is_wanted, infos, inside, numbers, goes, tuple(tag.name for tag in tags))
        is_wanted[at] = True


def _is_wanted(version: Version, index: Index, manifest: Manifest) -> NDArray[np.bool_]:
    positions = index.find(expand(manifest, copies_of(version.info.config)).ids)
    is_wanted = np.zeros(len(index), bool)
    is_wanted[positions[positions >= 0]] = True
    if len(index) and not is_wanted.any():
        raise ManifestError(
            f"{manifest.source}: has none of the {counted(len(index), 'utterance')} of {version.path}: is it the right "
            "manifest? `featcache rm` removes a whole version"
        )
    return is_wanted


def _shards_that_go(infos: Mapping[str, ShardInfo], numbers: Mapping[str, list[int]], tagged: set[str]) -> list[str]:
    stays = {name for name, info in infos.items() if name in tagged or len(numbers[name]) == info.items}
    # What is written again still replaces what it did. A shard of which nothing is left to write stays in its place if
    # an item that stays would count again without it.
    replaced: set[tuple[str, int]] = set()
    pending = sorted(infos, key=lambda name: (name not in stays, not numbers[name]))
    while True:
        bound = []
        for name in pending:
            mine = {
                (shard, item) for shard, items in infos[name].supersedes.items() if shard in stays for item in items
            }
            if name in stays or numbers[name]:
                replaced |= mine
            elif mine - replaced:
                bound.append(name)
                replaced |= mine
        if not bound:
            break
        stays.update(bound)
    order: dict[str, None] = {}
    stack = [(name, False) for name in sorted(infos.keys() - stays, reverse=True)]
    seen = set()
    while stack:
        name, has_older = stack.pop()
        if has_older:
            order[name] = None
        elif name not in seen:
            seen.add(name)
            stack.append((name, True))
            stack += [(older, False) for older in infos[name].supersedes if older in infos and older not in stays]
    return [*order]


def _left_over(version: Version) -> Iterator[str]:
    of_work = version.desk / "work", lambda name: not name.endswith(".lock")
    of_files = ((folder, is_being_written) for folder in version.folders_of_small_files())
    of_cache = ((version.path.parent, is_being_made),) if isinstance(version.path, Path) else ()
    for folder, is_temporary in (of_work, *of_cache, *of_files):
        with suppress(OSError):
            yield from (str(folder / name) for name in sorted(leftovers(folder, is_temporary)))


def prune(
    version: Version,
    plan: PrunePlan,
    manifest: Manifest | None = None,
    *,
    report: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
) -> Pruned:
    """Take away what `plan_prune` has found, with the same manifest.

    Args:
        version: The version.
        plan: What has been said and agreed.
        manifest: As for the plan.
        report: Called after each shard.
        stop: Once it is set, no more shards are begun.

    Raises:
        StoreError: The version has changed since the plan; or a run, a repair or another prune is under way; or the
            version cannot be written. Whatever was sound is still there.
    """
    with claim_shards(version), prune_claim(version):
        refuse_beside_runs(version)
        contents = _look(version, manifest)
        if replace(contents.plan(version), leftovers=plan.leftovers) != plan:
            raise StoreError(f"{version.path}: has changed meanwhile; nothing has been removed: run this again")
        version.sweep()
        if isinstance(version.path, Path):
            sweep_cache(version.path.parent)
        else:
            require_put_if_absent(version.path.parent)
        if not contents.goes:
            return Pruned(plan.path)
        done = _prune_shards(version, contents, "" if manifest is None else manifest.source, report, stop)
    open_index(version, keep=True)
    return done


def _prune_shards(
    version: Version, contents: _Contents, manifest: str, report: Callable[[], object], stop: threading.Event | None
) -> Pruned:
    index, infos = contents.index, contents.infos
    goes_unwanted = sum(int((~contents.is_wanted[contents.inside[name]]).sum()) for name in contents.goes)
    asked = {"held": len(index) - goes_unwanted, "only": True, "pruned_to": manifest, "config": version.info.config}
    run = Run(version, {**asked, "made_by": library_versions()}, after=index.runs)
    until = max([*run_names(version), run.id])
    failed = latest_failures(version) if goes_unwanted else {}
    forget_indexes(version, contents.goes)
    stay: set[str] = set()
    removed = rewritten = 0
    is_stopped = False
    for name in contents.goes:
        if is_stopped := stop is not None and stop.is_set():
            break
        refuse_beside_runs(version, own=run.id)
        numbers = contents.numbers[name]
        if not numbers and stay & infos[name].supersedes.keys():
            stay.add(name)  # else what it replaces would count again
            continue
        events = []
        if numbers:
            try:
                events.append(_write_again(version, name, numbers))
            except (DamagedError, OSError):
                stay.add(name)
                continue
        at = contents.inside[name]
        gone = index.ids.take(at[~contents.is_wanted[at]])
        run.fail(replace(failed[id_], reason=WITHDRAWN, message="pruned") for id_ in gone if id_ in failed)
        event = ShardEvent(name, 0, until=until)
        if len(gone):
            event = replace(event, pruned=len(gone), made_by=str(infos[name].made_by.get("run", "")))
        run.record_shards([*events, event])
        with suppress(FileNotFoundError):  # without locks, another prune may have been faster
            remove_shard(version, name)
        removed, rewritten = removed + 1, rewritten + bool(numbers)
        report()
    run.finish({"extracted": 0, "failed": 0, "interrupted": is_stopped})
    return Pruned(str(version.path), removed, rewritten, tuple(sorted(stay)), is_stopped)


def _write_again(version: Version, name: str, numbers: list[int]) -> ShardEvent:
    """Commit some items of a shard as a shard of their own.

    Raises:
        DamagedError: The shard is damaged.
        OSError: It cannot be read.
        StoreError: The new shard cannot be written.
    """
    shard = DamagedShard(version.shard(name).folder, version.info.fingerprint, version.info.spec)
    if shard.check() & {*shard.ids.take(np.array(numbers))}:
        raise DamagedError(f"{shard.folder}: damaged")
    copied = copy_sound_items(version, shard, numbers)
    made_by = str(shard.info.made_by.get("run", ""))
    return ShardEvent(copied.name, len(numbers), entry=copied.entry, made_by=made_by)
