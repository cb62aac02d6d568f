"""Datasets of Hugging Face with audio inside: Parquet, and folders that `save_to_disk` has written.

The path of a row is its place in the table, as in `train-00000.parquet/audio/123` (see `manifest.audio_locations`), or
where there are no bytes, the path that the table has in their place, as `to_parquet` of files writes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

from featcache.errors import ManifestError, listing
from featcache.manifest.columns import names_of_whole_files
from featcache.manifest.formats.parquet import ArrowTable, ParquetTable
from featcache.manifest.formats.source import Batch, Source, opened
from featcache.manifest.formats.tables import parquet_batches


def is_dataset(source: Source) -> bool:
    """Whether it is a folder that `save_to_disk` has written, or Parquet with a column of audio, in a file or below a
    folder."""
    if source.is_folder and {"dataset_dict.json", "state.json"} & source.names:
        return True
    if not source.is_folder:
        return source.is_parquet and bool(ParquetTable(source.stream).audio)
    first = next(iter(_parquet_below(source)), None)
    if first is None:
        return False
    with opened(source.path / first) as stream:
        return bool(ParquetTable(stream).audio)


def read_dataset(source: Source) -> Iterator[Batch]:
    """The rows of all tables of a dataset, with every column without bytes. Raises ManifestError if there are none, or
    one has no column of audio, is damaged, or is not called `.parquet`."""
    if not source.is_folder:
        if source.path.suffix != ".parquet":  # its audio is read from it later, by a path that says what it is
            raise ManifestError("is Parquet with audio inside: name it with .parquet at its end, as a file")
        source.faults.unit("row")
        audio = _Audio(ParquetTable(source.stream), source.path.name, source)
        yield from parquet_batches(audio, source, renamed=_renamed)
        return
    files = _saved(source) if {"dataset_dict.json", "state.json"} & source.names else _parquet_below(source)
    if not files:
        raise ManifestError("there are no tables of a dataset in it")
    for file in files:
        base = source.faults.file(file, "row")
        with opened(source.path / file) as stream:
            table = ParquetTable(stream) if file.endswith(".parquet") else ArrowTable(stream)
            yield from parquet_batches(_Audio(table, file, source), source, base, _renamed)


class _Audio:
    """A table with the places of its audio, in `file`, relative to the manifest's folder, as a column."""

    def __init__(self, table: ParquetTable | ArrowTable, file: str, source: Source) -> None:
        if not table.audio:
            raise ManifestError(f"{file} has no column of audio, which has the fields bytes and path")
        audio, *others = table.audio
        if others:
            source.note(f"audio is read from the column {audio!r}, and not from {listing(map(repr, others))}")
        self._table, self._prefix = table, f"{file}/{audio}"
        self._outside = table.paths_outside(audio)
        self.names = [_PLACE, *table.names]

    def batches(self, columns: Collection[str]) -> Iterator[tuple[range, dict[str, Sequence[Any]]]]:
        for rows, cells in self._table.batches([name for name in columns if name != _PLACE]):
            places = [self._outside.get(row - 1, f"{self._prefix}/{row - 1}") for row in rows]
            yield rows, {_PLACE: places, **cells}


_PLACE = "audio.path"
"""The column with the places of audio, by a name that has no meaning."""

_renamed = partial(names_of_whole_files, _PLACE)


def _parquet_below(source: Source) -> list[str]:
    """The Parquet files in a folder; if there are none, those in its folders."""
    here = sorted(name for name in source.names if name.endswith(".parquet"))
    below = (f"{folder}/{name}" for folder in source.folders for name in sorted(os.listdir(source.path / folder)))
    return here or [path for path in below if path.endswith(".parquet")]


def _saved(source: Source) -> list[str]:
    """The Arrow files of a folder that `save_to_disk` has written: of each split, in order."""
    splits = [""]
    if "dataset_dict.json" in source.names:
        splits = [f"{split}/" for split in _listed(source, "dataset_dict.json", "splits")]
    listed = ((split, _listed(source, f"{split}state.json", "_data_files")) for split in splits)
    return [f"{split}{data['filename']}" for split, files in listed for data in files]


def _listed(source: Source, file: str, key: str) -> list[Any]:
    """The list that a small JSON file has under a key."""
    with opened(source.path / file) as stream:
        data = stream.read(_STATE_BYTES)
    try:
        found = json.loads(data)[key]
        names = [item["filename"] if isinstance(item, dict) else item for item in found]
        if all(isinstance(name, str) and os.path.basename(name) == name and name.isprintable() for name in names):
            return list(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ManifestError(f"{file} is not as save_to_disk writes it: no list of names under {key!r}")


_STATE_BYTES = 4 << 20
