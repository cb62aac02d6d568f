"""Features as a version stores them: computed from clips, cast or quantised, and checked
for NaN and infinity. If an extractor refuses a batch or raises, `in_halves` finds the
clips at fault; if memory runs out, see `until_it_fits`."""

from __future__ import annotations

import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, FeatcacheError, Reason, counted, listing
from featcache.extraction.audio_files import failure_of
from featcache.extraction.built_config import BuiltConfig
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.base import Tracks, tracks_by_name
from featcache.extractors.faults import describe_raised, fault, require_tensor, text_of
from featcache.format.shard import Item
from featcache.manifest.audio_locations import AudioLocation
from featcache.manifest.segments import Utterance
from featcache.spec import (
    BFLOAT16,
    MAIN,
    QUANTIZATION,
    FeatureSpec,
    Track,
    all_finite,
    as_values,
    dequantize_array,
)
from featcache.spec.quantize import quantize
from featcache.version.ledger import Failure

_Input = TypeVar("_Input")
_Result = TypeVar("_Result")

Waveform = NDArray[np.float32]
"""Mono samples, `[num_samples]`."""

WorkerTimes = defaultdict[str, float]
"""Seconds of a worker thread by stage: `decode`, with reading; `resample`, with mixing down
and noise; `extract`, with transfers to the device and back."""


@dataclass(frozen=True)
class ClipFeatures:
    """The stored features of a clip, or of a piece of a clip."""

    features: NDArray[Any]
    """`[frames, *item_shape]` of the stored dtype; float32 in pieces that are quantised
    later."""
    side: Mapping[str, NDArray[Any]]
    """The entries of each side array, by name."""

    def values(self, dtype: str) -> NDArray[Any]:
        """Return the features of `spec.dtype` as numpy reads them: quantised ones, and
        bfloat16, as float32."""
        if QUANTIZATION not in self.side:
            return as_values(self.features, dtype)
        return dequantize_array(self.features, *self.side[QUANTIZATION][0])

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return self.features.nbytes + sum(entries.nbytes for entries in self.side.values())


Result = ClipFeatures | AudioError
"""The features of a clip, or of a piece of a clip, or why it has none."""


@dataclass
class Extracted:
    """The results of one version for a part of a batch."""

    spec: FeatureSpec
    root: AudioLocation
    pool: str | None = None
    """The vector that is stored instead of frames."""
    items: list[Item] = field(default_factory=list)
    features: list[ClipFeatures] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of worker threads that computed the features."""
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)
    """For utterances that are silent or have another rate than the config, by id: the
    file's sample rate in Hz, and why it is silent, else empty. The first copy stands for
    all."""
    traceback: str = ""
    """The traceback of the extractor's last exception."""

    is_complete: ClassVar[bool] = True
    """False for `PendingRows` with rows that are still to be computed."""
    waiting_seconds: ClassVar[float] = 0.0
    """Seconds of audio in the computed rows of `PendingRows`."""

    @classmethod
    def of(cls, built: BuiltConfig, root: AudioLocation) -> Extracted:
        """Return the results of a config, still empty."""
        return cls(built.computed_spec, root, built.config.pool)

    def take_rows(self) -> list[Any]:
        """Return the rows still to be computed: none. `PendingRows` has some."""
        return []

    def extracted(self) -> Extracted:
        """Return the results, which are complete."""
        return self

    def take(self, items: Iterable[Item], results: Iterable[Result]) -> Extracted:
        """Add the features of some items, or their failures; returns self."""
        for item, result in zip(items, results, strict=True):
            if isinstance(result, AudioError):
                self.fail(item, result)
            elif QUANTIZATION in result.side and not all_finite(result.side[QUANTIZATION]):
                # Levels have finite values if their scale and offset are finite.
                self.fail(item, _non_finite(self.spec.dtype))
            else:
                if self.pool is not None:
                    result = ClipFeatures(pooled(result.values(self.spec.dtype), self.pool), {})
                self.items.append(item)
                self.features.append(result)
        return self

    def fail(self, utterance: Utterance, error: AudioError) -> Extracted:
        """Add the failure of an utterance; returns self."""
        self.failures.append(failure_of(utterance, self.root, error))
        if isinstance(error, RaisedError):
            self.traceback = error.traceback
        return self


def pooled(frames: NDArray[Any], pool: str) -> NDArray[np.float32]:
    """Return the vector of an utterance's frames `[frames, *item_shape]`, as the only entry:
    float32 `[1, *item_shape]`, computed in float64. Source of `mean+std`: the statistics
    pooling of x-vectors (Snyder et al., 2018), sqrt(mean((x - mean)²)) over all frames.

    Frames are rounded as a version without `pool` stores them, so the vector is the same
    from audio and from that version."""
    values = frames.astype(np.float64)
    if values.ndim == 1:
        values = values[:, None]
    mean = values.mean(axis=0)
    statistics = {"mean": mean, "std": np.sqrt(np.square(values - mean).mean(axis=0))}
    vector = np.concatenate([statistics[name] for name in pool.split("+")])
    return vector[None].astype(np.float32)


OVERFLOW = ", which ends at 65,504"
"""The part of a failure's message that says that float16 overflowed."""


def _non_finite(dtype: str, hint: str = "") -> AudioError:
    message = f"features are NaN or infinite as {dtype}{hint}"
    return AudioError(Reason.NON_FINITE_FEATURES, message)


def compute_clips(built: BuiltConfig, waveforms: Mapping[str, Waveform]) -> list[Result]:
    """Extract clips, by id, each long enough for a frame, and cast or quantise the
    features. Raises ExtractorError if the numbers of frames differ from
    `num_frames`."""
    device, are_aligned = built.device, built.extractor.needs_aligned_waveforms
    with device.slot():
        uploaded = device.upload([*waveforms.values()], are_aligned)
        clips = [Clip(*pair) for pair in zip(waveforms, uploaded, strict=True)]
        return in_halves(partial(_compute, built), clips)


class RaisedError(AudioError):
    """An exception of an extractor, as text: its frames hold waveforms."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(Reason.EXTRACTOR_ERROR, describe_raised(error))
        self.traceback = "".join(traceback.format_exception(error))


@contextmanager
def errors_of(built: BuiltConfig, ids: Iterable[str], alone: bool = True) -> Iterator[None]:
    """Turn an extractor's exceptions about some clips into an `AudioError`, and those that
    would end the process into an `ExtractorError`. Errors of featcache, of memory (see
    `is_out_of_memory`) and of a lost device stay as they are, and so do interrupts, which only
    the main thread gets."""
    name = type(built.extractor).__name__
    try:
        yield
        return
    except (SystemExit, KeyboardInterrupt) as error:
        exits = "raised KeyboardInterrupt"
        if isinstance(error, SystemExit):
            exits = f"called sys.exit({error.code!r})"
        elif threading.current_thread() is threading.main_thread():
            raise
        raise ExtractorError(f"{name} {exits} while it extracted {listing(ids)}") from error
    except BaseException as error:
        if isinstance(error, FeatcacheError) or is_out_of_memory(error, alone):
            raise
        if built.device.is_lost():
            error.add_note(f"featcache: while {name} extracted {listing(ids)}")
            raise
        raised = RaisedError(error)
    raise raised


def in_halves(
    compute: Callable[[list[_Input]], list[_Result]], inputs: list[_Input]
) -> list[_Result | AudioError]:
    """Compute inputs together; in halves if that raises an `AudioError`, down to single
    inputs."""
    if not inputs:
        return []
    try:
        return [*compute(inputs)]
    except AudioError as error:
        if len(inputs) == 1:
            # The traceback's frames hold waveforms.
            return [error.with_traceback(None)]
    middle = len(inputs) // 2
    return in_halves(compute, inputs[:middle]) + in_halves(compute, inputs[middle:])


def _compute(built: BuiltConfig, clips: list[Clip]) -> list[Result]:
    extractor, device = built.extractor, built.device
    with errors_of(built, (clip.id for clip in clips)):
        returned = extractor.extract(clips)
        features = [*returned] if isinstance(returned, Iterable) else []
        num_frames = [extractor.num_frames(len(clip.waveform)) for clip in clips]
        if len(features) != len(clips):
            raise fault(
                extractor,
                f"extract returned {type(returned).__name__} of {len(features):,}, and no list of "
                f"{counted(len(clips), 'tensor')}",
            )
        tracks = extractor.spec.tracks
        checked = [
            _entries_of(extractor, tracks, tensors, count)
            for tensors, count in zip(features, num_frames, strict=True)
        ]
        main = [clip[MAIN] for clip in checked]
        stored = download(built, main, built.computed_spec.is_quantized)
        for number, (result, clip) in enumerate(zip(stored, checked, strict=True)):
            if len(clip) > 1 and isinstance(result, ClipFeatures):
                others = {
                    name: device.download(entries.detach().contiguous()).copy()
                    for name, entries in clip.items()
                    if name != MAIN
                }
                stored[number] = ClipFeatures(result.features, {**result.side, **others})
    return stored


def _entries_of(
    extractor: Extractor[Params], tracks: Sequence[Track], extracted: Tracks, num_frames: int
) -> dict[str, torch.Tensor]:
    by_name = tracks_by_name(extracted)
    names = [track.name for track in tracks]
    if {*by_name} != {*names}:
        raise fault(
            extractor,
            f"extract returned the tracks {listing(by_name)}; its spec has {listing(names)}",
        )
    entries = {}
    for track in tracks:
        tensor = by_name[track.name]
        count = num_frames
        if track.name != MAIN or track.axis.has_times:
            count = [*getattr(tensor, "shape", ()), 0][0]
        expected = track.axis.dimensions and (count,)
        require_tensor(extractor, "extract", tensor, (*expected, *track.item_shape))
        entries[track.name] = track.axis.as_entries(tensor)
    return entries


def download(built: BuiltConfig, clips: Sequence[torch.Tensor], quantizes: bool) -> list[Result]:
    """Return the features of clips from the device: each quantised, or all cast to the
    stored dtype. Features that are not finite become an error. Raises ExtractorError if integers do
    not hold them."""
    device, dtype = built.device, built.computed_spec.dtype
    num_frames = [len(clip) for clip in clips]
    joined = torch.cat([*clips])
    if joined.is_complex():  # a cast would drop the imaginary parts
        raise fault(built.extractor, f"its features are {joined.dtype}, and {dtype} is stored")
    ends = np.cumsum(num_frames)[:-1]
    if quantizes:
        quantized, scales = quantize(joined, num_frames)
        levels = np.split(device.download(quantized), ends)
        # A copy, since it is held for long, amid memory that torch frees soon.
        parameters = device.download(scales)[:, None].copy()
        return [
            ClipFeatures(clip_levels, {QUANTIZATION: clip_parameters})
            for clip_levels, clip_parameters in zip(levels, parameters, strict=True)
        ]
    cast = joined.to(getattr(torch, dtype))
    if not cast.is_floating_point() and not torch.equal(cast.to(joined.dtype), joined):
        span = f"from {joined.min():g} to {joined.max():g}"
        raise fault(built.extractor, f"{dtype} cannot hold its features, {span}")
    if dtype == BFLOAT16:
        cast = cast.view(torch.uint16)
    stored = device.download(cast)
    are_finite = all_finite(as_values(stored, dtype))
    results: list[Result] = []
    for clip, features in zip(clips, np.split(stored, ends), strict=True):
        if are_finite or all_finite(as_values(features, dtype)):
            results.append(ClipFeatures(features, {}))
            continue
        hint = ""
        if cast.dtype == torch.float16 and clip.float().isfinite().all():
            hint = f"{OVERFLOW}: store.dtype: bfloat16 or float32 holds them"
        results.append(_non_finite(dtype, hint))
    return results


# If memory runs out

_OUT_OF_MEMORY = (
    "ALLOC_FAILED",  # cuBLAS, cuFFT, and cuDNN before version 9
    "ALLOCATION_FAILED",  # cuDNN
    # CUDA itself, as it makes a stream, loads a kernel or locks pages
    "error: out of memory",
    "DefaultCPUAllocator",
)
"""Parts of messages of errors that have no class."""

_PERHAPS_OUT_OF_MEMORY = (
    "unable to find an engine",  # cuDNN: nothing that fits can compute a convolution
    "STATUS_NOT_INITIALIZED",  # cuBLAS and cuDNN have no room for a thread's handle
)
"""Parts of messages that have other causes if nothing else is on the device."""


class DoesNotFitError(AudioError):
    """A clip, or a chunk of it, does not fit into the device's memory even alone."""

    def __init__(self, seconds: float, device: Device) -> None:
        super().__init__(
            Reason.TOO_LONG,
            f"{seconds:.0f} s do not fit on {device.label} at once: params.chunk of the "
            "config would cut them",
        )


def until_it_fits(
    compute: Callable[[int, bool], _Result],
    extractor: Extractor[Params],
    lengths: Collection[int],
    device: Device,
) -> _Result:
    """Compute a batch, again if memory runs out: in smaller batches, and at last alone on
    the device. Raises DoesNotFitError if a single row does not fit.

    Args:
        compute: Gets the number of rows in a batch of the shortest rows, and whether to
            have the device for itself.
        extractor: Its batches become smaller in all threads.
        lengths: The padded lengths of the rows, in samples.
    """
    shortest, on = min(lengths), device.torch_device
    alone = False
    while True:
        count = extractor.rows(shortest, on)
        try:
            return compute(count, alone)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error, alone):
                raise
        # The exception is gone by now, and with it the batch's memory.
        torch.cuda.empty_cache()
        if extractor.shrink(count, shortest, on):
            continue
        if alone:
            raise DoesNotFitError(max(lengths) / extractor.spec.sample_rate, device)
        alone = True


def is_out_of_memory(error: BaseException, alone: bool = True) -> bool:
    """Tell whether memory has run out. If nothing else was on the device (`alone`),
    ambiguous messages have another cause."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    texts = _OUT_OF_MEMORY if alone else _OUT_OF_MEMORY + _PERHAPS_OUT_OF_MEMORY
    message = text_of(error)
    return any(text in message for text in texts)
