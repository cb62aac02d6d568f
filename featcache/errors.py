"""The errors that featcache raises deliberately, checks of arguments, and what URLs give away.

    FeatcacheError                 exit code 1
    ├── ConfigError                2
    ├── ManifestError              2
    ├── MissingDependencyError     2
    ├── ArgumentError              2   also a ValueError
    ├── AudioError                 1   carries its `Reason`
    ├── ExtractorError             1
    └── StoreError                 1
        ├── DamagedError           1
        ├── LockedError            1
        └── MissingItemError       1   also a KeyError

Every message says what is wrong, where, and what to do. The command line prints it, one
fault on each line, and exits with the class's `exit_code`. No message has what gives
access in a URL. Its form tells that: presigned URLs have their signature in the query.
"""

from __future__ import annotations

import copyreg
import json
import math
import operator
import os
import re
import signal
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum, auto
from numbers import Real
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import unquote

NO_THREAD = "can't start new thread"
"""The text of `Thread.start`'s RuntimeError."""


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
    """A manifest that cannot be read, or has faults, which the message lists with their
    lines. Or a cache was not extracted from its rows, or its files do not exist."""

    exit_code = 2


class MissingDependencyError(FeatcacheError):
    """An optional package, which `needed_for` needs, is not installed. The message names the
    extra of featcache that installs it, or the package if no extra does."""

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
    """The reason why an utterance is in the failure ledger: its name in lower case."""

    FILE_MISSING = auto()
    FILE_UNREADABLE = auto()
    NOT_AUDIO = auto()
    NOT_LABELS = auto()
    NOT_FEATURES = auto()
    EMPTY = auto()
    TRUNCATED = auto()
    SEGMENT_OUTSIDE = auto()
    NO_SUCH_CHANNEL = auto()
    RATE_REFUSED = auto()
    TOO_SHORT = auto()
    TOO_LONG = auto()
    NON_FINITE_AUDIO = auto()
    NON_FINITE_FEATURES = auto()
    EXTRACTOR_REFUSED = auto()
    EXTRACTOR_ERROR = auto()
    OUT_OF_MEMORY = auto()
    CRASHED = auto()
    NOT_IN_SOURCE = auto()


class AudioError(FeatcacheError):
    """One utterance cannot be extracted: it goes into the failure ledger, and the run
    goes on."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = Reason(reason)
        """The reason, for the failure ledger."""


class ExtractorError(FeatcacheError):
    """An extractor that cannot be built from its parameters, or that broke its contract."""


class StoreError(FeatcacheError):
    """A cache that cannot be found, opened or written."""


class DamagedError(StoreError):
    """Bytes in a cache that differ from what was written: `what`, and where. The message
    tells how to repair the version at the given place."""

    def __init__(self, what: str, version: object = None) -> None:
        remedy = ""
        if version is not None:
            place = quote(str(version))
            remedy = f"; `featcache repair {place} --manifest MANIFEST` repairs it"
        super().__init__(what + remedy)
        self.what = what
        """The message without the remedy."""


class LockedError(StoreError):
    """Another run holds what one run alone may hold; the message says which."""


class MissingItemError(StoreError, KeyError):
    """An utterance that the cache does not hold. The message tells if and why it failed."""

    __str__ = Exception.__str__  # KeyError's would print the repr


def install_hint(extra: str) -> str:
    """Name the command that installs an extra into this copy of featcache, from where the
    copy came. The bare name `featcache` would install whatever an index has under it."""
    from importlib.metadata import PackageNotFoundError, distribution

    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install -e {quote(f'{checkout}[{extra}]')}"
    origin: dict[str, Any] = {}
    with suppress(PackageNotFoundError):
        origin = json.loads(distribution("featcache").read_text("direct_url.json") or "{}")
    url, vcs = origin.get("url", ""), origin.get("vcs_info")
    if not url:
        return f"install featcache's extra {extra!r} from where this copy came"
    requirement = f"featcache[{extra}] @ {url}"
    if vcs:
        requirement = f"featcache[{extra}] @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif url.startswith("file:///"):
        requirement = f"{unquote(url[7:])}[{extra}]"
    return f"pip install {quote(requirement)}"


def listing(names: Iterable[str], at_most: int = 10) -> str:
    """Join names for a message: the first `at_most`, then the number of the others."""
    names = list(names)
    shown = ", ".join(names[:at_most])
    if len(names) > at_most:
        shown += f" … and {len(names) - at_most:,} more"
    return shown


def differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """List the dotted paths at which two resolved configs differ, with both values, as
    `params.low_freq: 20.0 -> 0.0`. Parameters of two extractors are not compared."""

    def shown(config: dict[str, Any]) -> str:
        return json.dumps(config[key]) if key in config else "not given"

    keys = sorted({*old, *new})
    if not prefix and old.get("extractor") != new.get("extractor"):
        keys = ["extractor"]
    lines = []
    for key in keys:
        path, was, now = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            lines += differing_keys(was, now, f"{path}.")
        elif was != now:
            lines.append(f"{path}: {shown(old)} -> {shown(new)}")
    return lines


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like an unknown one; empty if none is like it."""
    from difflib import get_close_matches

    by_form = {each.lower(): each for each in known}
    forms = get_close_matches(name.lower(), by_form, 1, _LIKENESS)
    return by_form[forms[0]] if forms else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the nearest known name, for a message about an unknown one: ` (did you mean
    fbank80?)`; empty if none is like it."""
    meant = nearest(name, known)
    return f" (did you mean {meant}?)" if meant else ""


def counted(count: int, singular: str, plural: str = "") -> str:
    """Count things for a message: `1 shard`, `2,500 shards`."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"


def first_line(error: object) -> str:
    """The first line of another library's error, or its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def ending(return_code: int) -> str:
    """Describe a return code of `subprocess`: `exit code 3`, `SIGKILL`, `signal 40`."""
    if return_code >= 0:
        return f"exit code {return_code}"
    with suppress(ValueError):  # a real-time signal has no name
        return signal.Signals(-return_code).name
    return f"signal {-return_code}"


def megabytes(num_bytes: float) -> str:
    """Bytes for people: `12.3 MB`, `4.56 GB`."""
    units = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
    unit = next((unit for unit, size in units.items() if num_bytes >= size), "kB")
    amount = num_bytes / units[unit]
    if amount >= 999:
        return f"{amount:,.0f} {unit}"
    return f"{amount:.3g} {unit}"


def percent(share: float) -> str:
    """A share, 0 to 1, for people: `99.8 %`, `0.0123 %`."""
    return f"{100 * share:.3g} %"


def hours(seconds: float) -> str:
    """Seconds of audio for people: `3.71 h`, `12.4 min`, `9.7 s`."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.2f} h"
    if seconds >= 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s"


def real_time(ratio: float) -> str:
    """Seconds of audio a second, for people: `7,847 × real time`, `0.4 × real time`."""
    decimals = 1 if ratio < 10 else 0
    return f"{ratio:,.{decimals}f} × real time"


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
# Texts, not compiled: this file is imported by every command, and few of them meet a URL.
_URL = rf"(?i){_BEGINNING}(?P<authority>[^\\/?#]*)"
"""The beginning of a URL, or of what was meant for one: `https://host`, `s3:/bucket`,
`https:/user@host`, `//user:password@host`, `HTTPS%3A%2F%2Fhost`."""

_HOST = r"(?i)(?:\[[0-9a-f:.]+\]|[^:@]*)(?::[0-9]*)?"
_QUERY = r"[?#]|[;&][\w.%-]+="
# of a file, a `?` that is percent-encoded is only the name
_QUERY_IN_CODE = r"[?#;][\w.-]+="
_MARKS = "@?#;&%"  # all that is refused has one of these, and few paths have
# a password may have blanks in it
_WORD = rf"(?i)(?:\S*?{_BEGINNING}[^\\/?#\r\n]{{0,500}}{_AT})?\S+"
_AFTER_WORDS = "'\".,:;?)]"
_OF_THIS_MACHINE = r"(?i)file://(?:localhost)?/"


def secret_in(text: str, *, allow_query: bool = False) -> str | None:
    """Describe what may give access in a text with a URL, as a message goes on; None if
    nothing does. `allow_query` allows a query or a fragment."""
    if not may_have_secret(text):
        return None
    query = _QUERY
    for _ in range(4):  # a URL may be percent-encoded as a whole, and the whole of that
        urls = [
            url
            for url in re.finditer(_URL, text)
            if not re.match(_OF_THIS_MACHINE, text[url.start() : url.end() + 1])
        ]
        if not all(re.fullmatch(_HOST, unquote(url["authority"])) for url in urls):
            return "has a user or a password, or no valid host"
        if urls and not allow_query and re.search(query, text[urls[0].end() :]):
            return "has a query or a fragment, which may be a signature"
        if (decoded := unquote(text)) == text:
            break
        query = _QUERY_IN_CODE if ":" in text else _QUERY
        text = decoded
    return None


def may_have_secret(text: str) -> bool:
    """Tell quickly whether `secret_in` must read a text, or several joined texts."""
    # takes a tenth of a regular expression's time
    return any(mark in text for mark in _MARKS)


def without_secrets(text: str, *, allow_query: bool = False) -> str:
    """Shorten the URLs in a text in which `secret_in` finds something. All that featcache
    prints or raises passes through here."""
    if not may_have_secret(text):
        return text
    return re.sub(_WORD, lambda word: _shown(word[0], allow_query), text)


def _shown(whole: str, allow_query: bool) -> str:
    word = whole.rstrip(_AFTER_WORDS)
    if secret_in(word, allow_query=allow_query) is None:
        return whole
    url = re.search(_URL, word)
    if url is None:  # its percent signs are encoded themselves
        shown = word.partition("%")[0]
    elif secret_in(word, allow_query=True) is None:
        shown = word[: url.end()]
    else:
        shown = word[: url.start("authority")]
    return f"{shown}…{whole[len(word) :]}"


_LIKENESS = 0.65
"""The likeness, 0 to 1, from which on a name may have been meant."""

MOST_THREADS = 4096
"""The largest budget of threads that makes sense."""

MOST_COUNTED = 2**62
"""The largest number of frames, rows or epochs, for 64 bits."""

AT_MOST_NAME = 232
"""The longest name of a version, in characters. Its folder adds the fingerprint to it, up
to the 255 bytes of a file system."""

_URL_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Matches `s3://bucket`, and `s3:/bucket` of pathlib."""

_ALMOST_URL = re.compile(r"(s3|gs|az|memory|https?):(?!//)/?(?=.)", re.IGNORECASE)


def require_int(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> int:
    """Return the argument of that name as an int; an ArgumentError if it is not a whole
    number (of Python, numpy or torch, and no bool) from `least` to `most`."""
    limits = ""
    if least > -math.inf:
        limits = f", {least} or more"
    with suppress(TypeError):
        number = operator.index(value)
        if least <= number <= most and not isinstance(value, bool):
            return number
        if number > most:
            limits += f", at most {most}"
    raise ArgumentError(f"{name} is {value!r}: it must be a whole number{limits}")


def require_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return the argument of that name as a float; an ArgumentError if it is not a number
    (no bool, no NaN) from `low` to `high`."""
    if is_number(value) and low <= value <= high:
        return float(value)
    limits = ""
    least, most = (f"{limit:,.6f}".rstrip("0").rstrip(".") for limit in (low, high))
    if high < math.inf:
        limits = f" from {least} to {most}"
    elif low > -math.inf:
        limits = f", {least} or more"
    raise ArgumentError(f"{name} is {value!r}: it must be a number{limits}")


def is_number(value: object) -> bool:
    """Tell whether a value is a real number of Python or numpy, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def refuse_secrets(name: str, text: str) -> None:
    """Raise an ArgumentError, which does not quote it, for a text with a URL that may give
    its reader access."""
    if fault := secret_in(text):
        remedy = "give the URL without it, and credentials by the environment"
        raise ArgumentError(f"{name} {fault}: {remedy}")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Tell whether a text, or a path made of one, is a URL."""
    match = _URL_START.match(os.fspath(path))
    # only in a Path, one slash is left of two
    return match is not None and (not isinstance(path, str) or path.startswith("/", match.end()))


def names_url(name: str, path: str | os.PathLike[str]) -> bool:
    """Tell whether the argument of that name is a URL. Raises an ArgumentError for a URL that
    may give its reader access, or lacks a slash: as a path it would name a folder `s3:`."""
    text = os.fspath(path)
    refuse_secrets(name, text)
    match = _ALMOST_URL.match(text)
    if match and isinstance(path, str):
        meant = f"{match[1].lower()}://{text[match.end() :]}"
        refuse_secrets(name, meant)
        remedy = f"did you mean {meant}? A path of that name is ./{text}"
        raise ArgumentError(f"{name}: {text} is no URL: {remedy}")
    return is_url(path)


def refuse_url(name: str, path: str | os.PathLike[str]) -> None:
    """Raise an ArgumentError for a URL, or almost one, where a path is wanted."""
    if names_url(name, path):
        remedy = "mount or copy what is there, and give a path on this machine"
        raise ArgumentError(f"{name}: {path} is a URL: {remedy}")
