"""Extract some utterances again, each alone, and compare: does today's machine give what is stored?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.audio import to_waveform
from featcache.config import Config, config_from
from featcache.device import Device
from featcache.errors import AudioError
from featcache.manifest import Utterance
from featcache.pipeline import compute, decode_all
from featcache.store.check import Problem
from featcache.store.index import Index
from featcache.store.runs import asked_of
from featcache.store.shard import Item, Shard
from featcache.store.version import Version

_TOLERANCE = {"float16": 2.0**-8, "float32": 1e-4}
"""Of float features, relative to values of 1 and more: four units in float16's last place."""


@dataclass(frozen=True)
class Recomputed:
    """What came of extracting some utterances again.

    Attributes:
        utterances: how many.
        identical: how many of them bit for bit.
        largest_difference: of any value.
        problems: what differs by more than rounding, or could not be extracted again.
    """

    utterances: int
    identical: int
    largest_difference: float
    problems: list[Problem] = field(default_factory=list)


def recompute(
    version: Version, index: Index, positions: Sequence[int], root: Path | None, device: Device
) -> Recomputed:
    """Extract the items at `positions` of the index again, one by one, from the files they came from.

    Args:
        version: where they are.
        index: of the version.
        positions: of the items.
        root: what their relative paths are relative to; None for what it was in the run that extracted each.
        device: to extract on.
    """
    config = config_from(version.info.config)
    extractor = config.extractor_class(config.params, config.audio.sample_rate, device.torch_device)
    identical, largest, problems = 0, 0.0, []
    for position in positions:
        shard = version.shard(index.shards[int(index.shard[position])])
        (item,) = shard.items([int(index.item[position])])
        first = int(index.first_frame[position])
        stored = shard.features[first : first + int(index.num_frames[position])]
        try:
            again = _extract_again(item, config, extractor, root or _root_of(shard, version), device)
        except AudioError as error:
            problems.append(Problem("source", f"{item.id}: {item.path}: {error.reason}: {error}", shard.name, item.id))
            continue
        if again.tobytes() == stored.tobytes():
            identical += 1
            continue
        difference = _difference(again, stored)
        largest = max(largest, difference)
        if difference > _TOLERANCE.get(stored.dtype.name, 0.0):
            message = f"{item.id}: extracted again from {item.path}, it differs by {difference:.3g}"
            problems.append(Problem("recompute", message, shard.name, item.id))
    return Recomputed(len(positions), identical, largest, problems)


def _root_of(shard: Shard, version: Version) -> Path:
    return Path(asked_of(version, shard.info.made_by.get("run", "")).get("root", "."))


def sample(index: Index, count: int, seed: int | None = None) -> list[int]:
    """Random positions of the index, sorted, all different."""
    return sorted(random.Random(seed).sample(range(len(index)), min(count, len(index))))


def _extract_again(item: Item, config: Config, extractor: Any, root: Path, device: Device) -> NDArray[Any]:
    utterance = Utterance(item.id, item.path, item.start, item.duration, item.channel)
    (decoded,) = decode_all([utterance], root)
    if decoded.samples is None or decoded.source is None:
        assert decoded.error is not None
        raise decoded.error
    policy = config.audio.model_copy(update={"max_seconds": None})  # it was extracted, under whatever limit
    waveform = to_waveform(decoded.samples, decoded.source.sample_rate, policy, item.channel)
    features, _, (error,) = compute(extractor, [item.id], [waveform], config.dtype, device)
    if error is not None:
        raise error
    return features


def _difference(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest difference, relative where values are above 1; infinite where shapes differ, or codes."""
    if one.shape != other.shape or one.dtype.kind != "f":
        return float("inf")
    a, b = one.astype(np.float64), other.astype(np.float64)
    return float((np.abs(a - b) / np.maximum(1.0, np.abs(b))).max())
