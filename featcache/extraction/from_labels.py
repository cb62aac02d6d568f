"""Reads a batch of label files, for all versions that are filled together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import cast

from xxhash import xxh3_64_intdigest

from featcache.audio.members import open_file
from featcache.audio.remote import FileStamp, os_errors_as
from featcache.errors import AudioError, Reason
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import ClipFeatures, Extracted, WorkerTimes
from featcache.extraction.from_audio import Fetch
from featcache.extraction.padded_rows import PendingRows
from featcache.extractors.labels import Labels, packed
from featcache.format.shard import Item
from featcache.manifest.audio_locations import AudioLocation, Command, locate
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import nearest_sample
from featcache.spec import LABELS, Events


def read_labels(
    root: AudioLocation,
    configs: Sequence[BuiltConfig],
    fetched: Fetch,
    batch: Sequence[Utterance],
    times: WorkerTimes,
) -> Iterator[list[Extracted | PendingRows]]:
    """Read a batch of label files. Yields the results of all configs in their order."""
    began = perf_counter()
    results = [Extracted(config.computed_spec, root) for config in configs]
    for utterance in batch:
        content = None
        for config, result in zip(configs, results, strict=True):
            try:
                content = content or _content(root, utterance.path, fetched)
                item, features = _read(config, utterance, *content)
            except AudioError as error:
                result.fail(utterance, error.with_traceback(None))
            else:
                result.take([item], [features])
    for result in results:
        result.seconds = (perf_counter() - began) / len(results)
    yield [*results]


def _content(root: AudioLocation, path: str, fetched: Fetch) -> tuple[bytes, FileStamp]:
    """Return the bytes of a label file, or of a part of one, and its stamp."""
    if not path:
        raise AudioError(Reason.FILE_MISSING, "the row names no label file")
    location = locate(root, path)
    if isinstance(location, Command):
        raise AudioError(Reason.NOT_LABELS, "commands are run for audio only")
    with os_errors_as("the file cannot be read"):
        if isinstance(location, Path):
            file, stamp = open_file(location)
        else:
            copy = fetched(location)
            file, stamp = copy.open(), copy.stamp
        with closing(file):
            return file.readall(), stamp


def _read(
    config: BuiltConfig, utterance: Utterance, data: bytes, stamp: FileStamp
) -> tuple[Item, ClipFeatures]:
    """Read the labels of a row, cut to its segment, at the speed of its copy."""
    times, labels, end = cast("Labels", config.extractor).read(
        data, utterance.path, utterance.channel
    )
    start, duration = utterance.start or 0.0, utterance.duration or math.inf
    if end is None:
        end = float(times.max(initial=start))
    elif start and start >= end:
        what = f"the segment begins at {start:.3f} s, and the tier ends at {end:.3f} s"
        raise AudioError(Reason.SEGMENT_OUTSIDE, what)
    times, numbers = Events().cut(times, start, duration)
    speed = config.waveform_maker.speed(utterance.id)
    seconds = (utterance.duration or end - start) / speed
    item = Item(
        **utterance.row(),
        num_samples=nearest_sample(seconds, config.sample_rate),
        size=stamp.size,
        mtime_ns=stamp.mtime_ns,
        sample_rate=config.sample_rate,
        content_hash=xxh3_64_intdigest(data),
    )
    text = packed([labels[number] for number in numbers.tolist()])
    return item, ClipFeatures(times / speed, {LABELS: text})
