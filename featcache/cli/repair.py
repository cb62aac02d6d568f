"""`featcache repair`: keep what is sound, and re-extract only the damaged utterances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import FAILURES_LEFT, as_document, print_json, read_manifest, say
from featcache.cli.corpora import version_or_corpus
from featcache.cli.process import INTERRUPTED, stoppable
from featcache.cli.runs import complain_of_failures, print_summary
from featcache.errors import counted, listing
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.manifest.audio_locations import AudioLocation


@click.command(short_help="Re-extract damaged utterances, and keep the others.")
@version_or_corpus
@options.manifest("The manifest that the utterances came from.", required=True)
@options.root()
@options.manifest_format
@options.device()
@options.threads("As for extract.")
@options.trust_remote_code
@options.as_json()
def repair(
    path: Location,
    manifest: str,
    root: AudioLocation | None,
    device: str | None,
    threads: int | None,
    as_json: bool,
    reading: dict[str, Any],
) -> int:
    """Read every byte of a version (or of all versions of a cache), and re-extract the damaged utterances.

    The undamaged utterances of a damaged shard are kept, bit for bit: they are written to a new shard before
    the damaged shard is removed. If a shard's own description is damaged (any array except the features, or the
    group's zarr.json), all its utterances are re-extracted. A shard that belongs to another version is taken away, and
    its utterances are re-extracted; if that version is not in the same cache, or has no sound shard of the same name,
    the shard is moved to the folder `aside` of the version.

    What is damaged in the records of what is wanted and has failed is removed; the next `featcache extract` makes up
    for it.

    Only the damaged utterances need to be in the manifest, and their audio files must exist. Otherwise nothing
    is removed.

    \b
    Example:
      featcache repair features --manifest train.csv
    """
    from featcache.audio.commands import kill_commands
    from featcache.care.repair import repair as repair_version
    from featcache.extraction.options import Options
    from featcache.version.selection import version_folders

    read = read_manifest(manifest, reading, root=root, carry=False)
    chosen = Options(device=device, threads=threads)
    with stoppable(kill_commands) as stop:
        repaired = [repair_version(folder, read, chosen, stop=stop) for folder in version_folders(path)]
    if as_json:
        print_json({"versions": [as_document(version) for version in repaired]})
    else:
        for version in repaired:
            if version.interrupted:
                say(f"{version.path}: interrupted before any shard was removed")
                continue
            if version.metadata:
                say(f"{version.path}: metadata restored")
            if version.removed:
                shards, kept = counted(len(version.removed), "damaged shard"), counted(version.kept, "utterance")
                say(f"{version.path}: {shards}: {kept} kept, {version.extracted:,} extracted again")
            for folder, fingerprint in version.aside.items():
                say(
                    f"{version.path}: set aside {folder}: this shard belongs to the version {fingerprint[:12]}, which "
                    "has no sound one of its name in this cache: move it there, into shards, or remove it"
                )
            if tags := version.broken_tags:
                are = "tag is" if len(tags) == 1 else "tags are"
                say(f"{version.path}: the {are} no longer whole: {listing(tags)}: featcache verify says why")
            if version.records:
                records = f"{counted(version.records, 'damaged record')} of what is wanted or has failed"
                say(f"{version.path}: {records} removed: featcache verify says what it cost")
            if version.summary:
                print_summary(version.summary)
            elif not (version.metadata or version.removed or version.records):
                say(f"{version.path}: no damage found")
            if version.missing:
                missing = counted(version.missing, "utterance is", "utterances are")
                say(f"{version.path}: {missing} in no shard: featcache extract adds them")
    summaries = [version.summary for version in repaired if version.summary]
    given_up = [summary for summary in summaries if summary.too_many_failures]
    for summary in given_up:
        complain_of_failures(summary, summary.versions[0].path)
    if given_up:
        return 1
    interrupted = any(version.interrupted for version in repaired) or any(summary.interrupted for summary in summaries)
    return INTERRUPTED if interrupted else FAILURES_LEFT if any(summary.failed for summary in summaries) else 0
