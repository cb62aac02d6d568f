"""An index of a version of very many shards in an object store: requests, seconds and memory.

    python scripts/scale/entries.py --shards 100000 --latency 0 50

The store is a small server of S3's requests on loopback, in this process: it holds all in memory, counts requests, and
holds each back for the latency. Entries and records of runs are what the store's own writers make, of a made-up
shard; other files of shards nobody asks for, so there are none. Each command is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_left
from collections import Counter
from hashlib import md5, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np
from featcache.store import zarr3
from featcache.store.commits import Entry
from featcache.store.shard_writer import ShardWriter

from featcache.config import load_config
from featcache.device import Device
from featcache.extraction.version_plan import BuiltConfig, version_info
from featcache.format.shard import Item
from featcache.storage.location import parse_location
from featcache.strings import Strings
from featcache.version.records import Run, ShardEvent
from featcache.version.version import Version

PAGE = 1000
COMMAND = """
import atexit, runpy
atexit.register(lambda: print("\\n" + open("/proc/self/status").read()))
runpy.run_module("featcache", run_name="__main__")
"""
"""A command, which says in the end what memory it took: the kernel's peak of a child begins with that of its parent."""

RUN_SHARDS = 1000
"""The shards that a run has made."""


class Server(ThreadingHTTPServer):
    """What obstore asks of S3, for one bucket: objects by their keys, and how many requests of a kind there were."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.seconds = 0.0
        self._names: dict[tuple[str, bool], list[str]] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def listing(self, prefix: str, after: str, with_folders: bool) -> tuple[list[str], str]:
        """What is below a prefix, the first thousand from some name on; and where the next page begins. Folders, if
        they are not looked into, end in a slash.
        """
        if not after:  # what has come since does not matter: nothing is written while something is listed
            rest = [key.removeprefix(prefix) for key in list(self.objects) if key.startswith(prefix)]
            if with_folders:
                rest = [*{head + slash for head, slash, _ in (name.partition("/") for name in rest)}]
            self._names[prefix, with_folders] = sorted(rest)
        names = self._names[prefix, with_folders]
        first = bisect_left(names, after)
        return names[first : first + PAGE], names[first + PAGE] if len(names) > first + PAGE else ""


class Handler(BaseHTTPRequestHandler):
    """Answers a request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def answer(self) -> None:
        """Do what is asked, after the latency."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        query, key, objects = parse_qs(url.query), unquote(url.path).split("/", 2)[-1], self.server.objects
        is_listing = "list-type" in query
        self.server.requests["listings" if is_listing else f"{self.command}s"] += 1
        time.sleep(self.server.seconds)
        if is_listing:
            self.send(200, self.page(query))
        elif "partNumber" in query:
            objects[f"{key} {int(query['partNumber'][0]):05}"] = body
            self.send(200)
        elif self.command == "POST":  # an upload in parts begins, or ends
            parts = sorted(name for name in [*objects] if name.startswith(f"{key} "))
            if "uploads" not in parse_qs(url.query, keep_blank_values=True):
                objects[key] = b"".join(map(objects.pop, parts))
            self.send(200, b"<Upload><UploadId>1</UploadId><ETag>1</ETag></Upload>")
        elif self.command == "PUT":
            exists = key in objects and self.headers.get("If-None-Match") == "*"
            if not exists:
                objects[key] = body
            self.send(412 if exists else 200)
        elif self.command == "DELETE":
            objects.pop(key, None)
            self.send(204)
        else:
            self.send(200 if key in objects else 404, objects.get(key, b""))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def page(self, query: dict[str, list[str]]) -> bytes:
        """A page of a listing."""
        prefix, after = query.get("prefix", [""])[0], query.get("continuation-token", [""])[0]
        names, more = self.server.listing(prefix, after, "delimiter" in query)
        time_ = "2026-01-01T00:00:00.000Z"
        parts = [f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>"]
        parts += [f"<NextContinuationToken>{escape(more)}</NextContinuationToken>"] if more else []
        for name in names:
            if name.endswith("/"):
                parts.append(f"<CommonPrefixes><Prefix>{escape(prefix + name)}</Prefix></CommonPrefixes>")
                continue
            size = len(self.server.objects[prefix + name])
            parts.append(
                f"<Contents><Key>{escape(prefix + name)}</Key><LastModified>{time_}</LastModified>"
                f'<ETag>"0"</ETag><Size>{size}</Size></Contents>'
            )
        return f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode()

    def send(self, status: int, data: bytes = b"") -> None:
        """Send an answer."""
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{md5(data).hexdigest()}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class Shards:
    """Makes entries of shards of a version, as if they had been extracted."""

    def __init__(self, version: Version, items: int, folder: Path) -> None:
        self.version, self.items = version, items
        spec = version.info.spec
        rows = [
            Item(id=f"{row}", path="a.flac", num_samples=1600, size=1, mtime_ns=1, sample_rate=spec.sample_rate)
            for row in range(items)
        ]
        writer = ShardWriter(folder / "work", spec)
        writer.append(rows, np.zeros((items, *spec.item_shape), version.dtype), [1] * items, {})
        (folder / "shards").mkdir()
        made_by = {"fingerprint": version.info.fingerprint, "batching": "frames"}
        name = writer.commit(
            folder / "shards", sample_rate=spec.sample_rate, row=0, supersedes={}, made_by=made_by, attempt="0" * 16
        )
        self._attributes, _ = zarr3.read_sealed_group(folder / "shards" / name)
        self._files = {
            str(path.relative_to(folder / "shards" / name)): path.stat().st_size
            for path in (folder / "shards" / name).rglob("*")
            if path.is_file() and path.parent.name != name
        }

    def add(self, objects: dict[str, bytes], first: int, count: int) -> None:
        """Enter so many shards, from this number on, and the records of the runs that made them."""
        for start in range(first, first + count, RUN_SHARDS):
            run = Run(self.version, {"manifest": "m.csv", "root": "/", "only": True})
            numbers = range(start, min(start + RUN_SHARDS, first + count))
            run.record_shards([self._enter(objects, number, run.id) for number in numbers], are_there=True)
            run.finish({"interrupted": False})

    def _enter(self, objects: dict[str, bytes], number: int, run: str) -> ShardEvent:
        what = sha256(f"what {number}".encode()).hexdigest()[:12]
        digest = sha256(f"shard {number}".encode()).hexdigest()
        made_by = self._attributes["made_by"] | {"run": run, "attempt": f"{what}.{'0' * 16}"}
        described = self._attributes | {"digest": digest, "row": number * self.items, "made_by": made_by}
        zarr_json = zarr3.group_metadata(described)
        ids = Strings.of(f"utt-{row:08}" for row in range(number * self.items, (number + 1) * self.items))
        columns = {
            "ids": ids.blob,
            "id_offsets": ids.offsets,
            "row_hash": ids.hashes(),
            "offsets": np.arange(self.items + 1),
        }
        key = self.version.path.key  # type: ignore[union-attr]
        objects[f"{key}/commits/{what}"] = Entry(digest[:12], zarr_json.decode(), self._files, columns).data()
        objects[f"{key}/shards/{digest[:12]}/zarr.json"] = zarr_json
        return ShardEvent(digest[:12], self.items, entry=what)


def measure(server: Server, what: str, *command: str) -> None:
    """Run a command of featcache, and print what it cost."""
    server.requests.clear()
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", COMMAND, *command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        peak = [int(line.split()[1]) for line in process.stdout if line.startswith("VmHWM")]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = status
    seconds, cpu = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
    requests = ", ".join(f"{count:,} {kind}" for kind, count in sorted(server.requests.items()))
    print(
        f"{server.seconds * 1000:.0f} ms, {what}: {seconds:.1f} s ({cpu:.1f} s of a core), "
        f"{peak[0] / 1024:,.0f} MB; {requests}",
        flush=True,
    )
    assert status == 0, command


def main() -> None:
    """Enter the shards, and print a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--items", type=int, default=4, help="of a shard")
    parser.add_argument("--more", type=int, default=100, help="shards that are added then")
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 50], help="milliseconds")
    given = parser.parse_args()
    server = Server()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory() as name:
        tempfile.tempdir = os.environ["TMPDIR"] = name
        built = BuiltConfig.build(load_config("mfcc13"), Device("cpu", 1).torch_device)
        url = "s3://bucket/cache"
        version = Version.create(parse_location("url", url), version_info(built.config, built.extractor.spec))
        shards, count = Shards(version, given.items, Path(name)), given.shards
        shards.add(server.objects, 0, count)
        for latency in given.latency:
            server.seconds = latency / 1000
            for key in [key for key in server.objects if "/index/" in key]:
                del server.objects[key]
            measure(server, f"index of {count:,} shards", "index", url)
            measure(server, "the same again", "index", url)
            measure(server, "info", "info", url)
            measure(server, "ls", "ls", url)
            server.seconds = 0
            shards.add(server.objects, count, given.more)
            count += given.more
            server.seconds = latency / 1000
            measure(server, f"index after {given.more} more", "index", url)


if __name__ == "__main__":
    main()
