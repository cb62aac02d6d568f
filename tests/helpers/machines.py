"""A `featcache` command on a machine of its own, for tests: run by `cli_server.py` as `machines:run`."""

from __future__ import annotations

import fcntl
import os


def run(name: str, *arguments: str) -> None:
    """Run a command on a machine of that name, which is granted every lock."""
    from featcache.cli import main

    here = list(os.uname())
    here[1] = name
    os.uname = lambda: os.uname_result(here)
    fcntl.flock = lambda *_: None
    main(list(arguments), prog_name="featcache")
