"""Batches of rows that hold whole documents, for language models of speech."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from featcache.errors import ArgumentError, FeatcacheWarning, counted
from featcache.loader.data_loader import DataLoader
from featcache.loader.dataset import FeatureDataset
from featcache.loader.documents import Overflow, Packing
from featcache.loader.mixture import Mixture
from featcache.loader.packed_batch import OWN_KEYS, PackedBatch
from featcache.loader.packed_rows import Batch, PackedRows
from featcache.loader.utterances import DatasetVersion

_ONLY = "data"
"""The name of a single dataset."""


class Share(NamedTuple):
    """The share of a source."""

    asked: float
    """The share that the weights give."""
    reached: float
    """The share in the rows so far, of all ranks; NaN before the first row."""
    amount: float
    """The tokens, seconds or utterances in these rows."""


class PackedLoader(DataLoader, IterableDataset[dict[str, Any]]):
    """Batches of rows of a fixed number of tokens, which hold whole utterances, the documents.
    A token is a frame of the first version of frames.

    Documents go into rows by best fit, a window of rows at a time. All batches have the same
    shape, and every rank gets the same number of batches: at the end of an epoch, rows may be
    empty. The rows and their order depend only on the utterances, `tokens`, `spare`,
    `overflow`, `window`, `seed`, the mixture and the epoch, on every machine.

    A batch is a dictionary of

    * `features`: `[rows, tokens, *item_shape]`, padded with the dataset's `padding_value`;
      vectors are `[documents, *item_shape]`, and events an `EventBatch` by document;
    * `document_ids`: int32 `[rows, tokens]`, the number of each token's document in the
      batch; -1 in padding;
    * `positions`: int32 `[rows, tokens]`, from 0 in each document; 0 in padding;
    * `cu_seqlens`: int32 `[sequences + 1]`, where each document, and the padding of each row,
      begins and ends in the flattened rows;
    * `max_seqlen`: an int, the longest of these;
    * `ids`, `lengths` and the columns of the manifest, for each document;
    * `rows`, `parts`: int64 `[documents]`, the row of each document; and the number of the
      part, 0 for whole utterances;
    * `sources`: the name of each document's source, of mixtures.

    With several versions, all but the last three items are dictionaries by the versions'
    names. Rows of another version have as many frames as last as long, rounded up.

    The loader is also an `IterableDataset`: torchdata's
    `StatefulDataLoader(loader, batch_size=None, num_workers=2)` shares the batches of a rank
    among its workers.

    Args:
        mixture: A `Mixture`; or a dataset, each of whose utterances comes once in an epoch.
        tokens: The tokens of a row.
        rows: The rows of a batch.
        overflow: The treatment of utterances that are longer than a row: `"error"` refuses
            them; `"split"` makes consecutive parts of them; `"drop"` leaves them out. A
            `FeatcacheWarning` counts what is split or dropped, and `long` has the counts.
        window: How many rows to pack together. Windows of more rows have fewer free tokens,
            and need more time and memory.
        spare: Tokens that stay free behind each document, and belong to it: for an end, or a
            delay pattern.
        seed: The seed of the order; not negative.
        rank: The rank whose rows to yield. All other arguments must be the same for all ranks.
        world_size: The number of ranks.
        device: As of `featcache.DataLoader`, and so are all other arguments.

    Attributes:
        mixture: The mixture.
        long: By source, how many utterances are longer than a row, and their tokens.

    Raises:
        ArgumentError: The arguments do not fit the mixture or each other, or utterances are
            longer than a row.
    """

    def __init__(
        self,
        mixture: Mixture | FeatureDataset,
        *,
        tokens: int,
        rows: int,
        overflow: Overflow,
        window: int = 256,
        spare: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        prefetch: int | None = None,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        if isinstance(mixture, FeatureDataset):
            mixture = Mixture.union({_ONLY: mixture})
        if not isinstance(mixture, Mixture):
            raise ArgumentError(
                f"mixture is a {type(mixture).__name__}: give a FeatureDataset, or a Mixture of "
                "several"
            )
        hidden = [name for name in OWN_KEYS if name in mixture.first.columns]
        if hidden:
            raise ArgumentError(
                f"the column {hidden[0]!r} would hide the batch's own: leave it out by columns="
            )
        packing = Packing(
            tokens=tokens,
            rows=rows,
            overflow=overflow,
            window=window,
            spare=spare,
            seed=seed,
            rank=rank,
            world_size=world_size,
        )
        self.mixture = mixture
        self._packed = PackedRows(mixture, packing)
        batches: Any = self._packed
        super().__init__(
            mixture.first,
            batches,
            device=device,
            prefetch=prefetch,
            dtype=dtype,
            transform=transform,
        )
        self._packed.remember(self.prefetch + 2)
        self._makes_batches = True
        pairs = zip(mixture.sources, self._packed.sources, strict=True)
        self.long = {name: source.long for name, source in pairs}
        num_long, num_tokens = map(sum, zip(*self.long.values(), strict=True))
        if num_long:
            treated = "split" if overflow == "split" else "left out"
            warnings.warn(
                f"{counted(num_long, 'utterance has', 'utterances have')} more than "
                f"{self._packed.budget.most:,} tokens, {num_tokens:,} in all: {treated}",
                FeatcacheWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        settings = f"device={str(self.device)!r}, prefetch={self.prefetch}"
        return f"PackedLoader({self.mixture!r}, {self.batch_sampler!r}, {settings})"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Begin the epoch, or go on at the place of a loaded state. A weighted mixture goes on
        behind the last batch that was received."""
        if self.mixture.is_endless:
            self._packed.go_to(self._packed.position(self._consumed))
        return super().__iter__()

    @property
    def shares(self) -> dict[str, Share]:
        """The share of each source in the rows of all ranks so far, in this epoch: as asked,
        and as reached."""
        reached = self._packed.reached(self._packed.position(self._consumed))
        total = sum(reached) or math.nan
        triples = zip(self.mixture.sources, self._packed.shares, reached, strict=True)
        return {name: Share(asked, amount / total, amount) for name, asked, amount in triples}

    def __len__(self) -> int:
        """Return the number of batches of the epoch, for which all of it is packed. Raises
        TypeError for a mixture without an end."""
        return len(self._packed)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training after the batches that it has received: plain numbers and
        text, for all ranks at the same step."""
        return self._packed.state_dict(consumed=self._consumed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration give the rows that were left when the state was taken, also
        to another number of ranks, workers or rows in a batch. Raises ArgumentError if it is
        not such a state, or one of other utterances or rules."""
        self._packed.load_state_dict(state)
        self._latest.ended = None

    @property
    def _consumed(self) -> int:
        """The batches of the sampler's pass that training has received."""
        return min(self._packed.given, self._latest.received)

    @property
    def _versions(self) -> list[DatasetVersion]:
        return self.mixture.versions

    def _read(self, rows: list[Any], epoch: int) -> dict[str, Any]:
        batch = Batch(*rows)
        return PackedBatch(
            self.mixture, self._packed.budget, batch, self._gather, self._transfer.move
        ).read()
