"""Who runs shard tasks: `local` does it in this process."""
