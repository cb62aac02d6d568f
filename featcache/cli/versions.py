"""`featcache index`, `featcache tag` and `featcache copy`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from featcache.cli import options
from featcache.cli.common import (
    advise,
    as_document,
    count_are,
    note_unfinished,
    say,
    say_json,
    say_problems,
)
from featcache.cli.corpora import for_each_part, version_or_corpus
from featcache.cli.process import INTERRUPTED, progress_bar, stoppable
from featcache.errors import counted, megabytes
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.copying import Copied


@options.command(short_help="Build the index, after the jobs of an array.")
@version_or_corpus
@options.as_json()
def index(path: Location) -> None:
    """Build the index of all versions of a cache, or of one, unless it is there.

    `featcache extract` builds it when it ends, but not with --partition: build it once,
    after all jobs. Until then, every program that opens the version builds it. Prints on
    stderr if utterances are still missing.

    \b
    Examples:
      featcache index features
      featcache index features/fbank80
    """
    from featcache.version.corpus import PartVersion, record_version
    from featcache.version.indexing import keep_index
    from featcache.version.selection import version_folders
    from featcache.version.version import Version
    from featcache.version.wanted import wanted_failures

    documents = []
    for folder in version_folders(path):
        version = Version.open(folder)
        opened, is_built = keep_index(version)
        if not note_unfinished(version, opened):
            failed = len(wanted_failures(version, opened))
            record_version(version, PartVersion.of(version, opened, failed))
        shards, utterances = len(opened.shards), len(opened)
        documents.append(
            {"path": str(folder), "shards": shards, "utterances": utterances, "built": is_built}
        )
        state = "built" if is_built else "already there"
        say(
            f"{folder}: {counted(utterances, 'utterance')} in {counted(shards, 'shard')}: "
            f"index {state}"
        )
    say_json({"versions": documents})


@options.command(short_help="Give a version a name, to read it later as it is now.")
@click.argument("path", metavar="CACHE/VERSION", type=options.LOCATION)
@click.argument("name", metavar="NAME")
@options.as_json()
@for_each_part
def tag(path: Location, name: str) -> None:
    """Tag a version: NAME stands for the shards that it has now. Whatever is extracted,
    replaced or pruned later, featcache.open("features/fbank80", tag="NAME") reads just
    these utterances, bit for bit, and so do verify, diff, show and stats of
    CACHE/VERSION@NAME. `featcache rm CACHE/VERSION@NAME` removes a tag.

    A tag copies nothing. `featcache prune` keeps its shards until the tag is removed. If
    repair replaces a damaged shard of the tag, opening the tag fails.

    \b
    Example:
      featcache tag features/fbank80 paper
    """
    from featcache.version.indexing import open_index
    from featcache.version.selection import select_version
    from featcache.version.tags import make_tag

    version = select_version(path)
    made = make_tag(version, name, open_index(version))
    shards, utterances = len(made.shards), made.items
    note_unfinished(version)
    say_json({"path": str(version.path), "tag": name, "shards": shards, "utterances": utterances})
    say(f"{version.path}@{name}: {counted(utterances, 'utterance')} in {counted(shards, 'shard')}")


@options.command(short_help="Copy a cache to another folder or object store.")
@version_or_corpus
@click.argument("to", metavar="TO", type=options.LOCATION)
@options.reading_threads("How many shards are copied at once.")
@options.flag("--dry-run", "Only say what would be copied.")
@options.as_json()
def copy(path: Location, to: Location, threads: int, dry_run: bool) -> int:
    """Copy a cache, or one of its versions, into the cache TO: shards, index, tags, what
    manifests want, failure ledgers, and records of runs and probes. Both may be folders
    or URLs: s3://bucket/features, gs://…, az://….

    Every byte is checked while it is copied: a damaged shard is named, and not copied.
    Nothing in TO is removed: run the same command again to continue a copy that was
    interrupted, or to add what has been extracted since. A shard appears as a whole, and a
    new version when all of it is copied.

    What manifests want of the copy stays wanted. If both have extracted an utterance again,
    from different rows or files, nothing tells which features are newer: it is missing in
    the copy until `featcache extract` makes it there. TO may neither lie in CACHE nor hold
    it.

    Exits with 1 if a shard is damaged.

    \b
    Examples:
      featcache copy features s3://bucket/features
      featcache copy s3://bucket/features/fbank80 /local/features
      featcache copy features s3://bucket/features --dry-run
    """
    from featcache.care.copying import copy_version, plan_copy
    from featcache.storage.location import as_location
    from featcache.version.selection import version_folders
    from featcache.version.version import Version

    versions = [Version.open(folder) for folder in version_folders(path)]
    if dry_run:
        plans = [plan_copy(version, to) for version in versions]
        say_json({"dry_run": True, "versions": [as_document(plan) for plan in plans]})
        for plan in plans:
            _print(plan, "to copy")
        return 0
    options.refuse_unwritable(to)
    total = sum(len(version.shard_names()) for version in versions)
    results = []
    with stoppable() as stop, progress_bar(total, "shards") as bar:
        for version in versions:
            if not stop.is_set():
                results.append(
                    copy_version(version, to, threads=threads, report=bar.update, stop=stop)
                )
    damaged = any(result.problems for result in results)
    interrupted = any(result.interrupted for result in results)
    documents = [as_document(result) for result in results]
    say_json({"ok": not (damaged or interrupted), "versions": documents})
    for result in results:
        _print(result)
        if not (result.interrupted or result.problems):
            note_unfinished(Version.open(as_location("to", result.path)))
    if interrupted:
        return INTERRUPTED
    return int(damaged)


def _print(result: Copied, done: str = "copied") -> None:
    copied = f"{counted(result.copied, 'shard')} {done}, {megabytes(result.num_bytes)}"
    kept = counted(result.there, "shard was", "shards were")
    records = ""
    if done == "copied":
        records = f"; {counted(result.records, 'other file')} copied"
    say(f"{result.path}: {copied}; {kept} there{records}")
    if result.diverged:
        utterances = count_are(result.diverged, "utterance")
        say(f"  {utterances} to be extracted again: nothing tells which features are newer")
    if result.others:
        say(f"  {count_are(result.others, 'shard')} there that {result.source} does not have")
    say_problems(result.problems)
    damaged = sum(problem.shard is not None for problem in result.problems)
    if damaged:
        verify = f"featcache verify {shlex.quote(result.source)}"
        advise(f"{count_are(damaged, 'shard')} not copied, for damage: {verify}")
    if result.interrupted:
        advise(f"{result.path}: interrupted: run the same command again to copy the rest")
