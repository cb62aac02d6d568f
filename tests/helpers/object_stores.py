"""An S3 server on loopback, moto's in a process of its own, behind a proxy that counts
what passes and breaks some."""

import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from http.client import HTTPConnection
from itertools import count, cycle
from pathlib import Path

import pytest
from loopback import serving
from s3_in_memory import ENVIRONMENT

from featcache.storage import clients
from featcache.storage.location import parse_location
from featcache.storage.opening import open_store

BUCKET = "speech"
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
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
        "text": True,
    }
    with subprocess.Popen([sys.executable, "-c", _SERVER], **pipes) as server:
        try:
            proxy = Proxy(
                next(int(line.split()[1]) for line in server.stdout if line.startswith("port "))
            )
            with serving(proxy.pass_on) as address:
                proxy.environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": address}
                yield proxy
        finally:
            server.stdin.close()
            server.kill()


class Proxy:
    """Passes requests on to the server, each after so many `seconds`; counts them by
    method, and the bytes of answers.

    `fault` is called with the method and the path of each, and what it returns happens to
    it: `before` (the connection ends before it is passed on), `after` (it ends before the
    answer), `503` (said after it was done), `cut` (half of the body is sent), `stall` (the
    same, but the connection stays open), `silent` (it stays open without an answer), or None.
    A process finds it by the variables of `environment`."""

    def __init__(self, port):
        self.port = port
        self.environment = ENVIRONMENT
        self.reset()

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

    def break_every(self, step):
        """Break the first of so many requests, each in another way."""
        numbers, faults = count(), cycle(["before", "503", "cut", "after"])
        self.fault = lambda method, path: None if next(numbers) % step else next(faults)

    def sent_of(self, ending):
        """The bytes that were sent of files whose names have this ending."""
        return sum(count for path, count in self.sent_by_path.items() if path.endswith(ending))

    def pass_on(self, request):
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests[request.command] += 1
        self.paths.append((request.command, request.path))
        fault = self.fault(request.command, request.path)
        time.sleep(self.seconds)
        if fault in ("before", "silent"):
            request.close_connection = fault == "before"
            return
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(request.command, request.path, body, dict(request.headers.items()))
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if fault == "after":
            request.close_connection = True
            return
        if fault == "503":
            return request.send(503, {})
        dropped = ("content-length", "transfer-encoding", "connection", "date", "server")
        headers = {
            name: value for name, value in answer.getheaders() if name.lower() not in dropped
        }
        length = answer.getheader("Content-Length") if request.command == "HEAD" else len(data)
        if fault in ("cut", "stall"):
            data = data[: len(data) // 2]
            request.close_connection = fault == "cut"
        self.sent += len(data)
        self.sent_by_path[request.path] += len(data)
        request.send(answer.status, headers, data, length)


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
    lead(monkeypatch, s3_of_module)
    yield s3_of_module
    s3_of_module.reset()


def lead(patch, s3):
    """Have this process find the server, with clients that it has not used before, and
    that do not wait long."""
    for name, value in s3.environment.items():
        patch.setenv(name, value)
    patch.setattr(clients, "_connected", lru_cache(clients._connect))
    patch.setattr(clients, "_FIRST_PAUSE", 0.001)
    patch.setattr(clients, "_PAUSES", (0.001,) * 4)


def any_store():
    """A fresh place in the store that FEATCACHE_STORE_URL names, as
    scripts/scale/stores.sh does; else in memory."""
    return parse_location(
        "place", f"{os.environ.get('FEATCACHE_STORE_URL', 'memory:/')}/{uuid.uuid4()}/features"
    )


def upload(folder, url):
    """Put all files of a folder into an object store, as they are."""
    store = open_store(parse_location("url", url))
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda path: store.put(str(path.relative_to(folder)), path.read_bytes()), paths
            )
        )


def upload_for_module(s3, folder, url):
    """The same before the tests of a module, with clients that are not theirs."""
    with pytest.MonkeyPatch.context() as patch:
        lead(patch, s3)
        upload(folder, url)
