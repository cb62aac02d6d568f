"""Extracts some utterances again, each alone, and compares them with what is stored.

On the device that wrote them, codes must be identical. Differences by rounding (see
`compare.py`) are counted separately. Of quantised features, one level counts as rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.audio.formats import OLD_FFMPEG
from featcache.care.compare import (
    SampledClip,
    decode_waveform,
    extract_results,
    largest_difference,
    tied_frames,
)
from featcache.care.report import Problem, Recomputed
from featcache.care.sources import SourceCheck
from featcache.config import recorded_config
from featcache.device import Device
from featcache.errors import AudioError, Reason, listing
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import ClipFeatures, WorkerTimes
from featcache.extraction.jobs import batch_extractor
from featcache.extraction.padded_rows import compute_now
from featcache.extractors.base import BATCHINGS
from featcache.format.shard import Item
from featcache.manifest.audio_locations import AudioLocation, locate, url_of
from featcache.spec import QUANTIZATION, numpy_dtype
from featcache.version.index import Index
from featcache.version.records import library_versions
from featcache.version.version import Version

_TOLERANCE = {"float16": 2.0**-8, "bfloat16": 2.0**-5, "float32": 1e-4}
"""The largest difference of floats by rounding, relative if they are above 1; for float16
and bfloat16, four units in the last place."""

_OF_EXTRACTION = {
    Reason.EXTRACTOR_ERROR,
    Reason.NON_FINITE_FEATURES,
    Reason.OUT_OF_MEMORY,
    Reason.TOO_LONG,
}
"""Failures that are not the audio file's fault."""

Array = NDArray[Any]


def recompute(
    version: Version, index: Index, positions: list[int], sources: SourceCheck, device: Device
) -> Recomputed:
    """Extract the items at `positions` of the index again, one by one. Raises ConfigError
    if the version's config cannot be built here."""
    built, result = built_again(version, device), Recomputed(len(positions))
    built.require_audio(version.path, "--recompute is not for this version")
    for position in positions:
        name, number = index.place(position)
        shard = version.shard(name)
        (item,) = shard.items([number])
        first, num_frames = int(index.first_frame[position]), int(index.num_frames[position])
        (features,) = shard.open_features().read_ranges([first], [num_frames])
        stored = ClipFeatures(
            features, {side.name: shard.side(side.name).item(number) for side in shard.spec.side}
        )
        kind = "recompute"
        try:
            folder = sources.root_of(shard, version)
            url = url_of(locate(folder, item.path))
            if url and url not in sources.urls:
                raise AudioError(
                    Reason.FILE_UNREADABLE, "is at a URL, which is fetched if it is in --manifest"
                )
            batching = shard.info.made_by.get("batching")
            built.extractor.chosen_batching = batching if batching in BATCHINGS else None
            again = _extract_again(built, item, folder)
        except AudioError as error:
            if error.reason not in _OF_EXTRACTION:
                kind = "source"
            faults = [f"{item.path}: {error.reason}: {error}"]
        else:
            count_ties = partial(_count_ties, built, item, folder)
            dtype = shard.spec.dtype
            unlike = _count(again, stored, dtype, result, count_ties)
            unlike += _unlike_side_arrays(again, stored)
            causes = _possible_causes(shard.info.made_by, item, device)
            faults = [f"extracted again from {item.path}, {fault}{causes}" for fault in unlike]
        result.problems += [
            Problem(kind, f"{item.id}: {fault}", shard.name, item.id) for fault in faults
        ]
    return result


def _possible_causes(made_by: Mapping[str, object], item: Item, device: Device) -> str:
    causes = ""
    wrote = made_by.get("device", device.label)
    if wrote != device.label:
        causes = f"; it was written on {wrote}, and this is {device.label}"
    others = [
        f"{library} {made_by[library]} (here {version})"
        for library, version in library_versions().items()
        if made_by.get(library, version) != version
    ]
    if item.decoder == OLD_FFMPEG:
        others.append("an older way to decode it by FFmpeg")
    if others:
        causes += f"; it was made with {listing(others)}"
    return causes


def built_again(version: Version, device: Device) -> BuiltConfig:
    """Build a version's config, without the limit of length, which a run has checked."""
    config = recorded_config(version.info.config, str(version.path))
    config = replace(config, audio=config.audio.model_copy(update={"max_seconds": None}))
    return BuiltConfig(config, device, version.path.name)


def _extract_again(built: BuiltConfig, item: Item, root: AudioLocation) -> ClipFeatures:
    for (result,) in batch_extractor(root, [built], None)([item], WorkerTimes(float)):
        (extracted,) = compute_now([result])
        for failure in extracted.failures:
            raise AudioError(Reason(failure.reason), failure.message)
        (again,) = extracted.features
    return again


def _count(
    again: ClipFeatures,
    stored: ClipFeatures,
    dtype: str,
    result: Recomputed,
    count_ties: Callable[[Array, Array], int],
) -> list[str]:
    """Count an utterance in the result. Returns how it differs by more than rounding."""
    is_quantized = QUANTIZATION in stored.side
    is_float = numpy_dtype(dtype).kind == "f"
    if not is_float:
        result.codes += stored.features.size
    arrays = [(again.features, stored.features)]
    if is_quantized:
        arrays.append((again.side[QUANTIZATION], stored.side[QUANTIZATION]))
    if all(a.tobytes() == b.tobytes() for a, b in arrays):
        result.identical += 1
        return []
    if again.features.shape != stored.features.shape:
        return [f"it has shape {list(again.features.shape)} and not {list(stored.features.shape)}"]
    if is_float:
        values, expected = again.values(dtype), stored.values(dtype)
        difference = largest_difference(values, expected)
        result.largest_difference = max(result.largest_difference, difference)
        step: Array | float = 0.0
        if is_quantized:
            # A level that differs by rounding alone may be half a scale off in each of them.
            scales = [clip.side[QUANTIZATION][0, 0].astype(np.float64) for clip in (again, stored)]
            step = (scales[0] + scales[1]) / 2
        if largest_difference(values, expected, step) <= _TOLERANCE.get(dtype, 0.0):
            return []
        return [f"it differs by {difference:.3g}"]  # also if it is NaN
    differing = int((again.features != stored.features).sum())
    ties = count_ties(again.features, stored.features)
    result.differing += differing
    result.tied += ties
    if differing == ties:
        return []
    return [f"{differing - ties} of {stored.features.size} codes differ by more than rounding"]


def _count_ties(
    built: BuiltConfig, item: Item, root: AudioLocation, again: Array, stored: Array
) -> int:
    """Count the codes that differ in frames where rounding decides; 0 without latents."""
    extractor, device = built.extractor, built.device
    if not extractor.quantizes_latents:
        return 0
    clip = SampledClip(item.id, decode_waveform(item, root, built.waveform_maker))
    unequal = again != stored
    frames = unequal.any(axis=1)
    codes = torch.from_numpy(again[frames].astype(np.int64))
    others = torch.from_numpy(stored[frames].astype(np.int64))
    with device.slot():
        (result,) = extract_results(extractor, [clip], device)
        latents = result.continuous[torch.from_numpy(frames).to(device.torch_device)].float()
        is_tied = tied_frames(extractor.quantize, latents, codes, others).cpu().numpy()
    return int(unequal[frames][is_tied].sum())


def _unlike_side_arrays(again: ClipFeatures, stored: ClipFeatures) -> list[str]:
    faults = []
    for name, array in again.side.items():
        expected, allowed = stored.side[name], _TOLERANCE.get(array.dtype.name, 0.0)
        is_near = array.shape == expected.shape and largest_difference(array, expected) <= allowed
        if name != QUANTIZATION and not is_near:
            faults.append(f"its {name} differ")
    return faults
