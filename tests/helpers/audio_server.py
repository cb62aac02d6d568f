"""A web server on loopback that has audio files, and the faults that servers have."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class AudioServer:
    """The files of a server, and what it does wrong."""

    address: str
    """The address: `http://127.0.0.1:1234`."""
    files: dict[str, bytes] = field(default_factory=dict)
    """What there is, by path: `/a.wav`."""
    requests: list[str] = field(default_factory=list)
    """What was asked: `GET /a.wav`."""
    faults: dict[str, list[Any]] = field(default_factory=dict)
    """What goes wrong with the next requests for a path. A status, with headers if there are any; `drop`: no answer;
    `half`: half of the file; `reset`: the same, broken off; `replace`: the same, and then the file is another one."""
    always: dict[str, Any] = field(default_factory=dict)
    """What goes wrong with each request for a path."""
    has_etags: bool = True
    """Whether answers have an ETag."""
    has_dates: bool = False
    """Whether answers have a Last-Modified."""
    has_ranges: bool = True
    """Whether a part of a file can be asked for."""

    def url(self, path: str) -> str:
        return f"{self.address}{path}"

    def asked(self, kind: str) -> int:
        """The number of requests of a kind: `GET`, `HEAD`."""
        return sum(request.startswith(f"{kind} ") for request in self.requests)


@contextmanager
def audio_server() -> Iterator[AudioServer]:
    """An `AudioServer` that answers as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            path = unquote(parts.path)
            server.requests.append(f"{self.command} {path}" + (f"?{parts.query}" if parts.query else ""))
            waiting = server.faults.get(path)
            fault = waiting.pop(0) if waiting else server.always.get(path)
            if fault == "drop":
                self.close_connection = True
                return
            if isinstance(fault, int | tuple):
                status, headers = fault if isinstance(fault, tuple) else (fault, {})
                self._send(status, b"a secret place", headers)
                return
            if path not in server.files:
                self._send(404, b"", {})
                return
            data, status, headers = server.files[path], 200, {}
            if server.has_etags:
                headers["ETag"] = f'"{md5(data).hexdigest()}"'
            if server.has_dates:
                headers["Last-Modified"] = "Sun, 22 Nov 2026 12:00:00 GMT"
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if wanted and server.has_ranges:
                first, last = int(wanted[1]), min(int(wanted[2]), len(data) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                data, status = data[first : last + 1], 206
            if fault == "replace":
                server.files[path] = server.files[path][::-1]
            self._send(status, data, headers, fault)

        def _send(self, status: int, data: bytes, headers: dict[str, str], fault: Any = None) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(data if fault is None else data[: len(data) // 2])
            if fault is not None:
                self.close_connection = True
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

    class Listener(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # whoever asked has gone

    with Listener(("127.0.0.1", 0), Handler) as listener:
        server = AudioServer(f"http://127.0.0.1:{listener.server_port}")
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()
