"""What `featcache extract` did, in a few words."""

from __future__ import annotations

from pathlib import Path

from processes import Finished


def extracted(finished: Finished, number: int = 0) -> int:
    """How many utterances a run with --json extracted for one of its configs."""
    return finished.json()["versions"][number]["extracted"]


def versions_in(cache: Path) -> set[str]:
    """The names of a cache's versions."""
    return {path.name for path in cache.iterdir()}
