"""Python code in a process of its own, with nothing imported, kept or changed before."""

import subprocess
import sys
import textwrap

from processes import MOST_SECONDS


def run_python(code: str, *arguments: object, **options) -> str:
    """Run a script in a new process with warnings as errors; returns what it prints."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout
