"""`featcache verify` and `featcache repair`."""

from __future__ import annotations

import random
import shlex
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import (
    FAILURES_LEFT,
    Document,
    advise,
    as_document,
    complain,
    count_are,
    error_document,
    need_columns,
    open_each,
    printing,
    say,
    say_json,
    say_problems,
)
from featcache.cli.corpora import version_or_corpus, worst
from featcache.cli.process import INTERRUPTED, stoppable
from featcache.cli.progress import Shards
from featcache.cli.runs import say_summary
from featcache.errors import DamagedError, FeatcacheError, counted, listing, megabytes
from featcache.storage.location import Location, parse_location

if TYPE_CHECKING:
    from featcache.care.repair import Repaired
    from featcache.care.report import Problem, Recomputed, Report
    from featcache.care.sources import SourceCheck
    from featcache.version.version import Version

_SHOWN = 20
_SOURCES = (
    "Also check if audio files have changed since extraction. stat (the default) compares "
    "size and modification time, content a hash. URLs are checked only with --manifest."
)


@options.command()
@version_or_corpus
@options.manifest(
    help="Also report which utterances of this manifest are missing, changed or failed, and "
    "which utterances are not in it."
)
@options.root("as in the run that extracted the utterance")
@options.manifest_format
@click.option(
    "--data/--no-data",
    default=True,
    help="Read every byte of the features, or with --no-data only the metadata, which is quick.  "
    "[default: --data]",
)
@click.option(
    "--values",
    "all_values",
    is_flag=True,
    help="Check all values for NaN and infinity, and the hashes of rows and shards, even if the "
    "writer recorded that it has checked them.",
)
@click.option(
    "--sources",
    type=click.Choice(["stat", "content"]),
    is_flag=False,
    flag_value="stat",
    help=_SOURCES,
)
@options.number("--recompute", "Extract N random utterances again, each alone, and compare.", 0)
@options.device("For --recompute: compute on cpu, cuda, cuda:1 …")
@options.reading_threads
@options.trust_remote_code
def verify(
    path: Location,
    manifest: str | None,
    data: bool,
    all_values: bool,
    sources: str | None,
    recompute: int,
    **chosen: Any,
) -> int:
    """Check a cache: what is damaged, missing, changed. This checks metadata, offsets, the
    checksums of all features, non-finite values, frame counts, duplicate ids, shards of other
    versions, and the records of which utterances are wanted and which have failed.

    Exits with 1 if something is damaged, missing or changed; otherwise with 3 if utterances
    are in the failure ledger. `featcache repair` repairs damage; `featcache extract` adds
    what is missing.

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
    from featcache.manifest.label_files import template_of, with_label_files
    from featcache.version.selection import split_tag
    from featcache.version.version import UnfinishedCopyError

    device, threads, root = chosen.pop("device"), chosen.pop("threads"), chosen["root"]
    wanted, again = None, None
    files = SourceCheck(sources == "content", root)
    if manifest:
        wanted = options.read_manifest(manifest, chosen, carry=need_columns(path))
        given = [manifest]
        for name in ("root", "format"):
            if chosen[name] is not None:
                given += [f"--{name}", str(chosen[name])]
        again = shlex.join(given)
    checking: dict[str, Any] = {"data": data, "values": all_values, "manifest": wanted}
    checking["threads"] = threads
    passes = 2 if sources else 1
    reports: list[Report] = []
    codes: list[int] = []
    errors: dict[str, Document] = {}
    ending = "looking at no more, and telling what was found (once more to stop at once)"
    path, tag = split_tag(path)
    for folder, version in open_each(path, tag):
        if isinstance(version, DamagedError):
            is_copy = isinstance(version, UnfinishedCopyError)
            problem = Problem("unfinished" if is_copy else "metadata", version.what)
            reports.append(Report(str(folder), 0, 0, 0, 0, data, [problem]))
            continue
        if wanted is not None:
            rows = with_label_files(wanted, template_of(version.info.config))
            files = replace(files, urls=rows.urls)
        if sources:
            checking["sources"] = files
        total = len(version.shard_names())
        with stoppable(ending=ending) as stop, Shards(total, passes) as bar:
            report = check(version, report=bar.done, stop=stop, **checking)
        if recompute and not report.interrupted:
            try:
                report.recomputed = _recompute(version, recompute, files, device, threads)
            except FeatcacheError as error:  # the other versions are still checked
                complain(error)
                codes.append(error.exit_code)
                errors[report.path] = error_document(error)
        reports.append(report)
        if report.interrupted:
            break
    code = worst([*codes, *map(_exit_code, reports)])
    documents: list[Document] = []
    if printing.as_json:
        documents = [as_document(each) | errors.get(each.path, {}) for each in reports]
    say_json({"ok": code in (0, FAILURES_LEFT), "versions": documents})
    for report in reports:
        _print(report, again, f"@{tag}" if tag is not None else "")
    return code


def _exit_code(report: Report) -> int:
    if report.interrupted:
        return INTERRUPTED
    if _problems(report):
        return 1
    return FAILURES_LEFT if report.failed else 0


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


def _is_in_damaged_shard(problem: Problem) -> bool:
    """Tell whether an utterance is missing because its shard is damaged: a line counts these."""
    return problem.kind == "missing" and problem.shard is not None


def _print(report: Report, manifest: str | None, tag: str = "") -> None:
    """Print what was found in a version. `manifest` is the manifest with its options, quoted
    for a shell."""
    _print_counts(report, f"{report.path}{tag}")
    problems = [it for it in _problems(report) if not _is_in_damaged_shard(it)]
    say_problems(problems[:_SHOWN])
    if len(problems) > _SHOWN:
        say(f"  … and {len(problems) - _SHOWN:,} more: --json has them all")
    again = report.recomputed
    if again is not None:
        difference = f"largest difference {again.largest_difference:.3g}"
        if again.codes:
            difference = f"{again.differing:,} of {again.codes:,} codes differ, "
            difference += f"{again.tied:,} of them by rounding (ties)"
        say(
            f"  extracted {again.utterances:,} again: {again.identical:,} bit-identical, "
            f"{difference}"
        )
    for line in report.notes:
        say(f"  {line}")
    if report.interrupted:
        say("  interrupted: the rest was not checked")
    if report.surplus:
        say(f"  {count_are(report.surplus, 'utterance')} not in the manifest")
    if report.repeated:
        say(f"  {count_are(report.repeated, 'utterance')} there twice, with equal values")
    _print_remedies(report, manifest, Counter(problem.kind for problem in problems))


def _print_remedies(report: Report, manifest: str | None, kinds: Counter[str]) -> None:
    path = shlex.quote(report.path)
    if report.failed:
        failed = f"{count_are(report.failed, 'utterance')} in the failure ledger"
        say(f"  {failed}: featcache info {path} --failures")
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
    if lacking and manifest is not None and not damaged:
        place = parse_location("path", report.path)
        if place.name.rpartition("-")[0] != "fbank80":
            manifest += " -c CONFIG"
        output = shlex.quote(str(place.parent))
        advise(f"{', '.join(lacking)}: featcache extract {manifest} -o {output}")


def _print_counts(report: Report, path: str) -> None:
    checked = "every byte read" if report.data else "features not read"
    damaged = len(report.damaged_shards)
    shards = counted(report.shards, "shard")
    if report.shards_left_out:
        shards += f" of {report.shards + report.shards_left_out:,}"
    entry = {"clip": "vector", "events": "event"}.get(report.kind, "frame")
    state = f"{counted(report.utterances, 'utterance')}, {counted(report.frames, entry)}, "
    state += megabytes(report.num_bytes)
    if damaged == report.shards == 1:
        state = "damaged"
    elif damaged == report.shards > 0:
        state = "all damaged"
    elif damaged:
        state = f"{damaged:,} of them damaged; the others hold {state}"
    say(f"{path}: {shards}, {state}; {checked}")
    if damaged and report.damaged_utterances:
        hold = "shard holds" if damaged == 1 else "shards hold"
        utterances = counted(report.damaged_utterances, "utterance")
        missing = len([*filter(_is_in_damaged_shard, report.problems)])
        in_manifest = f", {missing:,} of the manifest" if missing else ""
        say(f"  the damaged {hold} {utterances}{in_manifest}: repair keeps the sound ones")


@options.command()
@version_or_corpus
@options.manifest(help="The manifest that the utterances came from.", required=True)
@options.root()
@options.manifest_format
@options.device()
@options.extraction_threads
@options.trust_remote_code
def repair(
    path: Location, manifest: str, device: str | None, threads: int | None, **reading: Any
) -> int:
    """Re-extract damaged utterances, and keep the others. Every byte is read.

    The undamaged utterances of a damaged shard are kept, bit for bit, in a new shard. If
    more than the features of a shard is damaged, all its utterances are re-extracted. A shard
    of another version is moved there, or to the folder `aside` if the cache lacks that
    version. Damaged records of wanted or failed utterances are removed; the next `featcache
    extract` writes them again.

    The manifest needs only the damaged utterances. If one of their audio files does not
    exist, repair removes nothing.

    \b
    Example:
      featcache repair features --manifest train.csv
    """
    from featcache.audio.commands import kill_commands
    from featcache.care.repair import repair as repair_version
    from featcache.extraction.options import Options
    from featcache.version.selection import version_folders

    read = options.read_manifest(manifest, reading, carry=need_columns(path))
    chosen = Options(device=device, threads=threads)
    folders = version_folders(path)
    documents: list[Document] = []
    codes: list[int] = []
    with stoppable(kill_commands) as stop:
        for folder in folders:
            try:
                repaired = repair_version(folder, read, chosen, stop=stop)
            except FeatcacheError as error:
                if len(folders) == 1:
                    raise
                complain(error)  # the other versions are still repaired
                codes.append(error.exit_code)
                documents.append({"path": str(folder)} | error_document(error))
            else:
                codes.append(_say_repaired(repaired))
                documents.append(as_document(repaired))
    say_json({"versions": documents})
    return worst(codes)


def _say_repaired(version: Repaired) -> int:
    """Print what became of a version. Returns the exit code."""
    path = version.path
    if version.interrupted:
        say(f"{path}: interrupted before any shard was removed")
        return INTERRUPTED
    if version.metadata:
        say(f"{path}: metadata restored")
    if version.removed:
        kept = f"{counted(version.kept, 'utterance')} kept"
        shards = counted(len(version.removed), "damaged shard")
        say(f"{path}: {shards}: {kept}, {version.extracted:,} extracted again")
    for folder, fingerprint in version.aside.items():
        say(
            f"{path}: set aside {folder}, a shard of the version {fingerprint[:12]}, which has no "
            "sound one of its name in this cache: move it there, into shards, or remove it"
        )
    if version.broken_tags:
        tags = listing(version.broken_tags)
        are = "tag is" if len(version.broken_tags) == 1 else "tags are"
        say(f"{path}: the {are} no longer whole: {tags}: featcache verify says why")
    if version.records:
        records = counted(version.records, "damaged record")
        say(f"{path}: {records} of what is wanted or has failed removed: run featcache verify")
    code = 0
    if version.summary:
        code = say_summary(version.summary, version.summary.versions[0].path)
    elif not (version.metadata or version.removed or version.records):
        say(f"{path}: no damage found")
    if version.missing:
        are = count_are(version.missing, "utterance")
        say(f"{path}: {are} in no shard: featcache extract adds them")
    return code
