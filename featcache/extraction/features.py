"""Features as a version stores them: computed from clips, cast or quantised, and checked
for NaN and infinity.

If an extractor refuses a batch, or raises whatever else, the batch is halved until it is
known which clips are the cause: these fail, and the others are computed. Their values do
not depend on it, as they do not depend on neighbours. If memory runs out, padded rows are
computed in smaller batches, and then alone on the device."""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, FeatcacheError, Reason, counted, listing
from featcache.extraction.audio_files import failure_of
from featcache.extraction.pooling import pooled
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.base import Tracks, describe_raised, fault, require_tensor
from featcache.extractors.rows import RowExtractor
from featcache.format.shard import Item, dequantize_array
from featcache.manifest.audio_locations import AudioLocation
from featcache.manifest.segments import Utterance
from featcache.quantize import quantize
from featcache.spec import MAIN, QUANTIZATION, FeatureSpec, all_finite
from featcache.version.ledger import Failure

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")

Waveform = NDArray[np.float32]
"""Mono samples, float32 `[num_samples]`."""

WorkerTimes = defaultdict[str, float]
"""Seconds that a worker thread has spent in each stage: `decode`, reading and decoding
files; `resample`, mixing down, resampling, adding noise; `extract`, computing features,
with the transfers to the device and back."""


@dataclass(frozen=True)
class ClipFeatures:
    """The features of a clip, or of a piece of one, as they are stored."""

    features: NDArray[Any]
    """`[frames, *item_shape]` of the stored dtype; of a piece whose clip is still to be
    quantised, float32."""
    side: Mapping[str, NDArray[Any]]
    """The entries of each side array, by name."""

    def values(self) -> NDArray[Any]:
        """Return the features as they are read: those that are quantised are float32."""
        if QUANTIZATION not in self.side:
            return self.features
        return dequantize_array(self.features, *self.side[QUANTIZATION][0])

    @property
    def num_bytes(self) -> int:
        """The bytes of all arrays."""
        return self.features.nbytes + sum(entries.nbytes for entries in self.side.values())


@dataclass
class Extracted:
    """What one version gets from a part of a batch: the features of some utterances, and
    the failures of others."""

    spec: FeatureSpec
    """That of the features as they are stored."""
    root: AudioLocation
    """What paths are relative to."""
    pool: str | None = None
    """The vector that is stored instead of frames; see `pooling`."""
    items: list[Item] = field(default_factory=list)
    features: list[ClipFeatures] = field(default_factory=list)
    """Those of each item."""
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds of worker threads that computing the features took."""
    remarks: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Of each utterance whose file has another sample rate than the config, or that is
    silent: that rate in Hz, and why it is silent, else empty; by the utterance's id. Of
    several copies, the first stands for it."""
    traceback: str = ""
    """That of the last exception by which the extractor failed an utterance; empty if it
    failed none."""

    def take(
        self, items: Iterable[Item], results: Iterable[ClipFeatures | AudioError]
    ) -> Extracted:
        """Take the features of some items, or why there are none; returns this. An item
        fails if its quantised features are not finite."""
        for item, result in zip(items, results, strict=True):
            if isinstance(result, AudioError):
                self.fail(item, result)
            elif QUANTIZATION in result.side and not all_finite(result.side[QUANTIZATION]):
                # Of levels, their scale and offset tell what they stand for.
                self.fail(item, _non_finite(self.spec.dtype))
            else:
                self.items.append(item)
                self.features.append(result if self.pool is None else _pooled(result, self.pool))
        return self

    def fail(self, utterance: Utterance, error: AudioError) -> Extracted:
        """Take the failure of an utterance; returns this."""
        self.failures.append(failure_of(utterance, self.root, error))
        if isinstance(error, RaisedError):
            self.traceback = error.traceback
        return self


def _pooled(clip: ClipFeatures, pool: str) -> ClipFeatures:
    return ClipFeatures(pooled(clip.values(), pool), {})


def _non_finite(dtype: str, hint: str = "") -> AudioError:
    what = f"features are NaN or infinite as {dtype}{hint}"
    return AudioError(Reason.NON_FINITE_FEATURES, what)


def compute_clips(
    extractor: Extractor[Params],
    waveforms: Mapping[str, Waveform],
    spec: FeatureSpec,
    device: Device,
) -> list[ClipFeatures | AudioError]:
    """Extract clips, by their ids, each long enough for a frame, and cast the features as
    `spec` says, or quantise them clip by clip. Raises ExtractorError if the extractor
    returned other numbers of frames than its `num_frames` says."""
    with device.slot():
        uploaded = device.upload([*waveforms.values()], extractor.needs_aligned_waveforms)
        clips = [Clip(*pair) for pair in zip(waveforms, uploaded, strict=True)]
        return in_halves(partial(_compute, extractor, spec, device), clips)


class RaisedError(AudioError):
    """An exception that an extractor has raised, as the failure of what it extracted.

    It does not hold on to the exception, whose frames hold waveforms."""

    def __init__(self, error: Exception) -> None:
        super().__init__(Reason.EXTRACTOR_ERROR, describe_raised(error))
        self.traceback = "".join(traceback.format_exception(error))


@contextmanager
def errors_of(
    extractor: Extractor[Params],
    ids: Iterable[str],
    device: Device | None = None,
    alone: bool = True,
) -> Iterator[None]:
    """Turn what an extractor raises about some clips into an `AudioError`, and `sys.exit`
    into an `ExtractorError`.

    What is no clip's fault stays what it is: errors of featcache's own, memory that runs
    out, a device that is lost.

    Args:
        device: What it computes on; None if it computes nothing.
        alone: Whether nothing else is on the device, as for `is_out_of_memory`.
    """
    name = type(extractor).__name__
    try:
        yield
        return
    except SystemExit as error:
        raise ExtractorError(
            f"{name} called sys.exit({error.code!r}) while it extracted {listing(ids)}"
        ) from error
    except Exception as error:
        if isinstance(error, FeatcacheError) or is_out_of_memory(error, alone):
            raise
        if device is not None and device.is_lost():
            error.add_note(f"featcache: while {name} extracted {listing(ids)}")
            raise
        raised = RaisedError(error)
    raise raised


def in_halves(
    compute: Callable[[list[_Given]], list[_Result]], given: list[_Given]
) -> list[_Result | AudioError]:
    """Compute something together; in halves if that raises an `AudioError`, down to what
    raises it by itself."""
    if not given:
        return []
    try:
        return [*compute(given)]
    except AudioError as error:
        if len(given) == 1:
            return [error.with_traceback(None)]  # whose frames hold waveforms
    middle = len(given) // 2
    return in_halves(compute, given[:middle]) + in_halves(compute, given[middle:])


def _compute(
    extractor: Extractor[Params], spec: FeatureSpec, device: Device, clips: list[Clip]
) -> list[ClipFeatures | AudioError]:
    """Compute clips together. Raises AudioError if one of them cannot be extracted;
    ExtractorError if the extractor returned something else than its `num_frames` and its
    `spec` say."""
    with errors_of(extractor, (clip.id for clip in clips), device):
        returned = extractor.extract(clips)
        features = [*returned] if isinstance(returned, Iterable) else []
        num_frames = [extractor.num_frames(len(clip.waveform)) for clip in clips]
    if len(features) != len(clips):
        what = f"extract returned {type(returned).__name__} of {len(features):,}"
        raise fault(extractor, f"{what}, and no list of {counted(len(clips), 'tensor')}")
    tracks = [
        _tracks_of(extractor, one, count) for one, count in zip(features, num_frames, strict=True)
    ]
    main = [clip[MAIN] for clip in tracks]
    stored = download(extractor, main, spec, device, spec.is_quantized)
    if not spec.outputs:
        return stored
    return [
        result if isinstance(result, AudioError) else _with_others(result, clip, device)
        for result, clip in zip(stored, tracks, strict=True)
    ]


def _tracks_of(
    extractor: Extractor[Params], extracted: Tracks, num_frames: int
) -> dict[str, torch.Tensor]:
    """Return the entries of each track of a clip, `[entries, *item_shape]`, by name. Raises
    ExtractorError if they are not what the spec says."""
    by_name = extracted if isinstance(extracted, Mapping) else {MAIN: extracted}
    names = [track.name for track in extractor.spec.tracks]
    if {*by_name} != {*names}:
        what = f"extract returned the tracks {listing(by_name)}"
        raise fault(extractor, f"{what}; its spec has {listing(names)}")
    entries = {}
    for track in extractor.spec.tracks:
        tensor = by_name[track.name]
        count = num_frames if track.name == MAIN else getattr(tensor, "shape", (0,))[0]
        expected = track.axis.dimensions and (count,)
        require_tensor(extractor, "extract", tensor, (*expected, *track.item_shape))
        entries[track.name] = track.axis.as_entries(tensor)
    return entries


def _with_others(
    result: ClipFeatures, entries: Mapping[str, torch.Tensor], device: Device
) -> ClipFeatures:
    """Add the tracks besides the main one to the features of a clip."""
    others = {
        name: device.download(tensor.contiguous()).copy()
        for name, tensor in entries.items()
        if name != MAIN
    }
    return ClipFeatures(result.features, {**result.side, **others})


def download(
    extractor: Extractor[Params],
    clips: Sequence[torch.Tensor],
    spec: FeatureSpec,
    device: Device,
    quantizes: bool,
) -> list[ClipFeatures | AudioError]:
    """The features of some clips, or pieces of them, from the device: each quantised, or
    all cast as `spec` says. In the place of features that are not finite then, there is
    an error. Raises ExtractorError if integers do not hold them."""
    num_frames = [len(clip) for clip in clips]
    together, ends = torch.cat([*clips]), np.cumsum(num_frames)[:-1]
    if not quantizes:
        cast = together.to(getattr(torch, spec.dtype))
        if not cast.is_floating_point() and not torch.equal(cast.to(together.dtype), together):
            span = f"from {together.min():g} to {together.max():g}"
            raise fault(extractor, f"{spec.dtype} cannot hold its features, {span}")
        stored = device.download(cast)
        features = np.split(stored, ends)
        if all_finite(stored):
            return [ClipFeatures(one, {}) for one in features]
        return [
            ClipFeatures(one, {}) if all_finite(one) else _non_finite(spec.dtype, _hint(clip, cast))
            for one, clip in zip(features, clips, strict=True)
        ]
    quantized, scales = quantize(together, num_frames)
    levels = np.split(device.download(quantized), ends)
    # held for long, in the midst of what torch frees soon
    parameters = device.download(scales)[:, None].copy()
    return [
        ClipFeatures(one, {QUANTIZATION: own}) for one, own in zip(levels, parameters, strict=True)
    ]


def _hint(clip: torch.Tensor, cast: torch.Tensor) -> str:
    """What to do about features that are not finite once they are cast."""
    if cast.dtype == torch.float16 and clip.float().isfinite().all():
        return ", which ends at 65,504: store.dtype: float32 holds them"
    return ""


# If memory runs out

_OUT_OF_MEMORY = (
    "ALLOC_FAILED",  # cuBLAS, cuFFT, and cuDNN before version 9
    "ALLOCATION_FAILED",  # cuDNN
    # CUDA itself, as it makes a stream, loads a kernel or locks pages
    "error: out of memory",
    "DefaultCPUAllocator",
)
"""Parts of the messages when memory runs out; what torch says of its own memory on a GPU
has a class."""

_PERHAPS_OUT_OF_MEMORY = (
    "unable to find an engine",  # cuDNN: nothing that fits can compute a convolution
    "STATUS_NOT_INITIALIZED",  # cuBLAS and cuDNN have no room for a thread's handle
)
"""Parts of messages that may have other causes: with nothing else on the device, memory
is not the cause."""


class DoesNotFitError(AudioError):
    """A clip, or a chunk of a clip, does not fit into the device's memory even with
    nothing beside it."""

    def __init__(self, seconds: float, device: Device) -> None:
        what = (
            f"{seconds:.0f} s do not fit on {device.label} at once: params.chunk of the "
            "config would cut them"
        )
        super().__init__(Reason.TOO_LONG, what)


def until_it_fits(
    compute: Callable[[int, bool], _Result],
    extractor: Extractor[Params],
    lengths: Collection[int],
    device: Device,
) -> _Result:
    """Compute a batch, again if it does not fit into memory: in smaller batches, and at
    last with nothing beside it. Raises DoesNotFitError if a single row does not fit.

    Args:
        compute: Gets the number of rows of a batch of the shortest, and whether to have
            the device for itself.
        extractor: The extractor. If a batch of rows does not fit, its batches are smaller
            from then on, in all threads. An extractor that takes no rows gets one clip at
            a time.
        lengths: The numbers of samples of the rows, with their padding. Batches of the
            shortest rows have the most: once these have one row, no other batch has more.
    """
    shortest, alone = min(lengths), False
    while True:
        count = (
            extractor.rows(shortest, device.torch_device)
            if isinstance(extractor, RowExtractor)
            else 1
        )
        try:
            return compute(count, alone)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error, alone):
                raise
        # The exception is gone by now, and with it what the batch held.
        torch.cuda.empty_cache()
        if isinstance(extractor, RowExtractor) and extractor.shrink(
            count, shortest, device.torch_device
        ):
            continue
        if alone:
            raise DoesNotFitError(max(lengths) / extractor.spec.sample_rate, device)
        alone = True


def is_out_of_memory(error: BaseException, alone: bool = True) -> bool:
    """Whether the memory of the device or of the machine has run out; torch's libraries
    say so in different words.

    `alone` if nothing else was on the device: then what may have other causes has one of
    them."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    all_words = _OUT_OF_MEMORY if alone else (*_OUT_OF_MEMORY, *_PERHAPS_OUT_OF_MEMORY)
    return isinstance(error, RuntimeError) and any(words in str(error) for words in all_words)
