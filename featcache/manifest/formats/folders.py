"""Folders of audio, and datasets of Hugging Face: AudioFolder, with metadata in tables;
Parquet with audio inside; and folders that `save_to_disk` has written.

A row's path, with audio inside, is its place in the table, as in
`train-00000.parquet/audio/123` (see `manifest.audio_locations`), or without bytes, the
path that the table has, as `to_parquet` of files writes it."""

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
    Batch,
    Source,
    batched,
    opened,
)
from featcache.manifest.formats.tables import (
    Table,
    arrow_table,
    csv_rows,
    json_batches,
    json_rows,
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


def read_folder(source: Source) -> Iterator[Batch]:
    """Every audio file below a folder, sorted by path; its id is its path without the
    suffix. Links to folders are followed, each folder once; hidden files are left out."""
    audio: list[str] = []
    others: list[str] = []
    for path in _walk(source.path):
        (audio if path.lower().endswith(AUDIO_SUFFIXES) else others).append(path)
    _note_others(source, sorted(others))
    rows = enumerate(_with_ids(source, sorted(audio)), source.faults.file("", "file") + 1)
    return batched(rows, ("id", "path"), tuple, source.faults)


def _note_others(source: Source, paths: Sequence[str]) -> None:
    """Note how many files of a folder are left out, and which may be manifests."""
    kinds = Counter(f"*{os.path.splitext(path)[1].lower()}" for path in paths)
    if kinds:
        counts = listing(f"{count:,} {kind!r}" for kind, count in kinds.most_common())
        source.note(f"{counted(len(paths), 'file')} not named as audio left out: {counts}")
    if tables := [path for path in paths if _MANIFEST.search(path)]:
        names = listing(map(repr, tables))
        source.note(f"tables and tars among them are read when they are given: {names}")


def _with_ids(source: Source, paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    taken: dict[str, str] = {}
    for path in paths:
        try:
            path.encode()
        except UnicodeEncodeError:
            source.faults.add(0, f"the name of a file is not UTF-8: {path!r}")
            continue
        id_ = os.path.splitext(path)[0]
        if taken.setdefault(id_, path) == path:
            yield id_, path
        else:
            source.faults.add(
                0,
                f"{taken[id_]!r} and {path!r} would have the same id: list the files that "
                "are meant",
            )


def _walk(top: os.PathLike[str]) -> Iterator[str]:
    """The files below a folder, relative to it."""
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
    """Whether it is a folder with metadata that name files, in it or in its folders."""
    return any(
        _names_files(source, path) for path in _here_or_below(source, _METADATA.__contains__)
    )


def read_audiofolder(source: Source) -> Iterator[Batch]:
    """The rows of all metadata, whose `file_name` is relative to their folder; a
    ManifestError for none, or two."""
    found = _here_or_below(source, _METADATA.__contains__)
    folders = [os.path.dirname(path) for path in found]
    if not found or len(set(folders)) < len(folders):
        raise ManifestError(
            f"a folder needs one of {listing(_METADATA)}, and has {listing(found) or 'none'}"
        )
    source.renamed = partial(names_of_whole_files, "file_name")
    for path, folder in zip(found, folders, strict=True):
        for places, cells in _read_metadata(source, path):
            paths = [
                posixpath.join(folder, name) if isinstance(name, str) and name else name
                for name in cells["path"]
            ]
            yield places, {**cells, "path": paths}


def _read_metadata(source: Source, path: str) -> Iterator[Batch]:
    faults = source.faults
    with opened(source.path / path) as stream:
        if path.endswith(".parquet"):
            batches = parquet_batches(parquet_table(stream), source, path)
        elif path.endswith(".csv"):
            batches = table_batches(csv_rows(stream, faults, faults.file(path)), source)
        else:
            batches = json_batches(json_rows(stream, faults, faults.file(path)), source)
        yield from (batch for batch in batches if "path" in batch[1])


def _names_files(source: Source, path: str) -> bool:
    with opened(source.path / path) as stream:
        if path.endswith(".parquet"):
            return "file_name" in parquet_table(stream).names
        return b"file_name" in stream.readline(HEAD_BYTES)


def is_dataset(source: Source) -> bool:
    """Whether it is a folder by `save_to_disk`, or Parquet with a column of audio, a file
    or below a folder."""
    if not source.is_folder:
        return source.is_parquet and bool(parquet_table(source.stream).audio)
    if _is_saved(source):
        return True
    for first in _parquet_below(source)[:1]:
        with opened(source.path / first) as stream:
            return bool(parquet_table(stream).audio)
    return False


def read_dataset(source: Source) -> Iterator[Batch]:
    """The rows of all tables of a dataset, with every column without bytes. Raises
    ManifestError if there are none, or one has no column of audio, is damaged, or is not
    called `.parquet`."""
    source.renamed = partial(names_of_whole_files, _PLACE)
    if not source.is_folder:
        # its audio is read from it later, by a path that says what it is
        if source.path.suffix != ".parquet":
            raise ManifestError(
                "is Parquet with audio inside: name it with .parquet at its end, as a file"
            )
        yield from parquet_batches(
            _with_places(parquet_table(source.stream), source.path.name, source), source
        )
        return
    files = _saved(source) if _is_saved(source) else _parquet_below(source)
    if not files:
        raise ManifestError("there are no tables of a dataset in it")
    if wrong := broken_promises(files):
        raise ManifestError(f"{'; '.join(wrong)}: put all there, or give the paths of some")
    for line in gaps(files):
        source.note(line)
    for file in files:
        with opened(source.path / file) as stream:
            table = parquet_table(stream) if file.endswith(".parquet") else arrow_table(stream)
            yield from parquet_batches(_with_places(table, file, source), source, file)


def _is_saved(folder: Source) -> bool:
    """Whether `save_to_disk` has written a folder."""
    return any(name in folder.names for name in ("dataset_dict.json", "state.json"))


def _with_places(table: Table, file: str, source: Source) -> Table:
    """A table with the places of its audio, in `file`, relative to the manifest's folder,
    as a column."""
    if not table.audio:
        raise ManifestError(f"{file} has no column of audio, which has the fields bytes and path")
    audio, *others = table.audio
    if others:
        source.note(
            f"audio is read from the column {audio!r}, and not from {listing(map(repr, others))}"
        )
    outside = table.paths_outside(audio)

    def batches(columns: Collection[str]) -> Iterator[Batch]:
        for rows, cells in table.batches([name for name in columns if name != _PLACE]):
            yield (
                rows,
                {
                    _PLACE: [outside.get(row - 1, f"{file}/{audio}/{row - 1}") for row in rows],
                    **cells,
                },
            )

    return Table([_PLACE, *table.names], batches)


_PLACE = "audio.path"  # the column with the places of audio, by a name that has no meaning


def _parquet_below(source: Source) -> list[str]:
    return _here_or_below(source, lambda name: name.endswith(".parquet"))


def _here_or_below(source: Source, is_meant: Callable[[str], bool]) -> list[str]:
    """The files in a folder that are meant by their names; if there are none, those in
    its folders."""
    here = sorted(filter(is_meant, source.names))
    below = (
        (folder, name)
        for folder in source.folders
        for name in sorted(os.listdir(source.path / folder))
    )
    return here or [f"{folder}/{name}" for folder, name in below if is_meant(name)]


def _saved(source: Source) -> list[str]:
    """The Arrow files of a folder that `save_to_disk` has written: of each split, in
    order."""
    has_splits = "dataset_dict.json" in source.names
    splits = (
        [f"{split}/" for split in _listed(source, "dataset_dict.json", "splits")]
        if has_splits
        else [""]
    )
    return [
        f"{split}{name}"
        for split in splits
        for name in _listed(source, f"{split}state.json", "_data_files")
    ]


def _listed(source: Source, file: str, key: str) -> list[str]:
    """The names in the list that a small JSON file has under a key."""
    with opened(source.path / file) as stream:
        data = stream.read(_STATE_BYTES)
    # it is not as written: as if no name were good
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        names = [
            item["filename"] if isinstance(item, dict) else item for item in json.loads(data)[key]
        ]
        if all(
            isinstance(name, str) and os.path.basename(name) == name and name.isprintable()
            for name in names
        ):
            return names
    raise ManifestError(f"{file} is not as save_to_disk writes it: no list of names under {key!r}")


_STATE_BYTES = 4 << 20
