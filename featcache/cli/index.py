"""`featcache index`: what training opens, built once after the jobs of an array."""

from __future__ import annotations

import click

from featcache.cli import options
from featcache.cli.common import note, print_json, say
from featcache.cli.corpora import version_or_corpus
from featcache.errors import counted
from featcache.storage.location import Location


@click.command(short_help="Build the index, after the jobs of an array.")
@version_or_corpus
@options.as_json()
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
    from featcache.version.ledger import standing_failures
    from featcache.version.selection import version_folders
    from featcache.version.version import Version
    from featcache.version.wanted import find_lacking

    documents = []
    for folder in version_folders(path):
        version = Version.open(folder)
        opened, is_built = keep_index(version)
        if not (findings := find_lacking(version, opened)):
            failed = len(standing_failures(version, opened))
            record_version(version, PartVersion.of(version, opened, failed))
        for finding in findings:
            note(f"{folder}: {finding}")
        shards, utterances = len(opened.shards), len(opened)
        documents.append({"path": str(folder), "shards": shards, "utterances": utterances, "built": is_built})
        if not as_json:
            what = "built" if is_built else "already there"
            say(f"{folder}: {counted(utterances, 'utterance')} in {counted(shards, 'shard')}: index {what}")
    if as_json:
        print_json({"versions": documents})
