"""Files of NumPy's, one for each utterance, and `index.jsonl`."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from featcache.export.rows import Rows, encode_npy
from featcache.manifest.columns import json_line


def write_numpy(rows: Rows, folder: Path, target: Path) -> list[str]:
    """Write `<id>.npy` for each utterance, below a folder for each slash, and `index.jsonl`
    with the ids, files and columns."""
    rows.refuse_names()
    files = {"index.jsonl", *(f"{id_}.npy" for id_ in rows.ids)}
    rows.refuse_ids(
        lambda id_: not files.isdisjoint(map(str, PurePosixPath(id_).parents)),
        "ids are names of files here, and none may lead below another file",
    )
    rows.refuse_columns("id", "file")
    with (folder / "index.jsonl").open("w", encoding="utf-8") as index:
        for row in rows:
            name = f"{row.id}.npy"
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_npy(row.features))
            entry = {**row.columns, "id": row.id, "file": name}
            index.write(json_line(entry))
    return []
