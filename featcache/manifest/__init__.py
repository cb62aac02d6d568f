"""Manifests: tables of utterances, read into flat columns, with every fault reported at once.

Three formats. The suffix tells which it is; for standard input and for other suffixes, the first line does.

* CSV (`.csv`): comma-separated, with a header; a quoted field may hold commas, quotes and newlines.
* TSV (`.tsv`): tab-separated, with a header; quotes have no meaning: a cell is everything between two tabs.
* JSON lines (`.jsonl`, `.json`): an object on each line; its keys are the columns.

All are UTF-8, with or without a byte order mark; a file may be compressed by gzip (`train.csv.gz`). Blank lines are
skipped. A manifest may have 10^7 rows: they are read and checked in batches, and only flat arrays are kept.
"""

from featcache.manifest.columns import SPELLINGS
from featcache.manifest.read import read_manifest
from featcache.manifest.utterances import CallersUrls, Manifest, Segment, SegmentColumns, Utterance, rows_at_even_steps

__all__ = [
    "SPELLINGS",
    "CallersUrls",
    "Manifest",
    "Segment",
    "SegmentColumns",
    "Utterance",
    "read_manifest",
    "rows_at_even_steps",
]
