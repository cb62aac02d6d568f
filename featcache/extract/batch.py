"""One batch of utterances, from files to stored features: decode, resample, extract, cast or quantise, check.

A batch belongs to one shard task and feeds every target: each file is decoded once, each distinct audio policy
applied once. The worker thread that decodes a batch extracts it at once, but for targets whose extractor takes
rows: what is to become a row is handed out (`Pending`), to be computed together with rows of other batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.audio.resample import error_if_too_long
from featcache.device import Device
from featcache.errors import AudioError, Reason
from featcache.extract.decoding import Decoded, Waveforms, decode_all, failure_of, parts
from featcache.extract.features import compute
from featcache.extract.fitting import is_out_of_memory
from featcache.extract.memory import AudioMemory
from featcache.extract.rows import Pending, compute_alone, row_extractor
from featcache.extract.target import Extracted, Spent, Target
from featcache.manifest import Utterance
from featcache.store.runs import Failure
from featcache.store.shard import Item


def process(
    root: Path,
    targets: Sequence[Target],
    device: Device,
    memory: AudioMemory,
    batch: Sequence[Utterance],
    spent: Spent,
) -> Iterator[list[Extracted | Pending]]:
    """Extract a batch for every target, or hand out the rows that are to be computed for it.

    Yields the targets' results, in the targets' order, for one part of the batch after the other: a part
    holds about `device.batch_seconds`, however much the batch's files hold. Parts with a long recording are computed
    here, rows and all, so that no more of them is held than `memory` allows.
    """
    limits = [target.max_source_seconds for target in targets]
    max_seconds = None if None in limits else max(limit for limit in limits if limit)
    bytes_per_second = 4 * max(target.config.audio.sample_rate for target in targets)
    with memory.lease() as reserve:

        def reserve_all(num_bytes: int, seconds: float) -> None:
            reserve(num_bytes + int(seconds * bytes_per_second))

        for part in parts(decode_all(batch, root, max_seconds, reserve_all), device.batch_seconds, spent):
            yield from _extract_part(targets, part, root, device, spent)
            del part  # before the next one is decoded


def _extract_part(
    targets: Sequence[Target], part: Sequence[Decoded], root: Path, device: Device, spent: Spent
) -> Iterator[list[Extracted | Pending]]:
    """What each target gets of a part; clip by clip, where they do not fit into memory together."""
    is_large = any(one.is_large for one in part)
    try:
        waveforms = Waveforms(part, spent)
        results = [_extract(target, waveforms, root, device, spent, is_large) for target in targets]
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    else:
        del waveforms
        yield results
        return
    if len(part) > 1:
        for decoded in part:
            yield from _extract_part(targets, [decoded], root, device, spent)
    else:
        yield [_extract_if_it_fits(target, part[0], root, device, spent) for target in targets]


def _extract_if_it_fits(
    target: Target, decoded: Decoded, root: Path, device: Device, spent: Spent
) -> Extracted | Pending:
    """What a target gets of one clip, whose failure it is where there is not enough memory for it."""
    try:
        return _extract(target, Waveforms([decoded], spent), root, device, spent, True)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    too_large = AudioError(Reason.OUT_OF_MEMORY, "extracting it takes more memory than there is")
    return Extracted.of_failures(target, [failure_of(decoded.utterance, root, too_large)])


def _extract(
    target: Target, waveforms: Waveforms, root: Path, device: Device, spent: Spent, at_once: bool
) -> Extracted | Pending:
    items: list[Item] = []
    clips: list[NDArray[np.float32]] = []
    utterances: list[Utterance] = []
    failures: list[Failure] = []
    for decoded, waveform in zip(waveforms.part, waveforms.under(target.waveform_maker), strict=True):
        if isinstance(waveform, AudioError):
            failures.append(failure_of(decoded.utterance, root, waveform))
        elif refused := _refusal(target, decoded, len(waveform)):
            failures.append(failure_of(decoded.utterance, root, refused))
        else:
            item = decoded.item(len(waveform))
            if item.sample_rate != target.config.audio.sample_rate:
                spent.count_resampled(target, item.id)
            items.append(item)
            clips.append(waveform)
            utterances.append(decoded.utterance)
    if row_extractor(target):
        pending = Pending(target, items, clips, failures, lambda clip, error: failure_of(utterances[clip], root, error))
        if at_once:
            with spent.extracting(target):
                compute_alone(pending, device)
        return pending.extracted() if pending.is_complete else pending
    with spent.extracting(target):
        found = compute(target.extractor, [item.id for item in items], clips, target.config.dtype, device)
    failures += [failure_of(row, root, error) for row, error in zip(utterances, found.errors, strict=True) if error]
    return Extracted(
        items=[item for item, error in zip(items, found.errors, strict=True) if not error],
        num_frames=[count for count in found.num_frames if count],
        features=found.features,
        failures=failures,
        side=found.side,
    )


def _refusal(target: Target, decoded: Decoded, num_samples: int) -> AudioError | None:
    """Why a clip of `num_samples`, at the config's rate, is not for this target."""
    assert decoded.samples is not None
    assert decoded.source is not None
    speed = target.waveform_maker.speed(decoded.utterance.id)
    if too_long := error_if_too_long(len(decoded.samples), decoded.source.sample_rate * speed, target.max_seconds):
        return too_long
    if target.extractor.num_frames(num_samples):
        return None
    rate = target.config.audio.sample_rate
    return AudioError(Reason.TOO_SHORT, f"{num_samples} samples at {rate} Hz are too few for one frame")
