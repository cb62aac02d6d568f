"""NeMo's manifests: JSON lines with `audio_filepath`, of files, or of members of tars.

Its script `convert_to_tarred_audio_dataset.py` puts the audio of rows with `"shard_id": 3` into `audio_3.tar`, beside
`tarred_audio_manifest.json` and above `sharded_manifests/manifest_3.json`. Of a file with several rows, there is one
member, `a.wav`, and the rows name `a.wav`, `a-sub1.wav`, `a-sub2.wav` and so on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from featcache.errors import counted
from featcache.manifest.audio_locations import is_audio_url, names_container
from featcache.manifest.formats.source import Batch, Source, lines_of
from featcache.manifest.formats.tables import Rows, json_batches, json_rows

_PART = re.compile(r"(.+)-sub\d+(\.\w+)?")


def read_nemo(source: Source) -> Iterator[Batch]:
    """JSON lines as NeMo has them: without the rows that are to be skipped, and with the tars of members."""
    skipped = 0
    is_tarred: bool | None = None

    def kept() -> Rows:
        nonlocal skipped, is_tarred
        for place, row in json_rows(lines_of(source.stream, source.faults), source.faults):
            if row.pop("_skipme", False):
                skipped += 1
                continue
            if _may_be_member(row):
                if is_tarred is None:
                    is_tarred = _is_tarred(source, row)
                if is_tarred:
                    row["audio_filepath"] = _member(source, row)
            yield place, row

    yield from json_batches(kept(), source)
    if skipped:
        source.notes.append(f"{counted(skipped, 'row')} left out, by _skipme")


def _may_be_member(row: dict[str, Any]) -> bool:
    """Whether a row is one of a tar, whose members have no folders."""
    shard_id, name = row.get("shard_id"), row.get("audio_filepath")
    return type(shard_id) is int and shard_id >= 0 and type(name) is str and "/" not in name


def _is_tarred(source: Source, row: dict[str, Any]) -> bool:
    """Whether the rows' audio is in tars, and not unpacked. Sets the root if the tars are above the manifest."""
    root = source.given_root
    if root is not None and is_audio_url(root):
        return True
    folder = source.folder if root is None else Path(root)
    tar = f"audio_{row['shard_id']}.tar"
    above = source.folder.absolute().parent
    if root is None and not os.path.exists(folder / tar) and os.path.exists(above / tar):
        source.root = str(above)
        return True
    return os.path.exists(folder / tar) or not os.path.exists(folder / row["audio_filepath"])


def _member(source: Source, row: dict[str, Any]) -> str:
    """The path of a row's member; below a root that is a tar, its name."""
    part = _PART.fullmatch(row["audio_filepath"])
    name = row["audio_filepath"] if part is None else f"{part[1]}{part[2] or ''}"
    is_in_root = source.given_root is not None and names_container(f"{source.given_root}/")
    return name if is_in_root else f"audio_{row['shard_id']}.tar/{name}"
