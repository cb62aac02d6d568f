"""Engines, which do shard tasks: `local` does them in this process."""
