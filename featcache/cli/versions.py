"""What is made of versions, and taken away from them: `featcache index`, `tag`, `copy`, `prune`, `rm`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import advise, as_document, count_are, note, note_unfinished, say, say_json, say_problems
from featcache.cli.corpora import for_each_part, version_or_corpus
from featcache.cli.process import INTERRUPTED, progress_bar, stoppable
from featcache.errors import ArgumentError, DamagedError, counted, listing, megabytes
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.copying import Copied
    from featcache.care.prune import Pruned, PrunePlan


@click.command(short_help="Build the index, after the jobs of an array.")
@version_or_corpus
@options.as_json()
def index(path: Location) -> None:
    """Build the index of all versions of a cache, or of one, unless it is there.

    `featcache extract` builds it when it ends, but not with --partition: there, one job does it after all others. Until
    then, whoever opens the version builds it. Says on stderr if utterances are still missing.

    \b
    Examples:
      featcache index features
      featcache index features/fbank80
    """
    from featcache.version.corpus import PartVersion, record_version
    from featcache.version.index import keep_index
    from featcache.version.ledger import standing_failures
    from featcache.version.selection import version_folders
    from featcache.version.version import Version
    from featcache.version.wanted import find_lacking

    documents = []
    for folder in version_folders(path):
        version = Version.open(folder)
        opened, is_built = keep_index(version)
        if not (findings := find_lacking(version, opened)):
            failed = len(standing_failures(version, opened))
            record_version(version, PartVersion.of(version, opened, failed))
        for finding in findings:
            note(f"{folder}: {finding}")
        shards, utterances = len(opened.shards), len(opened)
        documents.append({"path": str(folder), "shards": shards, "utterances": utterances, "built": is_built})
        what = "built" if is_built else "already there"
        say(f"{folder}: {counted(utterances, 'utterance')} in {counted(shards, 'shard')}: index {what}")
    say_json({"versions": documents})


@click.command(short_help="Give a version a name, to read it later as it is now.")
@click.argument("path", metavar="CACHE/VERSION", type=options.LOCATION)
@click.argument("name", metavar="NAME")
@options.as_json()
@for_each_part
def tag(path: Location, name: str) -> None:
    """Tag a version: NAME stands for the shards that it has now, and never for others. Whatever is extracted, replaced
    or pruned later, featcache.open("features/fbank80", tag="NAME") gives just these utterances, bit for bit, and so do
    verify, diff, show and stats of CACHE/VERSION@NAME. `featcache rm CACHE/VERSION@NAME` removes a tag.

    A tag copies nothing. What it names stays until the tag is removed: `featcache prune` leaves it alone. If a shard of
    it is damaged, and repair has to put another in its place, the tag is no longer whole, and says so.

    \b
    Example:
      featcache tag features/fbank80 paper
    """
    from featcache.version.index import open_index
    from featcache.version.selection import select_version
    from featcache.version.tags import make_tag

    version = select_version(path)
    made = make_tag(version, name, open_index(version))
    note_unfinished(version)
    say_json({"path": str(version.path), "tag": name, "shards": len(made.shards), "utterances": made.items})
    say(f"{version.path}@{name}: {counted(made.items, 'utterance')} in {counted(len(made.shards), 'shard')}")


@click.command(short_help="Copy a cache to another folder or object store.")
@version_or_corpus
@click.argument("to", metavar="TO", type=options.LOCATION)
@options.threads("How many shards are copied at once.  [default: every core, at most 8]", default=options.all_cores)
@options.as_json()
def copy(path: Location, to: Location, threads: int) -> int:
    """Copy a cache, or one of its versions, into the cache TO: shards, index, tags, what manifests want, failure
    ledgers, and records of runs and probes. Both may be folders or URLs: s3://bucket/features, gs://…, az://….

    Every byte is checked while it is copied: a damaged shard is named, and not copied. What is there already stays: run
    the same command again to continue a copy that was interrupted, or to add what has been extracted since. Nothing is
    removed. A shard is there as a whole or not at all, and a new version once all of it is there.

    Exits with 1 if a shard is damaged.

    \b
    Examples:
      featcache copy features s3://bucket/features
      featcache copy s3://bucket/features/fbank80 /local/features
    """
    from featcache.care.copying import copy_version
    from featcache.version.selection import version_folders
    from featcache.version.version import Version

    versions = [Version.open(folder) for folder in version_folders(path)]
    total = sum(len(version.shard_names()) for version in versions)
    results = []
    with stoppable() as stop, progress_bar(total, "shards") as bar:
        for version in versions:
            if not stop.is_set():
                results.append(copy_version(version, to, threads=threads, report=bar.update, stop=stop))
    damaged = any(result.problems for result in results)
    interrupted = any(result.interrupted for result in results)
    say_json({"ok": not damaged and not interrupted, "versions": [as_document(result) for result in results]})
    for result in results:
        _print(result)
    return INTERRUPTED if interrupted else 1 if damaged else 0


def _print(result: Copied) -> None:
    say(
        f"{result.path}: {counted(result.copied, 'shard')} copied, {megabytes(result.num_bytes)}; "
        f"{counted(result.there, 'shard was', 'shards were')} there; {counted(result.records, 'other file')} copied"
    )
    if result.others:
        say(f"  {count_are(result.others, 'shard')} there that {result.source} does not have")
    say_problems(result.problems)
    if damaged := sum(problem.shard is not None for problem in result.problems):
        verify = f"featcache verify {shlex.quote(result.source)}"
        advise(f"{count_are(damaged, 'shard')} not copied, for damage: {verify}")
    if result.interrupted:
        advise(f"{result.path}: interrupted: run the same command again to copy the rest")


@click.command(short_help="Remove what no reader needs: replaced utterances, leftovers.")
@version_or_corpus
@options.manifest("Also remove the utterances that are not in it.")
@options.manifest_format
@options.flag(
    "--force",
    "Remove utterances even if they are more than 5% of the version, or the MANIFEST names other files for those "
    "that stay.",
)
@options.dry_run
@options.yes
@options.as_json()
def prune(path: Location, manifest: str | None, force: bool, dry_run: bool, yes: bool, reading: dict[str, Any]) -> int:
    """Remove what no reader needs from all versions of a cache, or from one: items of utterances that were extracted
    again; with --manifest, utterances that it does not have; and what killed processes have left.

    Says first what will be gone, and asks. Utterances that stay keep their bytes: a shard of which some stay is written
    again with these alone, and then removed. A kill at any moment loses none of them; the same command does the rest.
    Shards that a tag names stay, and so do damaged shards, which `featcache repair` repairs, and whole versions, which
    `featcache ls` lists and `featcache rm` removes. A run that is filling the version is not disturbed: then nothing is
    removed. Do not prune beside jobs of an array, or a store that others write to. Who has opened a version before may
    have to open it again.

    Refuses a manifest with other files for the same ids, which looks like another corpus, and one that lacks more than
    5% of the utterances, and removes nothing then, unless --force is given.

    Exits with 1 if a damaged shard was left as it is.

    \b
    Examples:
      featcache prune features --dry-run
      featcache prune features/fbank80 --manifest train.csv
      featcache prune features --manifest half.csv --force
    """
    from featcache.care.prune import ids_to_keep, plan_prune
    from featcache.care.prune import prune as take_away
    from featcache.version.selection import version_folders
    from featcache.version.version import Version

    wanted = options.read_manifest(manifest, reading, audio=False, carry=False) if manifest else None
    versions = [Version.open(folder) for folder in version_folders(path)]
    keeping = [None if wanted is None else ids_to_keep(version, wanted, force=force) for version in versions]
    plans = [plan_prune(version, ids) for version, ids in zip(versions, keeping, strict=True)]
    for plan in plans:
        _say(plan, manifest, dry_run)
    done: list[Pruned] = []
    if not (dry_run or all(plan.is_empty for plan in plans)) and options.is_agreed("Remove all this?", yes):
        total = sum(len(plan.removed) + len(plan.rewritten) for plan in plans)
        with stoppable() as stop, progress_bar(total, "shards") as bar:
            jobs = zip(versions, plans, keeping, strict=True)
            done = [take_away(*job, report=bar.update, stop=stop) for job in jobs]
    damaged = [pruned for pruned in done if pruned.damaged]
    for pruned in damaged:
        shards = counted(len(pruned.damaged), "shard stays", "shards stay")
        repair = f"featcache repair {shlex.quote(pruned.path)} --manifest MANIFEST, then prune again"
        note(f"{pruned.path}: {shards} as they are, for damage: {listing(pruned.damaged)}: {repair}")
    results = {pruned.path: as_document(pruned) for pruned in done}
    say_json({"versions": [{**as_document(plan), "pruned": results.get(plan.path)} for plan in plans]})
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
        parts.append(counted(len(plan.leftovers), "leftover") + " of processes that are dead")
    removes = f"{'would remove' if dry_run else 'removes'} {', '.join(parts)}; {megabytes(plan.num_bytes)}"
    say(f"{plan.path}: {'nothing to remove' if plan.is_empty else removes}")
    if plan.rewritten:
        size = megabytes(plan.copied_bytes)
        say(f"  {count_are(len(plan.rewritten), 'shard')} written again with what stays in them, {size}")
    if plan.bound:
        items, are = counted(plan.bound, "more item"), "stays" if plan.bound == 1 else "stay"
        say(f"  {items} {are}: of shards that a tag names, or needs: {listing(plan.tags)}")


@click.command(short_help="Remove a version, or a tag.")
@click.argument("path", metavar="CACHE/VERSION[@TAG]", type=options.LOCATION)
@options.flag("--force", "Remove a version even if it has tags, or files in it are not featcache's.")
@options.dry_run
@options.yes
@options.as_json()
def rm(path: Location, force: bool, dry_run: bool, yes: bool) -> None:
    """Remove one version of a cache, with its records and its tags; or one of its tags, which removes no features.

    Says first what will be gone, and asks. What is removed is gone for good. A version that a run is filling stays, as
    far as its lock is seen: in an object store there is none. So does, without --force, one that has tags, or with
    files in its folder that are not featcache's.

    \b
    Examples:
      featcache rm features/fbank80-6f0612afda6c
      featcache rm features/fbank80@paper --yes
    """
    from featcache.care.prune import refuse_with_what_is_kept, remove_version, what_is_kept
    from featcache.version.index import open_index
    from featcache.version.selection import split_tag, version_folders, version_of_tag
    from featcache.version.tags import read_tag, remove_tag, tag_names
    from featcache.version.version import Version

    place, tag = split_tag(path)
    if tag is not None:
        version = version_of_tag(place, tag)
        if tag not in tag_names(version):
            read_tag(version, tag)  # which says that there is none
        what, size = f"{version.path}@{tag}: the tag; no features", 0
    else:
        folders = version_folders(place)
        if folders != [place] and folders[0].parent == place:
            there = listing(folder.name for folder in folders)
            raise ArgumentError(f"{place}: is a cache: name the version to remove: {there}")
        version = Version.open(folders[0])
        if not force:
            refuse_with_what_is_kept(version)
        try:
            held = counted(len(open_index(version)), "utterance")
        except DamagedError:
            held = "damaged"
        size = version.bytes_on_disk()
        what = f"{version.path}: {held}, {megabytes(size)} on disk"
        if kept := what_is_kept(version):
            what += f"; with {'; '.join(kept)}"
    say(f"{'would remove' if dry_run else 'removes'} {what}")
    removed = not dry_run and options.is_agreed("Remove it?", yes)
    if removed and tag is not None:
        remove_tag(version, tag)
    elif removed:
        remove_version(version, force=force)
    say_json({"path": str(version.path), "tag": tag, "bytes_on_disk": size, "removed": removed})
