"""A packed batch: the documents of some rows, gathered straight into these."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.loader.buffers import Buffers, Memory, as_bfloat16, tensor_in
from featcache.loader.dataset import FeatureDataset, Move, cells_of
from featcache.loader.documents import Budget, Documents, frame_versions
from featcache.loader.events import EventBatch
from featcache.loader.mixture import Mixture, item_shape_of
from featcache.loader.packed_rows import Batch
from featcache.loader.packing import Layout
from featcache.loader.shards import Spans
from featcache.loader.transfer import Gathered
from featcache.loader.utterances import DatasetVersion
from featcache.spec import BFLOAT16, Ints, bfloat16_bits

_OF_FRAMES = ("document_ids", "positions", "cu_seqlens", "max_seqlen")
"""The keys of a packed batch that belong to a version of frames."""

OWN_KEYS = (*_OF_FRAMES, "rows", "parts", "sources")
"""The keys of a packed batch that other batches do not have."""

_MEMORY = Buffers(kept=8)
"""Memory for document ids and positions: new memory costs more than to write them."""

_NO_LIMIT = 1e300
"""A duration in seconds that takes all events."""


@dataclass(frozen=True)
class PackedRanges:
    """The frames, or the vectors, that a batch holds of one version."""

    version: DatasetVersion
    """The version of the first source, for what all have in common."""
    parts: Sequence[tuple[DatasetVersion, Spans, Ints]]
    """The spans of each source, and the numbers of their documents."""
    shape: tuple[int, ...]
    """The shape of the tensor, without that of a frame."""
    starts: Ints
    """Where each document begins in the flattened tensor; they rise."""

    levels = None

    def gather(self, out: Memory | None = None, raw: bool = False) -> torch.Tensor:
        """Return the frames, `[*shape, *item_shape]`, padded behind each document."""
        version, spec = self.version, self.version.cache.spec
        item_shape = item_shape_of(version)
        memory = out or (lambda num_bytes: np.empty(num_bytes, np.uint8).data)
        is_bfloat16 = spec.dtype == BFLOAT16
        dtype, padding_value = spec.values_dtype, version.padding_value
        if is_bfloat16:
            dtype, padding_value = np.dtype(np.uint16), bfloat16_bits(padding_value)
        tensor = tensor_in(memory, (*self.shape, *item_shape), dtype)
        flat = tensor.numpy().reshape(-1, *item_shape)
        pieces: list[NDArray[Any]] = [flat[:0]] * len(self.starts)
        # The free frames before each document, and behind the last.
        gaps = np.full(len(self.starts) + 1, len(flat))
        gaps[:-1] = self.starts
        gaps[1:] -= self.starts
        with ExitStack() as reading:
            for of_source, spans, numbers in self.parts:
                frames = of_source.cache.frames(spans, of_source.codebooks)
                reading.enter_context(of_source.cache.read_ahead(frames))
                gaps[numbers + 1] -= spans.counts
                if len(self.parts) == 1:
                    pieces = frames
                    break
                for number, piece in zip(numbers.tolist(), frames, strict=True):
                    pieces[number] = piece
            padding = np.full((int(gaps.max()), *item_shape), padding_value, flat.dtype)
            # From the last gap on, so that the numbers of those before stay.
            for place in np.flatnonzero(gaps)[::-1].tolist():
                pieces.insert(place, padding[: gaps[place]])
            if pieces:  # a rank's last batch may have no document, and so no vector
                np.concatenate(pieces, out=flat)
        return as_bfloat16(tensor) if is_bfloat16 else tensor


class PackedBatch:
    """The documents of a batch. `gather` makes the tensors of frames, and `move` takes all
    other tensors to their device."""

    def __init__(
        self,
        mixture: Mixture,
        budget: Budget,
        batch: Batch,
        gather: Callable[[Gathered], torch.Tensor],
        move: Move,
    ) -> None:
        self._mixture, self._budget = mixture, budget
        self._documents, self._row_of = batch
        self._gather, self._move = gather, move
        self._parts = self._by_source()
        """The sources in the batch, with the numbers of their documents, and these."""

    def _by_source(self) -> list[tuple[FeatureDataset, Ints, Documents]]:
        datasets, documents = [*self._mixture.sources.values()], self._documents
        present = [0]
        if len(datasets) > 1:
            present = np.flatnonzero(np.bincount(documents.sources)).tolist() or [0]
        if len(present) == 1:
            return [(datasets[present[0]], np.arange(len(documents.rows)), documents)]
        numbers = [np.flatnonzero(documents.sources == source) for source in present]
        return [
            (datasets[source], inside, documents.take(inside))
            for source, inside in zip(present, numbers, strict=True)
        ]

    @cached_property
    def _order(self) -> Ints:
        """The order that brings values from source to source into the documents' order."""
        return np.argsort(np.concatenate([numbers for _, numbers, _ in self._parts]))

    def read(self) -> dict[str, Any]:
        """Return the batch, which `PackedLoader` describes."""
        first = self._mixture.first
        read = [self._version(number) for number in range(len(first.versions))]
        batch: dict[str, Any] = {"ids": self._merged(dataset.ids for dataset, *_ in self._parts)}
        for key in ("features", "lengths", *_OF_FRAMES):
            pairs = zip(first.names, read, strict=True)
            values = {name: version[key] for name, version in pairs if key in version}
            batch[key] = values if len(read) > 1 else values[first.names[0]]
        batch["rows"] = self._tensor(self._row_of)
        batch["parts"] = self._tensor(self._documents.parts)
        if len(self._mixture.sources) > 1:
            names = [*self._mixture.sources]
            batch["sources"] = [names[number] for number in self._documents.sources.tolist()]
        for name in first.columns:
            batch[name] = self._merged(dataset.columns[name] for dataset, *_ in self._parts)
        return batch

    def _merged(self, columns: Iterable[Any]) -> Any:
        """Return the values of all documents, of the column of each source."""
        pairs = zip(columns, self._parts, strict=True)
        cells = [cells_of(column, documents.rows) for column, (_, _, documents) in pairs]
        if isinstance(cells[0], np.ndarray):
            return self._tensor(np.concatenate(cells)[self._order])
        if len(cells) == 1:
            return cells[0]
        every = [*chain(*cells)]
        return [every[place] for place in self._order.tolist()]

    def _version(self, number: int) -> dict[str, Any]:
        """Return what the batch has of one version."""
        version = self._mixture.first.versions[number]
        axis = version.cache.spec.axis
        if axis.has_times:
            events = self._events(number)
            return {"features": events, "lengths": events.lengths}
        if version.name not in self._budget.names:
            starts = np.arange(len(self._row_of))
            one = np.ones_like(starts)
            features = self._frames(number, 0 * one, one, starts.shape, starts)
            return {"features": features, "lengths": None}
        place = self._budget.names.index(version.name)
        row_length, spare = self._budget.rooms[place]
        firsts, counts = self._documents.firsts[place], self._documents.counts[place]
        shape = (self._budget.packing.rows, row_length)
        layout = Layout.of(self._row_of, counts + spare, *shape)
        memory = _MEMORY.take(2 * 4 * math.prod(shape))
        ids, positions = np.frombuffer(memory, np.int32).reshape(2, *shape)
        layout.write(ids.reshape(-1), positions.reshape(-1))
        bounds = layout.bounds
        return {
            "features": self._frames(number, firsts, counts, shape, layout.starts),
            "lengths": self._tensor(counts),
            "document_ids": self._tensor(ids),
            "positions": self._tensor(positions),
            "cu_seqlens": self._tensor(bounds),
            "max_seqlen": int((bounds[1:] - bounds[:-1]).max()),
        }

    def _frames(
        self, number: int, firsts: Ints, counts: Ints, shape: tuple[int, ...], starts: Ints
    ) -> torch.Tensor:
        parts = []
        for dataset, inside, documents in self._parts:
            of_source = dataset.versions[number]
            positions = of_source.positions_of(documents.rows)
            parts.append((of_source, Spans(positions, firsts[inside], counts[inside]), inside))
        version = self._mixture.first.versions[number]
        return self._gather(PackedRanges(version, parts, shape, starts))

    def _events(self, number: int) -> EventBatch:
        """Return the events of all documents; in parts of utterances, the events of the
        part."""
        read = []
        for dataset, inside, documents in self._parts:
            version = dataset.versions[number]
            positions = version.positions_of(documents.rows)
            rate = frame_versions(dataset)[0].cache.spec.axis.exact_rate
            start = duration = None
            if not (documents.are_last & (documents.parts == 0)).all():
                # Not by frames: the first version may end before the others. One division, so
                # that borders are the floats nearest to them, as times of labels are.
                start, ends = (
                    count * self._budget.most * rate.denominator / rate.numerator
                    for count in (documents.parts, documents.parts + 1)
                )
                # The sum of both is the end, without rounding.
                duration = np.where(documents.are_last, _NO_LIMIT, ends - start)
            reader = version.cache.event_reader()
            events = reader.batch(positions, start, duration, torch.from_numpy, version.classes)
            read.append((events, inside[events.rows.numpy()]))
        rows = np.concatenate([rows for _, rows in read])
        order = np.argsort(rows, kind="stable")
        labels: Any = [events.labels for events, _ in read]
        if labels[0] is None:
            labels = None
        elif isinstance(labels[0], torch.Tensor):
            labels = self._move(torch.cat(labels)[order])
        else:
            every = [*chain(*labels)]
            labels = [every[event] for event in order.tolist()]
        return EventBatch(
            self._move(torch.cat([events.times for events, _ in read])[order]),
            self._tensor(rows[order]),
            self._tensor(np.bincount(rows, minlength=len(self._row_of))),
            labels,
        )

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return self._move(torch.from_numpy(array))
