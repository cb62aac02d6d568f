"""`featcache verify`: is every byte what was written, and is everything there?"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from tqdm import tqdm

from featcache.cli import options
from featcache.cli.common import default_threads, megabytes, note, print_json, terminal_columns
from featcache.errors import DamagedError, MissingDependencyError, counted

if TYPE_CHECKING:
    from featcache.health.recompute import Recomputed
    from featcache.health.verify import Report
    from featcache.store.version import Version

_SHOWN = 20


@click.command(short_help="Check a cache: what is damaged, missing, changed.")
@options.version_path
@options.manifest("Also report which of its utterances are missing, changed or failed, and which others are there.")
@options.root("that of the run that extracted each utterance")
@click.option("--data/--no-data", default=True, help="Read every byte of the features; --no-data is a quick check.")
@click.option(
    "--recompute",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Re-extract N random utterances, each alone, and compare.",
)
@options.device("For --recompute.")
@options.threads("[default: every core, at most 8]")
@options.trust_remote_code
@options.as_json("Print the result as one JSON document.")
@click.pass_context
def verify(
    ctx: click.Context,
    path: Path,
    manifest: str | None,
    root: Path | None,
    data: bool,
    recompute: int,
    device: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Check all versions of a cache, or one: structure, metadata, offsets, the checksum of every
    utterance, non-finite values, frame counts, duplicate ids, shards of other versions.

    Exits with 1 if something is damaged, missing or changed; with 3 if not, but utterances are in the
    failure ledger. `featcache repair` repairs damage; `featcache extract` adds what is missing.

    \b
    Examples:
      featcache verify features
      featcache verify features --manifest train.csv --no-data
      featcache verify features/fbank80 --recompute 100
    """
    from featcache.health.verify import Report
    from featcache.health.verify import verify as check
    from featcache.manifest import read_manifest
    from featcache.store.check import Problem
    from featcache.store.selection import version_folders
    from featcache.store.version import Version

    threads = threads or default_threads()
    wanted = read_manifest(manifest, root=root, carry=False) if manifest else None
    found: list[tuple[Report, Recomputed | None]] = []
    for folder in version_folders(path):
        try:
            version = Version.open(folder)
        except DamagedError as error:
            found.append((Report(str(folder), 0, 0, 0, 0, data, [Problem("metadata", error.what)]), None))
            continue
        with shard_bar(version) as report:
            result = check(version, data=data, manifest=wanted, threads=threads, report=report)
        again = _recompute(version, root, recompute, device, threads) if recompute else None
        found.append((result, again))
    damaged = any(result.problems or (again and again.problems) for result, again in found)
    if as_json:
        documents = [{**asdict(result), "recomputed": again and asdict(again)} for result, again in found]
        print_json({"ok": not damaged, "versions": documents})
    else:
        for result, again in found:
            _print(result, again, manifest and _as_given(manifest, root))
    ctx.exit(1 if damaged else 3 if any(result.failed for result, _ in found) else 0)


@contextmanager
def shard_bar(version: Version) -> Iterator[Callable[[], object]]:
    """Show a bar over the version's shards on a terminal; yields the function that advances it."""
    total = len(version.shard_names())
    with tqdm(total=total, unit=" shards", leave=False, file=sys.stderr, disable=not terminal_columns()) as bar:
        yield bar.update


def _recompute(
    version: Version,
    root: Path | None,
    count: int,
    device: str | None,
    threads: int,
) -> Recomputed:
    try:
        from featcache.device import Device
        from featcache.health.recompute import recompute
        from featcache.health.sampling import items_at_random
    except ImportError as error:
        raise MissingDependencyError(error.name or "pydantic", "verify --recompute") from error
    from featcache.store.index import open_index

    def again() -> Recomputed:
        index = open_index(version)
        return recompute(version, index, items_at_random(index, count), root, Device(device, threads))

    return version.reading(again)


def _as_given(manifest: str, root: Path | None) -> str:
    """The manifest and its root as arguments of a command, quoted for a shell."""
    return shlex.quote(manifest) + ("" if root is None else f" --root {shlex.quote(str(root))}")


def _print(result: Report, again: Recomputed | None, manifest: str | None) -> None:
    _print_counts(result)
    problems = [*result.problems, *(again.problems if again else [])]
    for problem in problems[:_SHOWN]:
        where = f" (shard {problem.shard})" if problem.shard else ""
        click.echo(f"  {problem.message}{where}")
    if len(problems) > _SHOWN:
        click.echo(f"  … and {len(problems) - _SHOWN:,} more: --json has them all")
    if again:
        found = f"largest difference {again.largest_difference:.3g}"
        if again.codes:
            found = f"{again.differing:,} of {again.codes:,} codes differ, {again.tied:,} of them by rounding (ties)"
        click.echo(f"  extracted {again.utterances:,} again: {again.identical:,} bit-identical, {found}")
    for line in result.notes:
        click.echo(f"  {line}")
    if result.surplus:
        click.echo(f"  {counted(result.surplus, 'utterance is', 'utterances are')} not in the manifest")
    if result.repeated:
        click.echo(f"  {counted(result.repeated, 'utterance is', 'utterances are')} there twice, with equal values")
    if result.failed:
        failed = counted(result.failed, "utterance is", "utterances are")
        click.echo(f"  {failed} in the failure ledger: featcache info {shlex.quote(result.path)} --failures")
    damaged = result.damaged_shards
    repair = f"featcache repair {shlex.quote(result.path)} --manifest {'MANIFEST' if manifest is None else manifest}"
    if damaged:
        shards = counted(len(damaged), "shard is", "shards are")
        note(f"{shards} damaged: {repair}")
    elif any(problem.kind == "metadata" for problem in problems):
        note(f"the metadata of the version is damaged: {repair}")
    elif not problems:
        click.echo("  no damage found")
    lacking = Counter(problem.kind for problem in problems if problem.kind in ("missing", "changed"))
    if lacking and manifest is not None:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in lacking.items())
        note(f"{counts}: {_extract_again(Path(result.path), manifest)}")


def _print_counts(result: Report) -> None:
    checked = "every byte read" if result.data else "features not read"
    damaged = len({problem.shard for problem in result.problems if problem.shard and problem.kind != "duplicate"})
    shards = counted(result.shards, "shard")
    sound = f"{counted(result.items, 'utterance')}, {counted(result.frames, 'frame')}, {megabytes(result.num_bytes)}"
    if not damaged:
        click.echo(f"{result.path}: {shards}, {sound}; {checked}")
    elif damaged < result.shards:
        click.echo(f"{result.path}: {shards}, {damaged:,} of them damaged; the others hold {sound}; {checked}")
    else:
        click.echo(f"{result.path}: {shards}, {'all ' if damaged > 1 else ''}damaged; {checked}")
    if damaged and result.damaged_items:
        are = "shard holds" if damaged == 1 else "shards hold"
        click.echo(f"  the damaged {are} {counted(result.damaged_items, 'utterance')}: repair keeps the sound ones")


def _extract_again(version: Path, manifest: str) -> str:
    """The command that adds what a version lacks; `manifest` is as `_as_given` returns it."""
    name = version.name.rpartition("-")[0]
    config = "" if name == "fbank80" else " -c CONFIG"
    return f"featcache extract {manifest}{config} -o {shlex.quote(str(version.parent))}"
