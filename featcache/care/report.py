"""The results of verifying a version."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """Something that is wrong in a version."""

    kind: str
    """The kind of fault: `metadata`, `structure`, `checksum`, `non_finite`, `frames`,
    `missing` …"""
    message: str
    shard: str | None = None
    """The damaged shard, if any."""
    id: str | None = None
    """The utterance, if the fault is in a single one."""


@dataclass
class Recomputed:
    """A comparison of utterances that were extracted again with what is stored."""

    utterances: int
    identical: int = 0
    """The number of utterances that are the same bit for bit."""
    largest_difference: float = 0.0
    codes: int = 0
    """The number of codes compared; 0 for float features."""
    differing: int = 0
    tied: int = 0
    """The number of differing codes in frames where rounding decides between codewords."""
    problems: list[Problem] = field(default_factory=list)
    """Utterances that differ by more than rounding, or could not be extracted again."""


@dataclass(frozen=True)
class Report:
    """The result of `verify`."""

    path: str
    shards: int
    utterances: int
    """The number of utterances in sound shards."""
    frames: int
    num_bytes: int
    """The stored bytes of features and side arrays in sound shards."""
    data: bool
    """True if the bytes of the features were read."""
    problems: list[Problem] = field(default_factory=list)
    """Damage; with a manifest, also what the version lacks of it."""
    failed: int = 0
    """The number of utterances (of the manifest, if given) that failed: no shard has
    them, or only an older item."""
    surplus: int = 0
    """The number of utterances in the version that are not in the manifest."""
    repeated: int = 0
    """The number of items that only cost space, since an equal item of their utterance
    counts."""
    notes: list[str] = field(default_factory=list)
    """Remarks that are not about damage."""
    interrupted: bool = False
    """True if the verification was stopped. The report is then about the shards that were
    checked before."""
    shards_left_out: int = 0
    """The number of shards that were not checked before the stop."""
    damaged_utterances: int | None = 0
    """The number of utterances in damaged shards, which `utterances` leaves out; None if
    a shard's document cannot be read."""
    recomputed: Recomputed | None = None
    """The comparison with utterances extracted again. `verify` leaves it None."""

    @property
    def damaged_shards(self) -> list[str]:
        """The names of shards with a problem in them."""
        return sorted({problem.shard for problem in self.problems if problem.shard})
