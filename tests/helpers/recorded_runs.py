"""A version and its runs, without audio: what extraction and repair record, in any order, with the truth beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from manifests import manifest_of
from small_shards import item, write

from featcache.care.prune import plan_prune, prune
from featcache.manifest import read_manifest
from featcache.strings import Strings
from featcache.version.index import build_index
from featcache.version.lacking import held_before, shards_to_make_up_for, unrecorded_shards
from featcache.version.ledger import Failure, standing_failures
from featcache.version.records import Run, ShardEvent
from featcache.version.version import Version

ROOT = "/corpus"


@dataclass
class Job:
    """A run over a manifest that has begun."""

    run: Run
    manifest: str
    todo: list[str]
    """The ids that it is still to extract."""
    lost: list[ShardEvent]
    rows: dict[str, int]


@dataclass
class Model:
    """A version, and what its runs do to it; all of it as `featcache.extract` does it, but for the features."""

    version: Version
    manifests: dict[str, list[str]]
    """The ids of each manifest."""
    asked: set[str] = field(default_factory=set)
    """The manifests that runs were to extract as a whole."""
    jobs: list[Job] = field(default_factory=list)
    pruned: set[str] = field(default_factory=set)
    """The ids that nobody has asked for since they were pruned."""

    def index(self):
        return build_index(map(self.version.shard, self.version.shard_names()))

    def begin(self, manifest: str) -> Job:
        """A run over a whole manifest, planned by what is there."""
        index, ids = self.index(), self.manifests[manifest]
        standing = standing_failures(self.version, index)
        todo = [id_ for id_ in ids if index.find_one(id_) < 0 and id_ not in standing]
        key = manifest, ROOT
        held = held_before(self.version, index, key, Strings.of(todo))
        asked = {"manifest": manifest, "root": ROOT, "utterances": len(ids), "new": len(todo), "held": len(index)}
        there = Strings.of([id_ for id_ in ids if index.find_one(id_) >= 0])
        unrecorded = unrecorded_shards(self.version, index, there)
        lost = shards_to_make_up_for(self.version, index, key)
        run = Run(self.version, {**asked, **held, "replaced": 0, "only": False}, after=index.runs)
        run.record_shards(unrecorded)
        self.asked.add(manifest)
        self.pruned.difference_update(ids)
        job = Job(run, manifest, todo, lost, {id_: row for row, id_ in enumerate(ids)})
        self.jobs.append(job)
        return job

    def step(self, job: Job, count: int, failing: int = 0) -> None:
        """Extract the next few utterances of a run, of which some fail; what others have made is left out."""
        index = self.index()
        failed = standing_failures(self.version, index)
        batch = [id_ for id_ in job.todo[:count] if index.find_one(id_) < 0 and id_ not in failed]
        job.todo = job.todo[count:]
        bad, good = batch[:failing], batch[failing:]
        job.run.fail(Failure(id=id_, path=f"{id_}.wav", reason="empty", message="") for id_ in bad)
        if good:
            row = job.rows[good[0]]
            shard = write(self.version, [item(id_) for id_ in good], row=row, run=job.run.id)
            job.run.record_shards([ShardEvent(shard.name, len(good))])

    def end(self, job: Job) -> None:
        """Let a run do the rest, and end well."""
        while job.todo:
            self.step(job, 3)
        job.run.record_shards(job.lost)
        job.run.finish({"extracted": 0, "failed": 0, "interrupted": False, "items": len(self.index())})
        self.jobs.remove(job)

    def interrupt(self, job: Job) -> None:
        """Let a run be stopped."""
        job.run.finish({"extracted": 0, "failed": 0, "interrupted": True})
        self.jobs.remove(job)

    def kill(self, job: Job) -> None:
        """Let a run die."""
        job.run._lock.release()
        self.jobs.remove(job)

    def prune(self, unwanted: set[str]) -> None:
        """Prune the version of these utterances, unless it would be empty then."""
        there = {*self.index().ids}
        if kept := sorted(there - unwanted):
            path = manifest_of(self.version.path, [(id_, f"{id_}.wav") for id_ in kept], ("id", "path"), "wanted.csv")
            wanted = read_manifest(path)
            prune(self.version, plan_prune(self.version, wanted, force=True), wanted)
            self.pruned |= there & unwanted

    def whole_run(self, manifest: str) -> Job:
        """A run over a manifest that begins, does it all, and ends well."""
        job = self.begin(manifest)
        self.end(job)
        return job

    def killed_run(self, manifest: str, count: int, failing: int = 0) -> Job:
        """A run over a manifest that does so many utterances, of which some fail, and dies."""
        job = self.begin(manifest)
        self.step(job, count, failing)
        self.kill(job)
        return job

    def missing(self) -> set[str]:
        """The truth: the ids of all manifests asked for that are in no shard and in no ledger."""
        index = self.index()
        failed = standing_failures(self.version, index)
        wanted = {id_ for manifest in self.asked for id_ in self.manifests[manifest]}
        return {id_ for id_ in wanted - self.pruned if index.find_one(id_) < 0 and id_ not in failed}
