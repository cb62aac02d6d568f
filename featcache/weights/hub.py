"""Finds weights: a folder, a file, or a commit of a model on a hub, which is downloaded
into the hub's cache on this machine if it is not there. Every error becomes one line that
says what to do.

`huggingface_hub` downloads each file, retries, and shows its progress bar on a terminal.
The files are downloaded one after another in this thread, and not by `snapshot_download`:
its threads, even a single one, finish their files before an interrupt takes effect, and
if the hub cannot list its files, it returns what is there as if that were all."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from featcache.errors import (
    ConfigError,
    ExtractorError,
    FeatcacheError,
    MissingDependencyError,
    counted,
    first_line,
    listing,
)
from featcache.trust import may_download
from featcache.weights.models import (
    PREPROCESSING,
    SUFFIXES,
    Located,
    folder_with_weights,
    has_all_weights,
    silenced,
    weights_error,
)

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_NAMES_OF_WEIGHTS = (
    *(
        r"model\.safetensors",
        r"model-\d+-of-\d+\.safetensors",
        r"pytorch_model\.bin",
        r"pytorch_model-\d+-of-\d+\.bin",
    ),
    *(r".*\.safetensors", r".*\.(bin|pt|pth|ckpt)"),
)
"""Names of weights in a hub's repository, best first. Only files that match the first
name found are downloaded."""

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""How often the download of a file is tried after a connection was reset. In each
attempt, huggingface_hub itself resumes up to five times after other faults."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS}

_MISUSE = (TypeError, AttributeError, LookupError)
"""What huggingface_hub raises if a hub's list of files is some other JSON. At other
times, these are bugs."""

_TOKEN = "run `hf auth login`, or set HF_TOKEN"


def locate(weights: str, revision: str | None) -> Located:
    """Find weights on this machine, after downloading them from the hub if necessary and
    allowed.

    `weights` is a folder, a file in such a folder, or a hub's id, `org/name`, with a
    commit of 40 hex digits as `revision`. Raises ConfigError if there is no such folder,
    file, model or commit, or it may not be downloaded: then the message says what to
    download, and where; ExtractorError if the hub cannot be reached, or its files not
    kept."""
    # Path.expanduser would raise for the home of an unknown user
    path = Path(os.path.expanduser(weights))
    if weights and os.path.isdir(path):  # "" would be the current folder
        folder = folder_with_weights(path)
        if folder is None and not (path / "config.json").is_file():
            raise weights_error(path, "the folder holds neither config.json nor weights")
        return Located(folder or path)
    if os.path.isfile(path):
        if path.suffix not in SUFFIXES:
            raise weights_error(path, f"a file of weights ends in {listing(SUFFIXES)}")
        return Located(path.parent, path)
    if not _HUB_ID.fullmatch(weights) or weights.startswith((".", "~")) or path.suffix in SUFFIXES:
        raise weights_error(weights, "there is no such folder or file")
    if revision is None or not _COMMIT.fullmatch(revision):
        why = (
            f"there is no folder {weights}, and a hub's id needs one"
            if revision is None
            else f"{revision!r} is none"
        )
        raise ConfigError(f"params.revision: {why}: the commit of {weights}, in 40 hex digits")
    return Located(_folder_of_hub_model(weights, revision))


def _folder_of_hub_model(name: str, revision: str) -> Path:
    """The folder of a hub's model in the hub's cache on this machine, downloaded first if
    anything is missing."""
    try:
        from huggingface_hub import constants
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError as error:
        raise MissingDependencyError(
            "huggingface_hub", f"params.weights: {name}", extra="models"
        ) from error
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(
            f"params.weights: {name}: neither a folder nor a model id: {first_line(error)}"
        ) from error
    model = HubModel(name, revision, constants.ENDPOINT, Path(constants.HF_HUB_CACHE).expanduser())
    if (folder := model.complete_folder()) is not None:
        return folder
    download(model)
    if (folder := folder_with_weights(model.snapshot)) is None:
        raise ConfigError(f"params.weights: {name} at {revision} holds no weights that torch reads")
    model.note_absent_files(folder)
    return folder


@dataclass(frozen=True)
class HubModel:
    """A commit of a model on a hub, and its place in the hub's cache on this machine,
    laid out as huggingface_hub documents it:
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache"""

    name: str
    """The model's name: `org/name`."""
    revision: str
    """The commit, in 40 hex digits."""
    endpoint: str
    """The hub's address."""
    cache: Path
    """The hub's cache on this machine."""

    @property
    def storage(self) -> Path:
        """The folder of the model's repository in the cache."""
        return self.cache / f"models--{self.name.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """The folder of the commit's files."""
        return self.storage / "snapshots" / self.revision

    def complete_folder(self) -> Path | None:
        """The folder with the model's files, if every file that decides values is there;
        else None.

        Other programs share this cache, and may have downloaded weights without the file
        that says how waveforms are prepared. So a folder is complete if it holds that
        file; or if it holds `.gitattributes`, which means that the whole repository was
        downloaded; or if there is a note that the repository has no such file."""
        folder = folder_with_weights(self.snapshot)
        if folder is None or not has_all_weights(folder) or not (folder / "config.json").is_file():
            return None
        is_whole = _says_preprocessing(folder) or (self.snapshot / ".gitattributes").is_file()
        return (
            folder
            if is_whole or all(note.is_file() for note in self._notes_of_absence(folder))
            else None
        )

    def note_absent_files(self, folder: Path) -> None:
        """Note that the repository does not say how waveforms are prepared, where
        huggingface_hub keeps such notes."""
        for note in () if _says_preprocessing(folder) else self._notes_of_absence(folder):
            with suppress(OSError):  # the next run will ask again
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()

    def _notes_of_absence(self, folder: Path) -> list[Path]:
        inside = folder.relative_to(self.snapshot)
        return [
            self.storage / ".no_exist" / self.revision / inside / name for name in PREPROCESSING
        ]


def _says_preprocessing(folder: Path) -> bool:
    return any((folder / name).is_file() for name in PREPROCESSING)


def download(model: HubModel) -> None:
    """Download the files a model needs and the cache lacks. Raises ConfigError if the hub
    has no such model or commit, refuses it to this user, or downloads are forbidden;
    ExtractorError if it cannot be reached, or files not kept."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import logging as hub_logging

    if not may_download():
        command = f"hf download {model.name} --revision {model.revision}"
        raise ConfigError(
            f"{_is_not_there(model)}, and what only a cache names is not downloaded: run "
            f"`{command}`"
        )
    # it warns of each failed attempt; the last error is raised anyway
    with silenced(hub_logging):
        with errors_in_one_line(model, is_listing=True):
            timeout = constants.HF_HUB_ETAG_TIMEOUT
            info = HfApi().model_info(
                model.name, revision=model.revision, files_metadata=True, timeout=timeout
            )
            files = {file.rfilename: file for file in info.siblings or []}
            missing = [
                files[name]
                for name in wanted_files(list(files))
                if not (model.snapshot / name).exists()
            ]
            num_bytes = sum((file.lfs.size if file.lfs else file.size) or 0 for file in missing)
            require_space(model, num_bytes)
        what = f"{model.name} at {model.revision[:12]} from {model.endpoint} to {model.cache}"
        _log.info(
            "downloading %s: %s, %s MB",
            what,
            counted(len(missing), "file"),
            f"{num_bytes / 1e6:,.1f}",
        )
        with errors_in_one_line(model, is_listing=False):
            for file in missing:
                _download_file(file, model)


def wanted_files(names: Sequence[str]) -> list[str]:
    """A repository's files to download: JSON, then the weights by their best name: once
    they are there, all are."""
    jsons = [name for name in names if name.endswith(".json")]
    weights = (
        [name for name in names if re.fullmatch(pattern, name)] for pattern in _NAMES_OF_WEIGHTS
    )
    return jsons + next(filter(None, weights), [])


def require_space(model: HubModel, num_bytes: int) -> None:
    """Raise ExtractorError if the cache's disk has no room for so many bytes."""
    folder = model.cache.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if num_bytes > (free := shutil.disk_usage(existing).free):
        raise _cannot_be_kept(model, f"{num_bytes:,} bytes are to come, and {free:,} are free")


def _download_file(file: RepoSibling, model: HubModel) -> None:
    """Download a file to the hub's cache, and remove it again if its content is not what
    the hub lists: huggingface_hub compares no hashes, and the fingerprint would take
    damaged weights for other weights."""
    from huggingface_hub import hf_hub_download

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            path = Path(hf_hub_download(model.name, file.rfilename, revision=model.revision))
            break
        except Exception as error:
            # A reset connection is a ReadError, which huggingface_hub does not retry. The
            # class is httpx's or httpx2's.
            if attempt == _ATTEMPTS or not any(
                type(cause).__name__ == "ReadError" for cause in _causes(error)
            ):
                raise
    if file.lfs is None:
        return
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != file.lfs.sha256:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        what = (
            f"{file.rfilename} arrived damaged from {model.endpoint} and was removed: run "
            "the command again"
        )
        raise ExtractorError(f"params.weights: {model.name}: {what}")


# Errors


@contextmanager
def errors_in_one_line(model: HubModel, is_listing: bool) -> Iterator[None]:
    """Instead of an error of huggingface_hub, of its HTTP library, or of the file system,
    raise a ConfigError if the config or the environment has to change, an ExtractorError
    if the same may work at another time; a bug stays what it is. Within the block, the
    hub is asked which files there are, or else they are downloaded."""
    try:
        yield
    except FeatcacheError:
        raise
    except (
        Exception
    ) as error:  # the hub's own errors, and those of whatever HTTP library it uses now
        what = f"params.weights: {model.name}"
        if not model.endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"{what}: HF_ENDPOINT is {model.endpoint!r}, and has to begin with https://"
            ) from error
        causes = [*_causes(error)]
        for cause in causes:
            if found := _known_error(cause, model, is_listing):
                raise found from error
        if isinstance(error, _MISUSE):
            raise
        reason = first_line(causes[-1])
        fault = (
            f"{what}: the download from {_route(model)} broke off ({reason}): run it again; "
            "whole files are kept"
        )
        if is_listing:
            fault = (
                f"{_is_not_there(model)}, and {_route(model)} cannot be reached ({reason}): "
                f"{_remedy(model)}"
            )
        raise ExtractorError(fault) from error


def _known_error(error: BaseException, model: HubModel, is_listing: bool) -> FeatcacheError | None:
    """The error to raise for a hub's answer, for what huggingface_hub says in its place,
    or for a fault of the disk."""
    from huggingface_hub import errors

    what, page = f"params.weights: {model.name}", f"{model.endpoint}/{model.name}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConfigError(
            f"{_is_not_there(model)}, and HF_HUB_OFFLINE forbids downloading it: {_remedy(model)}"
        )
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{what}: access has to be requested at {page}; once it is granted, {_TOKEN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"params.revision: {page} has no commit {model.revision}: see {page}/commits/main"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status, message = error.response.status_code, error.server_message
        if is_listing and status in (401, 404) and "credentials" not in (message or ""):
            # To a user without access, a hub says the same of a private model as of one
            # that does not exist.
            return ConfigError(
                f"{what}: {model.endpoint} has no public model of this name; if it is "
                f"private, {_TOKEN}"
            )
        what += f": {_route(model)} answers {status}" + (
            f" ({first_line(message)})" if message else ""
        )
        if status in (401, 403):
            return ConfigError(
                f"{what}: the token is not valid, or may not read this model; {_TOKEN}"
            )
        if status == 429:
            return ExtractorError(
                f"{what}, too many requests: run it again later; for a higher limit, {_TOKEN}"
            )
        return ExtractorError(f"{what}: run it again later")
    if (is_listing and isinstance(error, _MISUSE)) or isinstance(
        error, errors.FileMetadataError | ValueError
    ):
        what += (
            f": {_route(model)} does not answer as a hub does "
            f"({first_line(error).partition('. ')[0]})"
        )
        return ConfigError(
            f"{what}: check HF_ENDPOINT, and what stands between this machine and the network"
        )
    if isinstance(error, OSError) and (
        error.errno in _FULL or (error.errno in _CLOSED and error.filename)
    ):
        return _cannot_be_kept(model, str(error.strerror))
    return None


def _cannot_be_kept(model: HubModel, why: str) -> ExtractorError:
    return ExtractorError(
        f"params.weights: {model.name} cannot be kept in {model.cache}: {why}; set another HF_HOME"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and the errors that it was raised from: huggingface_hub wraps some."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_not_there(model: HubModel) -> str:
    return (
        f"params.weights: {model.name} is not "
        f"{'whole ' if model.snapshot.is_dir() else ''}in {model.cache}"
    )


def _remedy(model: HubModel) -> str:
    command = f"`hf download {model.name} --revision {model.revision}`"
    return (
        f"on a machine with network, {command}; then copy its HF_HOME to this one, and set "
        "HF_HOME to it"
    )


def _route(model: HubModel) -> str:
    """The hub's address, and the variable that names a proxy, if any. A proxy's URL may
    hold a password."""
    parts = urlsplit(model.endpoint)
    proxies = getproxies()
    scheme = next((scheme for scheme in (parts.scheme, "all") if scheme in proxies), None)
    if scheme is None or (parts.hostname and proxy_bypass(parts.hostname)):
        return model.endpoint
    return f"{model.endpoint}, through the proxy of {scheme.upper()}_PROXY,"
