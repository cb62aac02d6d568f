"""The results of verifying a version."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """A fault of a version, of a shard or of a single utterance."""

    kind: str
    """The kind of fault: `metadata`, `structure`, `checksum`, `non_finite`, `frames`,
    `missing` …"""
    message: str
    shard: str | None = None
    id: str | None = None


@dataclass
class Recomputed:
    """A comparison of utterances extracted again with what is stored: see docs/json.md."""

    utterances: int
    identical: int = 0
    largest_difference: float = 0.0
    codes: int = 0
    differing: int = 0
    tied: int = 0
    problems: list[Problem] = field(default_factory=list)
    """Utterances that differ by more than rounding, or could not be extracted again."""


@dataclass
class Report:
    """The result of `verify`: see docs/json.md."""

    path: str
    shards: int
    utterances: int
    frames: int
    num_bytes: int
    data: bool
    problems: list[Problem] = field(default_factory=list)
    """Damage; with a manifest, also what the version lacks of it."""
    failed: int = 0
    """The number of utterances (of the manifest, if given) that failed: no shard has
    them, or only an older item."""
    surplus: int = 0
    repeated: int = 0
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    shards_left_out: int = 0
    damaged_utterances: int | None = 0
    """The number of utterances in damaged shards; None if a shard's document cannot be
    read."""
    kind: str = "frames"
    """The axis of the features."""
    recomputed: Recomputed | None = None
    """The comparison with utterances extracted again. `verify` leaves it None."""

    @property
    def damaged_shards(self) -> list[str]:
        """The names of shards with a problem in them."""
        return sorted({problem.shard for problem in self.problems if problem.shard})
