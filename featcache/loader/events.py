"""Events as training reads them: of one utterance, or of a batch, cut to a span of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ArgumentError, DamagedError
from featcache.loader.shards import Shards, Spans
from featcache.spec import LABELS, Events, FeatureSpec, Ints

if TYPE_CHECKING:
    import torch

_AXIS = Events()


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
        """Join batches of one utterance each."""
        import torch

        lengths = torch.cat([batch.lengths for batch in batches])
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        labels: Any = [batch.labels for batch in batches]
        if isinstance(labels[0], torch.Tensor):
            labels = torch.cat(labels)
        elif labels[0] is not None:
            labels = [label for of_one in labels for label in of_one]
        else:
            labels = None
        return cls(torch.cat([batch.times for batch in batches]), rows, lengths, labels)


@dataclass(frozen=True)
class EventReader:
    """Reads the events of a version. Arguments and errors are those of `Cache.batch`."""

    shards: Shards
    spec: FeatureSpec
    check: bool

    def item(
        self, position: int, start: float | None = None, duration: float | None = None
    ) -> list[Event]:
        """Return the events of an utterance."""
        times, _, labels = self._read(np.array([position]), start, duration)
        if labels is None:
            return [Event(start, end, None) for start, end in times.tolist()]
        pairs = zip(times.tolist(), labels, strict=True)
        return [Event(start, end, label) for (start, end), label in pairs]

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
        times, lengths, labels = self._read(positions, start, duration)
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

    def labels(self, positions: Ints) -> Iterator[list[str]]:
        """Yield the labels of each utterance."""
        for position in positions.tolist():
            text = self.shards.side(LABELS, position).tobytes()
            yield text.decode(errors="replace").split("\0")[:-1]

    def _read(
        self, positions: Ints, start: ArrayLike | None, duration: ArrayLike | None
    ) -> tuple[NDArray[np.float64], Ints, list[str] | None]:
        """Return the times of some utterances' events, how many each has, and their labels."""
        lengths = np.asarray(self.shards.index.num_frames[positions])
        times = self._times(positions[lengths > 0], lengths[lengths > 0])
        labels = None
        if self.spec.has_labels:
            labels = [label for several in self.labels(positions) for label in several]
            if len(labels) != len(times):
                path = self.shards.version.path
                what = f"{len(times)} events have {len(labels)} labels"
                raise DamagedError(f"{path}: damaged: {what}", path)
        if start is None and duration is None:
            return times, lengths, labels
        if start is None:
            start = 0.0
        _AXIS.span(lengths, start, duration)  # which checks them
        if duration is None:
            duration = np.inf
        rows = np.repeat(np.arange(len(positions)), lengths)
        firsts, seconds = (
            np.broadcast_to(np.asarray(of_spans, np.float64), len(positions))[rows]
            for of_spans in (start, duration)
        )
        times, taken = _AXIS.cut(times, firsts, seconds)
        if labels is not None:
            labels = [labels[number] for number in taken.tolist()]
        return times, np.bincount(rows[taken], minlength=len(positions)), labels

    def _times(self, positions: Ints, lengths: Ints) -> NDArray[np.float64]:
        """Return the times of all events of utterances that have some."""
        arrays = self.shards.frames(Spans(positions, np.zeros_like(lengths), lengths))
        with self.shards.read_ahead(arrays):
            if self.check:
                pairs = zip(positions.tolist(), arrays, strict=True)
                arrays = [
                    self.shards.load_checked(position, array, np.empty_like(array))
                    for position, array in pairs
                ]
            return np.concatenate([np.empty((0, 2)), *arrays])
