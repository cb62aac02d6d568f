"""What the tests of copies share: extractions in this process, and configs with an `augment` section."""

import json
import signal
from pathlib import Path
from typing import Any

import yaml
from cache_contents import chunk_files, shard_folders
from extractions import extract_here, write_config
from processes import Cli

from featcache.config import Config, parse_config
from featcache.extraction.extraction import Summary
from featcache.extraction.options import Options
from featcache.manifest import read_manifest

SPEEDS = [0.9, 1.0, 1.1]


def config_of(augment: dict[str, Any] | None, folder: Path | None = None, **sections: Any) -> Config:
    """fbank with an `augment` section, and with others; paths in it are relative to `folder`."""
    document = {"name": "copies", "extractor": "fbank", **sections} | ({"augment": augment} if augment else {})
    return parse_config(yaml.safe_dump(document), "copies.yaml", folder)


def write_config_of(path: Path, augment: dict[str, Any], **sections: Any) -> Path:
    """The same as a file."""
    path.write_text(yaml.safe_dump({"name": path.stem, "extractor": "fbank", **sections, "augment": augment}))
    return path


def extract(manifest: Path, config: Config, cache: Path, *, threads: int = 2, **options: Any) -> Summary:
    """Extract in this process."""
    chosen = Options("cpu", threads, **options)
    return extract_here(read_manifest(manifest), [config], cache, chosen)


def assert_resumed_to_the_same_bits(cli: Cli, manifest: Path, augment: dict[str, Any], scratch: Path) -> None:
    """A run that is killed half way, and run again, makes the shards that an uninterrupted one makes."""
    gate = scratch / "gate"
    config = write_config(scratch, "Slow", gate=str(gate))
    config.write_text(f"{config.read_text()}augment: {json.dumps(augment)}\n")
    job = ("extract", manifest, "-c", config, "--shard-size", "0.0006", "--threads", 2)
    assert cli(*job, "-o", scratch / "whole").code == 0
    gate.write_text("7")
    running = cli.start(*job, "-o", scratch / "killed", "--threads", 1)
    running.wait_until(lambda: len(shard_folders(scratch / "killed")) >= 2)
    running.send(signal.SIGKILL)
    running.wait()
    gate.unlink()
    killed, whole = chunk_files(scratch / "killed"), chunk_files(scratch / "whole")
    assert 2 <= len(killed) < len(whole)
    assert cli(*job, "-o", scratch / "killed").code == 0
    assert chunk_files(scratch / "killed") == whole
