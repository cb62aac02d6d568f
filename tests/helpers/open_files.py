"""What a process has open, as Linux tells it."""

import os
from contextlib import suppress
from pathlib import Path


def open_files(path, pid="self"):
    """The files that a process has open of those at or below a path, each as often as it is open."""
    found = []
    with suppress(FileNotFoundError):  # the process has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it has been closed
                found.append(Path(os.readlink(descriptor)))
    return sorted(str(one) for one in found if one.is_relative_to(path))
