"""`featcache verify`: is every byte what was written, and is everything there?"""

from __future__ import annotations

import random
import shlex
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import (
    advise,
    as_document,
    count_are,
    printing,
    say,
    say_json,
    say_problems,
)
from featcache.cli.corpora import version_or_corpus
from featcache.cli.process import INTERRUPTED, progress_bar, stoppable
from featcache.errors import DamagedError, counted, megabytes
from featcache.storage.location import Location, parse_location

if TYPE_CHECKING:
    from featcache.care.recompute import Recomputed
    from featcache.care.sources import SourceCheck
    from featcache.care.verify import Report
    from featcache.version.version import Version

_SHOWN = 20
_SOURCES = (
    "Also compare the audio files with what was extracted, by size and mtime (stat, "
    "the default), or by a hash of all "
    "bytes (content). At URLs, only those of --manifest are asked for."
)


@options.command(short_help="Check a cache: what is damaged, missing, changed.")
@version_or_corpus
@options.manifest(
    help="Also report which of its utterances are missing, changed or failed, and which others "
    "are there."
)
@options.root("that of the run that extracted each utterance")
@options.manifest_format
@click.option(
    "--data/--no-data",
    default=True,
    help="Read every byte of the features; --no-data is a quick check.",
)
@click.option(
    "--sources",
    type=click.Choice(["stat", "content"]),
    is_flag=False,
    flag_value="stat",
    help=_SOURCES,
)
@options.number("--recompute", "Re-extract N random utterances, each alone, and compare.", 0)
@options.device("For --recompute.")
@options.threads(help="[default: every core, at most 8]", default=options.all_cores)
@options.trust_remote_code
@options.as_json()
def verify(
    path: Location,
    manifest: str | None,
    data: bool,
    sources: str | None,
    recompute: int,
    **chosen: Any,
) -> int:
    """Check all versions of a cache, or one: structure, metadata, offsets, the checksum
    of every utterance, non-finite values, frame counts, duplicate ids, shards of other
    versions; whether utterances are missing that a manifest wants; and the records of
    what is wanted and has failed.

    Only --sources looks at audio files. Exits with 1 if something is damaged, missing or
    changed; else with 3 if utterances are in the failure ledger. `featcache repair`
    repairs damage; `featcache extract` adds what is missing.

    \b
    Examples:
      featcache verify features
      featcache verify features --manifest train.csv --no-data
      featcache verify features/fbank80 --recompute 100
      featcache verify features --no-data --sources=content
    """
    from featcache.care.sources import SourceCheck
    from featcache.care.verify import Problem, Report
    from featcache.care.verify import verify as check
    from featcache.manifest.utterances import CallersUrls
    from featcache.version.selection import split_tag, version_folders
    from featcache.version.tags import at_tag
    from featcache.version.version import Version

    device, threads, root = chosen.pop("device"), chosen.pop("threads"), chosen["root"]
    wanted = options.read_manifest(manifest, chosen, carry=False) if manifest else None
    files = SourceCheck(sources == "content", root, CallersUrls(wanted))
    found: list[Report] = []
    look = partial(
        check, data=data, manifest=wanted, sources=files if sources else None, threads=threads
    )
    ending = "looking at no more, and telling what was found (once more to stop at once)"
    path, tag = split_tag(path)
    for folder in version_folders(path):
        try:
            version = at_tag(Version.open(folder), tag)
        except DamagedError as error:
            found.append(Report(str(folder), 0, 0, 0, 0, data, [Problem("metadata", error.what)]))
            continue
        looks = 1 if sources is None else 2
        with (
            stoppable(ending=ending) as stop,
            progress_bar(looks * len(version.shard_names()), "shards") as bar,
        ):
            result = look(version, report=bar.update, stop=stop)
        if recompute and not result.interrupted:
            result = replace(
                result, recomputed=_recompute(version, recompute, files, device, threads)
            )
        found.append(result)
        if result.interrupted:
            break
    interrupted = any(result.interrupted for result in found)
    damaged = any(
        result.problems or (result.recomputed and result.recomputed.problems) for result in found
    )
    if printing.as_json:
        say_json({"ok": not (damaged or interrupted), "versions": [*map(as_document, found)]})
    given = manifest and shlex.quote(manifest) + (
        "" if root is None else f" --root {shlex.quote(str(root))}"
    )
    for result in found:
        _print(result, given, "" if tag is None else f"@{tag}")
    if interrupted:
        return INTERRUPTED
    return 1 if damaged else 3 if any(result.failed for result in found) else 0


def _recompute(
    version: Version, count: int, files: SourceCheck, device: str | None, threads: int
) -> Recomputed:
    from featcache.care.recompute import recompute
    from featcache.device import Device
    from featcache.version.indexing import open_index

    def again() -> Recomputed:
        index = open_index(version)
        positions = sorted(random.sample(range(len(index)), min(count, len(index))))
        return recompute(version, index, positions, files, Device(device, threads))

    return version.reading(again)


def _print(result: Report, manifest: str | None, tag: str) -> None:
    _print_counts(result, f"{result.path}{tag}")
    again = result.recomputed
    unlike = again.problems if again else []
    problems = [*result.problems, *unlike]
    say_problems(problems[:_SHOWN])
    if len(problems) > _SHOWN:
        say(f"  … and {len(problems) - _SHOWN:,} more: --json has them all")
    if again:
        found = f"largest difference {again.largest_difference:.3g}"
        if again.codes:
            found = (
                f"{again.differing:,} of {again.codes:,} codes differ, {again.tied:,} of "
                "them by rounding (ties)"
            )
        say(f"  extracted {again.utterances:,} again: {again.identical:,} bit-identical, {found}")
    for line in result.notes:
        say(f"  {line}")
    if result.interrupted:
        say("  interrupted: the rest was not looked at")
    if result.surplus:
        say(f"  {count_are(result.surplus, 'utterance')} not in the manifest")
    if result.repeated:
        say(f"  {count_are(result.repeated, 'utterance')} there twice, with equal values")
    path = shlex.quote(result.path)
    if result.failed:
        say(
            f"  {count_are(result.failed, 'utterance')} in the failure ledger: featcache "
            f"info {path} --failures"
        )
    repair = f"featcache repair {path} --manifest {'MANIFEST' if manifest is None else manifest}"
    if damaged := len(result.damaged_shards):
        advise(f"{count_are(damaged, 'shard')} damaged: {repair}")
    elif any(problem.kind == "metadata" for problem in problems):
        advise(f"the metadata of the version is damaged: {repair}")
    elif not (result.interrupted or unlike) and all(
        problem.kind == "source" for problem in problems
    ):
        say("  no damage found")
    if other_files := sum(problem.kind == "source" for problem in result.problems):
        extract = (
            "`featcache extract … --check-sources` extracts those again that have changed "
            "in size or mtime"
        )
        advise(f"{count_are(other_files, 'audio file')} not what was extracted: {extract}")
    lacking = Counter(
        problem.kind for problem in problems if problem.kind in ("missing", "changed")
    )
    if lacking and manifest is not None:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in lacking.items())
        place = parse_location("path", result.path)
        config = "" if place.name.rpartition("-")[0] == "fbank80" else " -c CONFIG"
        advise(
            f"{counts}: featcache extract {manifest}{config} -o {shlex.quote(str(place.parent))}"
        )


def _print_counts(result: Report, path: str) -> None:
    checked = "every byte read" if result.data else "features not read"
    damaged = len(result.damaged_shards)
    shards, features = counted(result.shards, "shard"), megabytes(result.num_bytes)
    if result.shards_left_out:
        shards += f" of {result.shards + result.shards_left_out:,}"
    sound = (
        f"{counted(result.utterances, 'utterance')}, {counted(result.frames, 'frame')}, {features}"
    )
    if not damaged:
        say(f"{path}: {shards}, {sound}; {checked}")
    elif damaged < result.shards:
        say(f"{path}: {shards}, {damaged:,} of them damaged; the others hold {sound}; {checked}")
    else:
        say(f"{path}: {shards}, {'all ' if damaged > 1 else ''}damaged; {checked}")
    if damaged and result.damaged_utterances:
        are = "shard holds" if damaged == 1 else "shards hold"
        say(
            f"  the damaged {are} {counted(result.damaged_utterances, 'utterance')}: repair "
            "keeps the sound ones"
        )
