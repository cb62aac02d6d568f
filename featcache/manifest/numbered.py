"""Numbered files: which of them are not there."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import count, islice

from featcache.errors import listing

# `train-00000-of-00003.parquet`, or with a hash before the suffix; `split4/1` of Kaldi
_OF = re.compile(r"(.*?)(?P<number>\d+)[-_. ]?of[-_. ]?(?P<count>\d+)(?!\d)", re.IGNORECASE)
_SPLIT = re.compile(r"(.*/)?split(?P<count>\d+)(utt)?/(?P<number>\d+)$")
_NUMBER = re.compile(r"(?P<number>\d+)")
_NAMED = 10

Files = dict[int, re.Match[str]]
"""The names of files by number, each as the match of a pattern with a group `number`."""


def broken_promises(names: Iterable[str]) -> list[str]:
    """Find files whose names say how many there are, such as `train-00000-of-00003.parquet`,
    where there are more or fewer: a line for each set of them."""
    sets: dict[tuple[str, str], list[re.Match[str]]] = defaultdict(list)
    for name in names:
        if match := _counted(name):
            sets[name[: match.start("number")], os.path.splitext(name)[1]].append(match)
    lines = []
    for (_, suffix), matches in sets.items():
        files: Files = {int(match["number"]): match for match in matches}
        counts = {int(match["count"]) for match in matches}
        if len(counts) > 1 or len(files) < len(matches):
            alike = listing(sorted(match.string for match in matches))
            lines.append(f"two sets of numbered files are mixed: {alike}")
            continue
        promised = counts.pop()
        is_from_1 = 0 not in files and (promised in files or matches[0].re is _SPLIT)
        end = matches[0].end()
        lines += absent(files, int(is_from_1), promised, matches[0].string[:end] + suffix)
    return lines


def gaps(names: Iterable[str]) -> list[str]:
    """Find the numbers missing between files that are numbered from 0 or 1 without a count:
    a line for each row of such files."""
    rows: dict[tuple[str, str], Files] = defaultdict(dict)
    for name in names:
        for match in () if _counted(name) else _NUMBER.finditer(name):
            rows[name[: match.start()], name[match.end() :]][int(match[0])] = match
    lines = []
    for files in rows.values():
        first = min(files)
        if first <= 1 and len(files) > 1:
            lines += absent(files, first, max(files) + 1 - first)
    return lines


def absent(files: Mapping[int, re.Match[str]], first: int, total: int, like: str = "") -> list[str]:
    """Say in a line which of `total` numbers from `first` on have no file; no line if all
    have one. `like` is a file's name, if it is not one of `files`."""
    lacking = total - len(files)
    if lacking <= 0:
        return []
    match = next(iter(files.values()))
    name = like or match.string
    start, end = match.span("number")
    numbers = (number for number in count(first) if number not in files)
    missing = [
        f"{name[:start]}{number:0{end - start}}{name[end:]}"
        for number in islice(numbers, min(lacking, _NAMED))
    ]
    more = f" and {lacking - _NAMED:,} more" if lacking > _NAMED else ""
    return [f"{lacking:,} of {total:,} numbered files missing: {listing(missing)}{more}"]


def _counted(name: str) -> re.Match[str] | None:
    return _OF.match(name) or _SPLIT.match(name)
