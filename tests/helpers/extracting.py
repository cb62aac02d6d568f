"""What `featcache extract` did, in a few words."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from processes import MOST_SECONDS, Finished

from featcache.config import Config
from featcache.engines.local import run_locally
from featcache.extract.extraction import ExtractionPlan, Options, plan_extraction, run_extraction
from featcache.extract.summary import Summary
from featcache.manifest import Manifest


def extracted(finished: Finished, number: int = 0) -> int:
    """How many utterances a run with --json extracted for one of its configs."""
    return finished.json()["versions"][number]["extracted"]


def versions_in(cache: Path) -> set[str]:
    """The names of a cache's versions."""
    return {path.name for path in cache.iterdir()}


def extract_here(manifest: Manifest, configs: Sequence[Config], cache: Path, options: Options) -> Summary:
    """Extract in this process."""
    return run_extraction(plan_extraction(manifest, configs, cache, options), run_locally)


def run_to_its_end(plan: ExtractionPlan) -> Summary:
    """Run an extraction that waits for nobody: should it wait for ever, it is stopped, and the test fails."""
    stop = threading.Event()
    limit = threading.Timer(MOST_SECONDS, stop.set)
    limit.daemon = True
    limit.start()
    summary = run_extraction(plan, run_locally, stop=stop)
    limit.cancel()
    assert not summary.interrupted
    return summary
