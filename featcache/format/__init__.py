"""The files of a cache: sealed documents, tables of items, and groups of arrays. They
know no audio, extractor or config."""
