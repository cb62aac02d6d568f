"""`featcache report`: what a cache holds, as one page of HTML."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import Document, as_document, complain, printing, say, say_json
from featcache.cli.info import describe_versions
from featcache.cli.progress import Shards
from featcache.cli.show import describe_diff
from featcache.errors import ArgumentError, StoreError, counted, hours, megabytes
from featcache.storage.location import Location, as_location

if TYPE_CHECKING:
    from featcache.loader.cache import Cache


_SUMMED = ("utterances", "frames", "audio_seconds", "bytes", "bytes_on_disk", "shards", "failed")
_JOINED = ("failures", "unfinished")


@options.command()
@options.version_location
@click.option(
    "--against",
    type=options.LOCATION,
    metavar="CACHE/VERSION",
    help="Also show this other version, and how the two differ.",
)
@options.manifest(
    help="Also summarise the columns of this manifest, and include sound of its audio files."
)
@options.root()
@options.manifest_format
@options.output_file(help="The page to write, .html.  [default: report.html]")
@options.force
@options.reading_threads
def report(
    path: Location,
    against: Location | None,
    manifest: str | None,
    output: Path | None,
    force: bool,
    threads: int,
    **reading: Any,
) -> int:
    """Describe a cache or a corpus in one page of HTML. The page shows versions, durations,
    suspicious recordings, duplicates, pictures and sound. It is one file of at most 2 MB,
    and loads nothing else. Level, pitch, speech, quality and voices are shown if the cache
    has versions of audio-stats, f0-swift, vad-silero, dnsmos or speaker-ge2e, or similar.

    Exits with 1 if it leaves out a damaged version, or a missing part of a corpus. With
    --json, it prints the numbers and writes no page.

    \b
    Examples:
      featcache report features
      featcache report features --manifest train.csv -o train.html
      featcache report features/fbank80 --against features/fbank80-6f0612afda6c
    """
    from featcache.report import collect, make_clips, make_page
    from featcache.stats.diff import diff
    from featcache.storage.files import write_file

    if printing.as_json and output is not None:
        raise ArgumentError("--json prints the numbers, and writes no page: leave out -o")
    place = output or Path("report.html")
    if place.suffix != ".html":
        raise ArgumentError(f"-o: {place} does not end in .html")
    documents, caches, is_damaged = _open(path)
    if not printing.as_json:
        options.refuse_output(place, force)
    rows = None
    if manifest is not None:
        options.refuse_corpus(path, "--manifest")
        rows = options.read_manifest(manifest, reading, audio=False)
    compared: list[str] = []
    if against is not None:
        options.refuse_corpus(path, "--against")
        options.refuse_corpus(against, "--against")
        others, other_caches, _ = _open(against)
        for where, opened in ((path, caches), (against, other_caches)):
            if len(opened) > 1:
                raise ArgumentError(f"--against: {where} holds {len(opened)} versions: name one")
        if str(caches[0].version.path) == str(other_caches[0].version.path):
            raise ArgumentError(f"--against: {against} is the version itself: name another")
        places = caches[0].version.path, other_caches[0].version.path
        compared = describe_diff(diff(caches[0], other_caches[0]), *places)
        documents, caches = documents + others, caches + other_caches
    for others, other_caches, has_damage in _described_beside([*caches]):
        documents += others
        caches += other_caches
        is_damaged |= has_damage
    with Shards(sum(document["shards"] for document in documents), 2) as bar:
        collected = collect(
            str(path), documents, caches, rows, compared, threads=threads, report=bar.done
        )
    for version in collected.versions:
        if version["fault"]:
            complain(version["fault"])
            is_damaged = True
    say_json(as_document(collected))
    if printing.as_json:
        return int(is_damaged)
    page = make_page(collected, make_clips(collected, caches, rows))
    write_file(place, page)
    seconds = max(version["audio_seconds"] for version in collected.versions)
    amounts = counted(len(caches), "version")
    if seconds:  # imported vectors come without it
        amounts += f", {hours(seconds)} of audio"
    say(f"{place}: {amounts}; {megabytes(len(page))}")
    return int(is_damaged)


def _open(path: Location) -> tuple[list[Document], list[Cache], bool]:
    """Describe and open each version of a cache, or of all parts of a corpus together.
    Returns also whether a version is damaged and left out."""
    from featcache.loader.cache import Cache
    from featcache.loader.corpus import Corpus, open_parts
    from featcache.version.corpus import read_parts
    from featcache.version.selection import corpus_of
    from featcache.version.version import Version

    in_corpus = corpus_of(path)
    caches: list[Cache] = []
    if in_corpus is None:
        documents, is_damaged = describe_versions(path)
        for document in documents:
            caches.append(Cache(Version.open(as_location("CACHE", document["path"]))))
    else:
        corpus, name = in_corpus
        of_folders: dict[str, list[Document]] = defaultdict(list)
        is_damaged = False
        for part in read_parts(corpus):
            try:
                described, has_damage = describe_versions(corpus / part.name)
            except StoreError as error:  # it is gone, or holds nothing yet
                complain(error)
                described, has_damage = [], True
            is_damaged |= has_damage
            for document in described:
                folder = as_location("CACHE", document["path"]).name
                if name in ("", folder, document["name"]):
                    of_folders[folder].append(document)
        if not of_folders:
            open_parts(corpus, name or None, None, False)  # raises what is the matter
        documents = []
        for folder, of_parts in of_folders.items():
            documents.append(_joined(of_parts) | {"path": str(corpus / folder)})
            caches.append(Corpus(corpus, open_parts(corpus, folder, None, False)[0]))
    if not documents:
        raise ArgumentError(f"{path}: every version is damaged: see featcache verify")
    return documents, caches, is_damaged


def _joined(of_parts: list[Document]) -> Document:
    """Join the descriptions of a version in the parts of a corpus. Tags are a part's own."""
    runs = [document for document in of_parts if document["first_run"]]
    joined = of_parts[0] | {
        "tags": [],
        "first_run": min((document["first_run"] for document in runs), default=None),
        "last_run": max((document["last_run"] for document in runs), default=None),
    }
    for name in _SUMMED:
        joined[name] = sum(document[name] for document in of_parts)
    for name in _JOINED:
        joined[name] = [*chain.from_iterable(document[name] for document in of_parts)]
    return joined


def _described_beside(
    caches: Sequence[Cache],
) -> Iterator[tuple[list[Document], list[Cache], bool]]:
    """Open the other versions next to these that describe utterances: their recordings,
    pitch, scores, speech, voices."""
    from featcache.report.statistics import units_of
    from featcache.report.voices import has_voices
    from featcache.version.corpus import read_parts
    from featcache.version.selection import is_corpus, version_names
    from featcache.version.version import Version

    folder = place = caches[0].version.path.parent
    if is_corpus(folder):
        place = folder / read_parts(folder)[0].name
    opened = {cache.version.path.name for cache in caches}
    for name in version_names(place):
        with suppress(StoreError):  # another version may be damaged
            spec = Version.open(place / name).info.spec
            if name not in opened and (units_of(spec) or has_voices(spec)):
                try:
                    yield _open(folder / name)
                except ArgumentError:  # it is damaged, as `_open` has said
                    yield [], [], True
