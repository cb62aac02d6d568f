"""The lines of each recording in a label file of many: a CTM or an RTTM."""

from __future__ import annotations

import codecs
import mmap

import numpy as np
from numpy.typing import NDArray

from featcache.errors import AudioError, Reason, listing


class LineIndex:
    """The lines of a file by recording, which the given field of a line names, from 0."""

    def __init__(self, field: int, descriptor: int, size: int) -> None:
        lines: dict[str, list[bytes]] = {}
        data = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)[:].removeprefix(codecs.BOM_UTF8)
        for line in data.splitlines(keepends=True):
            fields = line.split(None, field + 1)
            if len(fields) > field and not line.startswith(b";;"):
                lines.setdefault(fields[field].decode(errors="replace"), []).append(line)
        self._lines = {name: b"".join(several) for name, several in lines.items()}
        self.num_bytes = size + 200 * len(lines)

    def find(self, name: str) -> NDArray[np.uint8]:
        """Return the lines of a recording. Raises AudioError if there are none."""
        if name in self._lines:
            return np.frombuffer(self._lines[name], np.uint8)
        message = f"the file has no line of {name!r}, but of {listing(self._lines, 3) or 'nothing'}"
        raise AudioError(Reason.FILE_MISSING, message)
