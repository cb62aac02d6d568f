"""Tars of WebDataset: for each utterance its features as `.npy`, and its id and columns as
`.json`."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from pathlib import Path

from featcache.errors import ArgumentError, counted, listing
from featcache.export.rows import FILE_BYTES, Rows, add_members, encode_npy, place_of
from featcache.manifest.columns import json_line
from featcache.manifest.strings import Strings, are_distinct

_NOT_IN_KEYS = re.compile(r"[^\w/+=@%,-]")
"""A key ends at the first dot of a name's last component, so it has none."""

_SKIPPED = re.compile(r"^__(?=[^/]*__/)")
"""Begins names that WebDataset's reader skips, as metadata of a tar."""


def write_webdataset(rows: Rows, folder: Path, target: Path) -> list[str]:
    """Write `features-N.tar`. A key is the id, with `_` for dots and the like."""
    keys = Strings.of(map(_key, rows.ids))
    if not are_distinct(keys.hashes()):
        ((key, _),) = Counter(keys).most_common(1)
        alike = listing([repr(id_) for id_ in rows.ids if _key(id_) == key], 3)
        what = f"{alike} differ only in dots or marks, and WebDataset's keys have none"
        remedy = "rename them, or choose another format"
        raise ArgumentError(f"{place_of(rows.cache)}: {what}: {remedy}")
    for number, group in rows.groups(FILE_BYTES):
        with tarfile.open(folder / f"features-{number:06d}.tar", "w") as tar:
            for row in group:
                key = keys[row.number]
                npy = encode_npy(row.features)
                text = json_line({**row.columns, "id": row.id}).rstrip("\n")
                add_members(tar, {f"{key}.npy": npy, f"{key}.json": text.encode()})
    num_changed = sum(key != id_ for key, id_ in zip(keys, rows.ids, strict=True))
    if num_changed:
        keys_are = counted(num_changed, "key")
        return [f"{keys_are} with _ in the place of dots or marks; .json has the ids"]
    return []


def _key(id_: str) -> str:
    key = _NOT_IN_KEYS.sub("_", id_.strip("/"))
    return _SKIPPED.sub("_", key) or "_"
