"""Manifests: tables of utterances, read into flat columns, with every fault reported at once.

`formats.FORMATS` is the table of formats, each with a reader in `formats/`;
docs/manifest.md shows them. The format is recognised by the name and the beginning, or
given.

Text is UTF-8, with or without a byte order mark; gzip may compress a file
(`train.csv.gz`). Blank lines are skipped. Up to 10^7 rows are read and checked in batches,
and only flat arrays are kept."""
