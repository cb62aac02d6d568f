"""An S3 server on loopback, in a process of its own, that holds everything in memory,
sorted: unlike moto's, it answers a listing of a million keys as fast as one of ten. It
does what obstore asks for, and checks no signatures."""

import json
import subprocess
import sys
import threading
import time
import urllib.request
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from contextlib import contextmanager
from email.utils import formatdate
from itertools import count
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from loopback import serving

PAGE = 1000
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
}


@contextmanager
def s3_in_memory():
    """Start the server; yields `S3InMemory`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__], **pipes) as server:
        try:
            yield S3InMemory(server.stdout.readline().strip())
        finally:
            server.stdin.close()  # at which it ends


class S3InMemory:
    """The server, as the process sees it that has started it; others find it by the
    variables of `environment`."""

    def __init__(self, address):
        self.environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": address}
        self._address = address

    def requests(self, seconds=0.0):
        """How many requests there were since the last time, by method. From now on, each
        takes at least so long."""
        with urllib.request.urlopen(f"{self._address}/?seconds={seconds}", timeout=30) as answer:
            return Counter(json.load(answer))


class _Server:
    """What the server holds: files, by bucket and key, and parts of those that come in
    parts."""

    def __init__(self):
        self._files, self._paths, self._parts, self._uploads = {}, [], {}, count()
        self._requests, self._seconds = Counter(), 0.0
        self._lock = threading.Lock()

    def answer(self, request):
        place, query = (
            urlsplit(request.path),
            dict(parse_qsl(urlsplit(request.path).query, keep_blank_values=True)),
        )
        path, method = unquote(place.path)[1:], request.command
        data = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if not path:
            counted, self._requests, self._seconds = (
                self._requests,
                Counter(),
                float(query["seconds"]),
            )
            return request.send(200, {}, json.dumps(counted).encode())
        self._requests[method] += 1
        time.sleep(self._seconds)
        bucket, _, key = path.partition("/")
        if not key:
            said = (
                self._listing(bucket, query) if method == "GET" else self._remove_all(bucket, data)
            )
            return request.send(200, {}, said.encode())
        if method == "DELETE":
            self._remove(path)
            return request.send(204, {})
        if method == "PUT" or method == "POST":
            return request.send(200, {"ETag": '"e"'}, self._write(path, query, data).encode())
        return self._read(request, path)

    def _write(self, path, query, data):
        """Take a file, a part of it, or word that parts begin or end; the answer."""
        if "uploads" in query:
            upload = str(next(self._uploads))
            self._parts[upload] = {}
            return f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
        if "partNumber" in query:
            self._parts[query["uploadId"]][int(query["partNumber"])] = data
            return ""
        if "uploadId" in query:
            data = b"".join(part for _, part in sorted(self._parts.pop(query["uploadId"]).items()))
        with self._lock:
            if path not in self._files:
                insort(self._paths, path)
            self._files[path] = data, time.time()
        return "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>" * (
            "uploadId" in query
        )

    def _remove_all(self, bucket, document):
        keys = [
            element.text
            for element in ElementTree.fromstring(document).iter()
            if element.tag.endswith("Key")
        ]
        for key in keys:
            self._remove(f"{bucket}/{key}")
        told = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return f"<DeleteResult>{told}</DeleteResult>"

    def _remove(self, path):
        with self._lock:
            if self._files.pop(path, None) is not None:
                del self._paths[bisect_left(self._paths, path)]

    def _read(self, request, path):
        if path not in self._files:
            return request.send(404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        data, written = self._files[path]
        size, headers = (
            len(data),
            {"ETag": '"e"', "Last-Modified": formatdate(written, usegmt=True)},
        )
        first, last = 0, size - 1
        if asked := request.headers.get("Range"):
            start, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = int(start), min(last, int(end or last))
            if first >= size:
                return request.send(416, {}, b"<Error><Code>InvalidRange</Code></Error>")
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        request.send(206 if asked else 200, headers, data[first : last + 1], last + 1 - first)

    def _listing(self, bucket, query):
        with self._lock:
            return self._page(bucket, query)

    def _page(self, bucket, query):
        prefix, delimiter = f"{bucket}/{query.get('prefix', '')}", query.get("delimiter")
        after = query.get("continuation-token") or query.get("start-after") or ""
        place = max(
            bisect_left(self._paths, prefix), bisect_right(self._paths, f"{bucket}/{after}")
        )
        told, told_last = [], ""
        while (
            place < len(self._paths)
            and (path := self._paths[place]).startswith(prefix)
            and len(told) < PAGE
        ):
            below = path[len(prefix) :]
            if delimiter and delimiter in below:
                folder = prefix + below.partition(delimiter)[0] + delimiter
                told.append(
                    f"<CommonPrefixes><Prefix>{escape(folder[len(bucket) + 1 :])}</Prefix></CommonPrefixes>"
                )
                told_last = folder + "\U0010ffff"
                place = bisect_right(self._paths, told_last)
                continue
            data, written = self._files[path]
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(written))
            key = f"<Key>{escape(path[len(bucket) + 1 :])}</Key><LastModified>{when}</LastModified>"
            told.append(f"<Contents>{key}<ETag>e</ETag><Size>{len(data)}</Size></Contents>")
            told_last, place = path, place + 1
        more = place < len(self._paths) and self._paths[place].startswith(prefix)
        token = (
            f"<NextContinuationToken>{escape(told_last[len(bucket) + 1 :])}</NextContinuationToken>"
            if more
            else ""
        )
        said = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(told)}"
        return f"<ListBucketResult><Name>{bucket}</Name><KeyCount>{len(told)}</KeyCount>{said}</ListBucketResult>"


if __name__ == "__main__":
    with serving(_Server().answer) as address:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        sys.stdin.read()
