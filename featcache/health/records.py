"""What the records of runs tell about a version's health: what it lacks or has lost, and what of them is damaged."""

from __future__ import annotations

from featcache.errors import counted, listing
from featcache.storage.objects import read_ahead
from featcache.store.check import Problem
from featcache.store.findings import DamagedRecord, Finding, LostShards, Unfinished, Unrecorded
from featcache.store.index import Index, open_index
from featcache.store.records import read_document, rewrite_lines, write_document
from featcache.store.run_records import RunRecord, is_running, read_runs, record_files, run_names
from featcache.store.runs import Run
from featcache.store.tags import TaggedVersion, check_tags
from featcache.store.unfinished import find_unfinished, held_before
from featcache.store.version import Version
from featcache.strings import Strings

_KINDS = {Unfinished: "unfinished", LostShards: "lost", Unrecorded: "record", DamagedRecord: "record"}

LACKING = frozenset(_KINDS.values())
"""The kinds of problems that may be over as soon as a run that is going on has added another shard."""


def check_records(
    version: Version, index: Index, *, has_damaged_shards: bool, has_manifest: bool
) -> tuple[list[Problem], list[str]]:
    """What is wrong according to the records of runs, and what is worth knowing and no damage.

    The index has the items in sound shards; if there are others, it cannot be told how many utterances are missing. A
    manifest that the version is compared with tells more than a record that is gone.
    """
    problems, notes = list[Problem](), list[str]()
    if isinstance(version, TaggedVersion):
        return problems, notes
    with read_ahead(record_files(version, run_names(version))):
        for finding in find_unfinished(version, index, all_runs=True):
            match finding:
                case Unfinished(is_going_on=True):
                    notes.append(str(finding))
                case Unfinished() if has_damaged_shards:
                    pass
                case Unrecorded(is_copy=is_copy) if has_manifest or is_copy:
                    notes.append(str(finding))
                case _:
                    problems.append(Problem(_kind_of(finding), f"{version.path}: {finding}"))
        for run in read_runs(version):
            if lost := run.lost("shards"):
                records = counted(lost, "record is", "records are")
                where = f" (line {listing(map(str, run.shards.damaged))})" if run.shards.damaged else ""
                message = (
                    f"{run.folder / 'shards.jsonl'}: damaged: {records} lost{where}: if the shards that they named "
                    "were removed, nothing would tell; `featcache repair` removes the lines"
                )
                problems.append(Problem("record", message))
    return [*problems, *(Problem("tag", message) for _, message in check_tags(version))], notes


def _kind_of(finding: Finding) -> str:
    if isinstance(finding, Unfinished) and finding.were_there:
        return "lost"
    return _KINDS[type(finding)]


def mend_records(version: Version) -> int:
    """Remove from the records of runs what is damaged; returns from how many files. The records say what has been lost
    by that.

    Raises:
        StoreError: They cannot be written.
    """
    mended = 0
    for run in read_runs(version):
        if is_running(version, run.name):  # it may be writing
            continue
        lost = {kind: run.lost(kind) for kind in ("failures", "shards")}
        mended += sum(map(bool, [run.fault, *lost.values()]))
        if lost["failures"] and run.is_known:
            _note_lost_failures(version, run, lost["failures"])
        for kind in [kind for kind, count in lost.items() if count]:
            rewrite_lines(run.folder / f"{kind}.jsonl", run.lines(kind).records)
        if run.fault:
            write_document(run.folder / "run.json", {"lost": True, "asked": {}})
        elif any(lost.values()) and run.outcome is not None:
            document = read_document(run.folder / "run.json")
            counts = {"failures": len(run.failures.records), "shards": len(run.shards.records)}
            document["outcome"]["lines"] = counts
            write_document(run.folder / "run.json", document)
    return mended


def _note_lost_failures(version: Version, run: RunRecord, count: int) -> None:
    """Record that the utterances of some lines are neither in the version nor in the ledger, until they are again."""
    index = open_index(version)
    manifest = str(run.asked.get("manifest")), str(run.asked.get("root"))
    asked = {key: run.asked.get(key) for key in ("manifest", "root", "utterances", "config", "made_by")}
    held = held_before(version, index, manifest, Strings.of([]))
    asked |= {"new": count, "replaced": 0, "held": len(index), **held, "only": True, "mended": run.name}
    Run(version, asked, after=index.runs).finish({"extracted": 0, "failed": 0, "interrupted": True})
