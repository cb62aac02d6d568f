"""`featcache repair`: remove what is damaged, and extract just that again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from featcache.cli import options
from featcache.cli.common import print_json
from featcache.cli.extract import FAILURES_LEFT, INTERRUPTED, print_summary, stoppable
from featcache.errors import counted


@click.command(short_help="Remove what is damaged, and extract just that again.")
@options.version_path
@click.option("--manifest", required=True, metavar="MANIFEST", help="That the utterances came from.")
@options.root()
@options.device()
@options.threads("As for extract.")
@options.trust_remote_code
@options.as_json("Print what was done as one JSON document.")
@click.pass_context
def repair(
    ctx: click.Context,
    path: Path,
    manifest: str,
    root: Path | None,
    device: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Read every byte of a version (or of all versions of a cache), remove damaged shards, and extract
    what was in them again.

    Nothing is removed where the manifest lacks an utterance of a damaged shard.

    \b
    Example:
      featcache repair features --manifest train.csv
    """
    from featcache.manifest import read_manifest
    from featcache.repair import repair as mend
    from featcache.store.version import version_folders
    from featcache.work import Options

    read = read_manifest(manifest, root=root, carry=False)
    chosen = Options(device=device, threads=threads)
    with stoppable() as stop:
        done = [mend(folder, read, chosen, stop=stop) for folder in version_folders(path)]
    if as_json:
        print_json({"versions": [asdict(one) for one in done]})
    else:
        for one in done:
            if one.interrupted:
                click.echo(f"{one.path}: interrupted before any shard was removed")
                continue
            if one.metadata:
                click.echo(f"{one.path}: metadata restored")
            if one.summary:
                click.echo(f"{one.path}: {counted(len(one.removed), 'damaged shard')} removed, to be extracted again")
                print_summary(one.summary)
            elif not one.metadata:
                click.echo(f"{one.path}: no damage found")
            if one.missing:
                missing = counted(one.missing, "utterance is", "utterances are")
                click.echo(f"{one.path}: {missing} in no shard: featcache extract adds them")
    summaries = [one.summary for one in done if one.summary]
    interrupted = any(one.interrupted for one in done) or any(summary.interrupted for summary in summaries)
    ctx.exit(INTERRUPTED if interrupted else FAILURES_LEFT if any(summary.failed for summary in summaries) else 0)
