"""A hub on loopback, which says over HTTP what huggingface_hub wants to hear, and has the
faults that hubs have.

Source: what huggingface_hub asks (`HfApi.model_info`, `hf_hub_download`), and what
huggingface.co answers."""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopback import Request, serving
from processes import MOST_SECONDS

LARGE = {".safetensors", ".bin", ".pt"}
"""Files that a hub keeps elsewhere, by the SHA-256 of what they hold."""

CONFIG = """
name: encodec
extractor: encodec
params: {{weights: {weights}, revision: {revision}, bandwidth: 6.0}}
audio: {{sample_rate: 24000}}
"""
"""A config whose weights are on a hub."""


@dataclass
class Hub:
    """One repository with one commit, and others like it."""

    files: dict[str, bytes]
    """The repository's files by name."""
    address: str = ""
    """The address, for `HF_ENDPOINT`."""
    name: str = "org/name"
    commit: str = "c1dbe2ae3f1de713481a3b3e7c47f357092ee040"
    requests: list[str] = field(default_factory=list)
    """What was asked: `GET /api/models/org/name/revision/…`."""
    answers: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    """A status and headers for requests that match a regular expression, instead of what
    they ask for."""
    drop: str = "close"
    """What happens in the middle of a large file: `close` ends the connection, `reset`
    breaks it, `hold` just stops."""
    drops: int = 0
    """How many times that happens."""
    corrupt: bool = False
    """Whether large files arrive with a flipped bit."""
    others: dict[str, tuple[str, dict[str, bytes]]] = field(default_factory=dict)
    """The commit and the files of other repositories, by their names."""

    def asked_for(self, what: str) -> list[str]:
        """The requests that match."""
        return [request for request in self.requests if re.search(what, request)]

    def answer(self, request: Request) -> None:
        asked = f"{request.command} {request.path}"
        self.requests.append(asked)
        for pattern, (status, headers) in self.answers.items():
            if re.search(pattern, asked):
                return request.send(status, headers)
        repository, _, rest = request.path.partition(
            "/revision/" if "/api/" in request.path else "/resolve/"
        )
        if request.path.startswith("/large/"):
            every = [self.files, *(files for _, files in self.others.values())]
            held = {_sha256(content): content for files in every for content in files.values()}
            return self._send_large(request, held[request.path.rpartition("/")[2]])
        name = repository.removeprefix("/api/models").removeprefix("/")
        if name != self.name and name not in self.others:
            return request.send(401, {"X-Error-Message": "Invalid username or password."})
        commit, files = self.others.get(name, (self.commit, self.files))
        revision, _, file = rest.partition("?")[0].partition("/")
        if revision != commit:
            return request.send(404, {"X-Error-Code": "RevisionNotFound"})
        if not file:
            siblings = [_described(path, content) for path, content in files.items()]
            document = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
            return request.send(
                200, {"Content-Type": "application/json"}, json.dumps(document).encode()
            )
        headers = {"X-Repo-Commit": commit}
        if file not in files:
            return request.send(404, headers | {"X-Error-Code": "EntryNotFound"})
        content = files[file]
        if Path(file).suffix not in LARGE:
            return request.send(200, headers | {"ETag": f'"{blob_id(content)}"'}, content)
        headers |= {"X-Linked-Size": str(len(content)), "X-Linked-ETag": f'"{_sha256(content)}"'}
        # By another name of this machine: huggingface_hub takes what stays on the hub's
        # own host for the file itself.
        elsewhere = f"{self.address.replace('127.0.0.1', 'localhost')}/large/{_sha256(content)}"
        return request.send(302, headers | {"Location": elsewhere})

    def _send_large(self, request: Request, content: bytes) -> None:
        if self.corrupt:
            content = bytes([content[0] ^ 1]) + content[1:]
        start = int(re.search(r"\d+", request.headers.get("Range", "0"))[0])
        headers = (
            {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        )
        whole, rest = len(content) - start, content[start:]
        if self.drops:
            self.drops -= 1
            rest = rest[: len(rest) // 2]
            request.close_connection = True
        request.send(206 if start else 200, headers, rest, whole)
        if len(rest) < whole and self.drop == "hold":
            request.rfile.read(1)  # until the other side goes
        if len(rest) < whole and self.drop == "reset":
            request.reset()


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Serve the files of a folder as a hub's repository."""
    hub = Hub(files_in(folder))
    with serving(hub.answer) as hub.address:
        yield hub


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _described(name: str, content: bytes) -> dict[str, Any]:
    described: dict[str, Any] = {
        "rfilename": name,
        "size": len(content),
        "blobId": blob_id(content),
    }
    if Path(name).suffix in LARGE:
        described["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}
    return described


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def blob_id(content: bytes) -> str:
    """As git names what a file holds."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


BEHIND_TRANSFORMERS = ["torch._dynamo", "torch.distributed.tensor", "scipy.optimize"]
"""What transformers imports and takes long; it cannot be imported itself before it is
known where its models are."""


def environment(hub, home, **others):
    """Of a process that is to use this hub and this HF_HOME."""
    return {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_ETAG_TIMEOUT": str(MOST_SECONDS),
        "HF_HUB_DOWNLOAD_TIMEOUT": str(MOST_SECONDS),
        "HF_TOKEN": "",
        "no_proxy": "*",
        **others,
    }
