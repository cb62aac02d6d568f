"""Extracts a batch of utterances from audio, for all versions that are filled together.

Each file is decoded once, and made into waveforms once for each way of doing that. The worker thread that decodes a
batch also extracts it, except for extractors that take rows: their rows are handed out (`PendingRows`), to be computed
together with rows of other batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from featcache.audio.content_hash import ContentHashes
from featcache.audio.remote import Fetched
from featcache.audio.resample import error_if_too_long, why_silent
from featcache.device import Device
from featcache.errors import AudioError, Reason
from featcache.extraction.decoding import AudioMemory, Decoded, Waveforms, WorkerTimes, decode_all, parts
from featcache.extraction.failures import failure_of
from featcache.extraction.features import Extracted, compute_clips, errors_of, last_traceback
from featcache.extraction.out_of_memory import is_out_of_memory
from featcache.extraction.padded_rows import PendingRows
from featcache.extraction.version_plan import BuiltConfig
from featcache.format.shard import Item
from featcache.manifest import Utterance
from featcache.manifest.audio_locations import AudioLocation, CopiedSource
from featcache.version.ledger import Failure


def extract_from_audio(
    root: AudioLocation,
    configs: Sequence[BuiltConfig],
    device: Device,
    memory: AudioMemory,
    hashes: ContentHashes,
    fetched: Callable[[CopiedSource], Fetched],
    batch: Sequence[Utterance],
    times: WorkerTimes,
) -> Iterator[list[Extracted | PendingRows]]:
    """Extract a batch for every config, or hand out the rows that are to be computed for it.

    Yields:
        For one part of the batch after the other, the results of all configs in their order. A part holds about
        `device.batch_seconds`, however long the batch's files are. Parts with a large recording are computed here, with
        their rows, so that no more of them are held than `memory` allows.
    """
    limits = [config.max_source_seconds for config in configs]
    max_seconds = None if None in limits else max(limit for limit in limits if limit)
    bytes_per_second = 4 * max(config.sample_rate for config in configs)
    extracting = [_BatchOfConfig(config, root, device, times) for config in configs]
    with memory.lease() as reserve:

        def reserve_all(num_bytes: int, seconds: float) -> None:
            reserve(num_bytes + int(seconds * bytes_per_second))

        decoding = decode_all(batch, root, max_seconds, reserve_all, hashes, fetched)
        for part in parts(decoding, device.batch_seconds, times):
            yield from _extract_part(extracting, part, times)
            del part  # before the next one is decoded


def extract_alone(config: BuiltConfig, root: AudioLocation, device: Device, decoded: Decoded) -> Extracted:
    """Extract one decoded utterance for one config, as a run does whose batch holds nothing else."""
    extracted = _BatchOfConfig(config, root, device, WorkerTimes()).extract_if_it_fits(decoded)
    assert isinstance(extracted, Extracted)
    return extracted


def _extract_part(
    extracting: Sequence[_BatchOfConfig], part: Sequence[Decoded], times: WorkerTimes
) -> Iterator[list[Extracted | PendingRows]]:
    """The results for a part; clip by clip if the clips do not fit into memory together."""
    is_large = any(decoded.is_large for decoded in part)
    try:
        waveforms = Waveforms(part, times)
        results = [config.extract(waveforms, is_large) for config in extracting]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        del waveforms
        yield results
        return
    if len(part) > 1:
        for decoded in part:
            yield from _extract_part(extracting, [decoded], times)
    else:
        yield [config.extract_if_it_fits(part[0]) for config in extracting]


class _BatchOfConfig:
    """Extracts a batch for one config, part by part."""

    def __init__(self, config: BuiltConfig, root: AudioLocation, device: Device, times: WorkerTimes) -> None:
        self._config = config
        self._root = root
        self._device = device
        self._times = times

    def extract(self, waveforms: Waveforms, at_once: bool) -> Extracted | PendingRows:
        """Extract a part of the batch; with `at_once`, compute its rows too."""
        config = self._config
        items: list[Item] = []
        clips: list[NDArray[np.float32]] = []
        utterances: list[Utterance] = []
        failures: list[Failure] = []
        traceback = ""
        for decoded, waveform in zip(waveforms.part, waveforms.made_by(config.waveform_maker), strict=True):
            clip = waveform if isinstance(waveform, AudioError) else self._checked(decoded, waveform)
            if isinstance(clip, AudioError):
                failures.append(self._fail(decoded.utterance, clip))
                traceback = last_traceback([clip]) or traceback
            else:
                items.append(decoded.item(len(clip)))
                assert decoded.samples is not None
                if why := why_silent(decoded.samples, clip):
                    config.silent[self._without_suffix(decoded.utterance.id)] = why
                clips.append(clip)
                utterances.append(decoded.utterance)
        resampled = self._resampled(items)
        if config.row_extractor is not None:
            pending = PendingRows(
                extractor=config.row_extractor,
                spec=config.spec,
                items=items,
                waveforms=clips,
                failures=failures,
                fail=lambda clip, error: self._fail(utterances[clip], error),
                resampled=resampled,
                traceback=traceback,
            )
            if at_once:
                pending.compute(self._device)
            if not pending.is_complete:
                return pending
            extracted = pending.extracted()
            self._times.extract += extracted.seconds
            return extracted
        started = perf_counter()
        computed = compute_clips(config.extractor, [item.id for item in items], clips, config.spec, self._device)
        seconds = perf_counter() - started
        self._times.extract += seconds
        failures += [self._fail(row, error) for row, error in zip(utterances, computed.errors, strict=True) if error]
        return Extracted(
            items=[item for item, error in zip(items, computed.errors, strict=True) if not error],
            num_frames=[count for count in computed.num_frames if count],
            features=computed.features,
            failures=failures,
            side=computed.side,
            seconds=seconds,
            resampled=resampled,
            traceback=last_traceback(computed.errors) or traceback,
        )

    def extract_if_it_fits(self, decoded: Decoded) -> Extracted | PendingRows:
        """Extract one clip; it fails if there is not enough memory for it."""
        try:
            return self.extract(Waveforms([decoded], self._times), at_once=True)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        too_large = AudioError(Reason.OUT_OF_MEMORY, "extracting it takes more memory than there is")
        return Extracted.of_failures(self._config.spec, [self._fail(decoded.utterance, too_large)])

    def _checked(self, decoded: Decoded, waveform: NDArray[np.float32]) -> NDArray[np.float32] | AudioError:
        """A clip's waveform at the config's rate, or why it cannot be extracted."""
        assert decoded.samples is not None
        assert decoded.source is not None
        config = self._config
        speed = config.waveform_maker.speed(decoded.utterance.id)
        if too_long := error_if_too_long(len(decoded.samples), decoded.source.sample_rate * speed, config.max_seconds):
            return too_long
        try:
            with errors_of(config.extractor, [decoded.utterance.id]):
                has_frames = config.extractor.num_frames(len(waveform)) > 0
        except AudioError as error:
            return error
        too_few = f"{len(waveform)} samples at {config.sample_rate} Hz are too few for one frame"
        return waveform if has_frames else AudioError(Reason.TOO_SHORT, too_few)

    def _resampled(self, items: Sequence[Item]) -> dict[str, int]:
        """The sample rates of files that have another than the config, by the ids without the suffixes of copies."""
        others = (item for item in items if item.sample_rate != self._config.sample_rate)
        return {self._without_suffix(item.id): item.sample_rate for item in others}

    def _without_suffix(self, id_: str) -> str:
        """The utterance's id, of that of a copy."""
        return id_.removesuffix(self._config.waveform_maker.copies.copy_of(id_).suffix)

    def _fail(self, utterance: Utterance, error: AudioError) -> Failure:
        return failure_of(utterance, self._root, error)
