"""Python scripts in forked processes: run by `cli_server.py` as `scripts:run`, for `processes.run_script`."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import warnings


def run(path: str, ignore: str, *arguments: str) -> None:
    """Run a script as the interpreter does; `ignore` is a list, as JSON, of how warnings to ignore begin."""
    for message in json.loads(ignore):
        warnings.filterwarnings("ignore", re.escape(message))
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
