"""A packed batch: the documents of some rows, gathered straight into these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.loader.cache import Memory, tensor_in
from featcache.loader.data_loader import Gathered
from featcache.loader.dataset import FeatureDataset, Move, cells_of
from featcache.loader.documents import Budget, Documents
from featcache.loader.events import EventBatch
from featcache.loader.mixture import Mixture
from featcache.loader.packing import boundaries, document_ids, starts_in_rows
from featcache.loader.shards import Spans
from featcache.loader.utterances import DatasetVersion
from featcache.spec import Ints

OWN_KEYS = ("document_ids", "positions", "cu_seqlens", "max_seqlen", "rows", "parts", "sources")
"""The keys of a packed batch that those of other batches do not have."""

_NO_LIMIT = 1e300
"""A duration in seconds that takes all events."""


@dataclass(frozen=True)
class _Part:
    """The documents of one source in a batch."""

    dataset: FeatureDataset
    numbers: Ints
    """Their numbers in the batch."""
    documents: Documents

    def version(self, number: int) -> DatasetVersion:
        """Return one of the source's versions."""
        return self.dataset.versions[number]

    def positions(self, number: int) -> Ints:
        """Return the documents' positions in a version."""
        return self.version(number).positions_of(self.documents.rows)


@dataclass(frozen=True)
class PackedRanges:
    """The frames, or the vectors, that a batch holds of one version."""

    version: DatasetVersion
    """The version of the first source, for what all have in common."""
    parts: Sequence[tuple[DatasetVersion, Spans, Ints]]
    """The spans of each source, and their numbers in the batch."""
    shape: tuple[int, ...]
    """The shape of the tensor, without that of a frame."""
    starts: Ints
    """Where each document begins in the flattened tensor; they rise."""

    levels = None

    def gather(self, out: Memory | None = None, raw: bool = False) -> torch.Tensor:
        """Return the frames, `[*shape, *item_shape]`, padded behind each document."""
        version, cache = self.version, self.version.cache
        item_shape = cache.spec.item_shape
        if version.codebooks is not None:
            item_shape = (version.codebooks,)
        dtype = np.dtype(cache.spec.dtype)
        memory = out or (lambda num_bytes: np.empty(num_bytes, np.uint8).data)
        tensor = tensor_in(memory, (*self.shape, *item_shape), dtype)
        flat = tensor.numpy().reshape(-1, *item_shape)
        if all(of_source.cache.are_views for of_source, *_ in self.parts):
            self._concatenate(flat)
        else:
            self._scatter(flat)
        return tensor

    def _concatenate(self, flat: NDArray[Any]) -> None:
        """Copy documents as they are stored, and padding, in one call."""
        version, num_documents = self.version, len(self.starts)
        views: list[NDArray[Any]] = [flat[:0]] * num_documents
        counts = np.zeros(num_documents, np.int64)
        with ExitStack() as reading:
            for of_source, spans, numbers in self.parts:
                frames = of_source.cache.views(spans, of_source.codebooks)
                reading.enter_context(of_source.cache.read_ahead(frames))
                counts[numbers] = spans.counts
                for number, view in zip(numbers.tolist(), frames, strict=True):
                    views[number] = view
            begins = np.append(self.starts + counts, 0)
            gaps = np.append(self.starts, len(flat)) - np.roll(begins, 1)
            value = np.array(version.padding_value, flat.dtype)
            padding = np.broadcast_to(value, (int(gaps.max()), *flat.shape[1:]))
            padded = np.flatnonzero(gaps)[::-1]
            for place, gap in zip(padded.tolist(), gaps[padded].tolist(), strict=True):
                views.insert(place, padding[:gap])
            np.concatenate(views, out=flat)

    def _scatter(self, flat: NDArray[Any]) -> None:
        """Check or compute each document in its place."""
        version = self.version
        bounds = [*self.starts.tolist(), len(flat)]
        flat[: bounds[0]] = version.padding_value
        rooms = [flat[begin:end] for begin, end in pairwise(bounds)]
        for of_source, spans, numbers in self.parts:
            of_source.cache.scatter(
                spans,
                [rooms[number] for number in numbers.tolist()],
                codebooks=of_source.codebooks,
                padding_value=version.padding_value,
            )


def read_packed(
    mixture: Mixture,
    budget: Budget,
    num_rows: int,
    documents: Documents,
    row_of: Ints,
    gather: Callable[[Gathered], torch.Tensor],
    move: Move,
) -> dict[str, Any]:
    """Return the batch of documents in rows, which `PackedLoader` describes: `gather` makes the
    tensors of frames, and `move` takes all other tensors to their device."""
    batch = _Batch(mixture, budget, num_rows, documents, row_of, gather, move)
    first = mixture.first
    read = {version.name: batch.version(number) for number, version in enumerate(first.versions)}
    keys = ("features", "lengths", *OWN_KEYS[:4])
    values: dict[str, Any] = {}
    for key in keys:
        by_name = {name: of_version[key] for name, of_version in read.items() if key in of_version}
        values[key] = by_name if len(first.versions) > 1 else by_name[first.names[0]]
    return {"ids": batch.ids(), **values, **batch.of_documents(), **batch.columns()}


class _Batch:
    """The documents of a batch, by source."""

    def __init__(
        self,
        mixture: Mixture,
        budget: Budget,
        num_rows: int,
        documents: Documents,
        row_of: Ints,
        gather: Callable[[Gathered], torch.Tensor],
        move: Move,
    ) -> None:
        self._mixture, self._budget, self._num_rows = mixture, budget, num_rows
        self._gather, self._move = gather, move
        self._documents, self._row_of = documents, row_of
        self._parts = []
        for number, dataset in enumerate(mixture.sources.values()):
            numbers = np.flatnonzero(documents.sources == number)
            if len(numbers):
                self._parts.append(_Part(dataset, numbers, documents.take(numbers)))
        numbers = np.concatenate([documents.rows[:0], *(part.numbers for part in self._parts)])
        self._back = np.argsort(numbers, kind="stable")
        """The order that brings what is read source by source into that of the batch."""

    def version(self, number: int) -> dict[str, Any]:
        """Return the part of the batch that belongs to one version."""
        version = self._mixture.first.versions[number]
        axis = version.cache.spec.axis
        if axis.has_times:
            events = self._events(number)
            return {"features": events, "lengths": events.lengths}
        if not axis.exact_rate:
            num_documents = len(self._documents)
            ones = np.ones(num_documents, np.int64)
            starts = np.arange(num_documents)
            ranges = self._ranges(number, 0 * ones, ones, (num_documents,), starts)
            return {"features": self._gather(ranges), "lengths": None}
        return self._frames(number)

    def _frames(self, number: int) -> dict[str, Any]:
        versions = self._mixture.first.versions[:number]
        place = sum(bool(version.cache.spec.axis.exact_rate) for version in versions)
        row_length = self._budget.row_lengths[place]
        firsts, counts = self._documents.firsts[place], self._documents.counts[place]
        rooms = counts + self._budget.spare_frames[place]
        starts = self._row_of * row_length + starts_in_rows(self._row_of, rooms)
        shape = (self._num_rows, row_length)
        ranges = self._ranges(number, firsts, counts, shape, starts)
        ids, positions = document_ids(starts, starts + rooms, self._num_rows * row_length)
        bounds = boundaries(starts, starts + rooms, *shape)
        return {
            "features": self._gather(ranges),
            "lengths": self._tensor(counts),
            "document_ids": self._tensor(ids.reshape(shape)),
            "positions": self._tensor(positions.reshape(shape)),
            "cu_seqlens": self._tensor(bounds),
            "max_seqlen": int(np.diff(bounds).max()),
        }

    def _ranges(
        self, number: int, firsts: Ints, counts: Ints, shape: tuple[int, ...], starts: Ints
    ) -> PackedRanges:
        parts = [
            (
                part.version(number),
                Spans(part.positions(number), firsts[part.numbers], counts[part.numbers]),
                part.numbers,
            )
            for part in self._parts
        ]
        return PackedRanges(self._mixture.first.versions[number], parts, shape, starts)

    def _events(self, number: int) -> EventBatch:
        """Return the events of all documents; in parts of utterances, those of the part."""
        read = [self._events_of(part, number) for part in self._parts]
        rows = np.concatenate([np.arange(0), *(part.numbers[events.rows] for part, events in read)])
        order = np.argsort(rows, kind="stable")
        times = np.concatenate([np.empty((0, 2)), *(events.times for _, events in read)])
        labels: Any = [events.labels for _, events in read]
        if not labels or labels[0] is None:
            labels = None
        elif isinstance(labels[0], torch.Tensor):
            labels = self._tensor(np.concatenate(labels)[order])
        else:
            every = [*chain(*labels)]
            labels = [every[event] for event in order.tolist()]
        return EventBatch(
            self._tensor(times[order]),
            self._tensor(rows[order]),
            self._tensor(np.bincount(rows, minlength=len(self._documents))),
            labels,
        )

    def _events_of(self, part: _Part, number: int) -> tuple[_Part, EventBatch]:
        version = part.version(number)
        rate = float(self._budget.rate)
        firsts, counts = part.documents.firsts[0], part.documents.counts[0]
        durations = np.where(part.documents.are_last, _NO_LIMIT, counts / rate)
        start = duration = None
        if not (part.documents.are_last & (firsts == 0)).all():
            start, duration = firsts / rate, durations
        reader = version.cache.event_reader()
        positions = part.positions(number)
        return part, reader.batch(positions, start, duration, torch.from_numpy, version.classes)

    def ids(self) -> list[str]:
        """Return the documents' ids."""
        ids = [part.dataset.ids.texts(part.documents.rows) for part in self._parts]
        every = [*chain(*ids)]
        return [every[place] for place in self._back.tolist()]

    def of_documents(self) -> dict[str, Any]:
        """Return what a batch says of each document."""
        documents = self._documents
        values: dict[str, Any] = {
            "rows": self._tensor(self._row_of),
            "parts": self._tensor(documents.parts),
        }
        if len(self._mixture.sources) > 1:
            names = [*self._mixture.sources]
            values["sources"] = [names[number] for number in documents.sources.tolist()]
        return values

    def columns(self) -> dict[str, Any]:
        """Return the manifest's columns, one value for each document."""
        return {name: self._column(name) for name in self._mixture.first.columns}

    def _column(self, name: str) -> Any:
        datasets = [(part.dataset, part.documents.rows) for part in self._parts]
        if not datasets:
            datasets = [(self._mixture.first, np.arange(0))]
        cells = [cells_of(dataset.columns[name], rows) for dataset, rows in datasets]
        if isinstance(cells[0], np.ndarray):
            return self._tensor(np.concatenate(cells)[self._back])
        every = [*chain(*cells)]
        return [every[place] for place in self._back.tolist()]

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return self._move(torch.from_numpy(array))
