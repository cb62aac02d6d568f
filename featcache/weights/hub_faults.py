"""Download errors: what went wrong, and what to do about it, in one line."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from featcache.errors import ConfigError, ExtractorError, FeatcacheError
from featcache.weights.files import first_line

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS}

_MISUSE = (TypeError, AttributeError, LookupError)
"""What huggingface_hub raises where a hub's list of files is some other JSON; else they are programming errors."""

_TOKEN = "run `hf auth login`, or set HF_TOKEN"


@dataclass
class Wanted:
    """A hub's model that is wanted here.

    Attributes:
        name: `org/name`.
        revision: the commit.
        endpoint: the hub's address.
        cache: the hub's cache on this machine.
        in_part: whether some of the model's files are there.
        has_begun: whether the hub has told what there is, and files are on their way.
    """

    name: str
    revision: str
    endpoint: str
    cache: Path
    in_part: bool = False
    has_begun: bool = False


def as_fault(error: Exception, wanted: Wanted) -> FeatcacheError | None:
    """What to raise for an error of huggingface_hub, of its HTTP library, or of the file system.

    Returns a ConfigError where the config or the environment has to change, an ExtractorError where the same may work
    at another time, and None where the error is a programming error.
    """
    what = f"params.weights: {wanted.name}"
    if not wanted.endpoint.startswith(("http://", "https://")):
        return ConfigError(f"{what}: HF_ENDPOINT is {wanted.endpoint!r}, and has to begin with https://")
    for cause in _causes(error):
        if fault := _of_hub(cause, wanted) or _of_disk(cause, wanted):
            return fault
    if isinstance(error, _MISUSE):
        return None
    reason = first_line([*_causes(error)][-1])
    if wanted.has_begun:
        return ExtractorError(
            f"{what}: the download from {_route(wanted)} broke off ({reason}): run it again; whole files are kept"
        )
    return ExtractorError(
        f"{_is_not_there(wanted)}, and {_route(wanted)} cannot be reached ({reason}): {_remedy(wanted)}"
    )


def _of_hub(error: BaseException, wanted: Wanted) -> FeatcacheError | None:
    """What a hub answered, or what huggingface_hub says in its place."""
    from huggingface_hub import errors

    what, page = f"params.weights: {wanted.name}", f"{wanted.endpoint}/{wanted.name}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ConfigError(f"{_is_not_there(wanted)}, and HF_HUB_OFFLINE forbids downloading it: {_remedy(wanted)}")
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(f"{what}: access has to be requested at {page}; once it is granted, {_TOKEN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"params.revision: {page} has no commit {wanted.revision}: see {page}/commits/main")
    if isinstance(error, errors.HfHubHTTPError):
        return _of_status(error.response.status_code, error.server_message, wanted)
    is_misuse = isinstance(error, _MISUSE) and not wanted.has_begun
    if is_misuse or isinstance(error, errors.FileMetadataError | ValueError):
        reason = first_line(error).partition(". ")[0]
        return ConfigError(
            f"{what}: {_route(wanted)} does not answer as a hub does ({reason}): check HF_ENDPOINT, and what stands "
            "between this machine and the network"
        )
    return None


def _of_status(status: int, message: str | None, wanted: Wanted) -> FeatcacheError:
    what = f"params.weights: {wanted.name}"
    if status in (401, 404) and not wanted.has_begun and "credentials" not in (message or ""):
        # To whoever has no access, a hub says the same of a private model as of none.
        return ConfigError(f"{what}: {wanted.endpoint} has no public model of this name; for a private one, {_TOKEN}")
    what += f": {_route(wanted)} answers {status}" + (f" ({first_line(message)})" if message else "")
    if status in (401, 403):
        return ConfigError(f"{what}: the token is not valid, or may not read this model; {_TOKEN}")
    if status == 429:
        return ExtractorError(f"{what}, too many requests: run it again later; for a higher limit, {_TOKEN}")
    return ExtractorError(f"{what}: run it again later")


def _of_disk(error: BaseException, wanted: Wanted) -> FeatcacheError | None:
    if isinstance(error, OSError) and error.errno in _FULL:
        return no_space(wanted)
    if isinstance(error, OSError) and error.errno in _CLOSED and error.filename:
        return ExtractorError(
            f"params.weights: {wanted.name} cannot be kept in {wanted.cache}: {error.strerror}; HF_HOME names another "
            "place"
        )
    return None


def not_to_be_downloaded(wanted: Wanted) -> ConfigError:
    """What to raise where a model is not on this machine, and only a cache asks for it."""
    return ConfigError(
        f"{_is_not_there(wanted)}, and what only a cache names is not downloaded: "
        f"`hf download {wanted.name} --revision {wanted.revision}` downloads it"
    )


def is_reset(error: Exception) -> bool:
    """Whether a connection broke in a way that huggingface_hub does not take for a reason to try again.

    The error is httpx's or httpx2's, whichever huggingface_hub uses, and known by its name.
    """
    return any(type(cause).__name__ == "ReadError" for cause in _causes(error))


def no_space(wanted: Wanted, num_bytes: int | None = None, free: int | None = None) -> ExtractorError:
    """What to raise where a disk has no room: for how many bytes, and how many are free, where that is known."""
    amounts = "" if num_bytes is None or free is None else f": {num_bytes:,} bytes are to come, and {free:,} are free"
    return ExtractorError(
        f"params.weights: {wanted.name} does not fit into {wanted.cache}{amounts}; HF_HOME names another place"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from: huggingface_hub wraps some."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _is_not_there(wanted: Wanted) -> str:
    return f"params.weights: {wanted.name} is not {'whole ' if wanted.in_part else ''}in {wanted.cache}"


def _remedy(wanted: Wanted) -> str:
    return (
        f"on a machine with network, `hf download {wanted.name} --revision {wanted.revision}`; then copy its HF_HOME "
        "to this one and set HF_HOME to it, or give the downloaded folder as params.weights"
    )


def _route(wanted: Wanted) -> str:
    """The hub's address, and the variable that names a proxy, if any; not its URL, which may hold a password."""
    parts = urlsplit(wanted.endpoint)
    proxies = getproxies()
    scheme = next((one for one in (parts.scheme, "all") if one in proxies), None)
    if scheme is None or (parts.hostname and proxy_bypass(parts.hostname)):
        return wanted.endpoint
    return f"{wanted.endpoint}, through the proxy of {scheme.upper()}_PROXY,"
