"""Containers of audio that tests make: tars, and tables of Parquet and Arrow."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path


def write_tar(path: Path, members: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    """A tar of files."""
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members.items():
            add(tar, name, data)
    return path


def _zstd(data: bytes) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESSORS = {
    ".tar.gz": gzip.compress,
    ".tgz": gzip.compress,
    ".tar.bz2": lambda data: bz2.compress(data, 1),
    ".tar.xz": lambda data: lzma.compress(data, preset=0),
    ".tar.zst": _zstd,
}
"""What compresses a tar, by the suffix of its name then."""


def compress(tar: Path, suffix: str) -> Path:
    """Put a compressed tar in the place of a tar."""
    packed = tar.with_name(tar.stem + suffix)
    packed.write_bytes(COMPRESSORS[suffix](tar.read_bytes()))
    tar.unlink()
    return packed


def add(tar: tarfile.TarFile, name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    """Add a member of any kind."""
    header = tarfile.TarInfo(name)
    header.type, header.size, header.linkname, header.mtime = kind, len(data), link, 1.5
    tar.addfile(header, io.BytesIO(data))


def write_tables(folder: Path, values: list[bytes | None], rows_per_group: int = 2) -> tuple[Path, Path]:
    """The same table in Parquet and in Arrow's streaming format: a column `audio` of structs, and `raw` of bytes."""
    import pyarrow
    import pyarrow.parquet

    structs = [None if value is None else {"bytes": value, "path": f"{row}.wav"} for row, value in enumerate(values)]
    table = pyarrow.table(
        {"id": list(range(len(values))), "audio": structs, "raw": pyarrow.array(values, "large_binary")}
    )
    parquet, arrow = folder / "train.parquet", folder / "train.arrow"
    pyarrow.parquet.write_table(table, parquet, row_group_size=rows_per_group)
    with pyarrow.OSFile(str(arrow), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_per_group)
    return parquet, arrow
