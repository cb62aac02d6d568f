"""Downloads on stderr: a line with source and destination, then a bar on a terminal, or plain lines at intervals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Never

from tqdm import tqdm

from featcache.cli.common import LINE_SECONDS, megabytes, note, terminal_columns
from featcache.downloads import Download
from featcache.errors import counted


@contextmanager
def show(download: Download) -> Iterator[Callable[[int], object]]:
    """Show a download for as long as it goes on; yields what is called with the number of bytes that have come."""
    total = download.num_bytes
    size = "" if total is None else f", {megabytes(total)}"
    files = counted(download.num_files, "file")
    source = f"{download.name} at {download.revision[:12]} from {download.source}"
    note(f"downloading {source} to {download.folder}: {files}{size}")
    is_terminal = terminal_columns() > 0
    done, last = 0, monotonic()
    bar: tqdm[Never] = tqdm(
        total=total, unit="B", unit_scale=True, leave=False, file=sys.stderr, disable=not is_terminal
    )

    def advance(num_bytes: int) -> None:
        nonlocal done, last
        bar.update(num_bytes)
        done += num_bytes
        if not is_terminal and monotonic() - last >= LINE_SECONDS:
            last = monotonic()
            note(f"{megabytes(done)}{'' if total is None else f' of {megabytes(total)}'} of {download.name}")

    with bar:
        yield advance
