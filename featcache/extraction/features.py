"""Features as a version stores them: computed from clips, cast or quantised, and checked for NaN and infinity.

If an extractor refuses a batch, or raises whatever else, the batch is halved until it is known which clips are the
cause: these fail, and the others are computed. Their values do not depend on it, as they do not depend on neighbours.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, FeatcacheError, Reason, listing
from featcache.extraction.out_of_memory import is_out_of_memory
from featcache.extractors import Clip, Extractor, Params
from featcache.format.shard import Item
from featcache.quantize import quantize
from featcache.spec import QUANTIZATION, FeatureSpec, all_finite
from featcache.version.ledger import Failure

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Extracted:
    """What one version gets from a part of a batch."""

    items: list[Item]
    num_frames: list[int]
    """The number of frames of each item."""
    features: NDArray[Any]
    """The features of all items, one after the other: `[sum(num_frames), *item_shape]` of the stored dtype."""
    failures: list[Failure]
    side: dict[str, tuple[NDArray[Any], list[int]]] = field(default_factory=dict)
    """For each side array, the entries of all items one after the other, and how many each item has."""
    seconds: float = 0.0
    """Seconds of worker threads that computing the features took."""
    resampled: Mapping[str, int] = field(default_factory=dict)
    """The sample rate, in Hz, of each file that has another than the config; by the utterance's id, without the suffix
    of a copy."""
    traceback: str = ""
    """That of the last exception by which the extractor failed an utterance; empty if it failed none."""

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
    Raises ExtractorError if the extractor returned other numbers of frames than its `num_frames` says."""
    with device.slot():
        uploaded = device.upload(waveforms, extractor.needs_aligned_waveforms)
        clips = [Clip(*pair) for pair in zip(ids, uploaded, strict=True)]
        outcomes = in_halves(partial(_extract, extractor, device), clips)
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


class RaisedError(AudioError):
    """An exception that an extractor has raised, as the failure of what it extracted.

    It does not hold on to the exception, whose frames hold waveforms."""

    def __init__(self, error: Exception) -> None:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        own = [frame for frame in frames if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_ITS_OWN]
        where = ""
        if own:
            path = "/".join(Path(own[-1].f_code.co_filename).parts[-2:])
            where = f" ({path}:{own[-1].f_lineno}, in {own[-1].f_code.co_name})"
        what = "".join(traceback.format_exception_only(error)).strip()
        super().__init__(Reason.EXTRACTOR_ERROR, f"{what}{where}")
        self.traceback = "".join(traceback.format_exception(error))


_NOT_ITS_OWN = ("featcache", "torch", "contextlib")
"""Packages whose frames do not tell where in an extractor an exception was raised."""


@contextmanager
def errors_of(
    extractor: Extractor[Params], ids: Iterable[str], device: Device | None = None, alone: bool = True
) -> Iterator[None]:
    """Turn what an extractor raises about some clips into an `AudioError`, and `sys.exit` into an `ExtractorError`.

    What is no clip's fault stays what it is: errors of featcache's own, memory that runs out, a device that is lost.

    Args:
        device: What it computes on; None if it computes nothing.
        alone: Whether nothing else is on the device, as for `is_out_of_memory`.
    """
    name = type(extractor).__name__
    try:
        yield
        return
    except SystemExit as error:
        message = f"{name} called sys.exit({error.code!r}) while it extracted {listing(ids)}"
        raise ExtractorError(message) from error
    except Exception as error:
        if isinstance(error, FeatcacheError) or is_out_of_memory(error, alone):
            raise
        if device is not None and device.is_lost():
            error.add_note(f"featcache: while {name} extracted {listing(ids)}")
            raise
        raised = RaisedError(error)
    raise raised


def in_halves(
    compute: Callable[[Sequence[_Given]], list[_Result]], given: Sequence[_Given]
) -> list[_Result | AudioError]:
    """Compute something together; in halves if that raises an `AudioError`, down to what raises it by itself."""
    if not given:
        return []
    try:
        return [*compute(given)]
    except AudioError as error:
        if len(given) == 1:
            return [error.with_traceback(None)]  # whose frames hold waveforms
    middle = len(given) // 2
    return in_halves(compute, given[:middle]) + in_halves(compute, given[middle:])


def last_traceback(errors: Iterable[AudioError | None]) -> str:
    """The traceback of the last exception among errors; empty if there is none."""
    return next((error.traceback for error in reversed([*errors]) if isinstance(error, RaisedError)), "")


def _extract(extractor: Extractor[Params], device: Device, clips: Sequence[Clip]) -> list[torch.Tensor]:
    """Extract clips together. Raises AudioError if one of them cannot be extracted; ExtractorError if the extractor
    returned other numbers of frames than its `num_frames` says."""
    with errors_of(extractor, (clip.id for clip in clips), device):
        features = extractor.extract(clips)
    expected = [extractor.num_frames(len(clip.waveform)) for clip in clips]
    if (returned := [len(clip) for clip in features]) != expected:
        raise ExtractorError(
            f"{type(extractor).__name__} returned {returned} frames for clips of "
            f"{[len(clip.waveform) for clip in clips]} samples; its num_frames says {expected}"
        )
    return [*features]
