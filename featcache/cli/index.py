"""`featcache index`: what training opens, built once after the jobs of an array."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from featcache.cli import options
from featcache.cli.common import note, print_json, say
from featcache.cli.corpora import for_each_part
from featcache.errors import counted

if TYPE_CHECKING:
    from featcache.storage.location import Location


@dataclass(frozen=True)
class _Indexed:
    """The index of a version."""

    path: str
    """The folder of the version."""
    shards: int
    """The number of its shards."""
    utterances: int
    """The number of utterances in them."""
    built: bool
    """Whether the index was built now; else it was there."""


@click.command(short_help="Build the index, after the jobs of an array.")
@options.version_location
@options.as_json("Print the result as one JSON document.")
@for_each_part()
def index(path: Location, as_json: bool) -> None:
    """Build the index of all versions of a cache, or of one, unless it is there.

    `featcache extract` builds it when it ends, but not with --partition: there, one job does it after all others. Until
    then, whoever opens the version builds it. Says on stderr if utterances are still missing.

    \b
    Examples:
      featcache index features
      featcache index features/fbank80
    """
    from featcache.version.corpus import PartVersion, record_version
    from featcache.version.index import keep_index
    from featcache.version.lacking import find_lacking
    from featcache.version.ledger import standing_failures
    from featcache.version.selection import version_folders
    from featcache.version.version import Version

    found = []
    for folder in version_folders(path):
        version = Version.open(folder)
        opened, is_built = keep_index(version)
        if not (findings := find_lacking(version, opened)):
            failed = len(standing_failures(version, opened))
            record_version(version, PartVersion.of(version, opened, failed))
        found.append(_Indexed(str(folder), len(opened.shards), len(opened), is_built))
        for finding in findings:
            note(f"{folder}: {finding}")
    if as_json:
        print_json({"versions": [asdict(one) for one in found]})
        return
    for one in found:
        what = "built" if one.built else "already there"
        say(f"{one.path}: {counted(one.utterances, 'utterance')} in {counted(one.shards, 'shard')}: index {what}")
