"""`featcache info`: what a cache holds; `featcache ls`: its versions, a line each."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from os.path import isabs
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import (
    Document,
    cells,
    complain,
    describe_fastest,
    note,
    open_each,
    printing,
    say,
    say_json,
    say_table,
)
from featcache.cli.corpora import version_or_corpus
from featcache.errors import (
    ArgumentError,
    DamagedError,
    counted,
    hours,
    listing,
    megabytes,
    percent,
)
from featcache.storage.location import Location

if TYPE_CHECKING:
    from collections.abc import Iterator

    from featcache.version.index import Index
    from featcache.version.version import Version


@options.command()
@version_or_corpus
@options.flag("--failures", "List each utterance that failed, with the reason.")
@options.flag(
    "--csv", "With --failures, for one version: print them as a CSV manifest, with reasons."
)
def info(path: Location, failures: bool, csv: bool) -> int:
    """Show what a cache holds. For each version: utterances, hours, bytes, config, library
    versions, failures.

    Bytes of features, here and in other commands, include arrays stored with them, such as
    scales and offsets. Bytes on disk are the sizes of all files.

    \b
    Examples:
      featcache info features
      featcache info features/fbank80@paper
      featcache info features --failures
      featcache info features/fbank80 --failures --csv > failed.csv
    """
    if csv:
        if printing.as_json or not failures:
            raise ArgumentError("--csv needs --failures, and excludes --json")
        _print_csv(path)
        return 0
    from featcache.version.selection import split_tag

    documents, is_damaged = describe_versions(*split_tag(path))
    say_json({"versions": documents})
    for document in documents:
        _print(document, failures)
        if document["damage"]:
            complain(document["damage"])
            is_damaged = True
    return int(is_damaged)


def describe_versions(
    path: Location, tag: str | None = None, *, on_disk: bool = True
) -> tuple[list[Document], bool]:
    """Describe each version of a cache, or those with a tag as they were then; without
    `on_disk` in less time. Returns also whether a version is damaged and left out."""
    documents, is_damaged = [], False
    for _, version in open_each(path, tag):
        try:
            if isinstance(version, DamagedError):
                raise version
            documents.append(version.reading(partial(_describe, version, on_disk)))
        except DamagedError as error:
            complain(error)
            is_damaged = True
    configs = defaultdict(list)
    for document in documents:
        configs[document["name"]].append(dict(_leaves(document["config"])))
    for document in documents:
        namesakes = configs[document["name"]]
        document["distinction"] = [
            f"{key}={json.dumps(value)}"
            for key, value in sorted(_leaves(document["config"]))
            if any(config.get(key) != value for config in namesakes)
        ]
        if len(namesakes) > 1 and not document["distinction"]:
            document["distinction"] = ["weights or revision"]
    return documents, is_damaged


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _describe(version: Version, on_disk: bool) -> Document:
    import msgspec

    from featcache.version.indexing import open_index
    from featcache.version.records import began, read_probes, run_names
    from featcache.version.tags import tags_to_show
    from featcache.version.wanted import find_lacking, wanted_failures

    index, spec = open_index(version), version.info.spec
    if spec.outputs:
        num_bytes = sum(version.shard(name).num_bytes for name in index.shards)
    else:  # as `Shard.num_bytes` counts them
        num_bytes = sum(spec.num_bytes(shard.frames, shard.items) for shard in index.summaries)
    failures = [failure.document() for failure in wanted_failures(version, index).values()]
    pairs = sorted({(maker.batching, maker.mismatch) for maker in index.makers}, key=str)
    batching = [{"policy": policy, "mismatch": mismatch} for policy, mismatch in pairs if policy]
    began_at = [began(run) for run in run_names(version.store)]
    times = [time.isoformat(timespec="seconds") for time in began_at if time]
    newest_probes = {
        probe["device"]: probe
        for probe in read_probes(version)
        if {"device", "date", "fastest"} <= probe.keys()
    }
    unfinished = []
    for lack in find_lacking(version, index):
        what = {"what": lack} if isinstance(lack, str) else asdict(lack)
        unfinished.append(what | {"message": str(lack)})
    num_bytes_on_disk, damage = _on_disk(version, index) if on_disk else (None, None)
    tag = "" if version.tag is None else f"@{version.tag}"
    return {
        "path": f"{version.path}{tag}",
        "original_name": version.original_name,
        **msgspec.to_builtins(version.info),
        "spec": spec.document(),
        "first_run": next(iter(times), None),
        "last_run": next(reversed(times), None),
        "utterances": len(index),
        "replaced": sum(shard.items for shard in index.summaries) - len(index),
        "frames": int(index.num_frames.sum()),
        "audio_seconds": round(_audio_seconds(version, index), 3),
        "bytes": num_bytes,
        "bytes_on_disk": num_bytes_on_disk,
        "damage": damage,
        "shards": len(index.shards),
        "libraries": _libraries(version, index) if on_disk else {},
        "batching": batching,
        "probes": list(newest_probes.values()),
        "tags": tags_to_show(version),
        "unfinished": unfinished,
        "failed": len(failures),
        "failures": failures,
    }


def _on_disk(version: Version, index: Index) -> tuple[int, str | None]:
    """Add up the sizes of all files. Returns also a message about shards without a document."""
    from featcache.storage.base import MARK

    num_bytes, lost = 0, {f"shards/{name}/{MARK}": name for name in index.shards}
    for key, size in version.store.walk():
        num_bytes += size
        lost.pop(key, None)
    if not lost:
        return num_bytes, None
    names = [*lost.values()]
    with suppress(DamagedError):
        version.shard(names[0])  # raises ShardGoneError if it was removed meanwhile
    what = f"damaged: {counted(len(names), 'shard')} without {MARK}: {listing(names)}"
    return num_bytes, str(DamagedError(f"{version.path}: {what}", version.path))


def _libraries(version: Version, index: Index) -> dict[str, list[str]]:
    """List the libraries that runs had in several versions, by a shard of each run."""
    shard_of_run = {
        shard.made_by: name for name, shard in zip(index.shards, index.summaries, strict=True)
    }
    versions: dict[str, set[str]] = defaultdict(set)
    for name in shard_of_run.values():
        with suppress(DamagedError):
            for library, number in version.shard(name).info.made_by.items():
                if library not in ("run", "device", "batching", "mismatch"):
                    versions[library].add(str(number))
    return {name: sorted(numbers) for name, numbers in versions.items() if len(numbers) > 1}


def _audio_seconds(version: Version, index: Index) -> float:
    """Add up the seconds of audio of all current items. Only shards with replaced items are
    read for it."""
    seconds = 0.0
    for number, shard in enumerate(index.summaries):
        items = index.item[slice(*index.span(number))]
        if len(items) == shard.items:
            seconds += shard.seconds
        elif len(items):
            samples = version.shard(shard.name).table["num_samples"][items].sum()
            seconds += int(samples) / version.info.spec.sample_rate
    return seconds


def _print(document: Document, failures: bool) -> None:
    say(document["path"])
    _print_amounts(document)
    _print_spec(document)
    say(f"  made by {cells(document['made_by'])}")
    for library, versions in document["libraries"].items():
        say(f"  its shards were made with {library} {listing(versions)}")
    for batching in document["batching"]:
        policy, mismatch = batching["policy"], batching["mismatch"]
        if mismatch is not None:
            say(f"  batching {policy}: {percent(mismatch)} mismatched when probed before")
        elif policy != "frames":  # which needs no probe
            say(f"  batching {policy}: not probed before")
    for probe in document["probes"]:
        say(f"  probed on {probe['device']}, {probe['date']}: {describe_fastest(probe['fastest'])}")
    if failures:
        for failure in document["failures"]:
            message = failure["message"]
            if failure["generation"] != 1:
                message += "; an older item of this id is there, and stays"
            say(f"  {failure['id']}", failure["reason"], failure["path"], message)


def _print_amounts(document: Document) -> None:
    from featcache.version.version import renamed_note

    contents = counted(document["utterances"], "utterance")
    if _has_audio(document):
        contents += f", {hours(document['audio_seconds'])} of audio"
    features = f"{megabytes(document['bytes'])} of features in "
    features += counted(document["shards"], "shard")
    on_disk = f"{megabytes(document['bytes_on_disk'])} on disk in all"
    say(f"  {contents}, {features}, {on_disk}; {document['failed']:,} failed")
    if document["first_run"]:
        say(f"  first run {_date(document['first_run'])}, last run {_date(document['last_run'])}")
    if document["distinction"]:
        say(f"  unlike others called {document['name']}: {', '.join(document['distinction'])}")
    if document["original_name"]:
        say(f"  {renamed_note(document['original_name'])}")
    if document["replaced"]:
        items = counted(document["replaced"], "older item")
        say(f"  among these, {items} of utterances extracted again: not read, but kept")
    for tag in document["tags"]:
        state = tag["fault"] or f"{counted(tag['utterances'], 'utterance')}, {_date(tag['made'])}"
        say(f"  tag {tag['name']}: {state}")
    for lack in document["unfinished"]:
        say(f"  {lack['message']}")


def _has_audio(document: Document) -> bool:
    """Tell whether the length of the audio is known. Imported vectors come without it."""
    return document["audio_seconds"] > 0 or not document["utterances"]


def _print_spec(document: Document) -> None:
    import msgspec

    from featcache.spec import FeatureSpec, Unknown

    spec, config = msgspec.convert(document["spec"], FeatureSpec), document["config"]
    features = f"{spec.dtype} {spec.main.shape_text()}, {spec.axis}: {spec.units}"
    if spec.is_quantized:
        features += ", quantised to uint8 with a scale and an offset for each utterance and "
        features += "dimension"
    say(f"  {features}")
    for track in spec.outputs:
        side = f"{track.name}, {track.dtype} {track.shape_text()}"
        if track.axis != Unknown():
            side += f", {track.axis}"
        say(f"  side array {side}: {track.units}")
    say(f"  extractor {config.get('extractor')}, audio at {spec.sample_rate:,} Hz")
    augment = config.get("augment")
    if augment:
        copies = f"at speed {_numbers(augment['speed'])}"
        noise = augment["noise"]
        if noise:
            copies += f", clean and with noise of {noise['manifest']} (seed {noise['seed']})"
            copies += f" at {_numbers(noise['snr'])} dB"
        say(f"  copies {copies}")
    say(f"  fingerprint {document['fingerprint']}")


def _numbers(values: list[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _print_csv(path: Location) -> None:
    """Print the failure ledger as a manifest. A failed copy is a row of its utterance."""
    from featcache.manifest.audio_locations import is_audio_url, is_command
    from featcache.manifest.write import to_csv
    from featcache.version.records import failures_as_manifest
    from featcache.version.selection import select_version

    version = select_version(path)
    manifest, roots = failures_as_manifest(version)
    text = to_csv(manifest)
    if sys.stdout.isatty():
        for line in text.decode().splitlines():
            say(line)
    else:
        click.echo(text, nl=False)
    is_found = [isabs(path) or is_audio_url(path) or is_command(path) for path in manifest.paths]
    if not all(is_found):
        remedy = "give --root, and --retry-failed"
        if len(roots) > 1:
            remedy = "take the rows of one `root` at a time, with that --root and --retry-failed"
        note(f"some paths are relative, to {listing(roots)}: to extract these again, {remedy}")


def _date(time: str) -> str:
    """Return a time for people: `2026-03-01 14:05 UTC`."""
    return f"{time[:10]} {time[11:16]} UTC"


_FIELDS = (
    "path",
    "name",
    "fingerprint",
    "distinction",
    "utterances",
    "audio_seconds",
    "bytes",
    "failed",
    "first_run",
    "last_run",
    "tags",
)


@options.command()
@version_or_corpus
def ls(path: Location) -> int:
    """List the versions of a cache, a line each. A line shows how much the version holds, and
    the days (in UTC) of its first and latest run. Versions of the same name also show the
    keys of the config in which they differ.

    \b
    Example:
      featcache ls features
    """
    from featcache.version.selection import split_tag

    documents, is_damaged = describe_versions(*split_tag(path), on_disk=False)
    rows = [{name: document[name] for name in _FIELDS} for document in documents]
    say_json({"versions": rows})
    table = [
        {
            "version": document["path"].rstrip("/").rpartition("/")[2],
            "utterances": f"{document['utterances']:,}",
            "audio": hours(document["audio_seconds"]) if _has_audio(document) else "-",
            "features": megabytes(document["bytes"]),
            "failed": f"{document['failed']:,}",
            "first run": (document["first_run"] or "-")[:10],
            "last run": (document["last_run"] or "-")[:10],
            "tags": ", ".join(tag["name"] for tag in document["tags"]) or "-",
            "what sets it apart": ", ".join(document["distinction"]),
        }
        for document in documents
    ]
    say_table(table, to_the_right=range(1, 5))
    return int(is_damaged)
