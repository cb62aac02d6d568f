"""Manifests: tables of utterances, read into flat columns, with every fault reported at once.

They come in the formats of many tools: the table `FORMATS` has them, each reader is a file in `formats/`, and
docs/manifest.md shows them. The format is recognised by the name and the beginning, or given.

Text is UTF-8, with or without a byte order mark; a file may be compressed by gzip (`train.csv.gz`). Blank lines are
skipped. A manifest may have 10^7 rows: they are read and checked in batches, and only flat arrays are kept.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcache.manifest.columns import SPELLINGS
    from featcache.manifest.formats import FORMATS
    from featcache.manifest.in_memory import Table, manifest_of
    from featcache.manifest.read import read_manifest
    from featcache.manifest.segments import Segment, SegmentColumns, Utterance
    from featcache.manifest.utterances import CallersUrls, Manifest, rows_at_even_steps

__all__ = [
    "FORMATS",
    "SPELLINGS",
    "CallersUrls",
    "Manifest",
    "Segment",
    "SegmentColumns",
    "Table",
    "Utterance",
    "manifest_of",
    "read_manifest",
    "rows_at_even_steps",
]

_HOME = {
    "FORMATS": "formats",
    "SPELLINGS": "columns",
    "CallersUrls": "utterances",
    "Manifest": "utterances",
    "Segment": "segments",
    "SegmentColumns": "segments",
    "Table": "in_memory",
    "Utterance": "segments",
    "manifest_of": "in_memory",
    "read_manifest": "read",
    "rows_at_even_steps": "utterances",
}
"""Where a name is found: what reads a version needs segments, and no format of manifests."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'featcache.manifest' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"featcache.manifest.{_HOME[name]}"), name)
    return value
