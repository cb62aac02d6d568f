"""The files of a cache: sealed documents, tables of items, and groups of arrays. They
know no audio, extractor or config. What reads raises DamagedError if the bytes are not what
was written, and StoreError if they cannot be read now."""
