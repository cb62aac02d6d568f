"""Prune takes away what no reader needs, and keeps everything else bit for bit; and a
whole version is removed here.

A shard of which nothing is needed is removed. One of which some items are needed is
written again with these alone, and then removed: so at every moment, the item that counts
of each utterance that is wanted is there. Shards that a tag names stay as they are; and
so does, of the utterances that have an older item in such a shard, the item that
counts."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

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
from featcache.manifest.copies import copies_of, expand
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
from featcache.version.records import Run
from featcache.version.tags import read_tag, tag_names
from featcache.version.version import Version
from featcache.version.wanted import find_missing, forget_rows, read_all_wanted

_Hashes = NDArray[np.uint64]
_Needed = dict[str, list[int]]
"""Of each shard that goes, those first of which older generations go: the numbers of its
items that stay, rising."""


@dataclass(frozen=True)
class PrunePlan:
    """What is to be taken away of a version."""

    path: str
    removed: tuple[str, ...] = ()
    """The names of the shards of which nothing stays."""
    rewritten: tuple[str, ...] = ()
    """The names of the shards of which some items stay: they are written again, with
    these alone."""
    older: int = 0
    """The number of items that go because their utterance was extracted again."""
    unwanted: int = 0
    """The number of utterances that go because nobody wants them."""
    bound: int = 0
    """The number of items that would go, and stay because a tag names their shard, or an
    older item of theirs."""
    tags: tuple[str, ...] = ()
    num_bytes: int = 0
    """The bytes of features that go."""
    copied_bytes: int = 0
    """The bytes of features that are written again."""
    leftovers: tuple[str, ...] = ()
    """What killed processes have left."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take away."""
        return not (self.removed or self.rewritten or self.leftovers)


@dataclass(frozen=True)
class Pruned:
    """What was taken away of a version."""

    path: str
    removed: int = 0
    rewritten: int = 0
    """The number of those whose other items are now in a shard of their own."""
    damaged: tuple[str, ...] = ()
    """The names of shards that stay as they are: they are damaged, or have replaced items
    of one that is."""
    interrupted: bool = False


def ids_to_keep(version: Version, manifest: Manifest, *, force: bool = False) -> _Hashes:
    """The hashes of a manifest's ids, with all copies: what `prune` keeps of a version.
    Raises ManifestError if it has none of the version's utterances; or, without `force`,
    names other files for them, or lacks more than a few."""
    manifest = expand(manifest, copies_of(version.info.config))
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


def plan_prune(version: Version, wanted_ids: _Hashes | None = None) -> PrunePlan:
    """What of a version no reader needs. With the hashes of ids, readers need no others
    than these. Raises DamagedError if a shard's table, or a tag, is damaged."""
    return _plan(version, wanted_ids)[0]


def _plan(
    version: Version, wanted_ids: _Hashes | None, staying: Sequence[str] = ()
) -> tuple[PrunePlan, _Needed]:
    """What is to be taken away, and what stays of it. Shards that are `staying` stay as
    they are, as tagged ones do."""
    index = open_index(version, keep=False)
    # of a damaged one, all must stay
    tags = [read_tag(version, name) for name in tag_names(version)]
    tagged = {name for tag in tags for name in tag.shards} | {*staying}
    is_needed = np.ones(len(index), bool)
    if wanted_ids is not None:
        is_needed[index.by_hash] = np.isin(index.id_hash, wanted_ids)
        # Where an older item stays, the one that counts does, or the older one would
        # count again.
        there = sorted(tagged & {*index.shards})
        for hashes in in_parallel(lambda name: version.shard(name).table["id_hash"].copy(), there):
            at = index.find_hashes(hashes)
            is_needed[at[at >= 0]] = True
    generation = np.zeros(len(index.shards), np.uint64)
    # of what goes
    np.maximum.at(generation, index.shard[~is_needed], index.generation[~is_needed])
    surplus = np.array([shard.items for shard in index.summaries], np.int64)
    surplus -= np.bincount(index.shard[is_needed], minlength=len(surplus))
    is_tagged = np.array([name in tagged for name in index.shards], bool)
    by_generation = np.argsort(generation, kind="stable")
    goes = by_generation[((surplus > 0) & ~is_tagged)[by_generation]].tolist()
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
        bound=int(surplus[is_tagged].sum()),
        tags=tuple(tag.name for tag in tags),
        num_bytes=num_bytes(all_frames - copied_frames),
        copied_bytes=num_bytes(copied_frames),
        leftovers=tuple(version.store.sweep(remove=False)),
    )
    return plan, needed


def prune(
    version: Version,
    plan: PrunePlan,
    wanted_ids: _Hashes | None = None,
    *,
    report: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
) -> Pruned:
    """Take away what `plan_prune` has found, with the same ids.

    Args:
        plan: What has been said and agreed.
        report: Called after each shard.
        stop: Once it is set, no more shards are begun.

    Raises LockedError if a run, a repair or another prune is under way; StoreError if the
    version has changed since the plan, or cannot be written: whatever is wanted is still
    there."""
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
    wanted_ids: _Hashes | None,
    report: Callable[[], object],
    stop: threading.Event,
) -> Pruned:
    """Write again what stays of shards that go; and then remove these, the older
    generations first."""
    goes, made, damaged = [*needed], set[str](), list[str]()
    for name in goes:
        if needed[name] and not stop.is_set():
            try:
                made.add(rewrite(version, version.shard(name), needed[name]))
            except DamagedError:
                damaged.append(name)
    if damaged:  # what has replaced items of them stays, too
        goes = [name for name in _plan(version, wanted_ids, damaged)[1] if name in needed]
    removed = rewritten = 0
    for name in goes:
        # an earlier prune, which was cut off, has left it: it now holds what stays of
        # another
        if name in made:
            continue
        if stop.is_set():
            break
        version.store.remove(f"shards/{name}")
        removed, rewritten = removed + 1, rewritten + bool(needed[name])
        report()
    return Pruned(
        str(version.path), removed, rewritten, tuple(sorted({*needed} - {*goes})), stop.is_set()
    )


def rewrite(version: Version, shard: Shard, numbers: Sequence[int]) -> str:
    """Publish some items of a shard, whose numbers rise, with all that is known of them;
    returns the name of the shard that has them. If there is one of this name, its files
    are written again. Raises DamagedError if one of these items, the table or a side
    array is not what was written; StoreError if it cannot be written: nothing has been
    removed."""
    shard.check_table()
    builder = ShardBuilder(shard.spec)
    sides = {side.name: shard.side(side.name, check=True) for side in shard.spec.side}
    sound = shard.sound_items(numbers)
    for number, item in zip(numbers, shard.items(numbers), strict=True):
        found, features = next(sound, (None, None))
        if found != number or features is None:
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
    """Keep of the ledger what stands: once an item has gone, an old failure of it is not
    to stand again. Where not all records can be read, it is left as it is."""
    names, damaged = version.store.names("failures"), list[str]()
    failures = read_failures(version, damaged)
    missing = find_missing([*read_all_wanted(version, damaged)], index, failures)
    standing = [*dict.fromkeys(failure for _, _, of_rows in missing for failure in of_rows)]
    if len(standing) < len(failures) and not damaged:
        with suppress(StoreError):
            rewrite_failures(version, names, f"{run}.000000", standing)


# A whole version

_OWN_FILE = re.compile(
    r"(shards/)?zarr\.json|lock|(shards|index|aside)/[0-9a-f]{16}/.+|(tags|wanted|failures|runs|probes)/[^/]+|work/.+"
)
"""What the files of a version are called."""


def what_is_kept(version: Version, *, force: bool) -> list[str]:
    """What of a version is not removed without a word from the user: its tags, and files
    of others in its folder. Raises ArgumentError if there is something, and the user has
    not said it, by `force`."""
    kept = []
    if tags := tag_names(version):
        kept.append(f"the tags {listing(tags)}")
    if files := sorted(key for key, _ in version.store.walk() if not _OWN_FILE.fullmatch(key)):
        kept.append(f"files that are not featcache's: {listing(files)}")
    if kept and not force:
        raise ArgumentError(
            f"{version.path}: holds {'; '.join(kept)}: move it away, or give --force to "
            "remove it too"
        )
    return kept


def remove_version(version: Version, *, force: bool = False) -> None:
    """Remove a version, with everything in its folder. Outside of buckets, the next sweep
    removes what a kill leaves of it. Raises ArgumentError if it has tags, or files of
    others in its folder, without `force`; LockedError if a run, a repair or a prune is
    under way; StoreError if its folder is a link, or cannot be removed."""
    if not force:
        what_is_kept(version, force=False)
    with version.at_work("rm"):
        version.store.destroy()
