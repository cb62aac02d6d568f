"""Reads a batch of label files, for all versions that are filled together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import cast

from xxhash import xxh3_64_intdigest

from featcache.audio.members import copy_of, open_file
from featcache.audio.remote import FileStamp
from featcache.errors import AudioError, Reason
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import ClipFeatures, Extracted, WorkerTimes
from featcache.extraction.from_audio import Fetch
from featcache.extraction.padded_rows import PendingRows
from featcache.extractors.labels import LabelFile, Labels, packed
from featcache.format.shard import Item
from featcache.manifest.audio_locations import AudioLocation, AudioSource, Command, locate
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import nearest_sample
from featcache.spec import LABELS, Events


class LabelReader:
    """Reads batches of label files for some configs. Its calls come from several threads.

    Args:
        root: The root of relative paths.
    """

    def __init__(
        self, root: AudioLocation, configs: Sequence[BuiltConfig], fetched: Fetch = copy_of
    ) -> None:
        self._root = root
        self._configs = configs
        self._fetched = fetched

    def __call__(
        self, batch: Sequence[Utterance], times: WorkerTimes
    ) -> Iterator[list[Extracted | PendingRows]]:
        """Read a batch. Yields the results of all configs in their order."""
        began = perf_counter()
        results = [Extracted(config.computed_spec, self._root) for config in self._configs]
        for utterance in batch:
            for config, result in zip(self._configs, results, strict=True):
                try:
                    item, features = self._read(config, utterance)
                except AudioError as error:
                    result.fail(utterance, error.with_traceback(None))
                else:
                    result.take([item], [features])
        for result in results:
            result.seconds = (perf_counter() - began) / len(results)
        yield [*results]

    def _read(self, config: BuiltConfig, utterance: Utterance) -> tuple[Item, ClipFeatures]:
        """Read the labels of a row. Raises AudioError if that fails."""
        if not utterance.path:
            raise AudioError(Reason.FILE_MISSING, "the row names no label file")
        location = locate(self._root, utterance.path)
        data, stamp = self._content(location)
        extractor = cast("Labels", config.extractor)
        read = extractor.read(data, utterance.path, utterance.channel)
        num_samples, features = _cut(config, utterance, read)
        item = Item(
            **utterance.row(),
            num_samples=num_samples,
            size=stamp.size,
            mtime_ns=stamp.mtime_ns,
            sample_rate=config.sample_rate,
            content_hash=xxh3_64_intdigest(data),
        )
        return item, features

    def _content(self, location: AudioSource) -> tuple[bytes, FileStamp]:
        """Return the bytes of a file, or of a part of one, and its stamp."""
        if isinstance(location, Command):
            raise AudioError(Reason.NOT_LABELS, "commands are run for audio only")
        try:
            if isinstance(location, Path):
                file, stamp = open_file(location)
            else:
                copy = self._fetched(location)
                file, stamp = copy.open(), copy.stamp
            with closing(file):
                return file.readall(), stamp
        except OSError as error:
            message = f"the file cannot be read: {error.strerror}"
            raise AudioError(Reason.FILE_UNREADABLE, message) from error


def _cut(config: BuiltConfig, utterance: Utterance, read: LabelFile) -> tuple[int, ClipFeatures]:
    """Cut the labels of a file to the row's segment, at the speed of its copy. Returns also
    how many samples that lasts. Raises AudioError if it begins behind the tier's end."""
    start, end = utterance.start or 0.0, read.end
    if end is None:
        end = float(read.times.max(initial=start))
    elif start and start >= end:
        what = f"the segment begins at {start:.3f} s, and the tier ends at {end:.3f} s"
        raise AudioError(Reason.SEGMENT_OUTSIDE, what)
    times, labels = read.times, read.labels
    if start or utterance.duration is not None:
        times, numbers = Events().cut(times, start, utterance.duration)
        labels = [labels[number] for number in numbers.tolist()]
    speed = config.waveform_maker.speed(utterance.id)
    seconds = (utterance.duration or end - start) / speed
    num_samples = nearest_sample(seconds, config.sample_rate)
    return num_samples, ClipFeatures(times / speed, {LABELS: packed(labels)})
