"""Reads a batch of files that stand in the place of audio, for all versions that are filled
together: label files, or features that another program made."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from featcache.audio.content_hash import hash_of_content, state_of
from featcache.audio.members import changed, open_file, stamp_now
from featcache.audio.remote import FileStamp, os_errors_as
from featcache.errors import AudioError, ManifestError, Reason
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import ClipFeatures, Extracted, Result, WorkerTimes, download
from featcache.extraction.from_audio import Fetch
from featcache.extraction.padded_rows import PendingRows
from featcache.extractors.imported import Imported, read_array
from featcache.extractors.labels import Labels, packed
from featcache.format.shard import Item
from featcache.manifest.audio_locations import (
    AudioLocation,
    Command,
    LocalFile,
    Member,
    Url,
    locate,
    url_of,
)
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest, nearest_sample
from featcache.spec import LABELS, Events
from featcache.spec.quantize import is_quantized


def read_files(
    root: AudioLocation,
    configs: Sequence[BuiltConfig],
    fetched: Fetch,
    batch: Sequence[Utterance],
    times: WorkerTimes,
) -> Iterator[list[Extracted | PendingRows]]:
    """Read the files of a batch. Yields the results of all configs in their order."""
    began = perf_counter()
    results = [Extracted.of(config, root) for config in configs]
    for utterance in batch:
        content = None
        for config, result in zip(configs, results, strict=True):
            try:
                if isinstance(config.extractor, Imported):
                    item, features = _read_features(config, config.extractor, utterance, root)
                else:
                    content = content or _content(root, utterance.path, fetched)
                    item, features = _read_labels(config, utterance, *content)
            except AudioError as error:
                result.fail(utterance, error.with_traceback(None))
            else:
                result.take([item], [features])
    for result in results:
        result.seconds = (perf_counter() - began) / len(results)
    yield [*results]


def read_first(manifest: Manifest) -> NDArray[Any]:
    """Read the array of the first row, as another program made it. Raises ManifestError if
    it is damaged."""
    location = manifest.resolve(manifest.paths[0])
    file, inside = str(location), ""
    if isinstance(location, Member):
        file, inside = str(location.container), location.name
    try:
        return read_array(file, inside)
    except AudioError as error:
        where = f"{manifest.source}: {manifest.ids[0]}"
        raise ManifestError(f"{where}: {file}: {error}") from error


def _read_features(
    config: BuiltConfig, extractor: Imported, utterance: Utterance, root: AudioLocation
) -> tuple[Item, Result]:
    """Read the features of a row, cut to its segment."""
    location = locate(root, utterance.path)
    if isinstance(location, Command | Url) or url_of(location):
        raise AudioError(Reason.FILE_UNREADABLE, "imported features lie on this machine")
    content_hash = 0
    path = location.container if isinstance(location, Member) else location
    before = _state(path)
    if isinstance(location, Member):
        entries = extractor.read(str(location.container), location.name)
        size, mtime_ns = stamp_now(location)
    else:
        file, (size, mtime_ns) = open_file(location)
        with closing(file), os_errors_as("the file cannot be read"):
            content_hash = hash_of_content(file.fileno())
        entries = extractor.read(str(location), "")
    if _state(path) != before:
        raise changed("file")
    axis, start = extractor.spec.axis, utterance.start or 0.0
    if axis.exact_rate and (start or utterance.duration):
        last = float(axis.seconds(len(entries)))
        if start >= last:
            what = f"the segment begins at {start:.3f} s, and the features end at {last:.3f} s"
            raise AudioError(Reason.SEGMENT_OUTSIDE, what)
        (first,), (count,) = axis.span(np.array([len(entries)]), start, utterance.duration)
        entries = entries[first : first + count]
    seconds = axis.seconds(len(entries)) if axis.exact_rate else 0.0
    item = Item(
        **utterance.row(),
        num_samples=nearest_sample(seconds, config.sample_rate),
        size=size or 0,
        mtime_ns=mtime_ns,
        sample_rate=config.sample_rate,
        content_hash=content_hash,
    )
    quantizes = is_quantized(extractor.spec.dtype, config.config.dtype)
    if entries.dtype.kind != "f":
        entries = entries.astype(np.int64)  # as codes come from models
    (features,) = download(config, [torch.from_numpy(entries)], quantizes)
    return item, features


def _state(path: object) -> tuple[int, ...] | None:
    """Return `state_of` a file of this machine; None if there is no such file."""
    try:
        return state_of(os.stat(str(path)))
    except (OSError, ValueError):
        return None


def _content(root: AudioLocation, path: str, fetched: Fetch) -> tuple[bytes, FileStamp]:
    """Return the bytes of a label file, or of a part of one, and its stamp."""
    if not path:
        raise AudioError(Reason.FILE_MISSING, "the row names no label file")
    location = locate(root, path)
    if isinstance(location, Command):
        raise AudioError(Reason.NOT_LABELS, "commands are run for audio only")
    with os_errors_as("the file cannot be read"):
        if isinstance(location, LocalFile):
            file, stamp = open_file(location)
        else:
            copy = fetched(location)
            file, stamp = copy.open(), copy.stamp
        with closing(file):
            content = file.readall()
            status = os.fstat(file.fileno())
    if isinstance(location, LocalFile) and (status.st_size, status.st_mtime_ns) != stamp:
        raise changed("file")
    return content, stamp


def _read_labels(
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
    order = np.lexsort(times.T[::-1])  # several may begin with the row now
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
    text = packed([labels[number] for number in numbers[order].tolist()])
    return item, ClipFeatures(times[order] / speed, {LABELS: text})
