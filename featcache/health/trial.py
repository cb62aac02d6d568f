"""Trial runs of an extractor: batches of sampled utterances and cuts of others, computed as in extraction."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from featcache.device import Device
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.codec import CodecExtractor
from featcache.extractors.rows import RowExtractor, Rows
from featcache.health.differences import Values
from featcache.health.sampling import Sampled

_DRAWS = 20


@dataclass(frozen=True)
class Batch:
    """What is computed in one call.

    Attributes:
        clips: in the order in which they are given.
        wanted: which of the sample's clips some of them are: position here -> number there.
        seconds: of audio that count for the time.
    """

    clips: list[Sampled]
    wanted: dict[int, int]
    seconds: float


def compute(extractor: Extractor[Params], batches: Sequence[Batch], device: Device) -> tuple[list[Values], float]:
    """Compute batches, as many at once as extraction does.

    Returns the wanted clips' values, in the order of their numbers, and seconds of audio in a second.

    Raises:
        RuntimeError: from the model.
    """
    num_codebooks = len(extractor.spec.codebook_sizes)
    seen = with_latents(extractor) if isinstance(extractor, CodecExtractor) else extractor

    def values(features: torch.Tensor) -> Values:
        if seen is extractor:
            return Values(features if features.is_floating_point() else features.long())
        return Values(features[:, :num_codebooks].long(), features[:, num_codebooks:])

    def one(batch: Batch) -> dict[int, Values]:
        with device.slot():
            waveforms = device.upload([clip.waveform for clip in batch.clips])
            features = seen.extract([Clip(clip.id, one) for clip, one in zip(batch.clips, waveforms, strict=True)])
            return {number: values(features[position].cpu()) for position, number in batch.wanted.items()}

    with ThreadPoolExecutor(device.workers) as pool:
        started = perf_counter()
        found = {number: one for by_number in pool.map(one, batches) for number, one in by_number.items()}
        seconds = perf_counter() - started
    return [found[number] for number in sorted(found)], sum(batch.seconds for batch in batches) / seconds


def row_batches(
    extractor: RowExtractor[Params], clips: Sequence[Sampled], device: Device, seed: int | None
) -> list[Batch]:
    """A batch for each clip, of the shape that its length makes: with strangers, or with copies of itself.

    Strangers are cuts of the other clips, as many as fill the batch, of lengths that the extractor's policy lets be
    together, in any order. All rows of a padded batch count for the time, since any corpus fills them: there are few
    padded lengths. Of a batch of equal lengths, as many count as clips of the sample have the length.

    Args:
        extractor: with its policy set.
        clips: the sample.
        device: where the batches will be computed.
        seed: of the strangers and their order; None for each clip's copies.
    """
    same_length = Counter(len(clip.waveform) for clip in clips)
    batches = []
    for number, clip in enumerate(clips):
        rows = 1 if seed is None else clips_in_batch(extractor, len(clip.waveform), device)
        generator = np.random.default_rng((seed or 0, number))
        together = [_stranger(extractor, clips, number, generator) for _ in range(rows - 1)]
        position = int(generator.integers(rows))
        together.insert(position, clip)
        counted = sum(len(one.waveform) for one in together)
        if extractor.chosen_batching == "equal_length":
            counted = min(rows, same_length[len(clip.waveform)]) * len(clip.waveform)
        batches.append(Batch(together, {position: number}, counted / extractor.spec.sample_rate))
    return batches


def clips_in_batch(extractor: RowExtractor[Params], num_samples: int, device: Device) -> int:
    """How many clips of a length fill a batch; of clips in chunks, how many fill one of the longest chunks."""
    pieces = extractor.pieces(num_samples)
    longest = extractor.padded_length(max(piece.num_samples for piece in pieces))
    return math.ceil(extractor.rows(longest, device.torch_device) / len(pieces))


def with_latents(extractor: CodecExtractor[Any]) -> CodecExtractor[Any]:
    """The extractor, but that its features are float64 `[R, F, Q + D]`: codes, and the latents they were made of."""
    seeing = copy.copy(extractor)

    def encode(waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        seen: list[torch.Tensor] = []
        this_call = copy.copy(extractor)

        def latents(waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
            seen.append(extractor.latents(waveforms, num_samples))
            return seen[-1]

        this_call.latents = latents  # type: ignore[method-assign]
        rows = this_call.encode(waveforms, num_samples)
        (one,) = seen
        return Rows(torch.cat([rows.features.double(), one.double()], dim=2), rows.side)

    seeing.encode = encode  # type: ignore[method-assign]
    return seeing


def _stranger(
    extractor: RowExtractor[Params], clips: Sequence[Sampled], number: int, generator: np.random.Generator
) -> Sampled:
    """A cut of a clip other than `number`, repeated where it is too short, that may share a batch with `number`."""
    num_samples = _length_beside(extractor, len(clips[number].waveform), generator)
    others = [other for other in range(len(clips)) if other != number] or [number]
    clip = clips[int(generator.choice(others))]
    first = int(generator.integers(len(clip.waveform)))
    return Sampled(f"{clip.id} from {first}", np.resize(np.roll(clip.waveform, -first), num_samples))


def _length_beside(extractor: RowExtractor[Params], num_samples: int, generator: np.random.Generator) -> int:
    """A length near `num_samples` whose padded length is the same; drawn a few times, and then `num_samples`."""
    padded = extractor.padded_length(num_samples)
    for length in generator.integers(max(1, num_samples * 7 // 8), padded + 1, _DRAWS).tolist():
        if extractor.padded_length(length) == padded and extractor.num_frames(length):
            return int(length)
    return num_samples
