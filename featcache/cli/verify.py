"""`featcache verify`: is every byte what was written, and is everything there?"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import advise, as_document, printing, progress_bar, read_manifest, say, say_json, say_problems
from featcache.cli.corpora import version_or_corpus
from featcache.cli.process import INTERRUPTED, stoppable
from featcache.errors import DamagedError, MissingDependencyError, counted, megabytes
from featcache.storage.location import Location, parse_location

if TYPE_CHECKING:
    from featcache.care.recompute import Recomputed
    from featcache.care.verify import Report
    from featcache.manifest import CallersUrls
    from featcache.manifest.audio_locations import AudioLocation
    from featcache.version.version import Version

_SHOWN = 20


def _subset(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """`3/10`: a number from 0, and how many there are."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value, re.ASCII)
    if found is None or int(found[1]) >= int(found[2]):
        raise click.BadParameter(f"{value!r} is not one of 0/N to N-1/N, such as 0/10", context, parameter)
    return int(found[1]), int(found[2])


@click.command(short_help="Check a cache: what is damaged, missing, changed.")
@version_or_corpus
@options.manifest("Also report which of its utterances are missing, changed or failed, and which others are there.")
@options.root("that of the run that extracted each utterance")
@options.manifest_format
@click.option("--data/--no-data", default=True, help="Read every byte of the features; --no-data is a quick check.")
@click.option(
    "--sources",
    type=click.Choice(["stat", "content"]),
    is_flag=False,
    flag_value="stat",
    help="Also compare the audio files with what they were when they were extracted: by size and mtime (stat, "
    "the default), or by a hash of every byte. Files at URLs are asked for only if --manifest names them.",
)
@click.option(
    "--subset",
    callback=_subset,
    metavar="K/N",
    help="Only look at subset K of N, counted from 0: 0/10 to 9/10 look at all shards.",
)
@options.number("--recompute", "Re-extract N random utterances, each alone, and compare.", least=0, default=0)
@options.device("For --recompute.")
@options.threads("[default: every core, at most 8]", default=options.all_cores)
@options.trust_remote_code
@options.as_json()
def verify(
    path: Location,
    manifest: str | None,
    data: bool,
    sources: str | None,
    subset: tuple[int, int] | None,
    recompute: int,
    device: str | None,
    threads: int,
    reading: dict[str, Any],
) -> int:
    """Check all versions of a cache, or one: structure, metadata, offsets, the checksum of every
    utterance, non-finite values, frame counts, duplicate ids, shards of other versions; whether utterances are
    missing that a manifest wants; and the records of what is wanted and has failed.

    Audio files are looked at only with --sources. Exits with 1 if something is damaged, missing or
    changed; with 3 if not, but utterances are in the failure ledger. `featcache repair` repairs damage;
    `featcache extract` adds what is missing.

    \b
    Examples:
      featcache verify features
      featcache verify features --manifest train.csv --no-data
      featcache verify features/fbank80 --recompute 100
      featcache verify features --no-data --sources=content
      featcache verify features --subset 0/10
    """
    from featcache.care.sources import SourceCheck
    from featcache.care.verify import Problem, Report, Subset
    from featcache.care.verify import verify as check
    from featcache.manifest import CallersUrls
    from featcache.version.selection import split_tag, version_folders
    from featcache.version.tags import at_tag
    from featcache.version.version import Version

    wanted = read_manifest(manifest, reading, carry=False) if manifest else None
    root = reading["root"]
    urls = CallersUrls(wanted)
    found: list[tuple[Report, Recomputed | None]] = []
    path, tag = split_tag(path)
    for folder in version_folders(path):
        try:
            version = at_tag(Version.open(folder), tag)
        except DamagedError as error:
            found.append((Report(str(folder), 0, 0, 0, 0, data, [Problem("metadata", error.what)]), None))
            continue
        some = None if subset is None else Subset(*subset)
        total = sum(some is None or some.has(name) for name in version.shard_names())
        with stoppable() as stop, progress_bar(total if sources is None else 2 * total, "shards") as bar:
            files = None if sources is None else SourceCheck(sources == "content", root, urls)
            result = check(
                version,
                data=data,
                manifest=wanted,
                sources=files,
                subset=some,
                threads=threads,
                report=bar.update,
                stop=stop,
            )
        if result.interrupted:
            found.append((result, None))
            break
        again = _recompute(version, root, recompute, device, threads, urls) if recompute else None
        found.append((result, again))
    interrupted = any(result.interrupted for result, _ in found)
    damaged = any(result.problems or (again and again.problems) for result, again in found)
    if printing().as_json:
        documents = [{**as_document(result), "recomputed": again and as_document(again)} for result, again in found]
        say_json({"ok": not (damaged or interrupted), "versions": documents})
    for result, again in found:
        _print(result, again, manifest and _as_given(manifest, root), "" if tag is None else f"@{tag}")
    if interrupted:
        return INTERRUPTED
    return 1 if damaged else 3 if any(result.failed for result, _ in found) else 0


def _recompute(
    version: Version, root: AudioLocation | None, count: int, device: str | None, threads: int, urls: CallersUrls
) -> Recomputed:
    try:
        from featcache.care.recompute import items_at_random, recompute
        from featcache.device import Device
    except ImportError as error:
        raise MissingDependencyError(error.name or "pydantic", "verify --recompute") from error
    from featcache.version.index import open_index

    def again() -> Recomputed:
        index = open_index(version)
        return recompute(version, index, items_at_random(index, count), root, Device(device, threads), urls)

    return version.reading(again)


def _as_given(manifest: str, root: AudioLocation | None) -> str:
    """The manifest and its root as arguments of a command, quoted for a shell."""
    return shlex.quote(manifest) + ("" if root is None else f" --root {shlex.quote(str(root))}")


def _print(result: Report, again: Recomputed | None, manifest: str | None, tag: str) -> None:
    _print_counts(result, f"{result.path}{tag}")
    problems = [*result.problems, *(again.problems if again else [])]
    say_problems(problems[:_SHOWN])
    if len(problems) > _SHOWN:
        say(f"  … and {len(problems) - _SHOWN:,} more: --json has them all")
    if again:
        found = f"largest difference {again.largest_difference:.3g}"
        if again.codes:
            found = f"{again.differing:,} of {again.codes:,} codes differ, {again.tied:,} of them by rounding (ties)"
        say(f"  extracted {again.utterances:,} again: {again.identical:,} bit-identical, {found}")
    for line in result.notes:
        say(f"  {line}")
    if result.surplus:
        say(f"  {counted(result.surplus, 'utterance is', 'utterances are')} not in the manifest")
    if result.repeated:
        say(f"  {counted(result.repeated, 'utterance is', 'utterances are')} there twice, with equal values")
    if result.failed:
        failed = counted(result.failed, "utterance is", "utterances are")
        say(f"  {failed} in the failure ledger: featcache info {shlex.quote(result.path)} --failures")
    damaged = result.damaged_shards
    repair = f"featcache repair {shlex.quote(result.path)} --manifest {'MANIFEST' if manifest is None else manifest}"
    if damaged:
        shards = counted(len(damaged), "shard is", "shards are")
        advise(f"{shards} damaged: {repair}")
    elif any(problem.kind == "metadata" for problem in problems):
        advise(f"the metadata of the version is damaged: {repair}")
    elif result.interrupted:
        say("  interrupted: the rest was not looked at")
    elif all(problem.kind == "source" for problem in problems) and not (again and again.problems):
        say("  no damage found")
    if other_files := sum(problem.kind == "source" for problem in result.problems):
        files = counted(other_files, "audio file is", "audio files are")
        extract = "`featcache extract … --check-sources` extracts those again that have changed in size or mtime"
        advise(f"{files} not what was extracted: {extract}")
    lacking = Counter(problem.kind for problem in problems if problem.kind in ("missing", "changed"))
    if lacking and manifest is not None:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in lacking.items())
        advise(f"{counts}: {_extract_again(parse_location('path', result.path), manifest)}")


def _print_counts(result: Report, path: str) -> None:
    checked = "every byte read" if result.data else "features not read"
    damaged = len({problem.shard for problem in result.problems if problem.shard and problem.kind != "duplicate"})
    shards = counted(result.shards, "shard") + (
        f" of {result.shards + result.shards_left_out:,}" if result.shards_left_out else ""
    )
    sound = (
        f"{counted(result.utterances, 'utterance')}, {counted(result.frames, 'frame')}, {megabytes(result.num_bytes)}"
    )
    if not damaged:
        say(f"{path}: {shards}, {sound}; {checked}")
    elif damaged < result.shards:
        say(f"{path}: {shards}, {damaged:,} of them damaged; the others hold {sound}; {checked}")
    else:
        say(f"{path}: {shards}, {'all ' if damaged > 1 else ''}damaged; {checked}")
    if damaged and result.damaged_utterances:
        are = "shard holds" if damaged == 1 else "shards hold"
        say(f"  the damaged {are} {counted(result.damaged_utterances, 'utterance')}: repair keeps the sound ones")


def _extract_again(version: Location, manifest: str) -> str:
    """The command that adds what a version lacks; `manifest` is as `_as_given` returns it."""
    name = version.name.rpartition("-")[0]
    config = "" if name == "fbank80" else " -c CONFIG"
    return f"featcache extract {manifest}{config} -o {shlex.quote(str(version.parent))}"
