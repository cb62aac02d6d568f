"""From waveforms to features as stored: extracted, cast or quantised, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, Reason, listing
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.frames import FrameExtractor
from featcache.quantize import is_quantized, quantize
from featcache.spec import QUANTIZATION, all_finite


@dataclass(frozen=True)
class Computed:
    """What some waveforms gave.

    Attributes:
        features: `[frames, *item_shape]` of the stored dtype, of those that gave some, one after the other.
        num_frames: of each waveform; 0 for those that gave none.
        errors: what was wrong with each waveform that gave none.
        side: scale and offset of quantised features, as `Extracted.side`.
    """

    features: NDArray[Any]
    num_frames: list[int]
    errors: list[AudioError | None]
    side: dict[str, tuple[NDArray[Any], list[int]]]


def compute(
    extractor: Extractor[Params],
    ids: Sequence[str],
    waveforms: Sequence[NDArray[np.float32]],
    dtype: str,
    device: Device,
) -> Computed:
    """Extract the features of some waveforms, each long enough for a frame, and cast them to `dtype`; or quantise each
    waveform's, where `dtype` asks for that.

    Raises:
        ExtractorError: the extractor returned other frames than its `num_frames` says.
    """
    with device.slot():
        align = not isinstance(extractor, FrameExtractor)  # which copies frames, wherever they lie
        clips = [Clip(*one) for one in zip(ids, device.upload(waveforms, align), strict=True)]
        outcomes = _call(extractor, clips)
        found = {number: one for number, one in enumerate(outcomes) if not isinstance(one, AudioError)}
        num_frames = [len(one) for one in found.values()]
        no_features = torch.empty(0, *extractor.spec.item_shape, device=device.torch_device)
        features, parameters = torch.cat([*found.values()]) if found else no_features, None
        if is_quantized(extractor.spec.dtype, dtype):
            levels, scales_and_offsets = quantize(features, num_frames)
            stored, parameters = device.download(levels), device.download(scales_and_offsets)
        else:
            stored = device.download(cast(features, dtype))
    stored, non_finite = without_non_finite(stored, num_frames, dtype, parameters)
    side = {}
    if parameters is not None:
        parameters = parameters[[error is None for error in non_finite]]
        side[QUANTIZATION] = parameters, [1] * len(parameters)
    wrong = dict(zip(found, non_finite, strict=True))
    errors = [one if isinstance(one, AudioError) else wrong[number] for number, one in enumerate(outcomes)]
    return Computed(
        features=stored,
        num_frames=[0 if error else len(found[number]) for number, error in enumerate(errors)],
        errors=errors,
        side=side,
    )


def cast(features: torch.Tensor, dtype: str) -> torch.Tensor:
    """Features as a version of that dtype stores them, on the device they are on."""
    return features.to(getattr(torch, dtype))


def without_non_finite(
    stored: NDArray[Any], num_frames: Sequence[int], dtype: str, parameters: NDArray[Any] | None = None
) -> tuple[NDArray[Any], list[AudioError | None]]:
    """Drop the items that hold NaN or infinity once they are cast, whether or not they did before.

    Args:
        stored: `[sum(num_frames), *item_shape]`, features of items one after the other.
        num_frames: of each item.
        dtype: the stored one, for the message.
        parameters: scale and offset of each item, `[items, 2, *item_shape]`, where they are quantised: these tell then.

    Returns the features that are left, and for each item what is wrong with it.
    """
    errors: list[AudioError | None] = [None] * len(num_frames)
    if all_finite(stored if parameters is None else parameters):
        return stored, errors
    dtype = dtype if parameters is None else "float32"
    kept = []
    for i, item in enumerate(np.split(stored, np.cumsum(num_frames)[:-1])):
        if all_finite(item if parameters is None else parameters[i]):
            kept.append(item)
        else:
            errors[i] = AudioError(Reason.NON_FINITE_FEATURES, f"features are NaN or infinite as {dtype}")
    return np.concatenate(kept) if kept else stored[:0], errors


def exits(extractor: Extractor[Params], error: SystemExit, ids: Iterable[str]) -> str:
    """What to say of an extractor that would end the process, which would say nothing."""
    return f"{type(extractor).__name__} called sys.exit({error.code!r}) while it extracted {listing(ids)}"


def _call(extractor: Extractor[Params], clips: Sequence[Clip]) -> list[torch.Tensor | AudioError]:
    """Extract, and find out which clip it was where one cannot be."""
    if not clips:
        return []
    try:
        features = extractor.extract(clips)
    except AudioError as error:
        return [error] if len(clips) == 1 else [_call(extractor, [clip])[0] for clip in clips]
    except SystemExit as error:
        raise ExtractorError(exits(extractor, error, (clip.id for clip in clips))) from error
    except Exception as error:
        error.add_note(f"featcache: while {type(extractor).__name__} extracted {listing(clip.id for clip in clips)}")
        raise
    expected = [extractor.num_frames(len(clip.waveform)) for clip in clips]
    if (found := [len(one) for one in features]) != expected:
        raise ExtractorError(
            f"{type(extractor).__name__} returned {found} frames for clips of "
            f"{[len(clip.waveform) for clip in clips]} samples; its num_frames says {expected}"
        )
    return [*features]
