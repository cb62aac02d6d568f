"""Features as a version stores them: computed from clips, cast or quantised, and checked for NaN and infinity.

If an extractor refuses a batch, or raises whatever else, the batch is halved until it is known which clips are the
cause: these fail, and the others are computed. Their values do not depend on it, as they do not depend on neighbours.
If memory runs out, padded rows are computed in smaller batches, and then alone on the device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, FeatcacheError, Reason, listing
from featcache.extraction.audio_files import failure_of
from featcache.extractors import Clip, Extractor, Params
from featcache.format.shard import Item
from featcache.manifest import Utterance
from featcache.manifest.audio_locations import AudioLocation
from featcache.quantize import quantize
from featcache.spec import QUANTIZATION, FeatureSpec, all_finite
from featcache.version.ledger import Failure

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


@dataclass
class WorkerTimes:
    """Seconds that one worker thread has spent."""

    decode: float = 0.0
    """Reading and decoding files."""
    resample: float = 0.0
    """Mixing down, resampling, adding noise."""
    extract: float = 0.0
    """Computing features, with the transfers to the device and back."""

    def add(self, other: WorkerTimes) -> None:
        """Add seconds that were spent in another process."""
        self.decode += other.decode
        self.resample += other.resample
        self.extract += other.extract


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
    """For each side array, the entries of the clips that could be, one after the other, and how many each has."""

    @classmethod
    def gather(
        cls,
        spec: FeatureSpec,
        outcomes: Sequence[int | AudioError],
        stored: Sequence[NDArray[Any]],
        side: Mapping[str, Sequence[NDArray[Any]]],
    ) -> ClipFeatures:
        """The features of clips, but for those with NaN or infinity, which a cast may have made.

        Args:
            outcomes: For each clip, its number of frames, or why it could not be extracted.
            stored: The features of the others as `spec` says, one after the other, in any number of pieces.
            side: For each side array, the entries of each of the others.
        """
        errors = [outcome if isinstance(outcome, AudioError) else None for outcome in outcomes]
        num_frames = [0 if isinstance(outcome, AudioError) else outcome for outcome in outcomes]
        nothing = np.empty((0, *spec.item_shape), spec.stored_dtype)
        features = stored[0] if len(stored) == 1 else np.concatenate([nothing, *stored])
        parameters = side.get(QUANTIZATION, ())  # which tell of the levels whether what they stand for was finite
        if not all(map(all_finite, parameters if spec.is_quantized else [features])):
            clips = np.split(features, np.cumsum(num_frames)[:-1])
            numbers = [number for number, error in enumerate(errors) if error is None]
            telling = parameters if spec.is_quantized else [clips[number] for number in numbers]
            is_finite = dict(zip(numbers, map(all_finite, telling), strict=True))
            for number in numbers:
                if not is_finite[number]:
                    message = f"features are NaN or infinite as {spec.dtype}"
                    errors[number], num_frames[number] = AudioError(Reason.NON_FINITE_FEATURES, message), 0
            features = np.concatenate([nothing, *(clips[number] for number in numbers if is_finite[number])])
            side = {
                name: [entry for number, entry in zip(numbers, entries, strict=True) if is_finite[number]]
                for name, entries in side.items()
            }
        gathered = {}
        for array in spec.side:
            entries = side.get(array.name, ())
            none = np.empty((0, *array.item_shape), array.dtype)
            gathered[array.name] = np.concatenate([none, *entries]), [len(one) for one in entries]
        return cls(features, num_frames, errors, gathered)


@dataclass(frozen=True)
class Extracted:
    """What one version gets from a part of a batch."""

    items: list[Item]
    num_frames: list[int]
    """The number of frames of each item."""
    features: NDArray[Any]
    """The features of all items, one after the other: `[sum(num_frames), *item_shape]` of the stored dtype."""
    failures: list[Failure]
    side: dict[str, tuple[NDArray[Any], list[int]]]
    """For each side array, the entries of all items one after the other, and how many each item has."""
    seconds: float
    """Seconds of worker threads that computing the features took."""
    remarks: Mapping[str, tuple[int, str]]
    """Of each utterance whose file has another sample rate than the config, or that is silent: that rate in Hz, and why
    it is silent, else empty; by the utterance's id, without the suffix of a copy."""
    traceback: str
    """That of the last exception by which the extractor failed an utterance; empty if it failed none."""


class BatchPart:
    """What one version is to get from a part of a batch: items, whose features are still to be made, and failures.

    Args:
        spec: That of the features as they are stored.
        root: What paths are relative to.
    """

    def __init__(self, spec: FeatureSpec, root: AudioLocation) -> None:
        self.spec = spec
        self.items: list[Item] = []
        self.remarks: dict[str, tuple[int, str]] = {}
        """As `Extracted` has it."""
        self._root = root
        self._failures: list[Failure] = []
        self._traceback = ""

    def fail(self, utterance: Utterance, error: AudioError) -> None:
        """Take the failure of an utterance that is no item, or that cannot be one."""
        self._failures.append(failure_of(utterance, self._root, error))
        if isinstance(error, RaisedError):
            self._traceback = error.traceback

    def extracted(self, clips: ClipFeatures | None = None, seconds: float = 0.0) -> Extracted:
        """The result, with the features of each item; None if there are no items."""
        clips = clips or ClipFeatures.gather(self.spec, (), (), {})
        items = []
        for item, error in zip(self.items, clips.errors, strict=True):
            if error is None:
                items.append(item)
            else:
                self.fail(item, error)
        return Extracted(
            items=items,
            num_frames=[count for count in clips.num_frames if count],
            features=clips.features,
            failures=self._failures,
            side=clips.side,
            seconds=seconds,
            remarks=self.remarks,
            traceback=self._traceback,
        )


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
        made = in_halves(partial(_extract, extractor, device), clips)
        outcomes = [one if isinstance(one, AudioError) else len(one) for one in made]
        extracted = [one for one in made if not isinstance(one, AudioError)]
        features = torch.cat(extracted or [torch.empty(0, *spec.item_shape, device=device.torch_device)])
        side: dict[str, list[NDArray[Any]]] = {}
        if spec.is_quantized:
            levels, parameters = quantize(features, [len(one) for one in extracted])
            stored, side[QUANTIZATION] = device.download(levels), [*device.download(parameters)[:, None]]
        else:
            stored = device.download(cast(features, spec.dtype))
    return ClipFeatures.gather(spec, outcomes, [stored], side)


def cast(features: torch.Tensor, dtype: str) -> torch.Tensor:
    """Cast features to the stored dtype, on the device they are on."""
    return features.to(getattr(torch, dtype))


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


# If memory runs out

_OUT_OF_MEMORY = (
    "ALLOC_FAILED",  # cuBLAS, cuFFT, and cuDNN before version 9
    "ALLOCATION_FAILED",  # cuDNN
    "error: out of memory",  # CUDA itself, as it makes a stream, loads a kernel or locks pages
    "DefaultCPUAllocator",
)
"""Parts of the messages when memory runs out; what torch says of its own memory on a GPU has a class."""

_PERHAPS_OUT_OF_MEMORY = (
    "unable to find an engine",  # cuDNN: nothing that fits can compute a convolution
    "STATUS_NOT_INITIALIZED",  # cuBLAS and cuDNN have no room for a thread's handle
)
"""Parts of messages that may have other causes: with nothing else on the device, memory is not the cause."""


class DoesNotFitError(AudioError):
    """A clip, or a chunk of a clip, does not fit into the device's memory even with nothing beside it."""

    def __init__(self, seconds: float, device: Device) -> None:
        super().__init__(
            Reason.TOO_LONG,
            f"{seconds:.0f} s do not fit on {device.label} at once: params.chunk of the config would cut them",
        )


class OutOfMemoryRetry:
    """Computes batches again that did not fit into memory: in smaller batches, and at last with nothing beside them.

    Args:
        extractor: The extractor. If a batch of rows does not fit, its batches are smaller from then on, in all threads.
            An extractor that takes no rows gets one clip at a time.
        lengths: The numbers of samples of the rows, with their padding. Batches of the shortest rows have the most:
            once these have one row, no other batch has more.
        device: The device that computes.
    """

    def __init__(self, extractor: Extractor[Params], lengths: Collection[int], device: Device) -> None:
        self._row_extractor = extractor.as_row_extractor()
        self._sample_rate = extractor.spec.sample_rate
        self._lengths = lengths
        self._device = device
        self._alone = False

    def run(self, compute: Callable[[int, bool], _Result]) -> _Result:
        """Call `compute` until it fits into memory, and return its result.

        Args:
            compute: Gets the number of rows of a batch of the shortest, and whether to have the device for itself. It
                may be called several times.

        Raises:
            DoesNotFitError: A single row does not fit.
        """
        rows, device, shortest = self._row_extractor, self._device.torch_device, min(self._lengths)
        while True:
            count = 1 if rows is None else rows.rows(shortest, device)
            try:
                return compute(count, self._alone)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error, self._alone):
                    raise
            # The exception is gone by now, and with it what the batch held.
            torch.cuda.empty_cache()
            if rows is not None and rows.shrink(count, shortest, device):
                continue
            if self._alone:
                raise DoesNotFitError(max(self._lengths) / self._sample_rate, self._device)
            self._alone = True


def is_out_of_memory(error: BaseException, alone: bool = True) -> bool:
    """Whether the memory of the device or of the machine has run out; torch's libraries say so in different words.

    `alone` if nothing else was on the device: then what may have other causes has one of them."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    all_words = _OUT_OF_MEMORY if alone else (*_OUT_OF_MEMORY, *_PERHAPS_OUT_OF_MEMORY)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in all_words)
