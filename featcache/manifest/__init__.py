"""Manifests: tables of utterances, read into flat columns, with every fault reported at once.

They come in the formats of many tools: the table `FORMATS` has them, each reader is a file in `formats/`, and
docs/manifest.md shows them. The format is recognised by the name and the beginning, or given.

Text is UTF-8, with or without a byte order mark; a file may be compressed by gzip (`train.csv.gz`). Blank lines are
skipped. A manifest may have 10^7 rows: they are read and checked in batches, and only flat arrays are kept."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featcache.manifest.formats import FORMATS as FORMATS
    from featcache.manifest.read import Table as Table
    from featcache.manifest.read import manifest_of as manifest_of
    from featcache.manifest.read import read_manifest as read_manifest
    from featcache.manifest.segments import Segment as Segment
    from featcache.manifest.segments import SegmentColumns as SegmentColumns
    from featcache.manifest.segments import Utterance as Utterance
    from featcache.manifest.utterances import SPELLINGS as SPELLINGS
    from featcache.manifest.utterances import CallersUrls as CallersUrls
    from featcache.manifest.utterances import Manifest as Manifest
    from featcache.manifest.utterances import rows_at_even_steps as rows_at_even_steps

_HOMES = {
    "formats": ("FORMATS",),
    "utterances": ("SPELLINGS", "CallersUrls", "Manifest", "rows_at_even_steps"),
    "segments": ("Segment", "SegmentColumns", "Utterance"),
    "read": ("Table", "manifest_of", "read_manifest"),
}
"""Where names are found: what reads a version needs segments, and no format of manifests."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(f"featcache.manifest.{home}"), name)
            return value
    raise AttributeError(f"module 'featcache.manifest' has no attribute {name!r}")
