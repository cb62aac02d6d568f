"""Extract some utterances again, each alone, and compare: does this machine reproduce what is stored?

On the device that wrote them, codes must be identical. Otherwise, differences by rounding (see `differences`) are
counted separately: another device computes other last bits, and so does a run that had memory only for small batches.
For quantised features the values are compared, and one level counts as rounding.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.audio.waveform import WaveformMaker
from featcache.config import recorded_config
from featcache.device import Device
from featcache.errors import AudioError
from featcache.extract.batching import BATCHINGS
from featcache.extract.decoding import decode_all
from featcache.extract.features import DoesNotFitError, OutOfMemoryRetry, cast, compute_clips
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.codec import CodecExtractor
from featcache.extractors.rows import RowExtractor
from featcache.health.compare import largest_difference, tied_frames
from featcache.health.trial import with_latents
from featcache.quantize import dequantize_array, is_quantized, quantize
from featcache.spec import QUANTIZATION
from featcache.store.check import Problem
from featcache.store.index import Index
from featcache.store.runs import request_of
from featcache.store.shard import Item, Shard
from featcache.store.version import Version

_TOLERANCE = {"float16": 2.0**-8, "float32": 1e-4}
"""Of floats, relative to values of 1 and more: four units in float16's last place."""


@dataclass(frozen=True)
class Recomputed:
    """What came of extracting some utterances again.

    Attributes:
        utterances: how many.
        identical: how many of them bit for bit.
        largest_difference: of any float.
        codes: that were compared; 0 of float features.
        differing: codes that are others now.
        tied: of those, the ones in frames where rounding decides between codewords.
        problems: what differs by more than rounding, or could not be extracted again.
    """

    utterances: int
    identical: int
    largest_difference: float
    codes: int = 0
    differing: int = 0
    tied: int = 0
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

    Raises:
        ConfigError: the version's config names an extractor that is not registered, or its weights are not here.
    """
    config = recorded_config(version.info.config, str(version.path))
    device.configure_torch()
    waveform_maker, extractor = WaveformMaker.of(config.audio, config.augment), config.build(device.torch_device)
    largest = 0.0
    identical = codes = differing = tied = 0
    problems = []
    for position in positions:
        shard = version.shard(index.shards[int(index.shard[position])])
        number = int(index.item[position])
        (item,) = shard.items([number])
        first = int(index.first_frame[position])
        stored = shard.features[first : first + int(index.num_frames[position])]
        parameters = shard.side(QUANTIZATION).item(number) if version.info.spec.is_quantized else None
        try:
            waveform = _waveform(item, waveform_maker, root or _root_of(shard, version))
            again = _extract_again(item.id, waveform, config.dtype, extractor, shard, device)
        except DoesNotFitError:
            message = f"{item.id}: {item.path}: cannot be extracted again: it does not fit on {device.label}"
            problems.append(Problem("recompute", message, shard.name, item.id))
            continue
        except AudioError as error:
            problems.append(Problem("source", f"{item.id}: {item.path}: {error.reason}: {error}", shard.name, item.id))
            continue
        faults = []
        is_float = stored.dtype.kind == "f" or parameters is not None
        if not is_float:
            codes += stored.size
        if _bytes_of(again.features, again.parameters) == _bytes_of(stored, parameters):
            identical += 1
        elif again.features.shape != stored.shape:
            faults.append(f"it has shape {list(again.features.shape)} and not {list(stored.shape)}")
        elif is_float:
            one, other = _values(again.features, again.parameters), _values(stored, parameters)
            difference, step = largest_difference(one, other), _step(again.parameters, parameters)
            largest = max(largest, difference)
            if not largest_difference(one, other, step) <= _tolerance(other):  # NaN is not
                faults.append(f"it differs by {difference:.3g}")
        else:
            unequal = again.features != stored
            ties = int(unequal[_tied(extractor, again, stored, device)].sum())
            differing, tied = differing + int(unequal.sum()), tied + ties
            if wrong := int(unequal.sum()) - ties:
                faults.append(f"{wrong} of {stored.size} codes differ by more than rounding")
        for name, array in again.side.items():
            there = shard.side(name).item(number)
            if array.shape != there.shape or not largest_difference(array, there) <= _tolerance(there):
                faults.append(f"its {name} differ")
        for fault in faults:
            message = f"{item.id}: extracted again from {item.path}, {fault}{_devices(shard, device)}"
            problems.append(Problem("recompute", message, shard.name, item.id))
    return Recomputed(len(positions), identical, largest, codes, differing, tied, problems)


def sample(index: Index, count: int, seed: int | None = None) -> list[int]:
    """Random positions of the index, sorted, all different."""
    return sorted(random.Random(seed).sample(range(len(index)), min(count, len(index))))


@dataclass(frozen=True)
class _Again:
    """What an utterance gives now.

    Attributes:
        features: `[frames, *item_shape]` of the stored dtype.
        parameters: scale and offset, `[1, 2, *item_shape]`, where they are quantised.
        side: the entries of the extractor's side arrays, by name.
        latents: of codes, `[frames, D]`, where the extractor tells.
    """

    features: NDArray[Any]
    parameters: NDArray[Any] | None = None
    side: dict[str, NDArray[Any]] = field(default_factory=dict)
    latents: torch.Tensor | None = None


def _waveform(item: Item, waveform_maker: WaveformMaker, root: Path) -> NDArray[np.float32]:
    """What an item is extracted from, float32 `[num_samples]`.

    Raises:
        AudioError: it cannot be decoded.
    """
    (decoded,) = decode_all([item], root)
    if decoded.samples is None or decoded.source is None:
        assert decoded.error is not None
        raise decoded.error
    return waveform_maker.waveform(decoded.samples, decoded.source.sample_rate, item.id, item.channel)


def _extract_again(
    id_: str,
    waveform: NDArray[np.float32],
    dtype: str,
    extractor: Extractor[Params],
    shard: Shard,
    device: Device,
) -> _Again:
    """Extract an item alone, in a batch of the shape that it was extracted in, or in a smaller one that fits.

    Raises:
        AudioError: it cannot be extracted, or does not fit on the device.
    """
    row_extractor = extractor.as_row_extractor()
    if row_extractor is None:
        retry = OutOfMemoryRetry(extractor, len(waveform), device)
        found = retry.run(lambda *_: compute_clips(extractor, [id_], [waveform], dtype, device))
        if found.errors[0] is not None:
            raise found.errors[0]
        return _Again(found.features, found.side[QUANTIZATION][0] if found.side else None)
    batching = shard.info.made_by.get("batching")
    row_extractor.chosen_batching = batching if batching in BATCHINGS else None
    # The length of which a batch has the most rows: once that is one, batches of the others are no larger.
    shortest = min(row_extractor.padded_length(piece.num_samples) for piece in row_extractor.pieces(len(waveform)))
    retry = OutOfMemoryRetry(extractor, shortest, device)
    return retry.run(lambda _, alone: _extract_rows_again(id_, waveform, dtype, row_extractor, device, alone))


def _extract_rows_again(
    id_: str,
    waveform: NDArray[np.float32],
    dtype: str,
    extractor: RowExtractor[Params],
    device: Device,
    alone: bool,
) -> _Again:
    seen = with_latents(extractor) if isinstance(extractor, CodecExtractor) else extractor
    with device.slot(alone):
        (rows,) = seen.extract_rows([Clip(id_, device.upload([waveform])[0])])
        num_codes = rows.features.shape[1] if seen is extractor else len(extractor.spec.codebook_sizes)
        side = {name: array.cpu().numpy() for name, array in rows.side.items()}
        if is_quantized(extractor.spec.dtype, dtype):
            levels, parameters = quantize(rows.features, [len(rows.features)])
            return _Again(levels.cpu().numpy(), parameters.cpu().numpy(), side)
        features = cast(rows.features[:, :num_codes], dtype).cpu().numpy()
    return _Again(features, None, side, None if seen is extractor else rows.features[:, num_codes:].float())


def _tied(extractor: Extractor[Params], again: _Again, stored: NDArray[Any], device: Device) -> NDArray[np.bool_]:
    """Which frames have other codes than the stored ones by rounding: bool `[frames]`."""
    tied = np.zeros(len(stored), bool)
    if again.latents is not None and isinstance(extractor, CodecExtractor):
        unequal = (again.features != stored).any(axis=1)
        codes, others = (torch.from_numpy(array[unequal].astype(np.int64)) for array in (again.features, stored))
        with device.slot():
            latents = again.latents[torch.from_numpy(unequal).to(again.latents.device)]
            tied[unequal] = tied_frames(extractor.quantize, latents, codes, others).cpu().numpy()
    return tied


def _root_of(shard: Shard, version: Version) -> Path:
    return Path(request_of(version, shard.info.made_by.get("run", "")).get("root", "."))


def _devices(shard: Shard, device: Device) -> str:
    """That another device wrote the shard, if so, for a message."""
    wrote = shard.info.made_by.get("device", device.label)
    return "" if wrote == device.label else f"; it was written on {wrote}, and this is {device.label}"


def _bytes_of(features: NDArray[Any], parameters: NDArray[Any] | None) -> bytes:
    return features.tobytes() + (b"" if parameters is None else parameters.tobytes())


def _values(features: NDArray[Any], parameters: NDArray[Any] | None) -> NDArray[Any]:
    """Features as they are read."""
    return features if parameters is None else dequantize_array(features, *parameters[0])


def _step(one: NDArray[Any] | None, other: NDArray[Any] | None) -> NDArray[Any] | float:
    """By how much quantisation alone may take values apart that were equal but for rounding; `[*item_shape]`.

    Each of the two is off by half a scale of its own at most.
    """
    return 0.0 if one is None or other is None else (one[0, 0].astype(np.float64) + other[0, 0]) / 2


def _tolerance(stored: NDArray[Any]) -> float:
    return _TOLERANCE.get(stored.dtype.name, 0.0)
