"""`featcache copy`: a cache, or a version, to another folder or object store."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import click

from featcache.cli import options
from featcache.cli.common import as_document, note, print_json, progress_bar, say
from featcache.cli.corpora import version_or_corpus
from featcache.cli.process import INTERRUPTED, stoppable
from featcache.errors import counted, megabytes
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.copying import Copied


@click.command(short_help="Copy a cache to another folder or object store.")
@version_or_corpus
@click.argument("to", metavar="TO", type=options.LOCATION)
@options.threads("How many shards are copied at once.  [default: every core, at most 8]", default=options.all_cores)
@options.as_json()
def copy(path: Location, to: Location, threads: int, as_json: bool) -> int:
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
    if as_json:
        print_json({"ok": not damaged and not interrupted, "versions": [as_document(result) for result in results]})
    else:
        for result in results:
            _print(result)
    return INTERRUPTED if interrupted else 1 if damaged else 0


def _print(result: Copied) -> None:
    say(
        f"{result.path}: {counted(result.copied, 'shard')} copied, {megabytes(result.num_bytes)}; "
        f"{counted(result.there, 'shard was', 'shards were')} there; {counted(result.records, 'other file')} copied"
    )
    if result.others:
        say(f"  {counted(result.others, 'shard is', 'shards are')} there that {result.source} does not have")
    for problem in result.problems:
        say(f"  {problem.message}" + (f" (shard {problem.shard})" if problem.shard else ""))
    if damaged := sum(problem.shard is not None for problem in result.problems):
        note(
            f"{counted(damaged, 'shard is', 'shards are')} not copied, for damage: "
            f"featcache verify {shlex.quote(result.source)}"
        )
    if result.interrupted:
        note(f"{result.path}: interrupted: run the same command again to copy the rest")
