"""Arrays that processes share: they map one file, and copy nothing. The file is anonymous, for
the processes that this one spawns; or it has a name, for all processes of the machine. The
rows of a dataset are in a file with a name, see `file_of_rows`."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import operator
import os
import pickle
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, Self

from crc32c import crc32c

from featcache import __version__
from featcache.errors import ArgumentError
from featcache.loader.cache import Cache
from featcache.loader.choices import Choices
from featcache.manifest.formats.folders import files_below
from featcache.manifest.formats.source import AUDIO_SUFFIXES
from featcache.manifest.where import texts_of
from featcache.storage.files import Lock
from featcache.version.corpus import manifests_of_parts
from featcache.version.index import index_name

_ALIGNED = 64

_ENDING = struct.Struct("<QQ")
"""The end of a file with a name: the length and the CRC-32C of what describes its arrays."""


def is_spawning() -> bool:
    """Return True while a value is pickled for a process that is being spawned."""
    return get_spawning_popen() is not None


def file_of_rows(
    folder: Path, caches: Sequence[Cache], manifest: object, choices: Choices, others: object
) -> Path:
    """Return the file in a folder for the rows of a dataset. Its name is a digest of the
    arguments, and after a dot a digest of the versions' content and of the manifest files,
    by their sizes and times. Raises ArgumentError if other processes could not tell that
    theirs is the same."""
    where = choices.where
    is_comparable = str(manifest) != "-" and not callable(where)
    if not (is_comparable and isinstance(manifest, str | os.PathLike | None)):
        raise ArgumentError(
            "shared_in= needs the path of a manifest, and where= as text or columns: other "
            "processes cannot compare tables, standard input or functions"
        )
    if isinstance(where, Mapping):
        texts = {name: texts_of(value) for name, value in where.items()}
        choices = replace(choices, where=texts)
    given = json.dumps([str(manifest), vars(choices), others], default=_as_list)
    joined = choices.open_columns(caches[0].check)
    # Tracks of one version have other lengths, and other values in columns.
    content: list[Any] = [
        (index_name(cache.version, cache.index.shards), cache.track_name)
        for cache in (*caches, *joined.values())
    ]
    files: list[Path] = []
    if manifest is not None:
        of_parts = manifests_of_parts([os.fspath(manifest)])
        files = [Path(manifest)] if of_parts is None else [*of_parts.values()]
    for file in files:
        names = [""]
        if file.is_dir():
            names = sorted(files_below(file))
        for name in names:
            path = file / name
            content.append(str(path.absolute()))
            if name.lower().endswith(AUDIO_SUFFIXES):  # its row is made of its name alone
                continue
            with suppress(FileNotFoundError):  # which reading reports
                status = path.stat()
                content.append((status.st_size, status.st_mtime_ns))
    texts_to_hash = given, repr((__version__, content))
    digests = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts_to_hash]
    return folder / "featcache" / "rows" / ".".join(digests)


def _as_list(value: object) -> object:
    """Return what JSON can hold instead of an argument, alike in all processes."""
    if isinstance(value, Set):
        return sorted(map(str, value))
    if isinstance(value, Iterable) and not isinstance(value, Cache):
        return [*value]
    return repr(value)


class SharedArrays:
    """A value whose arrays are in a file. Its pickle, for a spawned process, brings a descriptor
    of the file."""

    def __init__(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file)
        self._sizes: list[int] = []
        self._pickle = b""
        self.parts: Sequence[object] = ()
        """The objects that the value is made of, for `holds`."""

    @classmethod
    def in_memory(cls, value: object, parts: Sequence[object] = ()) -> Self:
        """Copy a value, made of some parts, to an anonymous file."""
        made = cls(os.memfd_create("featcache"))
        made._write(value)
        made.parts = parts
        return made

    @classmethod
    def in_file(cls, path: Path, make: Callable[[], object]) -> Self:
        """Open the file that holds a value. If it is missing or damaged, make the value, and
        the file, which replaces those whose names begin alike, up to a dot; other processes
        wait. Raises OSError if the file can be neither read nor written, or is another user's."""
        opened = cls._opened(path)
        if opened is not None:
            return opened
        path.parent.mkdir(parents=True, exist_ok=True)
        with Lock(path.parent, os.O_RDONLY | os.O_DIRECTORY) as lock:
            lock.take(wait=True)
            opened = cls._opened(path)
            if opened is not None:
                return opened
            value = make()
            unfinished = path.with_suffix(".part")
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            made = cls(os.open(unfinished, flags, 0o600))
            try:
                made._write(value)
                with open(made._file, "ab", closefd=False) as file:
                    head = pickle.dumps((made._sizes, made._pickle))
                    file.write(head + _ENDING.pack(len(head), crc32c(head)))
                os.fsync(made._file)
            except OSError:
                unfinished.unlink()  # it would fill the disk
                raise
            for older in path.parent.glob(f"{path.stem}.*"):
                if older != unfinished:
                    older.unlink()
            unfinished.rename(path)
            return made

    @classmethod
    def _opened(cls, path: Path) -> Self | None:
        """Open the file that holds a value; None if it is missing or damaged."""
        try:
            made = cls(os.open(path, os.O_RDONLY | os.O_NOFOLLOW))
        except FileNotFoundError:
            return None
        status = os.fstat(made._file)
        if status.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "belongs to another user", str(path))
        ends = max(0, status.st_size - _ENDING.size)
        ending = os.pread(made._file, _ENDING.size, ends)
        if len(ending) < _ENDING.size:
            return None
        length, checksum = _ENDING.unpack(ending)
        head = os.pread(made._file, length, ends - length) if length <= ends else b""
        if crc32c(head) != checksum or not head:
            return None
        made._sizes, made._pickle = pickle.loads(head)
        return made

    def value(self) -> Any:
        """Return the value, over mapped arrays."""
        return _mapped(self._file, self._sizes, self._pickle)

    def holds(self, parts: Sequence[object]) -> bool:
        """Return True if the value was made of these very parts."""
        if len(parts) != len(self.parts):
            return False
        return all(map(operator.is_, parts, self.parts))

    def _write(self, value: object) -> None:
        buffers: list[pickle.PickleBuffer] = []
        self._pickle = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        with open(self._file, "wb", closefd=False) as file:
            for array in (buffer.raw() for buffer in buffers):
                self._sizes.append(array.nbytes)
                file.write(array)
                file.write(bytes(-array.nbytes % _ALIGNED))

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self._file), self._sizes, self._pickle)


def _received(descriptor: Any, sizes: Sequence[int], pickled: bytes) -> object:
    """Return the value that a spawned process gets."""
    file = descriptor.detach()
    try:
        return _mapped(file, sizes, pickled)
    finally:
        os.close(file)


def _mapped(file: int, sizes: Sequence[int], pickled: bytes) -> object:
    """Return the value, over arrays in the file."""
    length = os.fstat(file).st_size
    view = memoryview(mmap.mmap(file, length, access=mmap.ACCESS_READ) if length else b"")
    buffers, begin = [], 0
    for size in sizes:
        buffers.append(view[begin : begin + size])
        begin += size + -size % _ALIGNED
    return pickle.loads(pickled, buffers=buffers)
