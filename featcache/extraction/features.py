"""Features as a version stores them: computed from clips, cast or quantised, and checked for NaN and infinity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, Reason, listing
from featcache.extractors import Clip, Extractor, Params
from featcache.quantize import quantize
from featcache.spec import QUANTIZATION, FeatureSpec, all_finite
from featcache.store.ledger import Failure
from featcache.store.shard import Item


@dataclass(frozen=True)
class Extracted:
    """What one version gets from a part of a batch."""

    items: list[Item]
    """The utterances that were extracted."""
    num_frames: list[int]
    """The number of frames of each item."""
    features: NDArray[Any]
    """The features of all items, one after the other: `[sum(num_frames), *item_shape]` of the stored dtype."""
    failures: list[Failure]
    """The utterances that could not be extracted."""
    side: dict[str, tuple[NDArray[Any], list[int]]] = field(default_factory=dict)
    """For each side array, the entries of all items one after the other, and how many each item has."""
    seconds: float = 0.0
    """Seconds of worker threads that computing the features took."""
    resampled: Mapping[str, int] = field(default_factory=dict)
    """The sample rate, in Hz, of each file that has another than the config; by the utterance's id, without the suffix
    of a copy."""

    @classmethod
    def of_failures(cls, spec: FeatureSpec, failures: list[Failure]) -> Extracted:
        """The result if everything has failed; `spec` is that of the stored features."""
        side = {array.name: (np.empty((0, *array.item_shape), array.dtype), list[int]()) for array in spec.side}
        return cls([], [], np.empty((0, *spec.item_shape), spec.stored_dtype), failures, side)


@dataclass(frozen=True)
class ClipFeatures:
    """The features of some clips, as they are stored."""

    features: NDArray[Any]
    """`[frames, *item_shape]` of the stored dtype: the clips that could be extracted, one after the other."""
    num_frames: list[int]
    """The number of frames of each clip; 0 for a clip that could not be extracted."""
    errors: list[AudioError | None]
    """For each clip, why it could not be extracted."""
    side: dict[str, tuple[NDArray[Any], list[int]]]
    """The scales and offsets of quantised features, in the form of `Extracted.side`."""


def compute_clips(
    extractor: Extractor[Params],
    ids: Sequence[str],
    waveforms: Sequence[NDArray[np.float32]],
    spec: FeatureSpec,
    device: Device,
) -> ClipFeatures:
    """Extract clips, each long enough for a frame, and cast the features as `spec` says, or quantise them clip by clip.

    Raises:
        ExtractorError: The extractor returned other numbers of frames than its `num_frames` says.
    """
    with device.slot():
        uploaded = device.upload(waveforms, extractor.needs_aligned_waveforms)
        outcomes = _extract(extractor, [Clip(*pair) for pair in zip(ids, uploaded, strict=True)])
        extracted = {number: outcome for number, outcome in enumerate(outcomes) if not isinstance(outcome, AudioError)}
        num_frames = [len(clip) for clip in extracted.values()]
        no_features = torch.empty(0, *spec.item_shape, device=device.torch_device)
        features, parameters = torch.cat([*extracted.values()]) if extracted else no_features, None
        if spec.is_quantized:
            levels, scales_and_offsets = quantize(features, num_frames)
            stored, parameters = device.download(levels), device.download(scales_and_offsets)
        else:
            stored = device.download(cast(features, spec.dtype))
    stored, non_finite = without_non_finite(stored, num_frames, spec.dtype, parameters)
    side = {}
    if parameters is not None:
        parameters = parameters[[error is None for error in non_finite]]
        side[QUANTIZATION] = parameters, [1] * len(parameters)
    error_of = dict(zip(extracted, non_finite, strict=True))
    errors = [
        outcome if isinstance(outcome, AudioError) else error_of[number] for number, outcome in enumerate(outcomes)
    ]
    return ClipFeatures(
        features=stored,
        num_frames=[0 if error else len(extracted[number]) for number, error in enumerate(errors)],
        errors=errors,
        side=side,
    )


def cast(features: torch.Tensor, dtype: str) -> torch.Tensor:
    """Cast features to the stored dtype, on the device they are on."""
    return features.to(getattr(torch, dtype))


def without_non_finite(
    stored: NDArray[Any], num_frames: Sequence[int], dtype: str, parameters: NDArray[Any] | None = None
) -> tuple[NDArray[Any], list[AudioError | None]]:
    """Drop items with NaN or infinity, which a cast may have made.

    Args:
        stored, num_frames: The features of items one after the other, `[sum(num_frames), *item_shape]`.
        dtype: The dtype of the features when they are read, for the message.
        parameters: The scale and offset of each quantised item, `[items, 2, *item_shape]`, which show it instead.

    Returns:
        The remaining features, and for each item why it was dropped.
    """
    errors: list[AudioError | None] = [None] * len(num_frames)
    if all_finite(stored if parameters is None else parameters):
        return stored, errors
    kept = []
    for i, item in enumerate(np.split(stored, np.cumsum(num_frames)[:-1])):
        if all_finite(item if parameters is None else parameters[i]):
            kept.append(item)
        else:
            errors[i] = AudioError(Reason.NON_FINITE_FEATURES, f"features are NaN or infinite as {dtype}")
    return np.concatenate(kept) if kept else stored[:0], errors


@contextmanager
def naming_clips(extractor: Extractor[Params], ids: Iterable[str]) -> Iterator[None]:
    """Have errors of an extractor say what it was extracting, and `sys.exit` not end the process without a word."""
    name = type(extractor).__name__
    try:
        yield
    except AudioError:
        raise
    except SystemExit as error:
        message = f"{name} called sys.exit({error.code!r}) while it extracted {listing(ids)}"
        raise ExtractorError(message) from error
    except Exception as error:
        error.add_note(f"featcache: while {name} extracted {listing(ids)}")
        raise


def _extract(extractor: Extractor[Params], clips: Sequence[Clip]) -> list[torch.Tensor | AudioError]:
    """Extract clips together; one by one if one of them cannot be extracted."""
    if not clips:
        return []
    try:
        with naming_clips(extractor, (clip.id for clip in clips)):
            features = extractor.extract(clips)
    except AudioError as error:
        return [error] if len(clips) == 1 else [_extract(extractor, [clip])[0] for clip in clips]
    expected = [extractor.num_frames(len(clip.waveform)) for clip in clips]
    if (returned := [len(clip) for clip in features]) != expected:
        raise ExtractorError(
            f"{type(extractor).__name__} returned {returned} frames for clips of "
            f"{[len(clip.waveform) for clip in clips]} samples; its num_frames says {expected}"
        )
    return [*features]
