"""The result of a probe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from featcache.spec import FeatureSpec


@dataclass(frozen=True)
class Measured:
    """How one policy fared at one precision. Shares are of codes; for float features, of frames.

    Attributes:
        policy: `single`, `equal_length`, `padded`; of extractors without rows, `single` and their `batching`.
        precision: `fp32`, `tf32`, `bf16`, `fp16`.
        is_declared: whether the extractor declares that it can stand the policy.
        error: why it could not be measured; None where it was.
        differing: the share that differs from the reference.
        tied: of it, what rounding accounts for.
        mismatch: of it, what rounding does not account for.
        disturbed: the share of frames whose latents or features batching moves by more than rounding: held to each
            utterance alone at this same precision. Of codes without known latents, those in which a code differs. A
            code may stay what it is though its frame is disturbed, as in the silence at the end of a clip; in another
            clip it will not.
        relative: the largest difference of a frame from the reference, relative in norm: of its latents, where codes
            have them, or its features.
        absolute: the largest difference of any number in them.
        first: disturbed frames are within so many frames of their utterance's beginning.
        last: and within so many of its end.
        repeatable: whether other strangers left every bit alone; None of utterances alone.
        times_real_time: seconds of audio in a second.
    """

    policy: str
    precision: str
    is_declared: bool
    error: str | None = None
    differing: float = 0.0
    tied: float = 0.0
    mismatch: float = 0.0
    disturbed: float = 0.0
    relative: float = 0.0
    absolute: float = 0.0
    first: int = 0
    last: int = 0
    repeatable: bool | None = None
    times_real_time: float = 0.0


@dataclass(frozen=True)
class Chunks:
    """What cutting into chunks changes: each utterance in chunks, alone, in fp32, against the whole of it.

    Attributes:
        exact: whether the overlap holds the model's receptive field, so that nothing may change.
        utterances: of the sample that are longer than a chunk; without any, nothing was measured.
        differing: the share of codes, or frames, that differs.
        mismatch: of it, what rounding does not account for.
        relative: the largest difference of a frame, relative in norm.
    """

    exact: bool
    utterances: int
    differing: float
    mismatch: float
    relative: float


@dataclass(frozen=True)
class Probe:
    """The result of a probe.

    Attributes:
        config: its name.
        fingerprint: of the version that it fills.
        extractor: as the config names it.
        declared: the loosest policy that the extractor declares.
        precision: the config's.
        device: its name.
        threads: that computed.
        date: ISO 8601, in UTC.
        made_by: the versions of featcache and of the libraries.
        utterances: how many were measured.
        skipped: those of the sample that could not be, each with the reason.
        shortest: seconds.
        longest: seconds.
        seconds: of audio.
        frames: of all utterances.
        spec: of the extractor's features.
        rounding: what it may do to a frame, relative in norm, by precision; empty where no bit may differ.
        measured: one entry for each policy and precision.
        chunks: what chunks change; None where the config has none.
    """

    config: str
    fingerprint: str
    extractor: str
    declared: str
    precision: str
    device: str
    threads: int
    date: str
    made_by: dict[str, str]
    utterances: int
    skipped: list[str]
    shortest: float
    longest: float
    seconds: float
    frames: int
    spec: FeatureSpec
    rounding: dict[str, float]
    measured: list[Measured]
    chunks: Chunks | None

    @property
    def fastest(self) -> Measured | None:
        """The fastest of the declared policies, at any precision, under which nothing is mismatched or disturbed."""
        able = [one for one in self.measured if one.is_declared and one.error is None]
        clean = [one for one in able if not one.mismatch and not one.disturbed]
        return max(clean, key=lambda one: one.times_real_time, default=None)

    def document(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {**asdict(self), "fastest": self.fastest and asdict(self.fastest)}
