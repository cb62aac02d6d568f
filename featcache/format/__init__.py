"""What is on disk: sealed documents, tables of items, and groups of arrays. Nothing of
audio, extractors or configs."""
