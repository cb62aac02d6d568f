"""Manifests: tables of utterances, read into flat columns, with every fault reported at once.

They come in the formats of many tools: the table `formats.FORMATS` has them, each reader
is a file in `formats/`, and docs/manifest.md shows them. The format is recognised by the
name and the beginning, or given.

Text is UTF-8, with or without a byte order mark; a file may be compressed by gzip
(`train.csv.gz`). Blank lines are skipped. A manifest may have 10^7 rows: they are read
and checked in batches, and only flat arrays are kept."""
