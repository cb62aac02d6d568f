"""The hook that shows downloads. The library itself shows nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Download:
    """What is about to be downloaded.

    Attributes:
        name: of the model on its hub: `org/name`.
        revision: its commit.
        source: the hub's address.
        folder: the hub's cache on this machine, where it goes.
        num_files: that are not there yet.
        num_bytes: of them; None where the hub does not say.
    """

    name: str
    revision: str
    source: str
    folder: Path
    num_files: int
    num_bytes: int | None


Show = Callable[[Download], AbstractContextManager[Callable[[int], object]]]
"""Entered when a download begins, left when it ends; gives what is called with the number of bytes that have come.
That number is negative where bytes have to come again."""


def _show_nothing(download: Download) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda num_bytes: None)


_show: Show = _show_nothing


def show_downloads(show: Show) -> None:
    """Have all downloads shown in this way, for the rest of the process."""
    global _show
    _show = show


def shown(download: Download) -> AbstractContextManager[Callable[[int], object]]:
    """Show a download for as long as it goes on; gives what is called with the number of bytes that have come."""
    return _show(download)
