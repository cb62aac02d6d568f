"""What `featcache extract` did, in a few words."""

from __future__ import annotations

import threading
from pathlib import Path

from processes import MOST_SECONDS, Finished

from featcache.extraction import Extraction
from featcache.summary import Summary


def extracted(finished: Finished, number: int = 0) -> int:
    """How many utterances a run with --json extracted for one of its configs."""
    return finished.json()["versions"][number]["extracted"]


def versions_in(cache: Path) -> set[str]:
    """The names of a cache's versions."""
    return {path.name for path in cache.iterdir()}


def run_to_its_end(extraction: Extraction) -> Summary:
    """Run an extraction that waits for nobody: should it wait for ever, it is stopped, and the test fails."""
    stop = threading.Event()
    limit = threading.Timer(MOST_SECONDS, stop.set)
    limit.daemon = True
    limit.start()
    summary = extraction.run(stop=stop)
    limit.cancel()
    assert not summary.interrupted
    return summary
