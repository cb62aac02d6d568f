"""What featcache promises of a cache in which something went wrong, held against a cache
on disk.

A `Scenario` is a command that changes a cache. Whatever happens to the command,
`assert_old_or_new` must hold at once, and `assert_finishes` when the command is run again
with nothing in its way."""

import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from cache_contents import check, items, only_version
from processes import Cli, Finished

import featcache
from featcache.care.report import Report
from featcache.errors import FeatcacheWarning, StoreError
from featcache.manifest.read import read_manifest
from featcache.version.indexing import open_index
from featcache.version.ledger import standing_failures
from featcache.version.selection import version_folders
from featcache.version.version import Version

TRIAL_SECONDS = 120
"""That a command in a trial may take: a limit for what hangs."""

Features = Mapping[str, tuple]
"""Items as `cache_contents.items` gives them."""


@dataclass(frozen=True)
class Scenario:
    """A command that changes a cache, and what it makes of it if nothing happens."""

    name: str
    manifest: Path
    base: Path | None
    """The cache that it begins with; None for none."""
    command: tuple
    """The command; the cache is `CACHE` in it."""
    finish: tuple[tuple, ...] = ()
    """The commands that complete what it did not, after a fault; by default, the same
    once more."""
    code: int = 0
    """The exit code of the command if nothing happens."""
    notes: frozenset[str] = frozenset()
    """The lines on stderr then."""
    damaged: frozenset[str] = frozenset()
    """The ids of utterances that are damaged in `base`."""
    before: Features = field(default_factory=dict)
    after: Features = field(default_factory=dict)
    """The items when it has finished; those of `before` are there until then, if they are
    to stay."""
    failed: frozenset[str] = frozenset()
    """The ids in the failure ledger then."""
    shards: frozenset[str] = frozenset()
    """The names of the shards then."""
    is_once: bool = True
    """Whether each item is in one shard then; runs that do not see each other may make it
    twice."""

    def arguments(self, cache: Path, command: Sequence[object] | None = None) -> list[object]:
        """The command's arguments for a cache."""
        return [cache if argument == CACHE else argument for argument in command or self.command]

    def complaints(self, ended: Finished) -> list[str]:
        """The lines on stderr that the undisturbed command does not write."""
        return [line for line in ended.err.splitlines() if line not in self.notes]

    def prepare(self, cache: Path) -> Path:
        """The cache as it is before the command; what was there is removed."""
        shutil.rmtree(cache, ignore_errors=True)
        if self.base is not None:
            shutil.copytree(self.base, cache)
        return cache


CACHE = "{cache}"


def version_in(cache: Path) -> Version | None:
    """The version in a cache; None if there is none yet."""
    try:
        version_folders(cache)
    except StoreError:
        return None
    return only_version(cache)


def assert_old_or_new(scenario: Scenario, cache: Path, where: object = "") -> set[str]:
    """What is in the cache is what was there or what the command makes, bit for bit, and
    verify says which; returns the ids of the items that are as the command makes them."""
    if (version := version_in(cache)) is None:
        assert not scenario.before, f"{where}: the version is gone"
        return set()
    there = items(cache)
    for id_, features in there.items():
        assert features in (scenario.before.get(id_), scenario.after.get(id_)), (
            f"{where}: {id_} is neither old nor new"
        )
    lost = (scenario.before.keys() & scenario.after.keys()) - scenario.damaged - there.keys()
    assert not lost, f"{where}: {lost} are gone"
    standing = standing_failures(version, open_index(version))
    assert standing.keys() <= scenario.failed, f"{where}: {standing}"
    if scenario.shards and not scenario.damaged and scenario.shards == {*version.shard_names()}:
        # what a shard lacks, because it has failed, was in the ledger before the shard
        # was there
        assert standing.keys() == scenario.failed, f"{where}: {scenario.failed} are in no ledger"
    new = {id_ for id_, features in there.items() if features == scenario.after.get(id_)}
    manifest = read_manifest(scenario.manifest)
    _assert_verified(scenario, check(cache, manifest=manifest), new, standing.keys(), where)
    _assert_opens(scenario, cache, there, standing.keys(), where)
    return new


def _assert_verified(
    scenario: Scenario, report: Report, new: set[str], standing: set[str], where: object
) -> None:
    """Verify names what is damaged still, and what is lacking or old, and nothing else."""
    kinds: dict[str, set[str]] = {}
    for problem in report.problems:
        if problem.kind == "unfinished" or (
            problem.kind == "record" and not new and not scenario.before
        ):
            assert scenario.after.keys() - new | scenario.failed - standing, f"{where}: {problem}"
            continue
        assert problem.id is not None, f"{where}: {problem}"
        kinds.setdefault(problem.kind, set()).add(problem.id)
    damaged = kinds.pop("checksum", set())
    assert damaged <= scenario.damaged - new, f"{where}: verify finds {damaged} damaged"
    not_yet = scenario.after.keys() - new
    named = kinds.pop("missing", set()) | kinds.pop("changed", set())
    assert not kinds, f"{where}: {report.problems}"
    assert not_yet <= named | damaged, f"{where}: verify does not name {not_yet - named}"
    # verify counts the sound items of damaged shards among those that are missing
    if not report.damaged_shards:
        assert named <= not_yet | (scenario.failed - standing), (
            f"{where}: verify names {named - not_yet}"
        )


def _assert_opens(
    scenario: Scenario, cache: Path, there: Features, standing: set[str], where: object
) -> None:
    """Training reads what is there; if the command was to add more, it is told so, and
    `strict` refuses."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", FeatcacheWarning)
        opened = featcache.open(cache)
    for id_, (_, shape, data) in there.items():
        found = np.asarray(opened[id_])
        assert (found.shape, found.tobytes()) == (shape, data), (
            f"{where}: reading {id_} gives something else"
        )
    has_begun = bool(there.keys() - scenario.before.keys())
    is_lacking = bool(scenario.after.keys() - there.keys() | scenario.failed - standing)
    if has_begun and is_lacking and not scenario.damaged:
        assert check(cache).problems, (
            f"{where}: verify without a manifest does not say that utterances are missing"
        )
        assert told, f"{where}: open does not say that utterances are missing"
        with pytest.raises(StoreError):
            featcache.open(cache, strict=True)


def assert_finishes(
    cli: Cli, scenario: Scenario, cache: Path, where: object = "", *, leftovers: bool = False
) -> None:
    """The command once more does the rest: the cache is as if nothing had happened, and
    nothing is left over, unless `leftovers` says that something may be."""
    for command in scenario.finish or (scenario.command,):
        finished = cli.start(*scenario.arguments(cache, command)).wait(TRIAL_SECONDS)
        assert finished.code == (3 if scenario.failed and command[0] == "extract" else 0), (
            f"{where}: {finished}"
        )
    assert_is_after(scenario, cache, where)
    if not leftovers:
        assert_no_leftovers(cache, where)


def assert_is_after(scenario: Scenario, cache: Path, where: object = "") -> None:
    """Item by item, the cache is what the undisturbed command made, and verify finds
    nothing."""
    version = only_version(cache)
    assert items(cache) == scenario.after, f"{where}: other items than of an undisturbed run"
    if scenario.shards and not scenario.damaged and scenario.is_once:
        assert {*version.shard_names()} == scenario.shards, (
            f"{where}: other shards than of an undisturbed run"
        )
    index = open_index(version)
    assert standing_failures(version, index).keys() == scenario.failed, where
    manifest = read_manifest(scenario.manifest)
    report = check(cache, manifest=manifest)
    assert (report.problems, report.surplus) == (
        [],
        len(scenario.after.keys() - {*manifest.ids}),
    ), f"{where}: {report}"
    assert not (scenario.is_once and report.repeated), f"{where}: {report}"
    assert not report.notes, f"{where}: {report.notes}"


def assert_no_leftovers(cache: Path, where: object = "") -> None:
    """Nothing is left of what was killed: no work, no names that begin with a dot, no
    marks of what was in flight."""
    hidden = [str(path) for path in cache.rglob(".*")]
    assert not hidden, f"{where}: left over: {hidden}"
    for folder in version_folders(cache):
        left = [path for path in (folder / "work").rglob("*") if path != folder / "work/desk"]
        assert not left, f"{where}: left over in work: {left}"
