"""obstore's errors in plain words. Its own quote addresses, to which a server may have redirected the request with
signatures in them, and whole documents of XML."""

from __future__ import annotations

import re

__all__ = ["has_no_credentials", "in_words", "status_of"]

_STATUS = re.compile(r"status code: (\d{3})( [A-Za-z' -]{1,40}[a-z])?")
_KEY = re.compile(r'Path "(.{1,1024}?)"(?: contained|:)', re.DOTALL)
_NO_CREDENTIALS = re.compile(
    r"Missing AccessKeyId|169\.254\.169\.254|token request|metadata\.google|Account must be", re.I
)
_WORDS = (
    ("NoSuchBucket", "there is no such bucket"),
    ("dns error", "its host is not known"),
    ("Connection refused", "its host refuses the connection"),
    ("kind: Connect,", "its host cannot be reached"),
    ("Timeout", "the server does not answer in time"),
    ("timed out", "the server does not answer in time"),
    ("kind: Interrupted", "the connection breaks off"),
    ("kind: Body", "the connection breaks off"),
    ("ConnectionReset", "the connection breaks off"),
    ("IncompleteMessage", "the connection breaks off"),
    ("Content-Length", "the server does not say how long the file is"),
    ("certificate", "the server's certificate is not valid"),
)
_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


def has_no_credentials(error: BaseException | None) -> bool:
    """Whether the environment has no credentials for the store."""
    return _NO_CREDENTIALS.search(str(error)) is not None


def status_of(error: BaseException) -> int:
    """The HTTP status that the server answered, or 0."""
    status = _STATUS.search(str(error))
    return int(status[1]) if status else 0


def in_words(url: str, error: BaseException) -> str:
    """What an error says about the store or server of a URL, without what it quotes."""
    scheme = url.partition("://")[0].lower()
    if has_no_credentials(error):
        hint = f": {_CREDENTIALS[scheme]}" if scheme in _CREDENTIALS else ""
        return f"there are no credentials{hint}"
    # By their names: in a forked process, obstore's errors are other classes.
    if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return f"the server forbids it ({403 if type(error).__name__ == 'PermissionDeniedError' else 401})"
    text = str(error)
    if type(error).__name__ == "InvalidPathError" and (key := _KEY.search(text)) is not None:
        return f"the bucket holds {key[1]}, which is no path: remove that object, or rename it"
    if "NoSuchBucket" not in text and (status := _STATUS.search(text)) is not None:
        return f"the server answers {status[1]}{status[2] or ''}"
    return next((words for sign, words in _WORDS if sign in text), "the request fails")
