"""The lines of each recording in a label file of many: a CTM or an RTTM."""

from __future__ import annotations

import mmap
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from featcache.errors import AudioError, Reason, listing


class CtmIndex:
    """The lines of a CTM, by recording."""

    field: ClassVar[int] = 0
    """The field of a line that names its recording, from 0."""

    def __init__(self, descriptor: int, size: int) -> None:
        lines: dict[bytes, list[bytes]] = {}
        for line in mmap.mmap(descriptor, size, prot=mmap.PROT_READ)[:].splitlines(keepends=True):
            fields = line.split(None, self.field + 1)
            if len(fields) > self.field and not line.startswith(b";;"):
                lines.setdefault(fields[self.field], []).append(line)
        self._lines = {name: b"".join(several) for name, several in lines.items()}
        self.num_bytes = size + 200 * len(lines)

    def find(self, name: str) -> NDArray[np.uint8]:
        """Return the lines of a recording. Raises AudioError if there are none."""
        if name.encode() in self._lines:
            return np.frombuffer(self._lines[name.encode()], np.uint8)
        names = [known.decode(errors="replace") for known in self._lines]
        message = f"the file has no line of {name!r}, but of {listing(names, 3) or 'nothing'}"
        raise AudioError(Reason.FILE_MISSING, message)


class RttmIndex(CtmIndex):
    """The lines of an RTTM, by recording."""

    field = 1
