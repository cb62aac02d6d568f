"""Folders of audio, and datasets of Hugging Face: AudioFolder, with metadata in tables;
Parquet with audio inside; and folders that `save_to_disk` wrote.

The path of audio inside a table is a `Member`, `train-00000.parquet/audio/123`, or without
bytes, the path in the table."""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial

from featcache.errors import ManifestError, counted, listing
from featcache.manifest.formats.source import (
    AUDIO_SUFFIXES,
    HEAD_BYTES,
    PLACE,
    Batch,
    Source,
    batched,
)
from featcache.manifest.formats.tables import (
    Table,
    arrow_table,
    csv_rows,
    json_batches,
    json_rows,
    note_column,
    parquet_batches,
    parquet_table,
    table_batches,
)
from featcache.manifest.numbered import broken_promises, gaps
from featcache.manifest.utterances import names_of_whole_files

_MANIFEST = re.compile(
    r"\.(?:csv|tsv|json|jsonl|parquet|arrow|scp)(?:\.gz)?$|\.(?:tar|tgz|tar\.\w+|zip)$", re.I
)
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")

_STATE_BYTES = 4 << 20


def read_folder(source: Source) -> Iterator[Batch]:
    """List the audio files below a folder, except hidden ones, sorted by path. The id is
    the path without its suffix."""
    audio: list[str] = []
    others: list[str] = []
    for path in files_below(source.path):
        (audio if path.lower().endswith(AUDIO_SUFFIXES) else others).append(path)
    _note_others(source, sorted(others))
    return batches_of_paths(source, audio)


def _note_others(source: Source, paths: Sequence[str]) -> None:
    kinds = Counter(f"*{os.path.splitext(path)[1].lower()}" for path in paths)
    if kinds:
        counts = listing(f"{count:,} {kind!r}" for kind, count in kinds.most_common())
        source.note(f"{counted(len(paths), 'file')} not named as audio left out: {counts}")
    tables = [path for path in paths if _MANIFEST.search(path)]
    if tables:
        names = listing(map(repr, tables))
        source.note(f"to read a table or tar among them, give its path: {names}")


def batches_of_paths(source: Source, paths: Sequence[str]) -> Iterator[Batch]:
    """Give paths, sorted, with their ids, the paths without suffixes. Two of one id are a
    fault."""
    rows = enumerate(_with_ids(source, sorted(paths)), source.faults.file("", "file") + 1)
    return batched(rows, ("id", "path"), tuple, source.faults)


def _with_ids(source: Source, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    path_of: dict[str, str] = {}
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            source.faults.add(0, f"the name of a file is not UTF-8: {path!r}")
            continue
        id_ = os.path.splitext(path)[0]
        other = path_of.setdefault(id_, path)
        if other == path:
            yield id_, path
        else:
            what = f"{other!r} and {path!r} would have the same id: list the files that are meant"
            source.faults.add(0, what)


def files_below(top: os.PathLike[str]) -> Iterator[str]:
    """List the paths of all files below a folder, each folder once, even behind links."""
    start, seen = len(os.path.join(top, "")), set()
    for folder, folders, files in os.walk(top, onerror=_not_listed, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = (name for name in folders if name[0] != ".")
        yield from (os.path.join(folder, name)[start:] for name in files if name[0] != ".")


def _not_listed(error: OSError) -> None:
    raise error


def has_metadata(source: Source) -> bool:
    """Tell whether metadata in a folder, or in its folders, names files."""
    tables = _here_or_below(source, _METADATA.__contains__)
    return any(_names_files(source, path) for path in tables)


def read_audiofolder(source: Source) -> Iterator[Batch]:
    """Read all metadata; `file_name` is relative to its folder. Raises ManifestError if a
    folder has two tables, or none exists."""
    tables = _here_or_below(source, _METADATA.__contains__)
    folders = [os.path.dirname(path) for path in tables]
    if not tables or len(set(folders)) < len(folders):
        has = listing(tables) or "none"
        raise ManifestError(f"a folder needs one of {listing(_METADATA)}, and has {has}")
    source.renamed = partial(names_of_whole_files, "file_name")
    for path, folder in zip(tables, folders, strict=True):
        for places, cells in _read_metadata(source, path):
            paths = [
                posixpath.join(folder, name) if isinstance(name, str) and name else name
                for name in cells["path"]
            ]
            yield places, {**cells, "path": paths}


def _read_metadata(source: Source, path: str) -> Iterator[Batch]:
    with source.opened(path) as file:
        if path.endswith(".parquet"):
            batches = parquet_batches(parquet_table(file.stream), source, path)
        elif path.endswith(".csv"):
            batches = table_batches(csv_rows(file), source)
        else:
            batches = json_batches(json_rows(file), source)
        yield from (batch for batch in batches if "path" in batch[1])


def _names_files(source: Source, path: str) -> bool:
    with source.opened(path) as file:
        if path.endswith(".parquet"):
            return "file_name" in parquet_table(file.stream).names
        return b"file_name" in file.stream.readline(HEAD_BYTES)


def is_dataset(source: Source) -> bool:
    """Tell whether `save_to_disk` wrote a folder, or a file, or one in a folder, is Parquet
    with a column of audio."""
    if not source.is_folder:
        return source.is_parquet and bool(parquet_table(source.stream).audio)
    if _is_saved(source):
        return True
    files = _here_or_below(source, _is_parquet)
    if not files:
        return False
    with source.opened(files[0]) as file:
        return bool(parquet_table(file.stream).audio)


def read_dataset(source: Source) -> Iterator[Batch]:
    """Read the columns without bytes of all tables of a dataset. Raises ManifestError if it
    has none, or one is damaged, lacks a column of audio or is not named `.parquet`."""
    source.renamed = partial(names_of_whole_files, PLACE)
    if not source.is_folder:
        # the path of audio in it needs the suffix
        if source.path.suffix != ".parquet":
            raise ManifestError(
                "is Parquet with audio inside: name it with .parquet at its end, as a file"
            )
        table = _with_places(parquet_table(source.stream), source.path.name, source)
        yield from parquet_batches(table, source)
        return
    files = _saved(source) if _is_saved(source) else _here_or_below(source, _is_parquet)
    if not files:
        raise ManifestError("there are no tables of a dataset in it")
    incomplete = broken_promises(files)
    if incomplete:
        raise ManifestError(f"{'; '.join(incomplete)}: put all there, or give the paths of some")
    for line in gaps(files):
        source.note(line)
    for name in files:
        with source.opened(name) as file:
            read = parquet_table if name.endswith(".parquet") else arrow_table
            table = _with_places(read(file.stream), name, source)
            yield from parquet_batches(table, source, name)


def _is_saved(folder: Source) -> bool:
    return not folder.names.keys().isdisjoint(("dataset_dict.json", "state.json"))


def _with_places(table: Table, file: str, source: Source) -> Table:
    """Add a column with the places of the audio in a table, a file of the manifest."""
    if not table.audio:
        raise ManifestError(f"{file} has no column of audio, which has the fields bytes and path")
    audio, *others = table.audio
    note_column(source, audio, others)
    outside = table.paths_outside(audio)

    def batches(columns: Collection[str]) -> Iterator[Batch]:
        for rows, cells in table.batches([name for name in columns if name != PLACE]):
            places = [outside.get(row - 1, f"{file}/{audio}/{row - 1}") for row in rows]
            yield rows, {PLACE: places, **cells}

    return Table([PLACE, *table.names], batches)


def _is_parquet(name: str) -> bool:
    return name.endswith(".parquet")


def _here_or_below(source: Source, is_meant: Callable[[str], bool]) -> list[str]:
    return sorted(filter(is_meant, source.names)) or [
        f"{folder}/{name}"
        for folder in source.folders
        for name in sorted(filter(is_meant, os.listdir(source.path / folder)))
    ]


def _saved(source: Source) -> list[str]:
    splits = [""]
    if "dataset_dict.json" in source.names:
        splits = [f"{split}/" for split in _listed(source, "dataset_dict.json", "splits")]
    return [
        f"{split}{name}"
        for split in splits
        for name in _listed(source, f"{split}state.json", "_data_files")
    ]


def _listed(source: Source, file: str, key: str) -> list[str]:
    with source.opened(file) as opened:
        data = opened.stream.read(_STATE_BYTES)
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        items = json.loads(data)[key]
        names = [item["filename"] if isinstance(item, dict) else item for item in items]
        if all(
            isinstance(name, str) and os.path.basename(name) == name and name.isprintable()
            for name in names
        ):
            return names
    raise ManifestError(f"{file} is not as save_to_disk writes it: no list of names under {key!r}")
