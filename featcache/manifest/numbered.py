"""Numbered files: the files that a pattern with braces names, and the files that are
missing."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, islice

from featcache.errors import ArgumentError, listing

# `train-00000-of-00003.parquet`, or with a hash before the suffix; `split4/1` of Kaldi
_OF = re.compile(r"(.*?)(?P<number>\d+)[-_. ]?of[-_. ]?(?P<count>\d+)(?!\d)", re.IGNORECASE)
_SPLIT = re.compile(r"(.*/)?split(?P<count>\d+)(utt)?/(?P<number>\d+)$")
_NUMBER = re.compile(r"(?P<number>\d+)")
_BRACES = re.compile(r"\{(?:(?P<first>\d+)\.\.(?P<last>\d+)|(?P<names>[^{},]*(?:,[^{},]*)+))\}")
_MOST_EXPANDED = 1 << 16
_NAMED = 10

Files = dict[int, re.Match[str]]
"""Matches of files' names, by their group `number`."""


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern with `{000..015}` or `{train,test}` stands for, as in
    a shell; the pattern itself if it has neither. Raises ArgumentError if there are too
    many."""
    names = [pattern]
    while any(map(_BRACES.search, names)):
        expanded = chain.from_iterable(map(_expand_first, names))
        names = list(islice(expanded, _MOST_EXPANDED + 1))
        if len(names) > _MOST_EXPANDED:
            raise ArgumentError(f"{pattern}: stands for more than {_MOST_EXPANDED:,} names")
    return names


def _expand_first(pattern: str) -> Iterator[str]:
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    inside: Iterable[str]
    if braces["names"] is not None:
        inside = braces["names"].split(",")
    else:
        first, last = int(braces["first"]), int(braces["last"])
        if abs(last - first) >= _MOST_EXPANDED:
            raise ArgumentError(f"{pattern}: stands for more than {_MOST_EXPANDED:,} names")
        width = 0
        if any(re.match(r"0\d", braces[end]) for end in ("first", "last")):  # as in bash
            width = max(len(braces["first"]), len(braces["last"]))
        numbers = range(first, last + 1) or range(first, last - 1, -1)
        inside = (f"{number:0{width}}" for number in numbers)
    for name in inside:
        yield f"{before}{name}{after}"


def broken_promises(names: Iterable[str]) -> list[str]:
    """Describe each set of files that is not as large as their names promise, such as
    `train-00000-of-00003.parquet`."""
    sets: dict[tuple[str, str], list[re.Match[str]]] = defaultdict(list)
    for match in filter(None, map(_counted, names)):
        name = match.string
        sets[name[: match.start("number")], os.path.splitext(name)[1]].append(match)
    lines = []
    for (_, suffix), matches in sets.items():
        first = matches[0]
        files: Files = {int(match["number"]): match for match in matches}
        totals = {int(match["count"]) for match in matches}
        total = max(totals)
        if len(files) < len(matches) or len(totals) > 1:
            alike = listing(sorted(match.string for match in matches))
            lines.append(f"two sets of numbered files are mixed: {alike}")
            continue
        is_from_1 = 0 not in files and (total in files or first.re is _SPLIT)
        lines += absent(files, int(is_from_1), total, first[0] + suffix)
    return lines


def gaps(names: Iterable[str]) -> list[str]:
    """Describe the gaps in each row of files that are numbered from 0 or 1 without a count."""
    rows: dict[tuple[str, str], Files] = defaultdict(dict)
    for name in names:
        if not _counted(name):
            for match in _NUMBER.finditer(name):
                rows[name[: match.start()], name[match.end() :]][int(match[0])] = match
    lines = []
    for files in rows.values():
        first = min(files)
        if first <= 1 and len(files) > 1:
            lines += absent(files, first, max(files) + 1 - first)
    return lines


def absent(files: Mapping[int, re.Match[str]], first: int, total: int, like: str = "") -> list[str]:
    """Describe in one line, or none, the `total` numbers from `first` on that have no file.
    `like` is the name of a file, by default of the first."""
    num_missing = total - len(files)
    if num_missing <= 0:
        return []
    match = next(iter(files.values()))
    name = like or match.string
    start, end = match.span("number")
    numbers = (number for number in count(first) if number not in files)
    missing = [
        f"{name[:start]}{number:0{end - start}}{name[end:]}"
        for number in islice(numbers, min(num_missing, _NAMED))
    ]
    line = f"{num_missing:,} of {total:,} numbered files missing: {listing(missing)}"
    if num_missing > _NAMED:
        line += f" and {num_missing - _NAMED:,} more"
    return [line]


def _counted(name: str) -> re.Match[str] | None:
    return _OF.match(name) or _SPLIT.match(name)
