"""`featcache diff`: how two versions differ."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from featcache.cli import options
from featcache.cli.common import count_are, first_few, printing, say, say_json
from featcache.errors import counted
from featcache.storage.location import Location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from featcache.care.diff import ValuesDiff

_SHOWN = 5


@options.command(short_help="Compare two versions: configs, utterances, values.")
@click.argument("first", metavar="CACHE/VERSION", type=options.LOCATION)
@click.argument("second", metavar="CACHE/VERSION", type=options.LOCATION)
@options.number(
    "--values", "Compare the values of N random utterances that both have of the same rows.", 0
)
@options.as_json("Print the result as one JSON document, with all ids.")
def diff(first: Location, second: Location, values: int) -> None:
    """Compare two versions: the keys of their configs that differ, the utterances that
    only one of them has, those that were extracted from other rows, and with --values the
    features themselves. The exit code is 0 whatever differs.

    \b
    Examples:
      featcache diff features/fbank80-2a8b3903b266 features/fbank80-6f0612afda6c
      featcache diff features/fbank80 /backup/features/fbank80 --values 1000
    """
    from featcache.care.diff import diff as compare
    from featcache.loader.cache import Cache
    from featcache.version.selection import select_version

    result = compare(Cache(select_version(first)), Cache(select_version(second)), values)
    if printing.as_json:
        lists = {name: list(getattr(result, name)) for name in ("gone", "added", "changed")}
        say_json({**vars(result), **lists, "values": result.values and asdict(result.values)})
    differing = result.config
    if result.same_fingerprint:
        differing = ["the same"]
    elif not differing:
        differing = ["the same keys, but other weights, or another revision of the extractor"]
    for line in differing:
        say(f"config: {line}")
    say(f"{count_are(result.common, 'utterance')} in both")
    _say_ids(result.gone, f"only in {first}")
    _say_ids(result.added, f"only in {second}")
    _say_ids(result.changed, "in both, but from other rows")
    if result.values is not None:
        say(f"values: {_describe(result.values)}")


def _say_ids(ids: Sequence[str], where: str) -> None:
    if len(ids):
        say(f"{len(ids):,} {where}: {first_few(ids, _SHOWN)}")


def _describe(values: ValuesDiff) -> str:
    if values.utterances == 0:
        return "no utterance is in both, of the same row"
    parts = [f"{values.identical:,} of {counted(values.utterances, 'utterance')} bit-identical"]
    if values.other_lengths:
        parts.append(f"{values.other_lengths:,} with other numbers of frames or other labels")
    if values.codes:
        parts.append(f"{values.differing:,} of {values.codes:,} codes differ")
    elif values.worst is not None:
        parts.append(f"largest difference {values.largest:.3g}")
    if values.worst is not None:
        parts.append(f"most in {values.worst}")
    return ", ".join(parts)
