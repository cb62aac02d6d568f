"""`featcache show`: one utterance; `featcache why`: why a config is another version, and
what would be extracted; `featcache diff`: how two versions differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from featcache.cli import options
from featcache.cli.common import (
    Document,
    advise,
    cells,
    count_are,
    first_few,
    printing,
    say,
    say_json,
)
from featcache.cli.corpora import version_or_corpus
from featcache.cli.process import terminal_of_results
from featcache.cli.runs import say_failed_before
from featcache.errors import ArgumentError, MissingItemError, counted, listing, megabytes
from featcache.storage.location import Location

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from featcache.care.why import Cause
    from featcache.extraction.plan import VersionPlan
    from featcache.media.look import Shown
    from featcache.stats.diff import ValuesDiff, VersionDiff
    from featcache.version.version import Version

_SHOWN = 5

Described = TypeVar("Described")


@options.command()
@version_or_corpus
@options.utterance_argument
@options.written("--plot", "Draw the features, with axes, into this .png or .svg file.")
@options.written(
    "--wav",
    "Turn the features into sound: codes and latents with the model's own decoder, log mel "
    "spectrograms with Griffin-Lim.",
)
@options.force
def show(path: Location, utterance: str, plot: Path | None, wav: Path | None, force: bool) -> None:
    """Show one utterance: its place, its source, its values. A picture of the values follows,
    in colours on a terminal, otherwise made of characters.

    \b
    Examples:
      featcache show features LJ001-0001
      featcache show features/fbank80 LJ001-0001 --plot LJ001-0001.png
      featcache show features/encodec24k-6kbps LJ001-0001 --wav LJ001-0001.wav
    """
    from featcache.storage.files import write_file
    from featcache.version.selection import select_versions

    versions = select_versions(path)
    files = [file for file in (plot, wav) if file is not None]
    plotted = "--plot", plot, (".png", ".svg")
    heard = "--wav", wav, (".wav",)
    for name, given, suffixes in (plotted, heard):
        if given is not None and given.suffix not in suffixes:
            ends = " or ".join(suffixes)
            raise ArgumentError(f"{name}: {given} does not end in {ends}")
    if files and len(versions) > 1:
        names = listing(version.path.name for version in versions)
        raise ArgumentError(f"{path}: holds {names}: {files[0]} shows one of them: name it")
    for file in files:
        options.refuse_output(file, force)
    described, missing = _describe_in_each(versions, utterance, _describe_and_show)
    if missing is not None and not described:
        raise missing
    for document, shown in described:
        contents = {}
        if wav is not None:  # first, for it may be refused
            contents[wav] = shown.wav(document["audio_seconds"])
        if plot is not None:
            contents[plot] = shown.picture.encode(plot.suffix)
        for file, content in contents.items():
            write_file(file, content)
    say_json({"versions": [document for document, _ in described]})
    for number, (document, shown) in enumerate(described):
        if number:
            say()
        named = _named_values(shown)
        _say_utterance(document, named)
        if not (named or printing.as_json or printing.quiet):
            _print_picture(shown)
    for file in files:
        say(f"{file}: {megabytes(file.stat().st_size)}")


def _named_values(shown: Shown) -> Document:
    """Return the values of a vector by their names, with their units; empty for others."""
    from featcache.spec import MAIN

    units = shown.spec.named_units
    if not units:
        return {}
    values = shown.tracks[MAIN]
    return {
        name.replace("_", " "): f"{value:.4g} {unit}".rstrip()
        for (name, unit), value in zip(units.items(), values, strict=False)
    }


def _say_utterance(document: Document, named: Document) -> None:
    lines = _origin_lines(document)
    events = document.get("events", ())
    lines |= {"shape": document["shape"], "dtype": document["dtype"]}
    if not (events or named) and document["min"] is not None:
        lines |= {name: f"{document[name]:.6g}" for name in ("min", "mean", "max")}
    stored = document.get("quantized")
    if stored:
        lines["stored"] = f"{stored['dtype']}, off by at most {stored['largest_error']:.3g}"
    lines |= {name: cells(summary) for name, summary in document["side"].items()}
    lines |= named
    _say_lines(lines)
    for event in events:
        say(f"{event['start']:12.3f} {event['end']:12.3f}  {event['label'] or ''}")


def _print_picture(shown: Shown) -> None:
    from featcache.media.pictures import TERMINAL_ROWS

    columns, colours = terminal_of_results()
    picture = shown.draw(columns, TERMINAL_ROWS)
    for line in picture.as_lines(columns, colours):
        click.echo(line, color=colours > 0)  # its escapes are our own
    for line in picture.legend():
        say(line)


def _describe_in_each(
    versions: Iterable[Version], utterance: str, describe: Callable[[Version, str], Described]
) -> tuple[list[Described], MissingItemError | None]:
    documents: list[Described] = []
    missing: MissingItemError | None = None
    for version in versions:
        try:
            documents.append(version.reading(partial(describe, version, utterance)))
        except MissingItemError as error:
            missing = missing or error
    return documents, missing


def _describe_and_show(version: Version, utterance: str) -> tuple[Document, Shown]:
    import numpy as np

    from featcache.loader.cache import Cache
    from featcache.spec import LABELS, MAIN
    from featcache.version.join import describe_origin

    cache = Cache(version, check=True)
    shown = cache.show(utterance)
    item: Any = shown.tracks[MAIN]
    document = describe_origin(version, utterance)
    if cache.spec.axis.has_times:
        document["events"] = [event._asdict() for event in item]
        item = np.array([event[:2] for event in item]).reshape(-1, 2)
    document |= _summary(item)
    if cache.spec.is_quantized:
        scale, _ = cache.quantization([utterance])[0]
        largest = float(scale.max())
        document["quantized"] = {
            "dtype": cache.spec.stored_dtype,
            "smallest_scale": float(scale.min()),
            "largest_scale": largest,
            "largest_error": largest / 2,
        }
    document["side"] = {
        side.name: _summary(shown.tracks[side.name])
        for side in cache.spec.outputs
        if not (cache.spec.has_labels and side.name == LABELS)
    }
    return document, shown


def _origin_lines(document: Document) -> Document:
    """Return the document of `describe_origin` for people, by names."""
    lines = {name: document[name] for name in ("version", "shard", "id", "path")}
    if document["start"] is not None:
        lines["start"] = f"{document['start']:.3f} s"
    if document["audio_seconds"]:  # imported vectors come without it
        lines["duration"] = f"{document['audio_seconds']:.3f} s"
    lines["channel"] = document["channel"]
    lines["source rate"] = f"{document['source_rate']} Hz"
    file = counted(document["size"], "byte")
    seconds = document["mtime_ns"] // 10**9
    if document["mtime_ns"] > 0:  # else it follows from an ETag, or the server sent no time
        file += f", modified {datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if document["by_ffmpeg"]:
        file += ", decoded by FFmpeg"
    if document["decoder"] == 1:
        file += " as older versions of featcache did"
    lines["source file"] = file
    lines["run"] = document["run"]
    if document["run"] is not None and document["host"]:
        lines["run"] += f", on {document['host']}"
    if document["manifest"] is not None:
        lines["manifest"] = f"{document['manifest']}, relative to {document['root']}"
    lines["from"] = document["from"]
    lines["made by"] = cells(document["made_by"])
    if document["superseded"]:
        lines["replaces"] = f"older features in {listing(document['superseded'])}"
    return lines


def _say_lines(lines: Document) -> None:
    for name, value in lines.items():
        if value is not None:
            say(f"{name:12} {value}")


def _summary(array: NDArray[Any]) -> Document:
    """Return the shape, dtype and range of an array; the range of an empty array is None."""
    summary: Document = {"shape": list(array.shape), "dtype": array.dtype.name}
    if not array.size:
        return summary | dict.fromkeys(("min", "mean", "max"))
    values = array.astype("float64")
    least, mean, most = float(values.min()), float(values.mean()), float(values.max())
    return summary | {"min": least, "mean": mean, "max": most}


@options.command()
@version_or_corpus
@click.argument("manifest", type=options.TEXT, required=False)
@options.config("config", help=options.CONFIGS, default="fbank80", show_default=True)
@click.option(
    "--id",
    "utterance",
    metavar="ID",
    help="Print where this utterance came from.",
    shell_complete=options.complete_ids,
)
@options.root()
@options.manifest_and_config_keys
@options.retry_failed
@options.check_sources
@options.trust_remote_code
def why(
    path: Location, manifest: str | None, config: str, utterance: str | None, **chosen: Any
) -> None:
    """Explain why a config is another version. With a MANIFEST, also print which utterances
    `featcache extract` would extract, and why. With --id, print where one utterance came
    from. Nothing is written.

    \b
    Examples:
      featcache why features -c my-config.yaml
      featcache why features --set params.low_freq=0
      featcache why features train.csv -c fbank80 --id LJ001-0001
    """
    from featcache.care.why import compare_versions, find_causes
    from featcache.config import load_config
    from featcache.extraction.options import Options
    from featcache.extraction.plan import plan_extraction
    from featcache.manifest.label_files import needs_columns
    from featcache.version.selection import select_versions

    reading = {name: chosen.pop(name) for name in options.READING}
    loaded = load_config(config, options.take_keys(reading))
    fingerprint = loaded.fingerprint()
    if manifest is None:
        options.refuse_unused(reading["values"], loaded.keys)
    compared = compare_versions(loaded, fingerprint, select_versions(path))
    versions = [version for version, _ in compared]
    document: Document = {
        "name": loaded.name,
        "fingerprint": fingerprint,
        "versions": [
            {
                "path": str(version.path),
                "same_fingerprint": version.info.fingerprint == fingerprint,
                "differences": differences.deciding,
                "other_differences": differences.others,
            }
            for version, differences in compared
        ],
    }
    plan, causes = None, []
    if manifest is not None:
        carry = needs_columns(loaded.resolved())
        read = options.read_manifest(manifest, reading, loaded.keys, carry=carry)
        run_options = Options(device="cpu", replace=True, **chosen)
        cache = versions[0].path.parent
        plan = plan_extraction(read, [loaded], cache, run_options).versions[0]
        causes = find_causes(plan)
        document["plan"] = _plan_document(plan, causes)
    if utterance is not None:
        same = [version for version in versions if version.info.fingerprint == fingerprint]
        document["utterance"] = _trace(utterance, same or versions, plan, causes)
    _print_why(document, causes)
    say_json(document)


def _plan_document(plan: VersionPlan, causes: list[Cause]) -> Document:
    from featcache.care.why import refusal

    document: Document = {
        "path": str(plan.path),
        "is_new": plan.is_new,
        "utterances": len(plan.manifest),
        "present": int(plan.rows.present.sum()),
        "missing": plan.num_missing,
        "failed_before": plan.failed_before,
        "refused": refusal(plan) or None,
    }
    if printing.as_json:
        document["causes"] = [
            {
                "why": cause.why,
                "again": cause.again,
                "utterances": len(cause.ids),
                "example": cause.example,
                "ids": list(cause.ids),
            }
            for cause in causes
        ]
    return document


def _trace(
    utterance: str, versions: list[Version], plan: VersionPlan | None, causes: list[Cause]
) -> Document:
    """Return an utterance's row in the plan's manifest, and its origin in each version."""
    from featcache.version.join import describe_origin

    origins, missing = _describe_in_each(versions, utterance, describe_origin)
    document: Document = {"id": utterance, "row": None, "status": None, "versions": origins}
    row = None
    if plan is not None:
        row = plan.find(utterance)
        if row is not None:
            document["row"] = plan.manifest[row].row()
            document["status"] = _status(row, plan, causes)
    if missing is not None and row is None and not origins:
        raise missing
    return document | {"message": None if origins else str(missing)}


def _status(row: int, plan: VersionPlan, causes: list[Cause]) -> str:
    for cause in causes:
        if row in cause.rows:
            return f"to extract: {cause.why}"
    if plan.rows.present[row]:
        return "there"
    return "failed before, and is not tried again"


def _print_why(document: Document, causes: list[Cause]) -> None:
    if not document["versions"][0]["same_fingerprint"]:
        say(f"{document['name']}-{document['fingerprint'][:12]}: there is no such version")
    for version in document["versions"]:
        relation = "the version of this config"
        if not version["same_fingerprint"]:
            relation = f"another version: {', '.join(version['differences']) or 'unknown'}"
        for line in version["other_differences"]:
            relation += f"; {line}, which decides no values"
        say(f"{version['path']}: {relation}")
    if "plan" in document:
        _print_plan(document["plan"], causes)
    if "utterance" in document:
        trace = document["utterance"]
        say()
        row = trace["row"] and cells(trace["row"])
        _say_lines({"row": row, "status": trace["status"], "missing": trace["message"]})
        for origin in trace["versions"]:
            _say_lines(_origin_lines(origin))


def _print_plan(plan: Document, causes: list[Cause]) -> None:
    say(
        f"{counted(plan['utterances'], 'utterance')}: {plan['present']:,} there, "
        f"{plan['missing']:,} to extract"
    )
    for cause in causes:
        ids = cause.ids[: _SHOWN + 1]
        if cause.example:
            ids[0] += f" ({cause.example})"
        again = " again" if cause.again else ""
        say(f"  {len(cause.ids):,}{again}: {cause.why}: {first_few(ids, _SHOWN)}")
    say_failed_before(plan["failed_before"])
    if plan["refused"]:
        advise(f"featcache extract refuses this manifest: {plan['refused']}")


@options.command()
@click.argument("first", metavar="CACHE/VERSION", type=options.LOCATION)
@click.argument("second", metavar="CACHE/VERSION", type=options.LOCATION)
@options.number(
    "--values",
    "Also compare the values of N random utterances that both made from the same rows.",
    0,
)
def diff(first: Location, second: Location, values: int) -> None:
    """Compare two versions: configs, utterances, values. The exit code is 0 even if they differ.

    \b
    Examples:
      featcache diff features/fbank80-2a8b3903b266 features/fbank80-6f0612afda6c
      featcache diff features/fbank80 /backup/features/fbank80 --values 1000
    """
    from featcache.loader.cache import Cache
    from featcache.stats.diff import diff as compare
    from featcache.version.selection import select_version

    result = compare(Cache(select_version(first)), Cache(select_version(second)), values)
    if printing.as_json:
        lists = {name: list(getattr(result, name)) for name in ("gone", "added", "changed")}
        say_json({**vars(result), **lists, "values": result.values and asdict(result.values)})
    for line in describe_diff(result, first, second):
        say(line)
    if result.values is not None:
        say(f"values: {_describe_values(result.values)}")
        for name, track in result.values.tracks.items():
            described = "in one version only, or of another form"
            if track is not None:
                described = _describe_values(track)
            say(f"track {name}: {described}")


def describe_diff(result: VersionDiff, first: Location, second: Location) -> list[str]:
    """Return lines about how the configs and utterances of two versions differ."""
    differing = result.config
    if result.same_fingerprint:
        differing = ["the same"]
    elif not differing:
        differing = ["the same keys, but other weights, or another revision of the extractor"]
    lines = [f"config: {line}" for line in differing]
    in_both = f"{count_are(result.common, 'utterance')} in both"
    if len(result.changed):
        in_both += f", {len(result.changed):,} of them from other rows: "
        in_both += first_few(result.changed, _SHOWN)
    lines.append(in_both)
    for where, ids in ((first, result.gone), (second, result.added)):
        if len(ids):
            lines.append(f"{len(ids):,} only in {where}: {first_few(ids, _SHOWN)}")
    return lines


def _describe_values(values: ValuesDiff) -> str:
    if values.utterances == 0:
        return "no utterance is in both, of the same row"
    parts = [f"{values.identical:,} of {counted(values.utterances, 'utterance')} bit-identical"]
    if values.other_lengths:
        parts.append(f"{values.other_lengths:,} with other numbers of frames, or other labels")
    if values.codes:
        parts.append(f"{values.differing:,} of {values.codes:,} codes differ")
    elif values.worst is not None:
        parts.append(f"largest difference {values.largest:.3g}")
    if values.worst is not None:
        parts.append(f"most in {values.worst}")
    return ", ".join(parts)
