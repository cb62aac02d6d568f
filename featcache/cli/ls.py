"""`featcache ls`: the versions of a cache, a line each."""

from __future__ import annotations

from typing import Any

import click

from featcache.cli import options
from featcache.cli.common import print_json, say_table
from featcache.cli.corpora import for_each_part
from featcache.cli.info import describe_versions
from featcache.errors import DamagedError, hours, megabytes
from featcache.storage.location import Location

_COLUMNS = (
    *("version", "utterances", "audio", "features", "failed"),
    *("first run", "last run", "tags", "what sets it apart"),
)
_TO_THE_RIGHT = range(1, 5)
_FIELDS = (
    *("path", "name", "fingerprint", "distinction"),
    *("utterances", "audio_seconds", "bytes", "failed", "first_run", "last_run", "tags"),
)


@click.command(short_help="List the versions of a cache, a line each.")
@options.version_location
@options.as_json()
@for_each_part
def ls(path: Location, as_json: bool) -> int:
    """List the versions of a cache: how much each holds, when it was extracted, and the keys of its config in which it
    is unlike others of its name. Days are those of the first and the latest run, in UTC. `featcache info` says more.

    \b
    Examples:
      featcache ls features
      featcache ls features --json
    """
    documents, is_damaged = describe_versions(path, on_disk=False)
    if as_json:
        versions = [{name: one[name] for name in _FIELDS} for one in documents]
        print_json({"versions": versions})
    elif documents:
        say_table([_COLUMNS, *map(_row, documents)], _TO_THE_RIGHT)
    return DamagedError.exit_code if is_damaged else 0


def _row(document: dict[str, Any]) -> tuple[str, ...]:
    return (
        document["path"].rstrip("/").rpartition("/")[2],
        f"{document['utterances']:,}",
        hours(document["audio_seconds"]),
        megabytes(document["bytes"]),
        f"{document['failed']:,}",
        (document["first_run"] or "-")[:10],
        (document["last_run"] or "-")[:10],
        ", ".join(tag["name"] for tag in document["tags"]) or "-",
        ", ".join(document["distinction"]),
    )
