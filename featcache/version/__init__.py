"""A version of a cache: its shards, its index, what its manifests want of it, and what
failed."""
