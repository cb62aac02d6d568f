"""`featcache info`: what a cache holds; `featcache ls`: its versions, a line each."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from functools import partial
from os.path import isabs
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import (
    complain,
    describe_fastest,
    note,
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
    from collections.abc import Iterator, Sequence

    from featcache.version.index import Index
    from featcache.version.version import Version


@options.command(short_help="Show what a cache holds.")
@version_or_corpus
@options.flag("--failures", "List the failure ledger: each utterance that failed, with its reason.")
@options.flag(
    "--csv",
    "With --failures, of one version: print the ledger as a manifest, with reasons and messages.",
)
@options.as_json()
def info(path: Location, failures: bool, csv: bool) -> int:
    """Show what each version of a cache holds: utterances, hours, bytes, config, library
    versions, failures.

    Bytes of features, here and in the other commands, count the features as stored and
    all side arrays, including the scales and offsets of quantised features. Bytes on disk
    are the sizes of all files.

    \b
    Examples:
      featcache info features
      featcache info features --failures
      featcache info features/fbank80 --failures --csv > failed.csv
      featcache info features/fbank80 --json
    """
    if csv:
        if printing.as_json or not failures:
            raise ArgumentError("--csv goes with --failures, and without --json")
        _print_csv(path)
        return 0
    documents, is_damaged = describe_versions(path)
    say_json({"versions": documents})
    for document in documents:
        _print(document, failures)
    return DamagedError.exit_code if is_damaged else 0


def describe_versions(path: Location, *, on_disk: bool = True) -> tuple[list[dict[str, Any]], bool]:
    """What each version of a cache holds, and what tells it from others of its name; and
    whether one is damaged, which is said, and left out. With `on_disk`, the sizes of all
    files are added up, of which there are many."""
    from featcache.version.selection import version_folders
    from featcache.version.version import Version

    documents, is_damaged = [], False
    for folder in version_folders(path):
        try:
            version = Version.open(folder)
            documents.append(version.reading(partial(_describe, version, on_disk)))
        except DamagedError as error:
            complain(error)
            is_damaged = True
    for document in documents:
        namesakes = [other for other in documents if other["name"] == document["name"]]
        found = _distinction(document["config"], [other["config"] for other in namesakes])
        document["distinction"] = found or (["weights or revision"] if len(namesakes) > 1 else [])
    return documents, is_damaged


def _distinction(config: dict[str, Any], namesakes: Sequence[dict[str, Any]]) -> list[str]:
    """What tells a resolved config from others of its name, which it is among: the keys
    in which not all agree, by their dotted paths, with its values:
    `params.low_freq=20.0`. Keys that it has not are left out."""
    flat = [dict(_leaves(namesake)) for namesake in namesakes]
    own = dict(_leaves(config))
    unlike = [key for key in sorted(own) if any(other.get(key) != own[key] for other in flat)]
    return [f"{key}={json.dumps(own[key])}" for key in unlike]


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _describe(version: Version, on_disk: bool) -> dict[str, Any]:
    from dataclasses import asdict

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
    policies = sorted({(made.batching, made.mismatch) for made in index.makers}, key=str)
    lacking = find_lacking(version, index)
    times = [
        time.isoformat(timespec="seconds")
        for run in run_names(version.store)
        if (time := began(run))
    ]
    newest = {
        probe["device"]: probe
        for probe in read_probes(version)
        if {"device", "date", "fastest"} <= probe.keys()
    }
    return {
        "path": str(version.path),
        "original_name": version.original_name,
        **msgspec.to_builtins(version.info),
        "spec": spec.document(),
        "first_run": times[0] if times else None,
        "last_run": times[-1] if times else None,
        "utterances": len(index),
        "replaced": sum(shard.items for shard in index.summaries) - len(index),
        "frames": int(index.num_frames.sum()),
        "audio_seconds": round(_audio_seconds(version, index), 3),
        "bytes": num_bytes,
        "bytes_on_disk": version.bytes_on_disk() if on_disk else None,
        "shards": len(index.shards),
        "libraries": _libraries(version, index) if on_disk else {},
        "batching": [
            {"policy": policy, "mismatch": mismatch} for policy, mismatch in policies if policy
        ],
        "probes": list(newest.values()),
        "tags": tags_to_show(version),
        "unfinished": [
            ({"what": one} if isinstance(one, str) else asdict(one)) | {"message": str(one)}
            for one in lacking
        ],
        "failed": len(failures),
        "failures": failures,
    }


def _libraries(version: Version, index: Index) -> dict[str, list[str]]:
    """The libraries of which the shards were made with several versions; by one shard of
    each run."""
    shards = {
        shard.made_by: name for name, shard in zip(index.shards, index.summaries, strict=True)
    }
    versions: dict[str, set[str]] = {}
    for name in shards.values():
        with suppress(DamagedError):
            for library, number in version.shard(name).info.made_by.items():
                if library not in ("run", "device", "batching", "mismatch"):
                    versions.setdefault(library, set()).add(str(number))
    return {library: sorted(some) for library, some in versions.items() if len(some) > 1}


def _audio_seconds(version: Version, index: Index) -> float:
    """Seconds of the audio of all items that count. Only shards that also hold replaced
    items are read for it."""
    seconds = 0.0
    for number, shard in enumerate(index.summaries):
        span = slice(*index.span(number))
        numbers = index.item[span]
        if len(numbers) == shard.items:
            seconds += shard.seconds
        elif len(numbers):
            samples = version.shard(shard.name).table["num_samples"][numbers].sum()
            seconds += int(samples) / version.info.spec.sample_rate
    return seconds


def _print(document: dict[str, Any], failures: bool) -> None:
    import msgspec

    from featcache.spec import FeatureSpec, Unknown

    spec, config = msgspec.convert(document["spec"], FeatureSpec), document["config"]
    say(document["path"])
    utterances, shards = (
        counted(document["utterances"], "utterance"),
        counted(document["shards"], "shard"),
    )
    amount = (
        f"{hours(document['audio_seconds'])} of audio, {megabytes(document['bytes'])} of "
        f"features in {shards}"
    )
    on_disk = f"{megabytes(document['bytes_on_disk'])} on disk in all"
    say(f"  {utterances}, {amount}, {on_disk}; {document['failed']:,} failed")
    if document["first_run"]:
        say(f"  first run {_date(document['first_run'])}, last run {_date(document['last_run'])}")
    if document["distinction"]:
        say(f"  unlike others called {document['name']}: {', '.join(document['distinction'])}")
    if name := document["original_name"]:
        say(
            f"  this folder is a copy of {name}, or was renamed: extract adds to a version "
            "only under that name"
        )
    if replaced := document["replaced"]:
        say(
            f"  among these, {counted(replaced, 'older item')} of utterances extracted "
            "again: not read, but kept"
        )
    for tag in document["tags"]:
        told = tag["fault"] or f"{counted(tag['utterances'], 'utterance')}, {_date(tag['made'])}"
        say(f"  tag {tag['name']}: {told}")
    for run in document["unfinished"]:
        say(f"  {run['message']}")
    quantized = ", quantised to uint8 with a scale and an offset for each utterance and dimension"
    stored = quantized if spec.is_quantized else ""
    say(f"  {spec.dtype} {spec.main.shape_text()}, {spec.axis}: {spec.units}{stored}")
    for track in spec.outputs:
        axis = "" if track.axis == Unknown() else f", {track.axis}"
        what = f"{track.dtype} {track.shape_text()}{axis}: {track.units}"
        say(f"  side array {track.name}, {what}")
    say(f"  extractor {config.get('extractor')}, audio at {spec.sample_rate:,} Hz")
    if augment := config.get("augment"):
        copies = f"at speed {', '.join(f'{speed:g}' for speed in augment['speed'])}"
        if noise := augment["noise"]:
            snrs = ", ".join(f"{snr:g}" for snr in noise["snr"])
            copies += (
                f", clean and with noise of {noise['manifest']} (seed {noise['seed']}) at {snrs} dB"
            )
        say(f"  copies {copies}")
    say(f"  fingerprint {document['fingerprint']}")
    say(
        "  made by "
        + ", ".join(f"{name} {version}" for name, version in document["made_by"].items())
    )
    for library, versions in document["libraries"].items():
        say(f"  its shards were made with {library} {listing(versions)}")
    for batching in document["batching"]:
        mismatch = batching["mismatch"]
        if mismatch is None and batching["policy"] == "frames":
            continue  # frame by frame, batching changes nothing, so there is no probe
        measured = (
            "not probed before"
            if mismatch is None
            else f"{percent(mismatch)} mismatched when probed before"
        )
        say(f"  batching {batching['policy']}: {measured}")
    for probe in document["probes"]:
        say(f"  probed on {probe['device']}, {probe['date']}: {describe_fastest(probe['fastest'])}")
    if failures:
        for failure in document["failures"]:
            older = (
                ""
                if failure["generation"] == 1
                else "; an older item of this id is there, and stays"
            )
            say(
                f"  {failure['id']}",
                failure["reason"],
                failure["path"],
                f"{failure['message']}{older}",
            )


def _print_csv(path: Location) -> None:
    """Print the failure ledger as a manifest: what failed of copies is a row of their
    utterance."""
    from featcache.manifest.audio_locations import is_audio_url, is_command
    from featcache.manifest.write import to_csv
    from featcache.version.records import failures_as_manifest, manifest_roots
    from featcache.version.selection import select_version

    version = select_version(path)
    manifest = failures_as_manifest(version)
    text = to_csv(manifest)
    if sys.stdout.isatty():
        for line in text.decode().splitlines():
            say(line)
    else:
        click.echo(text, nl=False)
    if any(not (isabs(path) or is_audio_url(path) or is_command(path)) for path in manifest.paths):
        roots = listing(sorted(manifest_roots(version) - {"None"}))
        note(
            f"some paths are relative, to {roots}: to extract these again, give --root, and "
            "--retry-failed"
        )


def _date(time: str) -> str:
    """A time for people: `2026-03-01 14:05 UTC`."""
    return f"{time[:10]} {time[11:16]} UTC"


_FIELDS = (
    *("path", "name", "fingerprint", "distinction"),
    *("utterances", "audio_seconds", "bytes", "failed", "first_run", "last_run", "tags"),
)


@options.command(short_help="List the versions of a cache, a line each.")
@version_or_corpus
@options.as_json()
def ls(path: Location) -> int:
    """List the versions of a cache: how much each holds, when it was extracted, and the
    keys of its config in which it is unlike others of its name. Days are those of the
    first and the latest run, in UTC. `featcache info` says more.

    \b
    Examples:
      featcache ls features
      featcache ls features --json
    """
    documents, is_damaged = describe_versions(path, on_disk=False)
    say_json({"versions": [{name: one[name] for name in _FIELDS} for one in documents]})
    say_table([*map(_row, documents)], to_the_right=range(1, 5))
    return DamagedError.exit_code if is_damaged else 0


def _row(document: dict[str, Any]) -> dict[str, str]:
    return {
        "version": document["path"].rstrip("/").rpartition("/")[2],
        "utterances": f"{document['utterances']:,}",
        "audio": hours(document["audio_seconds"]),
        "features": megabytes(document["bytes"]),
        "failed": f"{document['failed']:,}",
        "first run": (document["first_run"] or "-")[:10],
        "last run": (document["last_run"] or "-")[:10],
        "tags": ", ".join(tag["name"] for tag in document["tags"]) or "-",
        "what sets it apart": ", ".join(document["distinction"]),
    }
