"""The versions of a cache: their shards, index, wanted rows, failures and tags.

What reads raises DamagedError if the bytes are not what was written, and StoreError if they
cannot be read now. What writes raises StoreError."""
