"""Exports a version to the formats of other tools: a file for each, and what they share in
`rows.py`."""

from featcache.export.export import FORMATS, Exported, export

__all__ = ["FORMATS", "Exported", "export"]
