"""A model on a hub: its files in the local hub cache, downloaded if missing."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcache.downloads import Download, shown
from featcache.errors import ConfigError, ExtractorError, FeatcacheError, MissingDependencyError
from featcache.trust import may_download
from featcache.weights.files import PREPROCESSING, first_line, is_complete, with_weights
from featcache.weights.hub_faults import Wanted, as_fault, is_reset, no_space, not_to_be_downloaded

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_FORMS = (
    r"model\.safetensors",
    r"model-\d+-of-\d+\.safetensors",
    r"pytorch_model\.bin",
    r"pytorch_model-\d+-of-\d+\.bin",
    r".*\.safetensors",
    r".*\.(bin|pt|pth|ckpt)",
)
"""Names of weights in a hub's repository, best first: one form is downloaded."""

_ATTEMPTS = 3
"""To download a file. In each, huggingface_hub tries five times to go on after faults of other kinds."""


def snapshot(name: str, revision: str) -> Path:
    """The folder that holds a hub's model in the hub's cache on this machine; what it lacks is downloaded first, except
    within `without_downloads`.

    Args:
        name: `org/name`.
        revision: the commit.

    Raises:
        ConfigError: there is no such model or commit, or it may not be downloaded, or holds no weights; or it is not
            on this machine, within `without_downloads`.
        ExtractorError: the hub cannot be reached, or the files cannot be kept.
        MissingDependencyError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import constants
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError as error:
        raise MissingDependencyError("huggingface_hub", f"params.weights: {name}", extra="models") from error
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"params.weights: {name}: neither a folder nor a model id: {first_line(error)}") from error
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    cached = _Cached(cache / f"models--{name.replace('/', '--')}", revision)
    if whole := cached.whole():
        return whole
    wanted = Wanted(name, revision, constants.ENDPOINT, cache, in_part=cached.snapshot.is_dir())
    if not may_download():
        raise not_to_be_downloaded(wanted)
    try:
        with _quiet():
            _download(wanted, cached)
    except FeatcacheError:
        raise
    except Exception as error:  # the hub's own errors, and those of whatever HTTP library it uses now
        if (fault := as_fault(error, wanted)) is None:
            raise
        raise fault from error
    downloaded = with_weights(cached.snapshot)
    if downloaded is None:
        raise ConfigError(f"params.weights: {name} at {revision} holds no weights that torch reads")
    return downloaded


@dataclass(frozen=True)
class _Cached:
    """A model in the hub's cache, laid out as huggingface_hub documents it.

    Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache

    Attributes:
        storage: the folder of its repository.
        revision: the commit.
    """

    storage: Path
    revision: str

    @property
    def snapshot(self) -> Path:
        """The folder of the commit's files."""
        return self.storage / "snapshots" / self.revision

    def whole(self) -> Path | None:
        """The folder that holds the model, if all is there that decides values.

        Other programs share this cache, and may have fetched a model's weights without the file that says how its
        waveforms are prepared. So a folder is whole if it holds that file; or all of the repository, which is so where
        there is `.gitattributes`; or if it is noted that the repository has no such file.
        """
        folder = with_weights(self.snapshot) if self.snapshot.is_dir() else None
        if folder is None or not is_complete(folder) or not (folder / "config.json").is_file():
            return None
        is_known = (
            any((folder / name).is_file() for name in PREPROCESSING)
            or (self.snapshot / ".gitattributes").is_file()
            or all(note.is_file() for note in self._notes_of_none(folder))
        )
        return folder if is_known else None

    def note_what_there_is_not(self) -> None:
        """Note that the repository does not say how waveforms are prepared, where huggingface_hub keeps such notes."""
        folder = with_weights(self.snapshot)
        if folder is not None and not any((folder / name).is_file() for name in PREPROCESSING):
            for note in self._notes_of_none(folder):
                with suppress(OSError):  # the next run will ask again
                    note.parent.mkdir(parents=True, exist_ok=True)
                    note.touch()

    def _notes_of_none(self, folder: Path) -> list[Path]:
        inside = folder.relative_to(self.snapshot)
        return [self.storage / ".no_exist" / self.revision / inside / name for name in PREPROCESSING]


def _download(wanted: Wanted, cached: _Cached) -> None:
    """Download the files that are wanted and not there."""
    from huggingface_hub import HfApi, constants

    name, revision = wanted.name, wanted.revision
    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    files = {file.rfilename: file for file in info.siblings or []}
    missing = [files[one] for one in wanted_files(list(files)) if not (cached.snapshot / one).exists()]
    sizes = [_num_bytes(file) for file in missing]
    total = None if None in sizes else sum(size or 0 for size in sizes)
    _require_space(wanted, total or 0)
    if missing:
        download = Download(name, revision, wanted.endpoint, wanted.cache, len(missing), total)
        with shown(download) as advance:
            wanted.has_begun = True
            for file in missing:
                _require_content(_download_file(file, wanted, advance), file, wanted)
    cached.note_what_there_is_not()


def _download_file(file: RepoSibling, wanted: Wanted, advance: Callable[[int], object]) -> Path:
    """Download a file to the hub's cache; again, where the connection breaks."""
    from huggingface_hub import hf_hub_download

    attempts = come = 0

    def count(num_bytes: int) -> None:
        nonlocal come
        come += num_bytes
        advance(num_bytes)

    while True:
        attempts += 1
        bar = _bar_class(count)
        try:
            return Path(hf_hub_download(wanted.name, file.rfilename, revision=wanted.revision, tqdm_class=bar))
        except Exception as error:
            if attempts == _ATTEMPTS or not is_reset(error):
                raise
            count(-come)  # it will come from its beginning


def wanted_files(names: Sequence[str]) -> list[str]:
    """Of a repository's files, those to download: JSON, and then the best form of the weights.

    Downloaded in this order, weights are there only where the rest is.
    """
    jsons = [name for name in names if name.endswith(".json")]
    for form in _FORMS:
        weights = [name for name in names if re.fullmatch(form, name)]
        if weights:
            return jsons + weights
    return jsons


def _num_bytes(file: RepoSibling) -> int | None:
    size: int | None = file.lfs.size if file.lfs else file.size
    return size


def _require_space(wanted: Wanted, num_bytes: int) -> None:
    """Raise ExtractorError where the cache's disk has no room for so many bytes."""
    folder = wanted.cache.absolute()
    existing = next(one for one in (folder, *folder.parents) if one.exists())
    if num_bytes > (free := shutil.disk_usage(existing).free):
        raise no_space(wanted, num_bytes, free)


def _require_content(path: Path, file: RepoSibling, wanted: Wanted) -> None:
    """Raise ExtractorError, and remove a file, where it is not what the hub says that it holds.

    The fingerprint would take it as it is, for other weights.
    """
    expected = file.lfs.sha256 if file.lfs else None
    if expected is None:
        return
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != expected:
        Path(os.path.realpath(path)).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise ExtractorError(
            f"params.weights: {wanted.name}: {file.rfilename} arrived damaged from {wanted.endpoint} and was removed: "
            "run the command again"
        )


def _bar_class(advance: Callable[[int], object]) -> type[Any]:
    """What huggingface_hub takes for a class of tqdm's bars: shows nothing, and passes on how many bytes have come."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(disable=True)

        def update(self, n: float | None = 1) -> None:
            advance(int(n or 0))

        # Of files in Xet storage, `update` is told what is on disk, and these what the network brought.

        def update_transfer(self, n: float | None = 1) -> None:
            pass

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None:
            pass

    return Bar


@contextmanager
def _quiet() -> Iterator[None]:
    """Without huggingface_hub's warnings, of each failed attempt, say: what comes of the last one is raised."""
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
