"""`featcache repair`: re-extract the damaged utterances, and keep the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from featcache.cli import options
from featcache.cli.common import as_document, count_are, say, say_json
from featcache.cli.corpora import version_or_corpus, worst
from featcache.cli.process import INTERRUPTED, stoppable
from featcache.cli.runs import say_summary
from featcache.errors import counted, listing
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.repair import Repaired


@options.command(short_help="Re-extract damaged utterances, and keep the others.")
@version_or_corpus
@options.manifest(help="The manifest that the utterances came from.", required=True)
@options.root()
@options.manifest_format
@options.device()
@options.threads(help="As for extract.")
@options.trust_remote_code
@options.as_json()
def repair(
    path: Location, manifest: str, device: str | None, threads: int | None, **reading: Any
) -> int:
    """Read every byte of a version (or of all versions of a cache), and re-extract the
    damaged utterances.

    The undamaged utterances of a damaged shard are kept, bit for bit, in a new shard. If a
    shard's own description is damaged (any array except the features, or the group's
    zarr.json), all its utterances are re-extracted. A shard that belongs to another version
    is removed, and its utterances are re-extracted; if that version is not in the same
    cache, or has no sound shard of the same name, the shard is moved to the folder `aside`.

    Damaged records of what is wanted and has failed are removed; the next `featcache
    extract` makes up for it.

    The manifest needs only the damaged utterances, and their audio files must exist; else
    nothing is removed.

    \b
    Example:
      featcache repair features --manifest train.csv
    """
    from featcache.audio.commands import kill_commands
    from featcache.care.repair import repair as repair_version
    from featcache.extraction.options import Options
    from featcache.version.selection import need_columns, version_folders

    read = options.read_manifest(manifest, reading, carry=need_columns(path))
    chosen = Options(device=device, threads=threads)
    with stoppable(kill_commands) as stop:
        repaired = [
            repair_version(folder, read, chosen, stop=stop) for folder in version_folders(path)
        ]
    say_json({"versions": [as_document(version) for version in repaired]})
    codes = [_say(version) for version in repaired]
    if 1 in codes:
        return 1
    return worst(codes)


def _say(version: Repaired) -> int:
    """Print what became of a version. Returns the exit code."""
    path = version.path
    if version.interrupted:
        say(f"{path}: interrupted before any shard was removed")
        return INTERRUPTED
    if version.metadata:
        say(f"{path}: metadata restored")
    if version.removed:
        say(
            f"{path}: {counted(len(version.removed), 'damaged shard')}: "
            f"{counted(version.kept, 'utterance')} kept, {version.extracted:,} extracted again"
        )
    for folder, fingerprint in version.aside.items():
        say(
            f"{path}: set aside {folder}, a shard of the version {fingerprint[:12]}, which has no "
            "sound one of its name in this cache: move it there, into shards, or remove it"
        )
    if version.broken_tags:
        tags = listing(version.broken_tags)
        are = "tag is" if len(version.broken_tags) == 1 else "tags are"
        say(f"{path}: the {are} no longer whole: {tags}: featcache verify says why")
    if version.records:
        say(
            f"{path}: {counted(version.records, 'damaged record')} of what is wanted or has "
            "failed removed: featcache verify says what it cost"
        )
    code = 0
    if version.summary:
        code = say_summary(version.summary, version.summary.versions[0].path)
    elif not (version.metadata or version.removed or version.records):
        say(f"{path}: no damage found")
    if version.missing:
        say(
            f"{path}: {count_are(version.missing, 'utterance')} in no shard: featcache extract "
            "adds them"
        )
    return code
