"""`featcache report`: what a cache holds, as one page of HTML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from featcache.cli import options
from featcache.cli.common import as_document, printing, say, say_json
from featcache.cli.info import describe_versions
from featcache.cli.progress import Steps
from featcache.errors import ArgumentError, counted, hours, megabytes
from featcache.storage.location import Location, as_location


@options.command()
@options.version_location
@options.manifest(help="Also summarise the columns of this manifest, and play its audio files.")
@options.root()
@options.manifest_format
@options.output_file(help="Where to write the page.  [default: report.html]")
@options.force
@options.reading_threads
@options.as_json
def report(
    path: Location,
    manifest: str | None,
    output: Path | None,
    force: bool,
    threads: int,
    **reading: Any,
) -> int:
    """Describe a cache in one page of HTML. It has versions, durations, recordings to look
    at, duplicates, pictures and sound; the file opens from disk, loads nothing, and has at
    most 2 MB. Statistics of recordings need a version of the config audio-stats.

    Exits with 1 if a version is damaged and left out. With --json, the numbers are printed
    and no page is written.

    \b
    Examples:
      featcache report features
      featcache report features --manifest train.csv -o train.html
    """
    from featcache.report import collect, make_clips, make_page
    from featcache.storage.files import write_file
    from featcache.version.selection import corpus_of
    from featcache.version.version import Version

    if corpus_of(path) is not None:
        raise ArgumentError(f"{path}: is a corpus: name one of its parts, a folder in it")
    if printing.as_json and output is not None:
        raise ArgumentError("--json prints the numbers, and writes no page: leave out -o")
    place = output or Path("report.html")
    if not printing.as_json:
        options.refuse_output(place, force)
    rows = None
    if manifest is not None:
        rows = options.read_manifest(manifest, reading, audio=False)
    documents, is_damaged = describe_versions(path)
    if not documents:
        raise ArgumentError(f"{path}: every version is damaged: see featcache verify")
    versions = [Version.open(as_location("CACHE", document["path"])) for document in documents]
    with Steps(2 * sum(document["shards"] for document in documents), "shards") as bar:
        collected = collect(
            str(path), documents, versions, rows, threads=threads, report=bar.update
        )
    say_json(as_document(collected))
    if printing.as_json:
        return int(is_damaged)
    page = make_page(collected, make_clips(collected, versions, rows))
    write_file(place, page)
    seconds = max(version["audio_seconds"] for version in collected.versions)
    amounts = f"{counted(len(versions), 'version')}, {hours(seconds)} of audio"
    say(f"{place}: {amounts}; {megabytes(len(page))}")
    return int(is_damaged)
