"""Extracts some utterances again, each alone, and compares: does this machine reproduce what is stored?

On the device that wrote them, codes must be identical. Otherwise, differences by rounding (see `compare.py`) are
counted separately: another device computes other last bits, and so does a run that had memory only for small batches.
Of quantised features the values are compared, and one level counts as rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.audio.waveform import WaveformMaker
from featcache.care.compare import SampledClip, decode_waveform, extract_results, largest_difference, tied_frames
from featcache.care.sources import SourceCheck
from featcache.care.verify import Problem
from featcache.config import recorded_config
from featcache.device import Device
from featcache.errors import AudioError, Reason
from featcache.extraction.features import ClipFeatures, DoesNotFitError, download, errors_of, until_it_fits
from featcache.extraction.padded_rows import BATCHINGS
from featcache.extractors import Extractor, Params
from featcache.extractors.codec import CodecExtractor
from featcache.extractors.rows import RowExtractor
from featcache.format.shard import Shard, dequantize_array
from featcache.manifest.audio_locations import locate, url_of
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


def recompute(
    version: Version, index: Index, positions: Sequence[int], sources: SourceCheck, device: Device
) -> Recomputed:
    """Extract the items at `positions` of the index again, one by one, from the files they came from, which `sources`
    finds. Raises ConfigError if the version's config names an extractor that is not registered, or its weights are not
    here."""
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
        stored = ClipFeatures(features, {side.name: shard.side(side.name).item(number) for side in shard.spec.side})
        kind, faults = "recompute", []
        try:
            folder = sources.root_of(shard, version)
            if (url := url_of(locate(folder, item.path))) and url not in sources.urls:
                raise AudioError(Reason.FILE_UNREADABLE, "is at a URL, which is fetched if it is in --manifest")
            clip = SampledClip(item.id, decode_waveform(item, folder, waveform_maker))
            again, latents = _extract_again(clip, extractor, shard, device)
        except DoesNotFitError:
            faults = [f"{item.path}: cannot be extracted again: it does not fit on {device.label}"]
        except AudioError as error:
            kind = "recompute" if error.reason == Reason.EXTRACTOR_ERROR else "source"
            faults = [f"{item.path}: {error.reason}: {error}"]
        else:
            unlike = _count(again, latents, stored, result, extractor, device) + _unlike_side_arrays(again, stored)
            wrote = shard.info.made_by.get("device", device.label)
            end = "" if wrote == device.label else f"; it was written on {wrote}, and this is {device.label}"
            faults = [f"extracted again from {item.path}, {fault}{end}" for fault in unlike]
        result.problems += [Problem(kind, f"{item.id}: {fault}", shard.name, item.id) for fault in faults]
    return result


def _count(
    again: ClipFeatures,
    latents: torch.Tensor | None,
    stored: ClipFeatures,
    result: Recomputed,
    extractor: Extractor[Params],
    device: Device,
) -> list[str]:
    """Add to the result how an utterance compares; returns how it differs by more than rounding, if it does."""
    is_quantized = QUANTIZATION in stored.side
    is_float = is_quantized or stored.features.dtype.kind == "f"
    result.codes += 0 if is_float else stored.features.size
    if _to_bytes(again) == _to_bytes(stored):
        result.identical += 1
        return []
    if again.features.shape != stored.features.shape:
        return [f"it has shape {list(again.features.shape)} and not {list(stored.features.shape)}"]
    if is_float:
        values, expected = _values(again), _values(stored)
        difference = largest_difference(values, expected)
        result.largest_difference = max(result.largest_difference, difference)
        step: NDArray[np.float64] | float = 0.0
        if is_quantized:  # a level that differs by rounding alone may be half a scale off in each of them
            scales = [clip.side[QUANTIZATION][0, 0].astype(np.float64) for clip in (again, stored)]
            step = (scales[0] + scales[1]) / 2
        is_rounded = largest_difference(values, expected, step) <= _TOLERANCE.get(expected.dtype.name, 0.0)
        return [] if is_rounded else [f"it differs by {difference:.3g}"]  # also if it is NaN
    unequal = again.features != stored.features
    differing, ties = int(unequal.sum()), 0
    if isinstance(extractor, CodecExtractor) and latents is not None:
        frames = unequal.any(axis=1)
        codes, others = (torch.from_numpy(clip.features[frames].astype(np.int64)) for clip in (again, stored))
        with device.slot():
            of_frames = latents[torch.from_numpy(frames).to(latents.device)].float()
            ties = int(unequal[frames][tied_frames(extractor.quantize, of_frames, codes, others).cpu().numpy()].sum())
    result.differing += differing
    result.tied += ties
    wrong = differing - ties
    return [f"{wrong} of {unequal.size} codes differ by more than rounding"] if wrong else []


def _unlike_side_arrays(again: ClipFeatures, stored: ClipFeatures) -> list[str]:
    """Which side arrays of the extractor differ by more than rounding."""
    pairs = [(name, array, stored.side[name]) for name, array in again.side.items() if name != QUANTIZATION]
    return [
        f"its {name} differ"
        for name, array, there in pairs
        if array.shape != there.shape or not largest_difference(array, there) <= _TOLERANCE.get(there.dtype.name, 0.0)
    ]


def _to_bytes(clip: ClipFeatures) -> bytes:
    return clip.features.tobytes() + (clip.side[QUANTIZATION].tobytes() if QUANTIZATION in clip.side else b"")


def _values(clip: ClipFeatures) -> NDArray[Any]:
    """The features as they are read."""
    quantization = clip.side.get(QUANTIZATION)
    return clip.features if quantization is None else dequantize_array(clip.features, *quantization[0])


def _extract_again(
    clip: SampledClip, extractor: Extractor[Params], shard: Shard, device: Device
) -> tuple[ClipFeatures, torch.Tensor | None]:
    """Extract an item alone, in a batch of the shape that it was extracted in, or in a smaller one that fits. Beside
    the features, the latents of codes, `[frames, D]`; None if the extractor does not tell."""
    spec, lengths = shard.spec, [len(clip.waveform)]
    if isinstance(extractor, RowExtractor):
        batching = shard.info.made_by.get("batching")
        extractor.chosen_batching = batching if batching in BATCHINGS else None
        pieces = extractor.pieces(len(clip.waveform))
        lengths = [extractor.padded_length(piece.num_samples) for piece in pieces]

    def extract(_: int, alone: bool) -> tuple[ClipFeatures, torch.Tensor | None]:
        with errors_of(extractor, [clip.id], device, alone), device.slot(alone):
            (found,) = extract_results(extractor, [clip], device)
            side = {name: array.cpu().numpy() for name, array in found.side.items()}
            (stored,) = download([found.features], spec, device, spec.is_quantized)
            return ClipFeatures(stored.features, {**side, **stored.side}), found.latents

    return until_it_fits(extract, extractor, lengths, device)
