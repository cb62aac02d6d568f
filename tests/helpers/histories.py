"""Random histories of two caches of one manifest, which are extracted into, killed, copied
to each other, pruned and repaired; and what each has to serve after every step."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import soundfile
from damage import CHUNKS, flip
from extractions import write_config
from odd_extractors import HOP

import featcache
from featcache.care.copying import copy_version
from featcache.care.prune import ids_to_keep, plan_prune, prune
from featcache.care.repair import repair
from featcache.care.report import Report
from featcache.care.verify import verify
from featcache.config import load_config
from featcache.engines.local import run_locally
from featcache.errors import StoreError
from featcache.extraction.extraction import Summary, run_extraction
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest.read import read_manifest
from featcache.manifest.utterances import Manifest
from featcache.version.indexing import open_index
from featcache.version.ledger import standing_failures
from featcache.version.selection import select_version
from featcache.version.tags import make_tag, remove_tag
from featcache.version.version import Version

IDS = ("u", "v", "w", "x", "y")
PATHS = ("a", "b", "c")
"""The files of each utterance, of which a row names one."""

ANY = -1
BAD = 0
"""The content of a file that is no audio; others are as loud as their number says."""

_LACKING = {"unfinished", "record"}


class KilledError(Exception):
    """The end of a run that is killed."""


@dataclass
class Copy:
    """A cache, and what it has to serve."""

    folder: Path
    seen: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Of each utterance that is wanted: when a run looked at its row last, here or in a
    cache that this one was copied from, the content of its file then, and its path."""
    dropped: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """The same of utterances that nobody wants any more, and whose features are there."""
    tags: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def version(self) -> Version:
        return select_version(self.folder)

    @property
    def is_there(self) -> bool:
        return self.folder.exists() and any(self.folder.glob("*/zarr.json"))


class History:
    """Two caches, a manifest, and the audio that it names."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.copies = [Copy(folder / name) for name in ("one", "two")]
        self.config = load_config(write_config(folder, "Slow"))
        self.rows = dict.fromkeys(self.chance.sample(IDS, 3), "a")
        self.contents: dict[str, int] = {}
        self.files: dict[int, str] = {}
        self.time = 0
        self.steps: list[str] = []
        for id_ in IDS:
            for path in PATHS:
                self.write(id_, path)

    def write(self, id_: str, path: str) -> None:
        """Write other audio to a file, or what is no audio."""
        self.time += 1
        name = f"{id_}-{path}.wav"
        content = BAD if self.chance.random() < 0.15 else self.time
        file = self.folder / name
        if content == BAD:
            file.write_bytes(b"no audio")
        else:
            samples = np.full(HOP * self.chance.choice([3, 7]), content / 4096)
            soundfile.write(file, samples, 16000, subtype="FLOAT")
        os.utime(file, ns=(self.time * 10**9,) * 2)
        self.contents[name] = content
        if content != BAD:
            self.files[content] = name

    @property
    def manifest(self) -> Manifest:
        lines = [f"{id_},{id_}-{path}.wav" for id_, path in sorted(self.rows.items())]
        file = self.folder / "manifest.csv"
        file.write_text("\n".join(["id,path", *lines]) + "\n")
        return read_manifest(file)

    # Steps

    def change(self) -> str:
        """Change a row or a file, drop a row, or have one come back."""
        id_ = self.chance.choice(IDS)
        if id_ not in self.rows:
            self.rows[id_] = self.chance.choice(PATHS)
            return f"{id_} comes with {self.rows[id_]}"
        what = self.chance.random()
        if what < 0.25 and len(self.rows) > 1:
            del self.rows[id_]
            return f"{id_} is dropped"
        if what < 0.7:
            self.rows[id_] = self.chance.choice(PATHS)
            return f"{id_} has {self.rows[id_]}"
        self.write(id_, self.rows[id_])
        return f"{id_}-{self.rows[id_]} is {self.contents[f'{id_}-{self.rows[id_]}.wav']}"

    def options(self, partition: str | None = None) -> Options:
        size = self.chance.choice([1e-5, 1.0])
        return Options(
            device="cpu",
            threads=1,
            shard_megabytes=size,
            check_sources=True,
            replace=True,
            partition=partition,
        )

    def look(self, copy: Copy, ids: Iterable[str]) -> None:
        """Note that a run looks at rows, and that no others are wanted. What it finds as it
        was is no news, to other caches."""
        self.time += 1
        for id_ in ids:
            path = self.rows[id_]
            now = self.contents[f"{id_}-{path}.wav"], path
            if id_ not in copy.seen or copy.seen[id_][1:] != now:
                copy.seen[id_] = self.time, *now
        found = served(copy.version) if copy.is_there else {}
        for id_ in copy.seen.keys() - self.rows.keys():
            seen = copy.seen.pop(id_)
            if found.get(id_) == seen[1]:
                copy.dropped[id_] = seen
        for id_ in copy.seen.keys() & copy.dropped.keys():
            del copy.dropped[id_]

    def run(
        self, copy: Copy, kill_after: int | None = None, partition: str | None = None
    ) -> Summary | None:
        """Extract the manifest, or be killed after so many shards."""

        def engine(group, tasks, control):
            run_locally(group, islice(tasks, kill_after), control)
            if kill_after is not None:
                raise KilledError

        plan = plan_extraction(self.manifest, [self.config], copy.folder, self.options(partition))
        self.look(copy, self.rows)
        try:
            return run_extraction(plan, engine)
        except KilledError:
            # what was to be extracted for the first time may come from the other cache
            (planned,) = plan.versions
            lacking = planned.wanted.lacks(open_index(copy.version))
            for row in np.flatnonzero(lacking & (planned.wanted.rows[2] == 1)).tolist():
                id_ = planned.manifest.ids[row]
                time, _, path = copy.seen[id_]
                copy.seen[id_] = time, ANY, path
            return None

    def extract(self, copy: Copy) -> str:
        self.run(copy)
        self.require_whole(copy)
        return "extract"

    def kill(self, copy: Copy) -> str:
        after = self.chance.randrange(3)
        self.run(copy, after)
        return f"extract, killed after {after}"

    def partitions(self, copy: Copy) -> str:
        for number in range(2):
            self.run(copy, partition=f"{number}/2")
        open_index(copy.version)
        self.require_whole(copy)
        return "two partitions"

    def copy_to(self, source: Copy, target: Copy) -> str:
        copy_version(source.version, target.folder)
        known = [target.dropped, target.seen, source.dropped, source.seen]
        newest: dict[str, tuple[int, int, str]] = {}
        for seen in known:
            for id_, event in seen.items():
                newest[id_] = max(event, newest.get(id_, event))
        wanted = target.seen.keys() | source.seen.keys()
        target.seen = {id_: newest[id_] for id_ in wanted}
        target.dropped = {id_: newest[id_] for id_ in newest.keys() - wanted}
        return f"copy to {target.folder.name}"

    def prune(self, copy: Copy) -> str:
        version, manifest = copy.version, self.manifest
        with_manifest = self.chance.random() < 0.5
        keep = None
        if with_manifest:
            if not {*open_index(version).ids} & self.rows.keys():
                return "no prune"
            keep = ids_to_keep(version, manifest, force=True)
        staying = copy.seen.keys() & self.rows.keys() if with_manifest else copy.seen.keys()
        before, was_whole = served(version), not lacking(copy)
        prune(version, plan_prune(version, keep), keep)
        after = served(version)
        for id_ in staying:
            assert before.get(id_) == after.get(id_), (id_, before, after)
        if was_whole:
            assert lacking(copy) == []
        copy.seen = {id_: seen for id_, seen in copy.seen.items() if id_ in staying}
        if with_manifest:
            copy.dropped = {}
        return "prune --manifest" if with_manifest else "prune"

    def repair(self, copy: Copy) -> str:
        """Damage a shard, and repair it; of what was damaged, a run has looked at the
        rows."""
        version = copy.version
        if not (names := version.shard_names()):
            return "no repair"
        shard = version.shard(self.chance.choice(names))
        flip(version.path / "shards" / shard.name / CHUNKS["features"], 5)
        try:
            repaired = repair(version.path, self.manifest, self.options())
        except StoreError as error:
            if "Nothing has been removed" not in str(error):
                raise
            flip(version.path / "shards" / shard.name / CHUNKS["features"], 5)
            return "no repair"
        for name in repaired.broken_tags:
            remove_tag(version, name)
            copy.tags.pop(name, None)
        self.run(copy)
        self.require_whole(copy)
        return "repair, extract"

    def tag(self, copy: Copy) -> str:
        version = copy.version
        if not len(open_index(version)):
            return "no tag"
        self.time += 1
        name = f"t{self.time}"
        make_tag(version, name, open_index(version))
        copy.tags[name] = served(version)
        return "tag"

    # What must hold

    def require_whole(self, copy: Copy) -> None:
        """After a run, nothing is missing, and another finds nothing to do."""
        assert lacking(copy) == [], lacking(copy)
        assert verify(copy.version).problems == []
        summary = self.run(copy)
        assert summary is not None
        (one,) = summary.versions
        assert (one.missing, one.extracted, lacking(copy)) == (0, 0, [])
        report = verify(copy.version, manifest=self.manifest)
        failed = {id_ for id_, (_, content, _) in copy.seen.items() if content == BAD}
        assert {problem.id for problem in report.problems} <= failed, report.problems
        assert report.failed == one.failed == len(failed)

    def check(self, copy: Copy) -> None:
        """What is served is of the newest audio, or is reported missing."""
        report = verify(copy.version)
        assert_equal_means_equal(copy.version, report)
        unknown = {problem.kind for problem in report.problems} - _LACKING
        assert not unknown, report.problems
        if lacking(copy):
            return
        found = served(copy.version)
        failed = standing_failures(copy.version, open_index(copy.version))
        for id_, (_, content, path) in copy.seen.items():
            if content == ANY:
                file = self.files.get(found.get(id_, BAD))
                assert file == f"{id_}-{path}.wav" or id_ in failed, (id_, file)
            elif content != BAD:
                assert found.get(id_) == content, (id_, path, content, found)
        for name, held in copy.tags.items():
            assert served(copy.version, name) == held

    def step(self) -> None:
        copy, other = self.chance.sample(self.copies, 2)
        acts = [self.extract, self.kill, self.partitions]
        if copy.is_there:
            acts += [self.prune, self.repair, self.tag, *[self.copy_between] * 3]
        act = self.chance.choice([self.change] * 6 + acts)
        if act == self.change:
            self.steps.append(self.change())
            return
        self.steps.append(f"{copy.folder.name}: {act.__name__} …")
        told = act(copy, other) if act == self.copy_between else act(copy)
        self.steps[-1] = f"{copy.folder.name}: {told}"
        for one in self.copies:
            if one.is_there:
                self.check(one)

    def copy_between(self, source: Copy, target: Copy) -> str:
        return self.copy_to(source, target)


def lacking(copy: Copy) -> list[str]:
    """Why a cache is not whole; `verify` and a strict opening agree."""
    problems = verify(copy.version).problems
    messages = [problem.message for problem in problems if problem.kind in _LACKING]
    try:
        featcache.open(copy.folder, strict=True)
    except StoreError:
        assert messages
    else:
        assert not messages, messages
    return messages


def served(version: Version, tag: str | None = None) -> dict[str, int]:
    """The contents that a version's features are of, by id."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = featcache.open(version.path, tag=tag)
    return {id_: round(float(cache[id_][0, 0]) * 4096) for id_ in cache}


def assert_equal_means_equal(version: Version, report: Report) -> None:
    """What `verify` says is there twice has equal rows and equal values."""
    index = open_index(version)
    is_counting = {index.place(position) for position in range(len(index))}
    counting, others = set[tuple[object, ...]](), list[tuple[object, ...]]()
    for name in version.shard_names():
        table = version.shard(name).table
        columns = [table[column].tolist() for column in ("generation", "row_hash", "item_crc32c")]
        for number, item in enumerate(zip(table.ids, *columns, strict=True)):
            if (name, number) in is_counting:
                counting.add(item)
            else:
                others.append(item)
    assert report.repeated == sum(item in counting for item in others)
