"""Folders: of audio files alone, and with metadata in tables as Hugging Face's AudioFolder has them."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from functools import partial

from featcache.errors import ManifestError, listing
from featcache.manifest.columns import names_of_whole_files
from featcache.manifest.formats.parquet import ParquetTable
from featcache.manifest.formats.source import AUDIO_SUFFIXES, HEAD_BYTES, Batch, Source, batched, lines_of, opened
from featcache.manifest.formats.tables import csv_rows, json_batches, json_rows, parquet_batches, table_batches

_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")

_renamed = partial(names_of_whole_files, "file_name")


def read_folder(source: Source) -> Iterator[Batch]:
    """Every audio file below a folder, sorted by path; its id is its path without the suffix. Links to folders are
    followed, each folder once; hidden files are left out."""
    source.faults.unit("file")
    return batched(enumerate(_audio_files(source), 1), ("id", "path"))


def _audio_files(source: Source) -> Iterator[tuple[str, str]]:
    taken: dict[str, str] = {}
    for path in sorted(_walk(source.path)):
        try:
            path.encode()
        except UnicodeEncodeError:
            source.faults.add(0, f"the name of a file is not UTF-8: {path!r}")
            continue
        id_ = os.path.splitext(path)[0]
        if taken.setdefault(id_, path) == path:
            yield id_, path
        else:
            source.faults.add(0, f"{taken[id_]!r} and {path!r} would have the same id: list the files that are meant")


def _walk(top: os.PathLike[str]) -> Iterator[str]:
    """The audio files below a folder, relative to it."""
    seen = set()
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(os.path.join(top, folder)) as entries:
            for entry in entries:
                if entry.name[0] == ".":
                    continue
                path = f"{folder}{entry.name}"
                if os.path.splitext(entry.name)[1].lower() in AUDIO_SUFFIXES:
                    yield path
                elif entry.is_dir():
                    status = entry.stat()
                    if (status.st_dev, status.st_ino) not in seen:
                        seen.add((status.st_dev, status.st_ino))
                        pending.append(f"{path}/")


def has_metadata(source: Source) -> bool:
    """Whether it is a folder with metadata that name files, in it or in its folders."""
    return source.is_folder and any(_names_files(source, path) for path in _metadata(source))


def read_audiofolder(source: Source) -> Iterator[Batch]:
    """The rows of all metadata, whose `file_name` is relative to their folder; a ManifestError if a folder has none, or
    two kinds."""
    found = _metadata(source)
    folders = [os.path.dirname(path) for path in found]
    if not found or len(set(folders)) < len(folders):
        raise ManifestError(
            f"one of {listing(_METADATA)} is expected in a folder, and there is {listing(found) or 'none'}"
        )
    for path, folder in zip(found, folders, strict=True):
        for places, cells in _read_metadata(source, path):
            names = cells["path"]
            paths = [posixpath.join(folder, name) if isinstance(name, str) and name else name for name in names]
            yield places, {**cells, "path": paths}


def _read_metadata(source: Source, path: str) -> Iterator[Batch]:
    faults = source.faults
    base = faults.file(path, "row" if path.endswith(".parquet") else "line")
    with opened(source.path / path) as stream:
        if path.endswith(".parquet"):
            batches = parquet_batches(ParquetTable(stream), source, base, _renamed)
        elif path.endswith(".csv"):
            batches = table_batches(csv_rows(lines_of(stream, faults, base), faults, base), source, _renamed)
        else:
            batches = json_batches(json_rows(lines_of(stream, faults, base), faults, base), source, _renamed)
        yield from (batch for batch in batches if "path" in batch[1])


def _names_files(source: Source, path: str) -> bool:
    with opened(source.path / path) as stream:
        if path.endswith(".parquet"):
            return "file_name" in ParquetTable(stream).names
        return b"file_name" in stream.readline(HEAD_BYTES)


def _metadata(source: Source) -> list[str]:
    """The metadata in the folder; if there are none, those in its folders."""
    here = sorted(source.names.intersection(_METADATA))
    below = (f"{folder}/{name}" for folder in source.folders for name in _METADATA)
    return here or [path for path in below if (source.path / path).is_file()]
