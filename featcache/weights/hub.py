"""Finds weights: a folder, a file, or a commit of a model on a hub, which is downloaded
into the hub's cache on this machine. Every error is one line that says what to do.

Files are downloaded one after another: `snapshot_download` finishes its threads' files
before an interrupt takes effect, and returns what is in the cache if the hub cannot list
its files."""

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
    r"model\.safetensors",
    r"model-\d+-of-\d+\.safetensors",
    r"pytorch_model\.bin",
    r"pytorch_model-\d+-of-\d+\.bin",
    r".*\.safetensors",
    r".*\.(bin|pt|pth|ckpt)",
)
"""Names of weights in a repository, best first. Only files with the best name are
downloaded."""

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
"""How often a download is tried after a connection was reset. After other faults,
huggingface_hub itself resumes."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS}

_MISUSE = (TypeError, AttributeError, LookupError)
"""Exceptions of huggingface_hub if a hub's list of files is some other JSON. At other
times, these are bugs."""

_TOKEN = "run `hf auth login`, or set HF_TOKEN"


def locate(weights: str, revision: str | None) -> Located:
    """Find weights on this machine, or download them from the hub, if that is allowed.

    `weights` is a folder, a file in such a folder, or a hub's id with a commit as
    `revision`. Raises ConfigError if it does not exist, or may not be downloaded;
    ExtractorError if the hub cannot be reached, or its files not kept."""
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
        why = f"{revision!r} is no commit"
        if revision is None:
            why = f"there is no folder {weights}, and a model of the hub needs a revision"
        raise ConfigError(f"params.revision: {why}: give the commit of {weights}, in 40 hex digits")
    return Located(_folder_of_hub_model(weights, revision))


def _folder_of_hub_model(name: str, revision: str) -> Path:
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
        what = f"neither a folder nor a model id: {first_line(error)}"
        raise weights_error(name, what) from error
    model = HubModel(name, revision, constants.ENDPOINT, Path(constants.HF_HUB_CACHE).expanduser())
    folder = model.complete_folder()
    if folder is not None:
        return folder
    download(model)
    folder = folder_with_weights(model.snapshot)
    if folder is None:
        raise ConfigError(f"{model} at {revision} holds no weights that torch reads")
    model.note_absent_files(folder)
    return folder


@dataclass(frozen=True)
class HubModel:
    """A commit of a model on a hub, and its place in the hub's cache, laid out as in
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache"""

    name: str
    revision: str
    endpoint: str
    cache: Path

    def __str__(self) -> str:
        return f"params.weights: {self.name}"

    @property
    def storage(self) -> Path:
        """The model's folder in the cache."""
        return self.cache / f"models--{self.name.replace('/', '--')}"

    @property
    def snapshot(self) -> Path:
        """The folder of the commit's files."""
        return self.storage / "snapshots" / self.revision

    def complete_folder(self) -> Path | None:
        """Return the folder with the model's files if it has every file that decides
        values.

        Other programs may have downloaded weights without the file that says how waveforms
        are prepared. A folder is complete with that file, with `.gitattributes`, as after a
        download of the whole repository, or with a note that there is no such file."""
        folder = folder_with_weights(self.snapshot)
        if folder is None or not has_all_weights(folder) or not (folder / "config.json").is_file():
            return None
        is_complete = (
            _says_preprocessing(folder)
            or (self.snapshot / ".gitattributes").is_file()
            or all(note.is_file() for note in self._notes_of_absence(folder))
        )
        return folder if is_complete else None

    def note_absent_files(self, folder: Path) -> None:
        """Note, as huggingface_hub does, if the repository does not say how waveforms are
        prepared."""
        if _says_preprocessing(folder):
            return
        for note in self._notes_of_absence(folder):
            with suppress(OSError):  # the next run will ask again
                note.parent.mkdir(parents=True, exist_ok=True)
                note.touch()

    def _notes_of_absence(self, folder: Path) -> list[Path]:
        notes = self.storage / ".no_exist" / self.revision / folder.relative_to(self.snapshot)
        return [notes / name for name in PREPROCESSING]


def _says_preprocessing(folder: Path) -> bool:
    return any((folder / name).is_file() for name in PREPROCESSING)


def download(model: HubModel) -> None:
    """Download the model's files that the cache lacks. Raises ConfigError if the hub has no
    such model or commit, refuses it, or downloads are forbidden; ExtractorError if it
    cannot be reached, or files not kept."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import logging as hub_logging

    if not may_download():
        raise ConfigError(
            f"{_is_not_there(model)}, and what only a cache names is not downloaded: run "
            f"{_command(model)}"
        )
    if not model.endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"{model}: HF_ENDPOINT is {model.endpoint!r}, and has to begin with https://"
        )
    # it warns of each failed attempt; the last error is raised anyway
    with silenced(hub_logging):
        with errors_in_one_line(model, is_listing=True):
            info = HfApi().model_info(
                model.name,
                revision=model.revision,
                files_metadata=True,
                timeout=constants.HF_HUB_ETAG_TIMEOUT,
            )
            files = {file.rfilename: file for file in info.siblings or []}
            wanted = wanted_files(list(files))
            missing = [files[name] for name in wanted if not (model.snapshot / name).exists()]
            num_bytes = sum((file.lfs.size if file.lfs else file.size) or 0 for file in missing)
            require_space(model, num_bytes)
        size = f"{counted(len(missing), 'file')}, {num_bytes / 1e6:,.1f} MB"
        what = f"{model.name} at {model.revision[:12]}"
        _log.info("downloading %s from %s to %s: %s", what, model.endpoint, model.cache, size)
        with errors_in_one_line(model, is_listing=False):
            for file in missing:
                _download_file(file, model)


def wanted_files(names: Sequence[str]) -> list[str]:
    """Choose a repository's files to download."""
    jsons = [name for name in names if name.endswith(".json")]
    for pattern in _NAMES_OF_WEIGHTS:
        weights = [name for name in names if re.fullmatch(pattern, name)]
        if weights:
            return jsons + weights
    return jsons


def require_space(model: HubModel, num_bytes: int) -> None:
    """Raise ExtractorError if the cache's disk has no room for so many bytes."""
    folder = model.cache.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise _cannot_be_kept(model, f"{num_bytes:,} bytes are to come, and {free:,} are free")


def _download_file(file: RepoSibling, model: HubModel) -> None:
    """Download a file to the hub's cache, and remove it if its hash is not what the hub
    lists."""
    from huggingface_hub import hf_hub_download

    for attempt in range(1, _ATTEMPTS + 1):
        try:
            path = Path(hf_hub_download(model.name, file.rfilename, revision=model.revision))
            break
        except Exception as error:
            # a reset connection, which huggingface_hub does not retry; of httpx or httpx2
            causes = {type(cause).__name__ for cause in _causes(error)}
            if attempt == _ATTEMPTS or "ReadError" not in causes:
                raise
    if file.lfs is None:
        return
    with path.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 != file.lfs.sha256:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise ExtractorError(
            f"{model}: {file.rfilename} arrived damaged from {model.endpoint} and was removed: "
            "run the command again"
        )


@contextmanager
def errors_in_one_line(model: HubModel, is_listing: bool) -> Iterator[None]:
    """Replace errors of huggingface_hub, of its HTTP library, or of the file system, by a
    ConfigError if the config or the environment has to change, an ExtractorError if the
    same may work at another time."""
    try:
        yield
    except FeatcacheError:
        raise
    except Exception as error:  # also of whatever HTTP library the hub's package uses
        causes = [*_causes(error)]
        for cause in causes:
            known = _known_error(cause, model, is_listing)
            if known is not None:
                raise known from error
        if isinstance(error, _MISUSE):
            raise
        route, reason = _route(model), first_line(causes[-1])
        what = (
            f"{model}: the download from {route} broke off ({reason}): run it again; whole files "
            "are kept"
        )
        if is_listing:
            what = f"{_is_not_there(model)}, and {route} cannot be reached ({reason}): "
            what += _remedy(model)
        raise ExtractorError(what) from error


def _known_error(error: BaseException, model: HubModel, is_listing: bool) -> FeatcacheError | None:
    from huggingface_hub import errors

    page = f"{model.endpoint}/{model.name}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConfigError(
            f"{_is_not_there(model)}, and HF_HUB_OFFLINE forbids downloading it: {_remedy(model)}"
        )
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{model}: access has to be requested at {page}; once it is granted, {_TOKEN}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"params.revision: {page} has no commit {model.revision}: see {page}/commits/main"
        )
    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error.response.status_code, error.server_message or "", model, is_listing)
    is_misuse = is_listing and isinstance(error, _MISUSE)
    if is_misuse or isinstance(error, errors.FileMetadataError | ValueError):
        reason = first_line(error).partition(". ")[0]
        return ConfigError(
            f"{model}: {_route(model)} does not answer as a hub does ({reason}): check "
            "HF_ENDPOINT, and what stands between this machine and the network"
        )
    if isinstance(error, OSError):
        is_closed = error.errno in _CLOSED and error.filename
        if error.errno in _FULL or is_closed:
            return _cannot_be_kept(model, str(error.strerror))
    return None


def _refusal(status: int, message: str, model: HubModel, is_listing: bool) -> FeatcacheError:
    if is_listing and status in (401, 404) and "credentials" not in message:
        # also the answer about a private model to a user without access
        return ConfigError(
            f"{model}: {model.endpoint} has no public model of this name; if it is private, "
            f"{_TOKEN}"
        )
    what = f"{model}: {_route(model)} answers {status}"
    if message:
        what += f" ({first_line(message)})"
    if status in (401, 403):
        return ConfigError(f"{what}: the token is not valid, or may not read this model; {_TOKEN}")
    if status == 429:
        return ExtractorError(
            f"{what}, too many requests: run it again later; for a higher limit, {_TOKEN}"
        )
    return ExtractorError(f"{what}: run it again later")


def _cannot_be_kept(model: HubModel, why: str) -> ExtractorError:
    return ExtractorError(f"{model} cannot be kept in {model.cache}: {why}; set another HF_HOME")


def _causes(error: BaseException) -> Iterator[BaseException]:
    yield error
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)


def _is_not_there(model: HubModel) -> str:
    whole = "whole " if model.snapshot.is_dir() else ""
    return f"{model} is not {whole}in {model.cache}"


def _command(model: HubModel) -> str:
    return f"`hf download {model.name} --revision {model.revision}`"


def _remedy(model: HubModel) -> str:
    return (
        f"on a machine with network, {_command(model)}; then copy its HF_HOME to this one, and "
        "set HF_HOME to it"
    )


def _route(model: HubModel) -> str:
    parts = urlsplit(model.endpoint)
    proxies = getproxies()
    is_bypassed = parts.hostname and proxy_bypass(parts.hostname)
    for scheme in (parts.scheme, "all"):
        if scheme in proxies and not is_bypassed:
            # not its URL, which may hold a password
            return f"{model.endpoint}, through the proxy of {scheme.upper()}_PROXY,"
    return model.endpoint
