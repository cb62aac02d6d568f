"""The errors in a manifest: all are counted, the first are shown."""

from __future__ import annotations

from bisect import insort
from operator import itemgetter

from featcache.errors import ManifestError, counted

_SHOWN = 20


class Faults:
    """Counts the faults, and keeps those that are shown: the first by line. Line 0 is the whole file.

    Args:
        source: the manifest, for the message.

    Attributes:
        count: of all faults so far.
    """

    def __init__(self, source: str) -> None:
        self.count = 0
        self._source = source
        self._first: list[tuple[int, str]] = []

    def add(self, line: int, what: str) -> None:
        """Add one: what is wrong with a line."""
        self.count += 1
        insort(self._first, (line, what), key=itemgetter(0))
        del self._first[_SHOWN:]

    def raise_if_any(self) -> None:
        """Raise a ManifestError that says how many there are, and lists the first by line."""
        if not self.count:
            return
        message = [f"{self._source}: {counted(self.count, 'error')}"]
        message += [f"  line {line}: {what}" if line else f"  {what}" for line, what in self._first]
        if self.count > _SHOWN:
            message.append(f"  … and {self.count - _SHOWN} more")
        raise ManifestError("\n".join(message))
