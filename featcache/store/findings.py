"""Why a version may not be whole, in the words that people read; `featcache.store.unfinished` finds out."""

from __future__ import annotations

from dataclasses import dataclass

from featcache.errors import counted, listing

_AGAIN = "run the same `featcache extract` again{} (or of a copy, the same `featcache copy`)"
_RESTORE = _AGAIN.format(" to restore them")


@dataclass(frozen=True)
class Unfinished:
    """What a version lacks of what a run was to add, or of what was there once."""

    manifest: str
    """The manifest that the run was given."""
    utterances: int
    """The number of utterances in the manifest; or, if some were lost, of items when the run last saw the version."""
    missing: int
    """The number of utterances that are neither in the version nor in the failure ledger."""
    failed: int
    """The number of utterances in the runs over that manifest whose failure stands; some may have an older item."""
    is_going_on: bool
    """Whether the run is still running, as far as can be seen from here."""
    were_there: bool = False
    """Whether the missing utterances were there once, and their shards have been removed."""
    partitions: tuple[str, ...] = ()
    """The partitions of the manifest, such as `3/8`, that are not known to have been extracted to the end. Then
    `missing` is the most that may be missing. Empty if the manifest was extracted as a whole."""

    def __str__(self) -> str:
        if self.were_there:
            return (
                f"{self.missing:,} of the {self.utterances:,} utterances that it held are no longer there: shards "
                f"have been removed; {_RESTORE}"
            )
        failed = f", {self.failed:,} failed" if self.failed else ""
        what = "extraction is running" if self.is_going_on else "extraction was interrupted, or is running elsewhere"
        if self.partitions:
            are = "partition {} is not" if len(self.partitions) == 1 else "partitions {} are not"
            begun = what if self.is_going_on else "interrupted, never begun, or running elsewhere"
            return (
                f"of the {self.utterances:,} utterances of {self.manifest}, up to {self.missing:,} are missing{failed}:"
                f" {are.format(listing(self.partitions))} known to be complete: {begun}; run `featcache extract … "
                "--partition` again for these, or without it for all that is missing"
            )
        return (
            f"{self.missing:,} of the {self.utterances:,} utterances of {self.manifest} are missing{failed}: {what}; "
            "run the same `featcache extract` again to add the rest"
        )


@dataclass(frozen=True)
class LostShards:
    """Shards that runs over one manifest have recorded, and that are no longer there."""

    manifest: str
    """The manifest."""
    shards: list[str]
    """The names of the shards."""
    missing: int
    """The number of utterances that were in them."""

    def __str__(self) -> str:
        return (
            f"{counted(self.missing, 'utterance')} of {self.manifest} are no longer there: removed from `shards/`: "
            f"{listing(self.shards)}; {_RESTORE}"
        )


@dataclass(frozen=True)
class Unrecorded:
    """Shards of runs without a record; or that there are neither shards nor records."""

    runs: list[str]
    """The names of the runs."""
    shards: list[str]
    """The names of the shards."""
    utterances: int
    """The number of utterances in them."""
    is_copy: bool
    """Whether the version has no records at all, as a copy that was made without the folder `runs`."""

    def __str__(self) -> str:
        if self.is_copy:
            return "there is no folder `runs`, as in a copy made without it: whether all is there is not known"
        if not self.runs and not self.shards:
            return f"it holds nothing, and has no record of a run; {_AGAIN.format('')}"
        if not self.shards:
            return (
                f"the records of {counted(len(self.runs), 'run')} were damaged ({listing(self.runs)}): what they were "
                "to add is not known; run the same `featcache extract` again"
            )
        return (
            f"{counted(self.utterances, 'utterance')} in {counted(len(self.shards), 'shard')} were extracted by "
            f"{counted(len(self.runs), 'run')} of which there is no record in `runs/` ({listing(self.runs)}): whether "
            "more were to be added, and which failed, is not known; run the same `featcache extract` again"
        )


@dataclass(frozen=True)
class DamagedRecord:
    """A run's record that is not what was written."""

    run: str
    """The run's name."""
    what: str
    """What is damaged, and what that costs."""

    def __str__(self) -> str:
        return self.what


Finding = Unfinished | LostShards | Unrecorded | DamagedRecord
"""A reason why a version may not be whole."""
