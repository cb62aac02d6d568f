"""`featcache prune`, and `featcache rm` for a version or a tag."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import (
    as_document,
    count_are,
    need_columns,
    note,
    open_versions,
    say,
    say_json,
)
from featcache.cli.corpora import version_or_corpus
from featcache.cli.process import INTERRUPTED, stoppable
from featcache.cli.progress import Shards
from featcache.errors import ArgumentError, DamagedError, counted, listing, megabytes
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.prune import Pruned, PrunePlan
    from featcache.version.version import Version


@options.command()
@version_or_corpus
@options.manifest(help="Also remove the utterances that are not in it.")
@options.manifest_format
@options.flag(
    "--force",
    "Remove even more than 5% of a version, or if MANIFEST names other files for what stays.",
)
@options.dry_run
@options.yes
def prune(
    path: Location, manifest: str | None, force: bool, dry_run: bool, yes: bool, **reading: Any
) -> int:
    """Remove what no reader needs: replaced utterances, leftovers. Replaced means the old
    features of utterances that were extracted again; leftovers are files of processes that
    have died. With --manifest, prune also removes the utterances that are not in it.

    prune first prints what it will remove, and asks. Utterances that stay keep their bytes:
    if a part of a shard stays, prune writes it to a new shard before it removes the old one.
    Shards of a tag stay, and so do damaged shards (see `featcache repair`). After a kill, the
    same command continues.

    While a run fills the version, prune removes nothing. It cannot see the jobs of an array,
    or runs into an object store: do not prune then. Programs that have opened the version
    may have to open it again.

    Without --force, prune refuses a manifest that names other files for the same ids, or
    that lacks more than 5% of the utterances. Exits with 1 if a damaged shard stays.

    \b
    Examples:
      featcache prune features --dry-run
      featcache prune features/fbank80 --manifest train.csv
    """
    from featcache.care.prune import ids_to_keep, plan_prune
    from featcache.care.prune import prune as prune_version

    wanted = None
    if manifest:
        carry = need_columns(path)
        wanted = options.read_manifest(manifest, reading, audio=False, carry=carry)
    versions, keeping = [*open_versions(path)], []
    for version in versions:
        keeping.append(None if wanted is None else ids_to_keep(version, wanted, force=force))
    plans = [*map(plan_prune, versions, keeping)]
    for plan in plans:
        _say(plan, manifest, dry_run)
    done: list[Pruned] = []
    is_empty = all(plan.is_empty for plan in plans)
    if not (dry_run or is_empty) and options.is_agreed("Remove all this?", yes):
        total = sum(len(plan.removed) + 2 * len(plan.rewritten) for plan in plans)
        with stoppable() as stop, Shards(total) as bar:
            jobs = zip(versions, plans, keeping, strict=True)
            done = [prune_version(*job, report=bar.done, stop=stop) for job in jobs]
    damaged = [pruned for pruned in done if pruned.damaged]
    for pruned in damaged:
        shards = counted(len(pruned.damaged), "damaged shard stays", "damaged shards stay")
        note(
            f"{pruned.path}: {shards}: {listing(pruned.damaged)}: featcache repair "
            f"{shlex.quote(pruned.path)} --manifest MANIFEST, then prune again"
        )
    results = {pruned.path: as_document(pruned) for pruned in done}
    documents = []
    for plan in plans:
        documents.append(as_document(plan) | {"pruned": results.get(plan.path)})
    say_json({"versions": documents})
    if any(pruned.interrupted for pruned in done):
        note("interrupted: the same command does the rest")
        return INTERRUPTED
    return DamagedError.exit_code if damaged else 0


def _say(plan: PrunePlan, manifest: str | None, dry_run: bool) -> None:
    parts = []
    if plan.older:
        parts.append(f"{counted(plan.older, 'item')} of utterances that were extracted again")
    if plan.unwanted:
        parts.append(f"{counted(plan.unwanted, 'utterance')} not in {manifest}")
    if plan.leftovers:
        parts.append(f"{counted(len(plan.leftovers), 'leftover')} of processes that are dead")
    if plan.is_empty:
        say(f"{plan.path}: nothing to remove")
    else:
        removes = "would remove" if dry_run else "removes"
        say(f"{plan.path}: {removes} {', '.join(parts)}; {megabytes(plan.num_bytes)}")
    if plan.rewritten:
        shards = count_are(len(plan.rewritten), "shard")
        size = megabytes(plan.copied_bytes)
        say(f"  {shards} written again with what stays, {size}")
    if plan.bound:
        items = counted(plan.bound, "more item stays", "more items stay")
        say(f"  {items}: of shards that a tag names, or needs: {listing(plan.tags)}")


@options.command()
@click.argument("path", metavar="CACHE/VERSION[@TAG]", type=options.LOCATION)
@options.flag(
    "--force", "Remove the version even if it has tags, or files that are not featcache's."
)
@options.dry_run
@options.yes
def rm(path: Location, force: bool, dry_run: bool, yes: bool) -> None:
    """Remove a version, or only a tag, which keeps all features.

    rm first prints what it will remove, and asks. It refuses a version that a run is
    filling; in an object store, it cannot see such a run. Without --force, it also refuses a
    version that has tags, or whose folder has files that are not featcache's.

    \b
    Examples:
      featcache rm features/fbank80-6f0612afda6c
      featcache rm features/fbank80@paper --yes
    """
    from featcache.care.prune import remove_version, what_is_kept
    from featcache.version.indexing import open_index
    from featcache.version.selection import split_tag, version_of_tag
    from featcache.version.tags import read_tag, remove_tag, tag_names

    place, tag = split_tag(path)
    options.refuse_corpus(place, "rm")
    if tag is not None:
        version = version_of_tag(place, tag)
        if tag not in tag_names(version):
            read_tag(version, tag)  # raises the error
        size = 0
        contents = f"{version.path}@{tag}: the tag; no features"
    else:
        version = _version_to_remove(place, dry_run)
        others = what_is_kept(version, force=force)
        size = version.bytes_on_disk()
        try:
            items = counted(len(open_index(version)), "utterance")
        except DamagedError:
            items = "damaged"
        contents = f"{version.path}: {items}, {megabytes(size)} on disk"
        if others:
            contents += f"; with {'; '.join(others)}"
    say(f"{'would remove' if dry_run else 'removes'} {contents}")
    removed = not dry_run and options.is_agreed("Remove it?", yes)
    if removed and tag is not None:
        remove_tag(version, tag)
    elif removed:
        remove_version(version, force=force)
    say_json({"path": str(version.path), "tag": tag, "bytes_on_disk": size, "removed": removed})


def _version_to_remove(place: Location, dry_run: bool) -> Version:
    from featcache.storage.opening import open_store
    from featcache.version.selection import version_folders
    from featcache.version.version import Version

    store = open_store(place)
    if not (dry_run or store.exists("")):
        store.sweep()  # an `rm` of it that was killed may have left something next to it
    folders = version_folders(place)
    if folders != [place] and folders[0].parent == place:
        names = listing(folder.name for folder in folders)
        raise ArgumentError(f"{place}: is a cache: name the version to remove: {names}")
    return Version.open(folders[0])
