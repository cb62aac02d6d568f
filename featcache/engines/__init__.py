"""Engines, which run shard tasks: `local` runs them in this process."""
