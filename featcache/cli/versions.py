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
    open_versions,
    say,
    say_json,
    say_problems,
)
from featcache.cli.corpora import for_each_part, version_or_corpus
from featcache.cli.process import INTERRUPTED, stoppable
from featcache.cli.progress import Shards
from featcache.errors import counted, megabytes
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.copying import Copied


@options.command()
@version_or_corpus
def index(path: Location) -> None:
    """Build the index, after the jobs of an array. `featcache extract` builds it when it
    ends, but not with --partition. Until then, every program that opens the version builds
    it. A message on stderr reports missing utterances.

    \b
    Example:
      featcache index features
    """
    from featcache.version.corpus import PartVersion, record_version
    from featcache.version.indexing import keep_index
    from featcache.version.wanted import wanted_failures

    documents = []
    for version in open_versions(path):
        opened, is_built = keep_index(version)
        if not note_unfinished(version, opened):
            failed = len(wanted_failures(version, opened))
            record_version(version, PartVersion.of(version, opened, failed))
        shards, items = len(opened.shards), len(opened)
        counts = {"shards": shards, "utterances": items}
        documents.append({"path": str(version.path), **counts, "built": is_built})
        state = "built" if is_built else "already there"
        say(f"{version.path}: {_contents(items, shards)}: index {state}")
    say_json({"versions": documents})


def _contents(utterances: int, shards: int) -> str:
    return f"{counted(utterances, 'utterance')} in {counted(shards, 'shard')}"


@options.command()
@click.argument("path", metavar="CACHE/VERSION", type=options.LOCATION)
@click.argument("name", metavar="NAME")
@for_each_part
def tag(path: Location, name: str) -> None:
    """Give a version a name, to read it later as it is now. In Python,
    featcache.open("features/fbank80", tag="NAME") then always reads the same utterances, bit
    for bit, even if some were extracted again or pruned since. The commands verify, diff,
    show and stats take CACHE/VERSION@NAME.

    `featcache rm CACHE/VERSION@NAME` removes the tag. `featcache prune` keeps the shards of
    a tag. If `featcache repair` replaces a damaged shard of a tag, opening the tag fails.

    \b
    Example:
      featcache tag features/fbank80 paper
    """
    from featcache.version.indexing import open_index
    from featcache.version.selection import select_version
    from featcache.version.tags import make_tag

    version = select_version(path)
    made = make_tag(version, name, open_index(version))
    note_unfinished(version)
    path_and_tag = {"path": str(version.path), "tag": name}
    say_json({**path_and_tag, "shards": len(made.shards), "utterances": made.items})
    say(f"{version.path}@{name}: {_contents(made.items, len(made.shards))}")


@options.command()
@version_or_corpus
@click.argument("to", metavar="TO", type=options.LOCATION)
@options.reading_threads
@options.flag("--dry-run", "Print what would be copied, and copy nothing.")
def copy(path: Location, to: Location, threads: int, dry_run: bool) -> int:
    """Copy a cache to another folder or object store. Both may be folders or URLs:
    s3://bucket/features, gs://…, az://…. Neither may lie inside the other.

    Every byte is checked while it is copied. A damaged shard is named and not copied, and
    the exit code is 1. Nothing in TO is removed. Run the same command again to continue an
    interrupted copy, or to add what has been extracted since. A new version appears in TO
    when all of it is copied.

    If both CACHE and TO have extracted an utterance again, from different rows or files,
    copy cannot know which features are newer. Then the utterance is missing in TO until
    `featcache extract` makes it.

    \b
    Examples:
      featcache copy features s3://bucket/features
      featcache copy s3://bucket/features/fbank80 /local/features
    """
    from featcache.care.copying import copy_version, missing_shards, plan_copy
    from featcache.storage.location import as_location
    from featcache.version.version import Version

    versions = [*open_versions(path)]
    if dry_run:
        results = [plan_copy(version, to) for version in versions]
        say_json({"dry_run": True, "versions": [*map(as_document, results)]})
        for result in results:
            _print(result, dry_run)
        return 0
    options.refuse_unwritable(to)
    total = sum(len(missing_shards(version, to)) for version in versions)
    results = []
    with stoppable() as stop, Shards(total) as bar:
        for version in versions:
            if not stop.is_set():
                results.append(
                    copy_version(version, to, threads=threads, report=bar.done, stop=stop)
                )
    damaged = any(result.problems for result in results)
    interrupted = any(result.interrupted for result in results)
    is_ok = not (damaged or interrupted)
    say_json({"ok": is_ok, "versions": [*map(as_document, results)]})
    for result in results:
        _print(result, dry_run)
        if not (result.interrupted or result.problems):
            note_unfinished(Version.open(as_location("to", result.path)))
    if interrupted:
        return INTERRUPTED
    return int(damaged)


def _print(result: Copied, dry_run: bool) -> None:
    copied = f"{counted(result.copied, 'shard')} {'to copy' if dry_run else 'copied'}"
    line = f"{copied}, {megabytes(result.num_bytes)}; "
    line += f"{counted(result.there, 'shard was', 'shards were')} there"
    if not dry_run:
        line += f"; {counted(result.records, 'other file')} copied"
    say(f"{result.path}: {line}")
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
