"""Files of NumPy's, one for each utterance, and `index.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath

from featcache.export.rows import Rows, encode_npy

_LONGEST = 250
"""The most bytes of a name that file systems take, with `.npy`."""


def write_numpy(rows: Rows, folder: Path, target: Path) -> list[str]:
    """Write `<id>.npy` for each utterance, below a folder for each slash, and `index.jsonl`
    with the ids, files and columns."""
    rows.refuse_ids(lambda id_: not _is_safe(id_), "ids are names of files here")
    with (folder / "index.jsonl").open("w", encoding="utf-8") as index:
        for row in rows:
            name = f"{row.id}.npy"
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_npy(row.features))
            entry = {**row.columns, "id": row.id, "file": name}
            index.write(json.dumps(entry, ensure_ascii=False) + "\n")
    return []


def _is_safe(id_: str) -> bool:
    """Tell whether an id is a path below a folder, and its own only spelling."""
    path = PurePosixPath(id_)
    is_short = all(len(part.encode()) <= _LONGEST for part in path.parts)
    return str(path) == id_ and is_short and not ({"..", "/", "index.jsonl"} & {*path.parts})
