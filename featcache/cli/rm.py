"""`featcache rm`: remove a version, or a tag."""

from __future__ import annotations

import click

from featcache.cli import options
from featcache.cli.common import is_agreed, note, print_json, say
from featcache.errors import ArgumentError, DamagedError, counted, listing, megabytes
from featcache.storage.location import Location


@click.command(short_help="Remove a version, or a tag.")
@click.argument("path", metavar="CACHE/VERSION[@TAG]", type=options.LOCATION)
@click.option("--force", is_flag=True, help="Remove a version even if it has tags, or files in it are not featcache's.")
@options.dry_run
@options.yes
@options.as_json()
def rm(path: Location, force: bool, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Remove one version of a cache, with its records and its tags; or one of its tags, which removes no features.

    Says first what will be gone, and asks. What is removed is gone for good. A version that a run is filling stays, as
    far as its lock is seen: in an object store there is none. So does, without --force, one that has tags, or with
    files in its folder that are not featcache's.

    \b
    Examples:
      featcache rm features/fbank80-6f0612afda6c
      featcache rm features/fbank80@paper --yes
    """
    from featcache.care.prune import refuse_with_what_is_kept, remove_version, what_is_kept
    from featcache.version.index import open_index
    from featcache.version.selection import split_tag, version_of_tag
    from featcache.version.tags import read_tag, remove_tag, tag_names
    from featcache.version.version import Version

    place, tag = split_tag(path)
    version = Version.open(_folder(place)) if tag is None else version_of_tag(place, tag)
    if tag is not None:
        if tag not in tag_names(version):
            read_tag(version, tag)
        what, size = f"{version.path}@{tag}: the tag; no features", 0
    else:
        if not force:
            refuse_with_what_is_kept(version)
        try:
            held = counted(len(open_index(version)), "utterance")
        except DamagedError:
            held = "damaged"
        size = version.bytes_on_disk()
        what = f"{version.path}: {held}, {megabytes(size)} on disk"
        if kept := what_is_kept(version):
            what += f"; with {'; '.join(kept)}"
    if not as_json:
        say(f"{'would remove' if dry_run else 'removes'} {what}")
    removed = not dry_run and is_agreed("Remove it?", yes, as_json)
    if removed and tag is not None:
        remove_tag(version, tag)
    elif removed:
        remove_version(version, force=force)
    elif not dry_run:
        note("nothing has been removed")
    if as_json:
        print_json({"path": str(version.path), "tag": tag, "bytes_on_disk": size, "removed": removed})


def _folder(path: Location) -> Location:
    """The folder of the version that is named; never that of the only version of a cache that is."""
    from featcache.version.selection import version_folders

    folders = version_folders(path)
    if folders != [path] and folders[0].parent == path:
        there = listing(folder.name for folder in folders)
        raise ArgumentError(f"{path}: is a cache: name the version to remove: {there}")
    return folders[0]
