"""Manifests: tables of utterances, read into flat columns, with every fault reported at once.

They come in the formats of many tools: the table `FORMATS` has them, each reader is a file in `formats/`, and
docs/manifest.md shows them. The format is recognised by the name and the beginning, or given.

Text is UTF-8, with or without a byte order mark; a file may be compressed by gzip (`train.csv.gz`). Blank lines are
skipped. A manifest may have 10^7 rows: they are read and checked in batches, and only flat arrays are kept.
"""

from featcache.manifest.columns import SPELLINGS
from featcache.manifest.formats import FORMATS
from featcache.manifest.in_memory import Table, manifest_of
from featcache.manifest.read import read_manifest
from featcache.manifest.utterances import CallersUrls, Manifest, Segment, SegmentColumns, Utterance, rows_at_even_steps

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
