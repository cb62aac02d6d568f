"""Extractions in tests: configs of the tests' own extractors, runs, and what a run did."""

import json
import threading
from pathlib import Path
from typing import Any

from processes import MOST_SECONDS, Finished

import featcache
from featcache.engines.local import run_locally
from featcache.extraction.extraction import Summary, run_extraction
from featcache.extraction.plan import ExtractionPlan

TINY = "0.004"
"""MB: a shard size that spreads the corpus over a dozen shards."""

ONE_EACH = 0.0003
"""MB: a shard size that gives each of the plain utterances a shard of its own, with
`odd_extractors`."""


def write_config(
    folder: Path,
    extractor: str,
    name: str | None = None,
    module: str = "odd_extractors",
    **params: Any,
) -> Path:
    """A config of one of the tests' extractors."""
    path = folder / f"{name or extractor.lower()}.yaml"
    path.write_text(
        f"name: {path.stem}\nextractor: {module}:{extractor}\nparams: {json.dumps(params)}\n"
    )
    return path


def extracted(finished: Finished, number: int = 0) -> int:
    """How many utterances a run with --json extracted for one of its configs."""
    return finished.json()["versions"][number]["extracted"]


def extract_fbank(
    manifest: Path, cache: Path, root: str | Path | None = None, **options: Any
) -> Summary:
    """Extract fbank80 in this process, into shards of a clip or two."""
    chosen = featcache.Options(
        **{"device": "cpu", "threads": 2, "shard_megabytes": float(TINY), **options}
    )
    return featcache.extract(manifest, "fbank80", cache, chosen, reading={"root": root})


def failures_of(cli: Any, cache: Path) -> list[dict[str, Any]]:
    """What the ledger of the only version says, as `info` tells it."""
    (version,) = cli("info", cache, "--json").json()["versions"]
    return version["failures"]


def reasons_of(cli: Any, cache: Path) -> dict[str, str]:
    return {failure["id"]: failure["reason"] for failure in failures_of(cli, cache)}


def run_to_its_end(plan: ExtractionPlan) -> Summary:
    """Run an extraction that waits for nobody: should it wait for ever, it is stopped,
    and the test fails."""
    stop = threading.Event()
    limit = threading.Timer(MOST_SECONDS, stop.set)
    limit.daemon = True
    limit.start()
    summary = run_extraction(plan, run_locally, stop=stop)
    limit.cancel()
    assert not summary.interrupted
    return summary
