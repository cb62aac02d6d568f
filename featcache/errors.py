"""All errors that featcache raises deliberately; checks of arguments that raise one of
them, and what names arguments.

    FeatcacheError                 exit code 1
    ├── ConfigError                2   a config that cannot be read or is invalid
    ├── ManifestError              2   a manifest that cannot be read, or has errors
    ├── MissingDependencyError     2   an optional package that this command needs
    ├── ArgumentError              2   invalid arguments of a call; also a ValueError
    ├── AudioError                 1   one utterance that cannot be extracted; carries its `Reason`
    ├── ExtractorError             1   an extractor that cannot be built or run
    └── StoreError                 1   a cache that cannot be opened or written
        ├── DamagedError           1   bytes that differ from what was written
        ├── LockedError            1   a cache that another run is writing
        └── MissingItemError       1   an utterance that the cache does not hold; also a KeyError

    FeatcacheWarning                   something is done in another way than asked; a UserWarning

Every message says what is wrong, where, and what to do. The command line prints it, one
fault on each line, and exits with the class's `exit_code`; library code lets the error
rise. No message has what gives access in a URL. That is told by its form, whatever a
parameter is called: presigned URLs have their signature in the query.
"""

from __future__ import annotations

import copyreg
import inspect
import json
import math
import operator
import os
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import StrEnum
from numbers import Real
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar
from urllib.parse import unquote

_Function = TypeVar("_Function", bound=Callable[..., Any])


class FeatcacheError(Exception):
    """The base of all errors that featcache raises deliberately."""

    exit_code = 1
    """The exit code of a command that ends with this error."""

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(message))

    def __reduce__(self) -> tuple[Any, ...]:
        # by its message and attributes: classes of errors take other arguments
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class FeatcacheWarning(UserWarning):
    """Something goes on, but in another way than was asked for, or incompletely."""

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(message))


class ConfigError(FeatcacheError):
    """A config that cannot be read or is invalid; the message lists every fault."""

    exit_code = 2


class ManifestError(FeatcacheError):
    """A manifest that cannot be read, or has faults: the message lists them with their
    lines. Or a manifest whose rows are not those that a cache was extracted from, or
    whose files do not exist."""

    exit_code = 2


class MissingDependencyError(FeatcacheError):
    """An optional package is not installed.

    Args:
        package: The name of the package.
        needed_for: The command or module that needs it.
        extra: The extra of featcache that installs the package; None if no extra does:
            the message then names the package.
    """

    exit_code = 2

    def __init__(self, package: str, needed_for: str, extra: str | None = "extract") -> None:
        remedy = f"pip install {package}" if extra is None else install_hint(extra)
        super().__init__(
            f"{needed_for} needs the package {package!r}, which cannot be imported: {remedy}"
        )


class ArgumentError(FeatcacheError, ValueError):
    """Arguments of a call that are invalid, contradict each other, or do not fit the data."""

    exit_code = 2


class Reason(StrEnum):
    """The reason why an utterance is in the failure ledger instead of a shard."""

    FILE_MISSING = "file_missing"
    FILE_UNREADABLE = "file_unreadable"
    NOT_AUDIO = "not_audio"
    NOT_LABELS = "not_labels"
    EMPTY = "empty"
    TRUNCATED = "truncated"
    SEGMENT_OUTSIDE = "segment_outside"
    NO_SUCH_CHANNEL = "no_such_channel"
    RATE_REFUSED = "rate_refused"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    NON_FINITE_AUDIO = "non_finite_audio"
    NON_FINITE_FEATURES = "non_finite_features"
    EXTRACTOR_REFUSED = "extractor_refused"
    EXTRACTOR_ERROR = "extractor_error"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    NOT_IN_SOURCE = "not_in_source"


class AudioError(FeatcacheError):
    """One utterance cannot be extracted: it goes into the failure ledger, and the run
    goes on."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Why the utterance cannot be extracted, for the failure ledger."""


class ExtractorError(FeatcacheError):
    """An extractor that cannot be built from its parameters, or that broke its contract."""


class StoreError(FeatcacheError):
    """A cache that cannot be found, opened or written."""


class DamagedError(StoreError):
    """Bytes in a cache that differ from what was written: `what`, and where. The message
    says that `featcache repair` can repair the version whose place is given."""

    def __init__(self, what: str, version: object = None) -> None:
        remedy = (
            ""
            if version is None
            else f"; `featcache repair {quote(str(version))} --manifest MANIFEST` repairs it"
        )
        super().__init__(what + remedy)
        self.what = what
        """The message without the remedy."""


class LockedError(StoreError):
    """Another run has what only one may have at a time; the message says which run, by
    its own words."""


class MissingItemError(StoreError, KeyError):
    """An utterance that the cache does not hold; the message says whether its extraction
    failed, and why."""

    __str__ = Exception.__str__  # KeyError's would print the repr


def install_hint(extra: str) -> str:
    """Name the command that installs an extra into this copy of featcache, from where the
    copy came: a checkout, or what pip has recorded. The bare name `featcache` would
    install whatever an index has under it."""
    from importlib.metadata import PackageNotFoundError, distribution

    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {quote(f'{checkout}[{extra}]')}"
    try:
        origin = json.loads(distribution("featcache").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        origin = {}
    url = origin.get("url", "")
    if url.startswith("file:///") and "vcs_info" not in origin:
        return f"pip install {quote(f'{unquote(url[7:])}[{extra}]')}"
    if not url:
        return f"install featcache's extra {extra!r} from where this copy came"
    if vcs := origin.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install {quote(f'featcache[{extra}] @ {url}')}"


def listing(names: Iterable[str], at_most: int = 10) -> str:
    """Join names for a message: the first `at_most`, then how many more there are."""
    names = list(names)
    shown = ", ".join(names[:at_most])
    return shown if len(names) <= at_most else f"{shown} … and {len(names) - at_most:,} more"


def counted(count: int, singular: str, plural: str = "") -> str:
    """Count things for a message: `1 shard`, `2,500 shards`; pass `plural` where it takes
    more than an s."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def first_line(error: object) -> str:
    """The first line of another library's error, or its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def ending(return_code: int) -> str:
    """Describe the end of a process for a message, by the return code of `subprocess`:
    `exit code 3`, `SIGKILL`, `signal 40`."""
    if return_code >= 0:
        return f"exit code {return_code}"
    with suppress(ValueError):  # a real-time signal has no name
        return signal.Signals(-return_code).name
    return f"signal {-return_code}"


def megabytes(num_bytes: float) -> str:
    """Bytes for people: `12.3 MB`, `4.56 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return (
                f"{num_bytes / size:.3g} {unit}"
                if num_bytes < 999 * size
                else f"{num_bytes / size:,.0f} {unit}"
            )
    return f"{num_bytes / 1e3:.3g} kB"


def percent(share: float) -> str:
    """A share, 0 to 1, for people: `99.8 %`, `0.0123 %`."""
    return f"{100 * share:.3g} %"


def hours(seconds: float) -> str:
    """Seconds of audio for people: `3.71 h`, `12.4 min`, `9.7 s`."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.2f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.1f} s"


_COLON, _SLASH, _AT = "(?::|%3a)", r"(?:[\\/]|%2f|%5c)", "(?:@|%40)"
_SCHEME = rf"[a-z][a-z0-9+.-]{{1,20}}{_COLON}"
# a blank before it, in a text that `repr` or JSON quoted: `\t`, `\x0b`, `\ufeff`
_ESCAPED = r"(?<=\\[abfnrtv])|(?<=\\x[0-9a-f]{2})|(?<=\\u[0-9a-f]{4})"
_BEGINNING = (
    # with a user: with however many slashes, as paths are normalised, or with no scheme
    rf"(?:{_SCHEME}{_SLASH}+(?:\.{_SLASH}+)*(?=[^\s\\/?#]*{_AT})"
    rf"|(?:(?<![^\s'\"(\[=,])|{_ESCAPED})//(?=[^\s/?#@]*:[^\s/?#]*@)"
    rf"|{_SCHEME}{_SLASH}{{2,}}"
    rf"|(?:\b|{_ESCAPED})(?:s3[an]?|gs|az|memory){_COLON}{_SLASH}"
    rf"|(?:\b|{_ESCAPED})(?:https?|s?ftps?){_COLON}{_SLASH}?)"
)
_URL = re.compile(rf"{_BEGINNING}(?P<authority>[^\\/?#]*)", re.IGNORECASE)
"""The beginning of a URL, and of what was meant for one or became of one: `https://host`,
`s3:/bucket`, `https:/user@host`, `//user:password@host`, `HTTPS%3A%2F%2Fhost`."""

_HOST = re.compile(r"(?:\[[0-9a-f:.]+\]|[^:@]*)(?::[0-9]*)?", re.IGNORECASE)
_QUERY = re.compile(r"[?#]|[;&][\w.%-]+=")
# of a file, a `?` that is percent-encoded is only the name
_QUERY_IN_CODE = re.compile(r"[?#;][\w.-]+=")
_MARKS = "@?#;&%"  # all that is refused has one of these, and few paths have
_WORD = re.compile(
    # a password may have blanks in it
    rf"(?:\S*?{_BEGINNING}[^\\/?#\r\n]{{0,500}}{_AT})?\S+",
    re.IGNORECASE,
)
_AFTER_WORDS = "'\".,:;?)]"
_OF_THIS_MACHINE = re.compile(r"file://(?:localhost)?/", re.IGNORECASE)


def secret_in(text: str, *, allow_query: bool = False) -> str | None:
    """Name what may give access in a text that is a URL or contains one, as a message
    goes on; None if nothing does. With `allow_query`, a query or a fragment gives no
    access."""
    if not may_have_secret(text):
        return None
    query = _QUERY
    for _ in range(4):  # a URL may be percent-encoded as a whole, and the whole of that
        urls = [url for url in _URL.finditer(text) if not _OF_THIS_MACHINE.match(text, url.start())]
        if not all(_HOST.fullmatch(unquote(url["authority"])) for url in urls):
            return "has a user or a password, or no valid host"
        if urls and not allow_query and query.search(text, urls[0].end()):
            return "has a query or a fragment, which may be a signature"
        if (decoded := unquote(text)) == text:
            break
        query = _QUERY_IN_CODE if ":" in text else _QUERY
        text = decoded
    return None


def may_have_secret(text: str) -> bool:
    """Tell quickly whether `secret_in` must look at a text, or at several joined texts."""
    # a tenth of the time that a regular expression takes
    return any(mark in text for mark in _MARKS)


def without_secrets(text: str, *, allow_query: bool = False) -> str:
    """Cut off the words of a text behind whose URLs stands what `secret_in` finds. All
    that featcache prints or raises passes through here."""
    if not may_have_secret(text):
        return text
    return _WORD.sub(lambda word: _shown(word[0], allow_query), text)


def _shown(whole: str, allow_query: bool) -> str:
    word = whole.rstrip(_AFTER_WORDS)
    if secret_in(word, allow_query=allow_query) is None:
        return whole
    url = _URL.search(word)
    if url is None:  # its percent signs are encoded themselves
        shown = word.partition("%")[0]
    elif secret_in(word, allow_query=True) is None:
        shown = word[: url.end()]
    else:
        shown = word[: url.start("authority")]
    return f"{shown}…{whole[len(word) :]}"


MOST_THREADS = 4096
"""The largest budget of threads that makes sense."""

MOST_COUNTED = 2**62
"""The largest number of frames, rows or epochs: what computes with 64 bits cannot hold
many more."""

_URL_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Matches a URL as text (`s3://bucket`) and as pathlib shortens it (`s3:/bucket`)."""

_ALMOST_URL = re.compile(r"(s3|gs|az|memory|https?):(?!//)/?(?=.)", re.IGNORECASE)


def require_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return the value of the argument of that name as an int; an ArgumentError if it is
    not a whole number (of Python, numpy or torch, and no bool) from `least` to `most`."""
    try:
        given = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        given = None
    is_large = given is not None and most is not None and given > most
    if given is None or is_large or (least is not None and given < least):
        limits = ("" if least is None else f", {least} or more") + (
            f", at most {most}" if is_large else ""
        )
        raise ArgumentError(f"{name} is {value!r}: it must be a whole number{limits}")
    return given


def require_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return the value of the argument of that name as a float; an ArgumentError if it is
    not a number (whole or not, no bool, no NaN) from `low` to `high`."""
    if not (is_number(value) and low <= value <= high):
        limits = (
            ""
            if low == -math.inf
            else f", {low:g} or more"
            if high == math.inf
            else f" from {low:g} to {high:g}"
        )
        raise ArgumentError(f"{name} is {value!r}: it must be a number{limits}")
    return float(value)


def is_number(value: object) -> bool:
    """Tell whether a value is a real number of Python or numpy, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def refuse_secrets(name: str, text: str) -> None:
    """Refuse a text with a URL that may give its reader access (a user, query or
    fragment) by an ArgumentError without it."""
    if fault := secret_in(text):
        raise ArgumentError(
            f"{name} {fault}: give the URL without it, and credentials by the environment"
        )


def refuse_almost_url(name: str, text: str) -> None:
    """Refuse a URL that lacks a slash or two, which would name a folder called `s3:`, by
    an ArgumentError that says what was probably meant."""
    if match := _ALMOST_URL.match(text):
        meant = f"{match[1].lower()}://{text[match.end() :]}"
        refuse_secrets(name, meant)
        raise ArgumentError(
            f"{name}: {text} is no URL: did you mean {meant}? A path of that name is ./{text}"
        )


def is_url(path: str | os.PathLike[str]) -> bool:
    """Tell whether a text, or a path made of one, is a URL."""
    match = _URL_START.match(os.fspath(path))
    # `Path("s3://bucket")` has one slash left; a text with one slash is the path of an
    # odd folder.
    return match is not None and (not isinstance(path, str) or path.startswith("/", match.end()))


def refuse_url(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse a URL, or almost one, where a path is wanted, by an ArgumentError: as a path
    it would be in `s3:`."""
    refuse_secrets(name, os.fspath(path))
    if isinstance(path, str):
        refuse_almost_url(name, path)
    if is_url(path):
        raise ArgumentError(
            f"{name}: {path} is a URL: mount or copy what is there, and give a path on this machine"
        )


def naming(passed_on: Mapping[str, object]) -> Callable[[_Function], _Function]:
    """Have a function's signature name the arguments that it passes on by `**`, with
    their defaults."""

    def name(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=passed_on[name])
            for name in passed_on
        ]
        function.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return function

    return name
