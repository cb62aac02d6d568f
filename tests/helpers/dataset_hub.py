"""A hub on loopback that datasets are pushed to, and read from.

Source: what huggingface_hub asks (`HfApi.create_repo`, `create_commit`, `list_repo_tree`,
`hf_hub_download`), and what huggingface.co answers."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import hub_server
from hub_server import blob_id
from loopback import Request, serving

TOKEN = "hf_of_a_test"
"""The token without which nothing may be written."""


@dataclass
class DatasetHub:
    """Datasets, each with the one branch `main`."""

    address: str = ""
    """The address, for `HF_ENDPOINT`."""
    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The files of the last commit, by path; by the name of the dataset."""
    large: dict[str, bytes] = field(default_factory=dict)
    """The large files that were uploaded before their commit, by SHA-256."""

    def answer(self, request: Request) -> None:
        url = urlsplit(request.path)
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        asked = f"{request.command} {unquote(url.path)}"
        writes = re.fullmatch("POST .*/(create|commit/main)", asked)
        if writes and request.headers["Authorization"] != f"Bearer {TOKEN}":
            return request.send(401, {"X-Error-Message": "Invalid username or password."})
        if asked == "POST /api/repos/create":
            return self._create(request, json.loads(body))
        if asked == "POST /api/validate-yaml":
            return _send(request, {"errors": [], "warnings": []})
        if asked.startswith("PUT /large/"):
            oid = url.path.removeprefix("/large/")
            assert oid == hashlib.sha256(body).hexdigest()
            self.large[oid] = body
            return request.send(200, {})
        for pattern, answer in _ANSWERS.items():
            match = re.fullmatch(pattern, asked)
            if match:
                return self._answer_of_dataset(request, answer, match, url.query, body)
        return request.send(404, {})

    def _create(self, request: Request, options: dict[str, Any]) -> None:
        assert options["type"] == "dataset", options
        name = f"{options['organization']}/{options['name']}"
        status = 409 if name in self.datasets else 200
        self.datasets.setdefault(name, {})
        _send(request, {"url": f"{self.address}/datasets/{name}", "name": name}, status)

    def _answer_of_dataset(
        self, request: Request, answer: Any, match: re.Match[str], query: str, body: bytes
    ) -> None:
        named = match.groupdict()
        name = named.pop("name")
        if name not in self.datasets:
            return request.send(404, {"X-Error-Code": "RepoNotFound"})
        files = self.datasets[name]
        if named.pop("revision", None) not in (None, "main", _commit_of(files)):
            return request.send(404, {"X-Error-Code": "RevisionNotFound"})
        return answer(self, request, name, files, query=query, body=body, **named)

    def _describe(self, request, name, files, **_) -> None:
        siblings = [{"rfilename": path} for path in files]
        _send(request, {"id": name, "sha": _commit_of(files), "siblings": siblings})

    def _preupload(self, request, name, files, body, **_) -> None:
        """Want Parquet as large files, and others in the commit itself."""
        modes = []
        for wanted in json.loads(body)["files"]:
            path = wanted["path"]
            mode = "lfs" if path.endswith(".parquet") else "regular"
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False})
        _send(request, {"files": modes})

    def _take_large(self, request, name, files, body, **_) -> None:
        objects = [
            {**wanted, "actions": {"upload": {"href": f"{self.address}/large/{wanted['oid']}"}}}
            for wanted in json.loads(body)["objects"]
        ]
        _send(request, {"transfer": "basic", "objects": objects})

    def _commit(self, request, name, files, body, **_) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        new = dict(files)
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                if value.get("parentCommit", _commit_of(files)) != _commit_of(files):
                    return request.send(412, {"X-Error-Message": "A commit has happened since"})
            elif line["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                new[value["path"]] = self.large[value["oid"]]
            else:
                assert line["key"] == "deletedFile", line
                del new[value["path"]]
        self.datasets[name] = new
        commit = _commit_of(new)
        url = f"{self.address}/datasets/{name}/commit/{commit}"
        return _send(request, {"commitUrl": url, "commitOid": commit, "success": True})

    def _list(self, request, name, files, query, path="", **_) -> None:
        known = _entries(files)
        folder = PurePosixPath(path or "")
        if folder != PurePosixPath() and folder not in known:
            return request.send(404, {"X-Error-Code": "EntryNotFound"})
        recursive = parse_qs(query).get("recursive", [""])[0].lower() == "true"
        below = [
            entry
            for place, entry in known.items()
            if place.parent == folder or (recursive and folder in place.parents)
        ]
        return _send(request, below)

    def _look_up(self, request, name, files, body, **_) -> None:
        paths = [PurePosixPath(path) for path in parse_qs(body.decode())["paths"]]
        known = _entries(files)
        _send(request, [known[path] for path in paths if path in known])

    def _resolve(self, request, name, files, path, **_) -> None:
        headers = {"X-Repo-Commit": _commit_of(files)}
        if path not in files:
            return request.send(404, headers | {"X-Error-Code": "EntryNotFound"})
        content = files[path]
        headers["ETag"] = f'"{blob_id(content)}"'
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if not wanted:
            return request.send(200, headers, content)
        first = int(wanted[1])
        part = content[first : int(wanted[2] or len(content) - 1) + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return request.send(206, headers, part)


_API = "/api/datasets/(?P<name>[^/]+/[^/]+)"
_ANSWERS = {
    f"GET {_API}(/revision/(?P<revision>[^/]+))?": DatasetHub._describe,
    f"POST {_API}/preupload/(?P<revision>[^/]+)": DatasetHub._preupload,
    "POST /datasets/(?P<name>[^/]+/[^/]+)[.]git/info/lfs/objects/batch": DatasetHub._take_large,
    f"POST {_API}/commit/(?P<revision>[^/]+)": DatasetHub._commit,
    f"GET {_API}/tree/(?P<revision>[^/]+)(/(?P<path>.*))?": DatasetHub._list,
    f"POST {_API}/paths-info/(?P<revision>[^/]+)": DatasetHub._look_up,
    "(GET|HEAD) /datasets/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)": (
        DatasetHub._resolve
    ),
}
"""What answers a request about a dataset, by the request."""


@contextmanager
def serve() -> Iterator[DatasetHub]:
    """Serve a hub without datasets."""
    hub = DatasetHub()
    with serving(hub.answer) as hub.address:
        yield hub


def environment(hub: DatasetHub, home: Path) -> dict[str, str]:
    """Of a process that may write to this hub, and is to ask nobody else."""
    return hub_server.environment(
        hub,
        home,
        HF_DATASETS_CACHE=str(home / "datasets"),
        HF_HUB_DISABLE_UPDATE_CHECK="1",
        HF_HUB_DISABLE_XET="1",  # Python does not see its connections
        HF_TOKEN=TOKEN,
        HF_UPDATE_DOWNLOAD_COUNTS="0",
    )


def _send(request: Request, document: object, status: int = 200) -> None:
    request.send(status, {"Content-Type": "application/json"}, json.dumps(document).encode())


def _commit_of(files: dict[str, bytes]) -> str:
    """Name a commit after its files."""
    names = [f"{blob_id(content)} {path}" for path, content in sorted(files.items())]
    return hashlib.sha1("\n".join(names).encode()).hexdigest()


def _entries(files: dict[str, bytes]) -> dict[PurePosixPath, dict[str, Any]]:
    """Describe files, and the folders that hold them."""
    entries: dict[PurePosixPath, dict[str, Any]] = {}
    for path, content in files.items():
        place = PurePosixPath(path)
        for folder in place.parents[:-1]:
            oid = blob_id(str(folder).encode())
            entries[folder] = {"type": "directory", "path": str(folder), "oid": oid, "size": 0}
        oid = blob_id(content)
        entries[place] = {"type": "file", "path": path, "oid": oid, "size": len(content)}
    return entries
