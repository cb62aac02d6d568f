"""An S3 server on loopback, moto's in a process of its own, behind a proxy that counts what passes and breaks some."""

import os
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from featcache.storage import clients
from featcache.storage.base import open_store
from featcache.storage.location import parse_location

BUCKET = "speech"
_ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
_SERVER = """
import socket, sys
from moto.server import ThreadedMotoServer
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False).start()
print("port", port, flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server():
    """Start the server; yields the `Proxy` before it."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", _SERVER], **pipes) as server:
        try:
            with Proxy(next(int(line.split()[1]) for line in server.stdout if line.startswith("port "))) as proxy:
                yield proxy
        finally:
            server.stdin.close()
            server.kill()


class Proxy:
    """Passes requests on to the server.

    Attributes:
        environment: The variables by which a process finds it.
        requests: How many there were, by method.
        sent: The bytes of bodies that were sent in answers.
        fault: Called with the method and the path of each; what it returns happens to it: `before` (the connection ends
            before it is passed on), `after` (it ends before the answer), `503` (said after it was done), `409` (said,
            and nothing is done), `cut` (half of the body is sent), `unconditional` (done whatever its conditions), or
            None.
        seconds: How long each takes at least.
    """

    def __init__(self, port):
        self.port = port
        self.conditional = threading.Lock()
        self.reset()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits 40 ms for what says that its headers have come

            def log_message(self, *args):
                pass

            def handle_one(self):
                proxy.pass_on(self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.environment = {**_ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.server_address[1]}"}

    def empty(self):
        """Forget all that the server holds, and make an empty bucket."""
        for method, path in (("POST", "moto-api/reset"), ("PUT", BUCKET)):
            wanted = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", method=method)
            urllib.request.urlopen(wanted, timeout=30).close()

    def reset(self):
        """Count from now on, and break nothing."""
        self.requests, self.sent, self.sent_by_path = Counter(), 0, Counter()
        self.seconds, self.paths = 0.0, []
        self.fault = lambda method, path: None

    def sent_of(self, ending):
        """The bytes that were sent of files whose names have this ending."""
        return sum(count for path, count in self.sent_by_path.items() if path.endswith(ending))

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *exception):
        self.server.shutdown()
        self.server.server_close()

    def pass_on(self, request):
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests[request.command] += 1
        self.paths.append((request.command, request.path))
        fault = self.fault(request.command, request.path)
        time.sleep(self.seconds)
        if fault == "before":
            request.close_connection = True
            return
        if fault == "409":
            return self.refuse(request, 409)
        if fault == "unconditional":
            del request.headers["If-None-Match"]
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        # moto looks whether there is an object, and then writes it: one request at a time, as in a store.
        is_conditional = "If-None-Match" in request.headers or "If-Match" in request.headers
        with self.conditional if is_conditional else nullcontext():
            connection.request(request.command, request.path, body, dict(request.headers.items()))
            answer = connection.getresponse()
            data = answer.read()
        connection.close()
        if fault == "after":
            request.close_connection = True
            return
        if fault == "503":
            return self.refuse(request, 503)
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                request.send_header(name, value)
        length = answer.getheader("Content-Length") if request.command == "HEAD" else len(data)
        request.send_header("Content-Length", str(length))
        request.end_headers()
        if fault == "cut":
            data = data[: len(data) // 2]
            request.close_connection = True
        self.sent += len(data)
        self.sent_by_path[request.path] += len(data)
        request.wfile.write(data)

    def refuse(self, request, status):
        request.send_response(status)
        request.send_header("Content-Length", "0")
        request.end_headers()


@pytest.fixture(scope="session")
def s3_of_session():
    """The server, which takes seconds to start."""
    with s3_server() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def s3_of_module(s3_of_session):
    """The server with an empty bucket, for the tests of a file."""
    s3_of_session.empty()
    return s3_of_session


@pytest.fixture
def s3(s3_of_module, monkeypatch):
    """The server, counted from now on, and the environment that leads to it."""
    s3_of_module.reset()
    for name, value in s3_of_module.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(clients, "_clients", OrderedDict())
    yield s3_of_module
    s3_of_module.reset()


def any_store():
    """A fresh place in the store that FEATCACHE_STORE_URL names, as scripts/scale/stores.sh does; else in memory."""
    return parse_location("place", f"{os.environ.get('FEATCACHE_STORE_URL', 'memory:/')}/{uuid.uuid4()}/features")


def upload(folder, url):
    """Put all files of a folder into an object store, as they are."""
    store = open_store(parse_location("url", url))
    paths = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]

    def put(path):
        store.put(str(path.relative_to(folder)), path.read_bytes())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, paths))


def upload_for_module(s3, folder, url):
    """The same before the tests of a module, with clients that are not theirs."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        patch.setattr(clients, "_clients", OrderedDict())
        upload(folder, url)
