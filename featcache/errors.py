"""All errors that featcache raises deliberately.

    FeatcacheError                 exit code 1
    ├── ConfigError                2   a config that cannot be read or is invalid
    ├── ManifestError              2   a manifest that cannot be read, has errors, or is not the cache's
    ├── MissingDependencyError     2   an optional package that this command needs
    ├── ArgumentError              2   invalid arguments of a call; also a ValueError
    ├── AudioError                 1   one utterance that cannot be extracted; carries its `Reason`
    ├── ExtractorError             1   an extractor that cannot be built or run
    └── StoreError                 1   a cache that cannot be opened or written
        ├── DamagedError           1   bytes that differ from what was written
        └── MissingItemError       1   an utterance that the cache does not hold; also a KeyError

    FeatcacheWarning                   something goes on otherwise than was asked for; a UserWarning

Every message says what is wrong, where, and what to do. The command line prints it, a fault to a line, and
exits with the class's `exit_code`; library code lets it rise.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from shlex import quote

__all__ = [
    "ArgumentError",
    "AudioError",
    "ConfigError",
    "DamagedError",
    "ExtractorError",
    "FeatcacheError",
    "FeatcacheWarning",
    "ManifestError",
    "MissingDependencyError",
    "MissingItemError",
    "Reason",
    "StoreError",
    "counted",
    "listing",
]


class FeatcacheError(Exception):
    """The base of all errors that featcache raises on purpose."""

    exit_code = 1


class FeatcacheWarning(UserWarning):
    """Something goes on, but not as it was asked for, or not with all that there should be."""


class ConfigError(FeatcacheError):
    """A config that cannot be read or does not hold together; the message lists every fault."""

    exit_code = 2


class ManifestError(FeatcacheError):
    """A manifest that cannot be read, or has faults: the message lists them with their lines. Or its rows are not those
    that a cache was extracted from, or its files are not there.
    """

    exit_code = 2


class MissingDependencyError(FeatcacheError):
    """An optional package is not installed; the message names the extra that brings it, or without one the package."""

    exit_code = 2

    def __init__(self, package: str, needed_for: str, extra: str | None = "extract") -> None:
        what = package if extra is None else f"'featcache[{extra}]'"
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed or does not import: pip install {what}"
        )


class ArgumentError(FeatcacheError, ValueError):
    """Arguments of a call that do not hold together, or do not fit the data."""

    exit_code = 2


class Reason(StrEnum):
    """Why an utterance is in the failure ledger instead of a shard."""

    FILE_MISSING = "file_missing"
    FILE_UNREADABLE = "file_unreadable"
    NOT_AUDIO = "not_audio"
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
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    NOT_IN_SOURCE = "not_in_source"


class AudioError(FeatcacheError):
    """One utterance that cannot be extracted: it goes to the failure ledger, the run goes on."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ExtractorError(FeatcacheError):
    """An extractor that cannot be built from its parameters, or that broke its contract."""


class StoreError(FeatcacheError):
    """A cache that cannot be found, opened or written."""


class DamagedError(StoreError):
    """Bytes in a cache that are not the bytes that were written.

    Args:
        what: is damaged, and where.
        version: the folder of the version, where `featcache repair` repairs it: the message then says so.

    Attributes:
        what: the message without the remedy.
    """

    def __init__(self, what: str, version: Path | None = None) -> None:
        remedy = "" if version is None else f"; `featcache repair {quote(str(version))} --manifest MANIFEST` repairs it"
        super().__init__(what + remedy)
        self.what = what


class MissingItemError(StoreError, KeyError):
    """An utterance that the cache does not hold; the message says whether, and why, it failed."""

    __str__ = Exception.__str__  # KeyError's would print the repr


def listing(names: Iterable[str], at_most: int = 10) -> str:
    """Join names for a message: the first `at_most`, then how many more there are."""
    names = list(names)
    shown = ", ".join(names[:at_most])
    return shown if len(names) <= at_most else f"{shown} … and {len(names) - at_most:,} more"


def counted(count: int, one: str, many: str = "") -> str:
    """Count things for a message: `1 shard`, `2,500 shards`; `many` is for where an s is not enough."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"
