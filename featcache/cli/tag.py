"""`featcache tag`: a name for a version as it is now."""

from __future__ import annotations

import click

from featcache.cli import options
from featcache.cli.common import note_unfinished, print_json, say
from featcache.cli.corpora import for_each_part
from featcache.errors import counted
from featcache.storage.location import Location


@click.command(short_help="Give a version a name, to read it later as it is now.")
@click.argument("path", metavar="CACHE/VERSION", type=options.LOCATION)
@click.argument("name", metavar="NAME")
@options.as_json()
@for_each_part
def tag(path: Location, name: str, as_json: bool) -> None:
    """Tag a version: NAME stands for the shards that it has now, and never for others. Whatever is extracted, replaced
    or pruned later, featcache.open("features/fbank80", tag="NAME") gives just these utterances, bit for bit, and so do
    verify, diff, show and stats of CACHE/VERSION@NAME. `featcache rm CACHE/VERSION@NAME` removes a tag.

    A tag copies nothing. What it names stays until the tag is removed: `featcache prune` leaves it alone. If a shard of
    it is damaged, and repair has to put another in its place, the tag is no longer whole, and says so.

    \b
    Example:
      featcache tag features/fbank80 paper
    """
    from featcache.version.index import open_index
    from featcache.version.selection import select_version
    from featcache.version.tags import make_tag

    version = select_version(path)
    made = make_tag(version, name, open_index(version))
    note_unfinished(version)
    if as_json:
        print_json({"path": str(version.path), "tag": name, "shards": len(made.shards), "utterances": made.items})
        return
    shards = counted(len(made.shards), "shard")
    say(f"{version.path}@{name}: {counted(made.items, 'utterance')} in {shards}")
