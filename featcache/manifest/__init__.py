"""Manifests: tables of utterances, read into flat columns, with every fault reported at once.

`formats.FORMATS` is the table of formats; docs/manifest.md shows them. Up to 10^7 rows are
read and checked in batches, and only flat arrays are kept."""
