"""Containers of audio that tests make: tars, tables of Parquet and Arrow, and archives of
Kaldi's."""

import bz2
import gzip
import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from corpora import Corpus


def write_tar(path: Path, members: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members.items():
            add(tar, name, data)
    return path


def _zstd(data: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
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


def add(
    tar: tarfile.TarFile,
    name: str,
    data: bytes = b"",
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
) -> None:
    header = tarfile.TarInfo(name)
    header.type, header.size, header.linkname, header.mtime = kind, len(data), link, 1.5
    tar.addfile(header, io.BytesIO(data))


def write_tables(
    folder: Path, values: list[bytes | None], rows_per_group: int = 2
) -> tuple[Path, Path]:
    """The same table in Parquet and in Arrow's streaming format: a column `audio` of
    structs, and `raw` of bytes.

    The test is skipped where there is no pyarrow."""
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    structs = [
        None if value is None else {"bytes": value, "path": f"{row}.wav"}
        for row, value in enumerate(values)
    ]
    raw = pyarrow.array(values, "large_binary")
    table = pyarrow.table({"id": list(range(len(values))), "audio": structs, "raw": raw})
    parquet, arrow = folder / "train.parquet", folder / "train.arrow"
    pyarrow.parquet.write_table(table, parquet, row_group_size=rows_per_group)
    with (
        pyarrow.OSFile(str(arrow), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=rows_per_group)
    return parquet, arrow


def write_archive(path: Path, values: list[bytes]) -> list[int]:
    """An archive of Kaldi's with files of any format, as ESPnet dumps them; gives where
    each begins."""
    places = []
    with path.open("wb") as ark:
        for number, value in enumerate(values):
            ark.write(f"{number} ".encode())
            places.append(ark.tell())
            ark.write(b"AUDIO\x04" + len(value).to_bytes(4, "little") + value)
    return places


def packed(corpus: Corpus, folder: Path, kind: str) -> Corpus:
    """The same rows, with their files in two tars, compressed if the kind is `tar.gz`, in
    a table, or in an archive."""
    paths = list(dict.fromkeys(row["path"] for row in corpus.rows))
    files = [(corpus.folder / path).read_bytes() for path in paths]
    if kind.startswith("tar"):
        half = len(paths) // 2
        for number, some in enumerate((slice(0, half), slice(half, None))):
            tar = write_tar(
                folder / f"audio_{number}.tar", dict(zip(paths[some], files[some], strict=True))
            )
            if kind != "tar":
                compress(tar, f".{kind}")
        places = [f"audio_{min(1, row // half)}.{kind}/{path}" for row, path in enumerate(paths)]
    elif kind == "ark":
        places = [f"raw.ark:{place}" for place in write_archive(folder / "raw.ark", files)]
    else:
        write_tables(folder, files, rows_per_group=5)
        places = [f"train.{kind}/audio/{row}" for row in range(len(paths))]
    place_of = dict(zip(paths, places, strict=True))
    return Corpus(folder, [{**row, "path": place_of[row["path"]]} for row in corpus.rows])
