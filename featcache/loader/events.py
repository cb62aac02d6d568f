"""Events as training reads them: of one utterance, or of a batch, cut to a span of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ArgumentError, DamagedError
from featcache.loader.shards import Shards, Spans
from featcache.spec import LABELS, Events, FeatureSpec, Ints

if TYPE_CHECKING:
    import torch


class Event(NamedTuple):
    """An event. Its times are in seconds from the beginning of what was read."""

    start: float
    end: float
    label: str | None
    """The label; None if the version has no labels."""


class EventBatch(NamedTuple):
    """The events of several utterances, one utterance after the other."""

    times: torch.Tensor
    """Start and end of each event in seconds from the beginning of its utterance, or of the
    window in it; float64 `[events, 2]`."""
    rows: torch.Tensor
    """The number of each event's utterance in the batch, int64 `[events]`."""
    lengths: torch.Tensor
    """The number of events of each utterance, int64 `[batch]`."""
    labels: list[str] | torch.Tensor | None
    """The label of each event; its number among classes, int64 `[events]`; or None."""

    @classmethod
    def joined(cls, batches: Sequence[EventBatch]) -> EventBatch:
        """Join batches, one after the other."""
        import torch

        lengths = torch.cat([batch.lengths for batch in batches])
        rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        labels: Any = [batch.labels for batch in batches]
        if isinstance(labels[0], torch.Tensor):
            labels = torch.cat(labels)
        else:
            labels = None if labels[0] is None else [*chain(*labels)]
        return cls(torch.cat([batch.times for batch in batches]), rows, lengths, labels)


@dataclass(frozen=True)
class EventReader:
    """Reads the events of a version. Arguments and errors are those of `Cache.batch`."""

    shards: Shards
    spec: FeatureSpec
    frames: Callable[[Spans], list[NDArray[np.float64]]]
    """Returns the times of all events of some utterances."""

    def item(
        self, position: int, start: float | None = None, duration: float | None = None
    ) -> list[Event]:
        """Return the events of an utterance."""
        times, _, labels = self.read(np.array([position]), start, duration)
        texts: Sequence[str | None] = labels or [None] * len(times)
        pairs = zip(times.tolist(), texts, strict=True)
        return [Event(first, last, label) for (first, last), label in pairs]

    def batch(
        self,
        positions: Ints,
        start: ArrayLike | None,
        duration: ArrayLike | None,
        to_tensor: Callable[[NDArray[Any]], torch.Tensor],
        classes: Mapping[str, int] | None = None,
    ) -> EventBatch:
        """Return the events of several utterances. `classes` has the number of each label;
        another label raises ArgumentError."""
        times, lengths, labels = self.read(positions, start, duration)
        rows = np.repeat(np.arange(len(positions)), lengths)
        numbers: list[str] | torch.Tensor | None = labels
        if classes is not None and labels is not None:
            try:
                numbers = to_tensor(np.array([classes[label] for label in labels], np.int64))
            except KeyError as unknown:
                raise ArgumentError(
                    f"the label {unknown} of {self.shards.version.path} is not in classes=: add "
                    "it, or read labels as text, and number them in a transform="
                ) from None
        return EventBatch(to_tensor(times), to_tensor(rows), to_tensor(lengths), numbers)

    def labels(self, positions: Iterable[int]) -> list[str]:
        """Return the labels of some utterances, one utterance after the other."""
        text = b"".join(self.shards.side(LABELS, position) for position in positions)
        return text.decode(errors="replace").split("\0")[:-1]

    def read(
        self, positions: Ints, start: ArrayLike | None = None, duration: ArrayLike | None = None
    ) -> tuple[NDArray[np.float64], Ints, list[str] | None]:
        """Return the times of some utterances' events, how many each has, and their labels."""
        lengths = np.asarray(self.shards.index.num_frames[positions])
        with_events = positions[lengths > 0], 0 * lengths[lengths > 0], lengths[lengths > 0]
        times = np.concatenate([np.empty((0, 2)), *self.frames(Spans(*with_events))])
        labels = None
        if self.spec.has_labels:
            labels = self.labels(positions.tolist())
            if len(labels) != len(times):
                path = self.shards.version.path
                what = f"{len(times)} events have {len(labels)} labels"
                raise DamagedError(f"{path}: damaged: {what}", path)
        if start is None and duration is None:
            return times, lengths, labels
        firsts = 0.0 if start is None else start
        Events().span(lengths, firsts, duration)  # which checks them
        seconds = np.inf if duration is None else duration
        rows = np.repeat(np.arange(len(positions)), lengths)
        of_events = [
            np.broadcast_to(of_spans, len(positions))[rows] for of_spans in (firsts, seconds)
        ]
        times, taken = Events().cut(times, *of_events)
        if labels is not None:
            labels = [labels[number] for number in taken.tolist()]
        return times, np.bincount(rows[taken], minlength=len(positions)), labels
