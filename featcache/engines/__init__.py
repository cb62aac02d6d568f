"""Engines, which do shard tasks: `local` in this process, `devices` and `ray` in others,
which `dispatch` leads."""
