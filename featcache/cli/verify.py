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
    FAILURES_LEFT,
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
    from featcache.care.report import Problem, Recomputed, Report
    from featcache.care.sources import SourceCheck
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
@options.reading_threads()
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
    from featcache.care.report import Problem, Report
    from featcache.care.sources import SourceCheck
    from featcache.care.verify import verify as check
    from featcache.manifest.utterances import CallersUrls
    from featcache.version.selection import need_columns, split_tag, version_folders
    from featcache.version.tags import at_tag
    from featcache.version.version import Version

    device, threads, root = chosen.pop("device"), chosen.pop("threads"), chosen["root"]
    wanted = None
    if manifest:
        wanted = options.read_manifest(manifest, chosen, carry=need_columns(path))
    source_check = SourceCheck(sources == "content", root, CallersUrls(wanted))
    check_version = partial(
        check,
        data=data,
        manifest=wanted,
        sources=source_check if sources else None,
        threads=threads,
    )
    passes = 2 if sources else 1
    reports: list[Report] = []
    ending = "looking at no more, and telling what was found (once more to stop at once)"
    path, tag = split_tag(path)
    for folder in version_folders(path):
        try:
            version = at_tag(Version.open(folder), tag)
        except DamagedError as error:
            problems = [Problem("metadata", error.what)]
            reports.append(Report(str(folder), 0, 0, 0, 0, data, problems))
            continue
        with (
            stoppable(ending=ending) as stop,
            progress_bar(passes * len(version.shard_names()), "shards") as bar,
        ):
            report = check_version(version, report=bar.update, stop=stop)
        if recompute and not report.interrupted:
            recomputed = _recompute(version, recompute, source_check, device, threads)
            report = replace(report, recomputed=recomputed)
        reports.append(report)
        if report.interrupted:
            break
    interrupted = any(report.interrupted for report in reports)
    damaged = any(_problems(report) for report in reports)
    if printing.as_json:
        documents = [as_document(report) for report in reports]
        say_json({"ok": not (damaged or interrupted), "versions": documents})
    again = None
    if manifest:
        again = shlex.quote(manifest)
        if root is not None:
            again += f" --root {shlex.quote(str(root))}"
    for report in reports:
        _print(report, again, f"@{tag}" if tag is not None else "")
    if interrupted:
        return INTERRUPTED
    if damaged:
        return 1
    return FAILURES_LEFT if any(report.failed for report in reports) else 0


def _recompute(
    version: Version, count: int, files: SourceCheck, device: str | None, threads: int
) -> Recomputed:
    from featcache.care.recompute import recompute
    from featcache.device import Device
    from featcache.version.indexing import open_index

    def extract_sample() -> Recomputed:
        index = open_index(version)
        positions = sorted(random.sample(range(len(index)), min(count, len(index))))
        return recompute(version, index, positions, files, Device(device, threads))

    return version.reading(extract_sample)


def _problems(report: Report) -> list[Problem]:
    if report.recomputed is None:
        return report.problems
    return report.problems + report.recomputed.problems


def _print(report: Report, manifest: str | None, tag: str = "") -> None:
    """Print what was found in a version. `manifest` is the manifest and its options, as
    in the shell."""
    _print_counts(report, f"{report.path}{tag}")
    problems = _problems(report)
    say_problems(problems[:_SHOWN])
    if len(problems) > _SHOWN:
        say(f"  … and {len(problems) - _SHOWN:,} more: --json has them all")
    if report.recomputed is not None:
        _print_recomputed(report.recomputed)
    for line in report.notes:
        say(f"  {line}")
    if report.interrupted:
        say("  interrupted: the rest was not looked at")
    if report.surplus:
        say(f"  {count_are(report.surplus, 'utterance')} not in the manifest")
    if report.repeated:
        say(f"  {count_are(report.repeated, 'utterance')} there twice, with equal values")
    _print_remedies(report, manifest, Counter(problem.kind for problem in problems))


def _print_recomputed(again: Recomputed) -> None:
    difference = f"largest difference {again.largest_difference:.3g}"
    if again.codes:
        difference = (
            f"{again.differing:,} of {again.codes:,} codes differ, {again.tied:,} of "
            "them by rounding (ties)"
        )
    say(f"  extracted {again.utterances:,} again: {again.identical:,} bit-identical, {difference}")


def _print_remedies(report: Report, manifest: str | None, kinds: Counter[str]) -> None:
    path = shlex.quote(report.path)
    if report.failed:
        say(
            f"  {count_are(report.failed, 'utterance')} in the failure ledger: featcache "
            f"info {path} --failures"
        )
    repair = f"featcache repair {path} --manifest {manifest or 'MANIFEST'}"
    damaged = len(report.damaged_shards)
    is_recomputed_well = report.recomputed is None or not report.recomputed.problems
    if damaged:
        advise(f"{count_are(damaged, 'shard')} damaged: {repair}")
    elif kinds["metadata"]:
        advise(f"the metadata of the version is damaged: {repair}")
    elif is_recomputed_well and not report.interrupted and not kinds.keys() - {"source"}:
        say("  no damage found")
    other_files = sum(problem.kind == "source" for problem in report.problems)
    if other_files:
        advise(
            f"{count_are(other_files, 'audio file')} not what was extracted: `featcache extract "
            "… --check-sources` extracts those again that have changed in size or mtime"
        )
    lacking = [f"{kinds[kind]:,} {kind}" for kind in kinds if kind in ("missing", "changed")]
    if lacking and manifest is not None:
        place = parse_location("path", report.path)
        config = " -c CONFIG"
        if place.name.rpartition("-")[0] == "fbank80":
            config = ""
        output = shlex.quote(str(place.parent))
        advise(f"{', '.join(lacking)}: featcache extract {manifest}{config} -o {output}")


def _print_counts(report: Report, path: str) -> None:
    checked = "every byte read" if report.data else "features not read"
    damaged = len(report.damaged_shards)
    shards = counted(report.shards, "shard")
    if report.shards_left_out:
        shards += f" of {report.shards + report.shards_left_out:,}"
    contents = (
        f"{counted(report.utterances, 'utterance')}, {counted(report.frames, 'frame')}, "
        f"{megabytes(report.num_bytes)}"
    )
    if not damaged:
        state = contents
    elif damaged < report.shards:
        state = f"{damaged:,} of them damaged; the others hold {contents}"
    else:
        state = "damaged" if damaged == 1 else "all damaged"
    say(f"{path}: {shards}, {state}; {checked}")
    if damaged and report.damaged_utterances:
        hold = "shard holds" if damaged == 1 else "shards hold"
        say(
            f"  the damaged {hold} {counted(report.damaged_utterances, 'utterance')}: repair "
            "keeps the sound ones"
        )
