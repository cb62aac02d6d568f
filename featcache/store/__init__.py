"""The format: versions, shards, the index over them, and what runs leave behind. Knows no audio and no extractor."""
