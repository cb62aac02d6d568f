"""A web server on loopback that has audio files, and the faults that servers have."""

import re
from dataclasses import dataclass, field
from hashlib import md5
from typing import Any
from urllib.parse import unquote, urlsplit

from loopback import Request


@dataclass
class AudioServer:
    """The files of a server, and what it does wrong."""

    address: str = ""
    """The address: `http://127.0.0.1:1234`."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What there is, by path: `/a.wav`."""
    requests: list[str] = field(default_factory=list)
    """What was asked: `GET /a.wav`."""
    faults: dict[str, list[Any]] = field(default_factory=dict)
    """What goes wrong with the next requests for a path. A status, with headers if there
    are any; `drop`: no answer; `half`: half of the file; `reset`: the same, broken off;
    `replace`: the same, and then the file is another one."""
    always: dict[str, Any] = field(default_factory=dict)
    """What goes wrong with each request for a path."""
    has_etags: bool = True
    has_dates: bool = False
    """Whether answers have a Last-Modified."""
    has_ranges: bool = True
    """Whether a part of a file can be asked for."""

    def reset(self) -> None:
        """Forget the files, the faults and what was asked."""
        vars(self).update(vars(AudioServer(self.address)))

    def url(self, path: str) -> str:
        return f"{self.address}{path}"

    def asked(self, kind: str) -> int:
        """The number of requests of a kind: `GET`, `HEAD`."""
        return sum(request.startswith(f"{kind} ") for request in self.requests)

    def answer(self, request: Request) -> None:
        parts = urlsplit(request.path)
        path = unquote(parts.path)
        self.requests.append(
            f"{request.command} {path}" + (f"?{parts.query}" if parts.query else "")
        )
        waiting = self.faults.get(path)
        fault = waiting.pop(0) if waiting else self.always.get(path)
        if fault == "drop":
            request.close_connection = True
            return
        if isinstance(fault, int | tuple):
            status, headers = fault if isinstance(fault, tuple) else (fault, {})
            return request.send(status, headers, b"a secret place")
        if path not in self.files:
            return request.send(404, {})
        data, status, headers = self.files[path], 200, {}
        if self.has_etags:
            headers["ETag"] = f'"{md5(data).hexdigest()}"'
        if self.has_dates:
            headers["Last-Modified"] = "Sun, 22 Nov 2026 12:00:00 GMT"
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if wanted and self.has_ranges:
            first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        if fault == "replace":
            self.files[path] = self.files[path][::-1]
        request.send(status, headers, data if fault is None else data[: len(data) // 2], len(data))
        if fault is not None and request.command != "HEAD":
            request.close_connection = True
            if fault == "reset":
                request.reset()
