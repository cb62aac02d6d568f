"""Kaldi's archives: matrices of float32, or vectors, with `feats.scp`, `text` and `utt2spk`."""

from __future__ import annotations

import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, listing
from featcache.export.rows import Rows, unfit

_EXACT = 1 << np.finfo(np.float32).nmant + 1
"""Whole numbers up to here are exact in float32."""

_FILES = {"text": "text", "utt2spk": "speaker"}
"""Files of a data directory, and the columns that they hold."""


def write_kaldi(rows: Rows, folder: Path, target: Path) -> list[str]:
    """Write a data directory whose `feats.scp` leads into `feats.ark`, sorted by id."""
    rows.require_frames("Kaldi")
    rows.refuse_ids(lambda id_: id_.split() != [id_], "an id of Kaldi's has no white space")
    if any(char.isspace() for char in str(target)):
        raise ArgumentError(f"-o: {target}: a path in feats.scp has no white space")
    if _largest_integer(rows) > _EXACT:
        what = f"maybe with integers above {_EXACT:,}"
        raise unfit(rows.cache, f"{what}, and Kaldi stores float32")
    has_blanks = False
    with ExitStack() as stack:
        archive = stack.enter_context((folder / "feats.ark").open("wb"))
        scp = stack.enter_context((folder / "feats.scp").open("w", encoding="utf-8"))
        tables = {
            column: stack.enter_context((folder / file).open("w", encoding="utf-8"))
            for file, column in _FILES.items()
            if column in rows.columns
        }
        for row in rows.sorted_by_id():
            archive.write(f"{row.id} ".encode())
            scp.write(f"{row.id} {target / 'feats.ark'}:{archive.tell()}\n")
            archive.write(_encoded(row.features))
            for column, table in tables.items():
                words = row.columns[column].split()
                if column == "speaker":  # a field of its own
                    has_blanks |= len(words) > 1
                    words = ["_".join(words)]
                if words != [""]:
                    table.write(f"{' '.join([row.id, *words])}\n")
    others = [repr(name) for name in rows.columns if name not in tables]
    notes = [f"columns left out: {listing(others)}"] if others else []
    if has_blanks:
        notes.append("speakers have _ in the place of white space")
    dtype = rows.cache.spec.values_dtype
    if dtype == np.float64:
        notes.append("float64 is rounded to float32")
    elif dtype != np.float32:
        notes.append(f"{dtype} is stored as float32, which holds every value exactly")
    return notes


def _largest_integer(rows: Rows) -> int:
    spec = rows.cache.spec
    if spec.codebook_sizes:
        return max(spec.codebook_sizes)
    return 0 if spec.values_dtype.kind == "f" else int(np.iinfo(spec.values_dtype).max)


def _encoded(features: NDArray[Any]) -> bytes:
    values = np.ascontiguousarray(features, "<f4")
    kind = {1: b"FV ", 2: b"FM "}[values.ndim]
    sizes = b"".join(struct.pack("<bi", 4, size) for size in values.shape)
    return b"\0B" + kind + sizes + values.tobytes()
