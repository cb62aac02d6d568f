"""HTTP servers on loopback, whose answers a test decides, and which break connections off;
and processes that ask nobody else."""

import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Request(BaseHTTPRequestHandler):
    """A request of any method, which waits to be answered."""

    protocol_version = "HTTP/1.1"
    # else each answer waits 40 ms for what says that its headers have come
    disable_nagle_algorithm = True

    def _answer(self) -> None:
        self.server.answer(self)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, *_: object) -> None:
        pass

    def send(
        self, status: int, headers: Mapping[str, str], body: bytes = b"", length: object = None
    ) -> None:
        """Answer; `length` is what is said of the body's length if that is not true."""
        self.send_response(status)
        for name, value in {
            **headers,
            "Content-Length": str(len(body) if length is None else length),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reset(self) -> None:
        """Break the connection off."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # at once, before the server ends the connection in peace
        os.close(self.connection.detach())


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    answer: Callable[[Request], object]

    def handle_error(self, *_: object) -> None:
        pass  # whoever asked has gone


@contextmanager
def serving(answer: Callable[[Request], object]) -> Iterator[str]:
    """A server that has requests answered by a function, as long as the block lasts; its
    address."""
    with _Server(("127.0.0.1", 0), Request) as server:
        server.answer = answer
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def stay_on_loopback() -> None:
    """End this process at once if its Python code asks for an address elsewhere."""

    def audit(event: str, arguments: tuple) -> None:
        if event == "socket.getaddrinfo":
            host = arguments[0]
        elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
            host = arguments[1][0]
        else:
            return
        if host not in ("127.0.0.1", "localhost", b"127.0.0.1", b"localhost"):
            os.write(2, f"{event} {host!r}: not on loopback\n".encode())
            os._exit(97)

    sys.addaudithook(audit)
