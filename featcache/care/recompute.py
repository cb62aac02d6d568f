"""Extracts some utterances again, each alone, and compares: does this machine reproduce what is stored?

On the device that wrote them, codes must be identical. Otherwise, differences by rounding (see `compare.py`) are
counted separately: another device computes other last bits, and so does a run that had memory only for small batches.
Of quantised features the values are compared, and one level counts as rounding."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.audio.waveform import WaveformMaker
from featcache.care.compare import SampledClip, decode_waveform, extract_results, largest_difference, tied_frames
from featcache.care.sources import root_of
from featcache.care.verify import Problem
from featcache.config import recorded_config
from featcache.device import Device
from featcache.errors import AudioError, Reason
from featcache.extraction.features import (
    ClipFeatures,
    DoesNotFitError,
    cast,
    compute_clips,
    error_if_not_finite,
    errors_of,
    until_it_fits,
)
from featcache.extraction.padded_rows import BATCHINGS
from featcache.extractors import Extractor, Params
from featcache.format.shard import Shard, dequantize_array
from featcache.manifest import CallersUrls
from featcache.manifest.audio_locations import AudioLocation, locate, url_of
from featcache.quantize import quantize
from featcache.spec import QUANTIZATION
from featcache.version.index import Index
from featcache.version.version import Version

_TOLERANCE = {"float16": 2.0**-8, "float32": 1e-4}
"""How far floats may differ by rounding, relative if they are above 1; for float16, four units in the last place."""


@dataclass
class Recomputed:
    """How utterances that were extracted again compare with what is stored."""

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
    """What differs by more than rounding, or could not be extracted again."""


def items_at_random(index: Index, count: int) -> list[int]:
    """Sample positions of the index at random, distinct and sorted."""
    return sorted(random.Random().sample(range(len(index)), min(count, len(index))))


def recompute(
    version: Version,
    index: Index,
    positions: Sequence[int],
    root: AudioLocation | None,
    device: Device,
    urls: CallersUrls | None = None,
) -> Recomputed:
    """Extract the items at `positions` of the index again, one by one, from the files they came from.

    Relative paths are relative to `root`, or if it is None to the root of the run that extracted the item. Files at
    URLs are fetched only if they are among `urls`. Raises ConfigError if the version's config names an extractor that
    is not registered, or its weights are not here."""
    config = recorded_config(version.info.config, str(version.path))
    device.configure_torch()
    waveform_maker, extractor = WaveformMaker.of(config.audio, config.augment), config.build(device.torch_device)
    result = Recomputed(len(positions))
    for position in positions:
        name, number = index.place(position)
        shard = version.shard(name)
        (item,) = shard.items([number])
        first, num_frames = int(index.first_frame[position]), int(index.num_frames[position])
        (features,) = shard.open_features().read_ranges([first], [num_frames])
        stored = _Features(features, {side.name: shard.side(side.name).item(number) for side in shard.spec.side})
        kind, faults = "recompute", []
        try:
            folder = root or root_of(shard, version)
            if (url := url_of(locate(folder, item.path))) and (urls is None or url not in urls):
                raise AudioError(Reason.FILE_UNREADABLE, "is at a URL, which is fetched if it is in --manifest")
            clip = SampledClip(item.id, decode_waveform(item, folder, waveform_maker))
            again = _extract_again(clip, extractor, shard, device)
        except DoesNotFitError:
            faults = [f"{item.path}: cannot be extracted again: it does not fit on {device.label}"]
        except AudioError as error:
            kind = "recompute" if error.reason == Reason.EXTRACTOR_ERROR else "source"
            faults = [f"{item.path}: {error.reason}: {error}"]
        else:
            unlike = _count(again, stored, result, extractor, device) + _unlike_side_arrays(again, stored)
            wrote = shard.info.made_by.get("device", device.label)
            end = "" if wrote == device.label else f"; it was written on {wrote}, and this is {device.label}"
            faults = [f"extracted again from {item.path}, {fault}{end}" for fault in unlike]
        result.problems += [Problem(kind, f"{item.id}: {fault}", shard.name, item.id) for fault in faults]
    return result


def _count(
    again: _Features, stored: _Features, result: Recomputed, extractor: Extractor[Params], device: Device
) -> list[str]:
    """Add to the result how an utterance compares; returns how it differs by more than rounding, if it does."""
    result.codes += 0 if stored.is_float else stored.array.size
    if again.to_bytes() == stored.to_bytes():
        result.identical += 1
        return []
    if again.array.shape != stored.array.shape:
        return [f"it has shape {list(again.array.shape)} and not {list(stored.array.shape)}"]
    if stored.is_float:
        difference = largest_difference(again.values, stored.values)
        result.largest_difference = max(result.largest_difference, difference)
        step = (again.step + stored.step) / 2
        is_rounded = largest_difference(again.values, stored.values, step) <= _tolerance(stored.values)
        return [] if is_rounded else [f"it differs by {difference:.3g}"]  # also if it is NaN
    unequal = again.array != stored.array
    differing, ties, codec = int(unequal.sum()), 0, extractor.as_codec_extractor()
    if codec is not None and again.latents is not None:
        frames = unequal.any(axis=1)
        codes, others = (torch.from_numpy(found.array[frames].astype(np.int64)) for found in (again, stored))
        with device.slot():
            latents = again.latents[torch.from_numpy(frames).to(again.latents.device)].float()
            ties = int(unequal[frames][tied_frames(codec.quantize, latents, codes, others).cpu().numpy()].sum())
    result.differing += differing
    result.tied += ties
    wrong = differing - ties
    return [f"{wrong} of {stored.array.size} codes differ by more than rounding"] if wrong else []


def _unlike_side_arrays(again: _Features, stored: _Features) -> list[str]:
    """Which side arrays of the extractor differ by more than rounding."""
    pairs = [(name, array, stored.side[name]) for name, array in again.side.items() if name != QUANTIZATION]
    return [
        f"its {name} differ"
        for name, array, there in pairs
        if array.shape != there.shape or not largest_difference(array, there) <= _tolerance(there)
    ]


@dataclass(frozen=True)
class _Features:
    """The features of an utterance, as they are stored or would be."""

    array: NDArray[Any]
    """`[frames, *item_shape]` of the stored dtype."""
    side: Mapping[str, NDArray[Any]]
    """The entries of side arrays, by name; of quantised features, the scale and the offset `[1, 2, *item_shape]`."""
    latents: torch.Tensor | None = None
    """The latents of codes, `[frames, D]`; None if the extractor does not tell."""

    @property
    def is_float(self) -> bool:
        return self.array.dtype.kind == "f" or QUANTIZATION in self.side

    @property
    def values(self) -> NDArray[Any]:
        """The features as they are read."""
        return dequantize_array(self.array, *self.side[QUANTIZATION][0]) if QUANTIZATION in self.side else self.array

    @property
    def step(self) -> NDArray[np.float64]:
        """The scale of quantised features: one that differs by rounding alone may be half of it off; 0 of others."""
        scale = self.side[QUANTIZATION][0, 0] if QUANTIZATION in self.side else 0.0
        return np.asarray(scale, np.float64)

    def to_bytes(self) -> bytes:
        return self.array.tobytes() + (self.side[QUANTIZATION].tobytes() if QUANTIZATION in self.side else b"")


def _extract_again(clip: SampledClip, extractor: Extractor[Params], shard: Shard, device: Device) -> _Features:
    """Extract an item alone, in a batch of the shape that it was extracted in, or in a smaller one that fits."""
    row_extractor, spec = extractor.as_row_extractor(), shard.spec
    if row_extractor is None:

        def compute(*_: object) -> list[ClipFeatures | AudioError]:
            return compute_clips(extractor, [clip.id], [clip.waveform], spec, device)

        (computed,) = until_it_fits(compute, extractor, [len(clip.waveform)], device)
        if isinstance(computed, AudioError):
            raise computed
        if error := error_if_not_finite(computed, spec):
            raise error
        return _Features(computed.features, computed.side)
    batching = shard.info.made_by.get("batching")
    row_extractor.chosen_batching = batching if batching in BATCHINGS else None

    def extract(_: int, alone: bool) -> _Features:
        with errors_of(extractor, [clip.id], device, alone), device.slot(alone):
            (found,) = extract_results(extractor, [clip], device)
            side = {name: array.cpu().numpy() for name, array in found.side.items()}
            if spec.is_quantized:
                levels, parameters = quantize(found.features, [len(found.features)])
                return _Features(levels.cpu().numpy(), {**side, QUANTIZATION: parameters.cpu().numpy()})
            return _Features(cast(found.features, spec.dtype).cpu().numpy(), side, found.latents)

    pieces = row_extractor.pieces(len(clip.waveform))
    lengths = [row_extractor.padded_length(piece.num_samples) for piece in pieces]
    return until_it_fits(extract, extractor, lengths, device)


def _tolerance(stored: NDArray[Any]) -> float:
    return _TOLERANCE.get(stored.dtype.name, 0.0)
