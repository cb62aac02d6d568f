"""Why a version may not be whole, in words that people read. It asks the wanted sets, the index and the ledger."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from featcache.errors import counted, listing
from featcache.version.index_table import Index
from featcache.version.ledger import read_failures
from featcache.version.version import Version
from featcache.version.wanted import find_missing, read_all_wanted

__all__ = ["DamagedRecord", "Finding", "Unfinished", "find_lacking"]


@dataclass(frozen=True)
class Unfinished:
    """What a version lacks of what a manifest wants."""

    manifest: str
    """The manifest, as the run was given it."""
    utterances: int
    """The number of utterances in the manifest."""
    missing: int
    """The number of them that are neither in the version nor in the failure ledger."""
    failed: int
    """The number of them whose failure stands; some may have an older item."""

    def __str__(self) -> str:
        failed = f", {self.failed:,} failed" if self.failed else ""
        return (
            f"{self.missing:,} of the {self.utterances:,} utterances of {self.manifest} are missing{failed}: "
            "extraction was interrupted, is going on, or shards have been removed; run the same `featcache extract` "
            "again to add the rest (or of a copy, the same `featcache copy`)"
        )


@dataclass(frozen=True)
class DamagedRecord:
    """A record, of what was wanted or has failed, that is not what was written."""

    what: str
    """What is damaged, and what that costs."""

    def __str__(self) -> str:
        return self.what


Finding = Unfinished | DamagedRecord
"""A reason why a version may not be whole."""


def find_lacking(version: Version, index: Index, sound_shards: Collection[str] = ()) -> list[Finding]:
    """Why a version may not be whole; nothing of a tag: what was wanted since is no part of it.

    Args:
        version: The version.
        index: Its items that count.
        sound_shards: Shards whose manifests' wanted sets must be there; those of the index, if none are given.
    """
    if version.tag is not None:
        return []
    damaged: list[str] = []
    wanted = [*read_all_wanted(version, damaged)]
    failures = read_failures(version, damaged)
    missing = find_missing(wanted, index, failures)
    known = {name for one in wanted for name in one.names}
    of_shards = {shard.manifest for shard in index.summaries if not sound_shards or shard.name in sound_shards}
    findings: list[Finding] = []
    for one in wanted:
        if (count := len(missing.missing.get(one.manifest, ()))) > 0:
            findings.append(Unfinished(one.manifest, len(one), count, missing.num_failed(one)))
    if not wanted and not len(index):
        findings.append(
            DamagedRecord(
                f"{version.path}: it holds nothing, and nothing says what it is to hold; run the same `featcache "
                "extract` again (or of a copy, the same `featcache copy`)"
            )
        )
    if gone := sorted(of_shards - known):
        shards = counted(sum(shard.manifest in gone for shard in index.summaries), "shard was", "shards were")
        what = (
            f"{version.path}/wanted: {listing(gone)} is gone, of which {shards} made: what else the manifest wants is "
            "not known; run the same `featcache extract` again"
        )
        findings.append(DamagedRecord(what))
    return [*findings, *map(DamagedRecord, damaged)]
