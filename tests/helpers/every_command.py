"""Runs every command, and what Python users do, on a cache that may be hostile: in this
process, which is limited.

Called by `cli(..., entry="every_command:run")`. A line of JSON on stdout tells of each:
its name, its exit code, what it printed, and the traceback of an error that is none of
featcache's own."""

import json
import os
import resource
import signal
import subprocess
import sys
import traceback
import warnings
from functools import partial
from typing import Any

import click
from click.testing import CliRunner

MORE_BYTES = 1 << 30
"""The memory that a hostile input may take besides what the process has to begin with."""

SECONDS = 60
"""The time that one command may take: a limit for what hangs."""


def run(cache: str, manifest: str) -> None:
    from featcache.cli import main
    from featcache.errors import FeatcacheError, FeatcacheWarning

    warnings.simplefilter("ignore", FeatcacheWarning)
    limit_memory()
    # what a command prints past Python does not get into it
    report = os.fdopen(os.dup(1), "w")
    commands = {
        name: partial(_command, CliRunner(), main, words)
        for name, words in _commands(cache, manifest).items()
    }
    for name, use in (commands | _uses(cache, manifest)).items():
        signal.alarm(SECONDS)
        sys.stderr.write(f"{name}\n")  # the last of these is the one that hangs
        sys.stderr.flush()
        found = {"name": name, "code": 0, "out": "", "err": "", "trace": None}
        try:
            found |= use() or {}
        except FeatcacheError as error:
            found |= {"code": error.exit_code, "err": str(error)}
        except Exception:  # noqa: BLE001
            found |= {"code": 1, "trace": traceback.format_exc()}
        print(json.dumps(found), file=report, flush=True)
    signal.alarm(0)


def _command(runner: CliRunner, main: click.Command, arguments: list[str]) -> dict[str, Any]:
    ended = runner.invoke(main, arguments, prog_name="featcache", catch_exceptions=False)
    return {"code": ended.exit_code, "out": ended.stdout, "err": ended.stderr}


def _commands(cache: str, manifest: str) -> dict[str, list[str]]:
    repaired, added = (f"{cache}.{name}" for name in ("repaired", "added"))
    # with whatever is in it: pipes, links, and sparse files as they are
    for copy in (repaired, added):
        subprocess.run(["cp", "-a", "--sparse=always", cache, copy], check=True)
    return {
        "info": ["info", cache, "--failures"],
        "info --json": ["info", cache, "--json"],
        "show": ["show", cache, "utt-1"],
        "why": ["why", cache, manifest, "-c", "fbank80", "--id", "utt-1"],
        "configs --from": ["configs", "--from", cache],
        "verify": ["verify", cache, "--threads", "1"],
        "verify --manifest": ["verify", cache, "--manifest", manifest, "--json", "--threads", "1"],
        "stats": ["stats", cache, "--threads", "1"],
        "report": ["report", cache, "-o", f"{cache}.html", "--force", "--threads", "1"],
        "export --to numpy": ["export", "--to", "numpy", cache, "-o", f"{cache}.numpy"],
        "export --to kaldi": ["export", "--to", "kaldi", cache, "-o", f"{cache}.kaldi"],
        "export --to datasets": ["export", "--to", "datasets", cache, "-o", f"{cache}.parquet"],
        "repair": ["repair", repaired, "--manifest", manifest, "--threads", "1", "--device", "cpu"],
        "extract": ["extract", manifest, "-o", added, "--threads", "1", "--device", "cpu"],
        "prune": ["prune", added, "--manifest", manifest, "--yes"],
    }


def _uses(cache: str, manifest: str):
    import featcache

    def items() -> None:
        opened = featcache.open(cache)
        repr(opened), opened.spec, opened.lengths.sum()
        for id_ in opened.ids[:3]:
            opened.item(id_), id_ in opened

    def batch() -> None:
        opened = featcache.open(cache, check=True)
        opened.batch(opened.ids[:2])
        opened.batch(range(len(opened)))

    def load() -> None:
        dataset = featcache.FeatureDataset(featcache.open(cache), manifest, skip_missing=True)
        sampler = featcache.BucketBatchSampler(dataset.lengths, batch_size=2)
        for _ in featcache.DataLoader(dataset, sampler):
            pass

    return {"items": items, "batch": batch, "load": load}


def limit_memory() -> None:
    with open("/proc/self/statm") as file:
        has = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + MORE_BYTES, resource.RLIM_INFINITY))
