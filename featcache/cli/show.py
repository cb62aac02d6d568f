"""`featcache show`: one utterance; `featcache why`: why a config is another version, and
what would be extracted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import advise, first_few, printing, say, say_json
from featcache.cli.corpora import version_or_corpus
from featcache.cli.runs import not_tried_again
from featcache.errors import MissingItemError, counted, listing
from featcache.storage.location import Location

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from featcache.care.why import Cause
    from featcache.extraction.version_plan import VersionPlan
    from featcache.version.version import Version

_SHOWN = 5


@options.command(short_help="Show one utterance: its place, its source, its values.")
@version_or_corpus
@click.argument("utterance", metavar="ID")
@options.as_json()
def show(path: Location, utterance: str) -> None:
    """Show one utterance in each version that has it: its shard, its audio file, the run
    and the libraries that extracted it, and a summary of its values.

    With --json, start, duration (seconds) and channel are those of the manifest's row,
    and null where it gave none; audio_seconds is how much audio was extracted, and
    num_samples the same at the config's rate; source_rate (Hz), size (bytes) and mtime_ns
    are those of the audio file. Of events, every one is printed: start and end in
    seconds, and its label.

    \b
    Example:
      featcache show features LJ001-0001
    """
    from featcache.version.selection import select_versions

    documents, missing = _describe_in_each(select_versions(path), utterance, _document)
    if missing is not None and not documents:
        raise missing
    say_json({"versions": documents})
    for number, document in enumerate(documents):
        if number:
            say()
        lines = _origin_lines(document)
        events = document.get("events")
        names = ("shape", "dtype", "min", "mean", "max")
        lines |= {name: document[name] for name in names[: 2 if events else None]}
        quantized = document.get("quantized")
        if quantized:
            lines["stored"] = (
                f"{quantized['dtype']}, off by at most {quantized['largest_error']:.3g}"
            )
        lines |= {name: _cells(summary) for name, summary in document["side"].items()}
        _say_lines(lines)
        for event in events or ():
            say(f"{event['start']:12.3f} {event['end']:12.3f}  {event['label'] or ''}")


def _describe_in_each(
    versions: Iterable[Version], utterance: str, describe: Callable[[Version, str], dict[str, Any]]
) -> tuple[list[dict[str, Any]], MissingItemError | None]:
    documents: list[dict[str, Any]] = []
    missing: MissingItemError | None = None
    for version in versions:
        try:
            documents.append(version.reading(partial(describe, version, utterance)))
        except MissingItemError as error:
            missing = missing or error
    return documents, missing


def _document(version: Version, utterance: str) -> dict[str, Any]:
    import numpy as np

    from featcache.loader.cache import Cache
    from featcache.spec import LABELS
    from featcache.version.join import describe_origin

    cache = Cache(version, check=True)
    item: Any = cache[utterance]
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
        side.name: _summary(cache.side(side.name, utterance))
        for side in cache.spec.outputs
        if not (cache.spec.has_labels and side.name == LABELS)
    }
    return document


def _origin_lines(document: dict[str, Any]) -> dict[str, Any]:
    """Return the document of `describe_origin` for people: a value for each name, None
    where there is none."""
    lines = {name: document[name] for name in ("version", "shard", "id", "path")}
    if document["start"] is not None:
        lines["start"] = f"{document['start']:.3f} s"
    lines["duration"] = f"{document['audio_seconds']:.3f} s"
    lines["channel"] = document["channel"]
    lines["source rate"] = f"{document['source_rate']} Hz"
    lines["source file"] = _source_file(document)
    lines["run"] = document["run"]
    if document["run"] is not None and document["host"]:
        lines["run"] += f", on {document['host']}"
    if document["manifest"] is not None:
        lines["manifest"] = f"{document['manifest']}, relative to {document['root']}"
    lines["from"] = document["from"]
    lines["made by"] = _cells(document["made_by"])
    if document["superseded"]:
        lines["replaces"] = f"older features in {listing(document['superseded'])}"
    return lines


def _source_file(document: dict[str, Any]) -> str:
    file = counted(document["size"], "byte")
    seconds = document["mtime_ns"] // 10**9
    if document["mtime_ns"] > 0:  # else it follows from an ETag, or the server sent no time
        file += f", modified {datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if document["by_ffmpeg"]:
        file += ", decoded by FFmpeg"
    if document["decoder"] == 1:
        file += " as older versions of featcache did"
    return file


def _cells(values: dict[str, Any]) -> str:
    """Return `name value, name value` for people, without values that are None."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _say_lines(lines: dict[str, Any]) -> None:
    for name, value in lines.items():
        if value is not None:
            say(f"{name:12} {value}")


def _summary(array: NDArray[Any]) -> dict[str, Any]:
    """Return the shape, dtype and range of an array; the range of an empty array is None."""
    import numpy as np

    summary: dict[str, Any] = {"shape": list(array.shape), "dtype": array.dtype.name}
    if not array.size:
        return summary | dict.fromkeys(("min", "mean", "max"))
    values = array.astype(np.float64)
    least, mean, most = float(values.min()), float(values.mean()), float(values.max())
    return summary | {"min": least, "mean": mean, "max": most}


@options.command(
    short_help="Say why a config is another version, and why utterances would be extracted."
)
@version_or_corpus
@click.argument("manifest", type=options.TEXT, required=False)
@options.config(
    "config", help="A YAML file, or a packaged config.", default="fbank80", show_default=True
)
@click.option(
    "--id", "utterance", metavar="ID", help="Say where this utterance's features came from."
)
@options.root()
@options.manifest_and_config_keys
@options.flag("--retry-failed", "As `featcache extract` would do it with this option.")
@options.flag("--check-sources", "As `featcache extract` would do it with this option.")
@options.trust_remote_code
@options.as_json("Print the result as one JSON document, with all ids.")
def why(
    path: Location, manifest: str | None, config: str, utterance: str | None, **chosen: Any
) -> None:
    """Say how CONFIG differs from the versions in the cache: in which keys, in the
    extractor's revision, or in the content of its weights. With a MANIFEST, say which
    utterances `featcache extract` would extract, and why: they are new, their rows or
    files have changed, or they have failed before. Nothing is extracted or written.

    With --id, say where one utterance came from: its row, audio file, shard, run and
    library versions.

    \b
    Examples:
      featcache why features -c my-config.yaml
      featcache why features --set params.low_freq=0
      featcache why features train.csv -c fbank80
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
    document: dict[str, Any] = {
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
        # As `extract` would do it, and with --replace.
        run_options = Options(device="cpu", replace=True, **chosen)
        plan = plan_extraction(read, [loaded], versions[0].path.parent, run_options).versions[0]
        causes = find_causes(plan)
        document["plan"] = _plan_document(plan, causes)
    if utterance is not None:
        same = [version for version in versions if version.info.fingerprint == fingerprint]
        document["utterance"] = _trace(utterance, same or versions, plan, causes)
    _print_why(document, causes)
    say_json(document)


def _plan_document(plan: VersionPlan, causes: list[Cause]) -> dict[str, Any]:
    from featcache.care.why import refusal

    document: dict[str, Any] = {
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
) -> dict[str, Any]:
    """Return an utterance's row in the plan's manifest, and its origin in each version."""
    from featcache.version.join import describe_origin

    origins, missing = _describe_in_each(versions, utterance, describe_origin)
    row = None
    if plan is not None:
        row = plan.find(utterance)
    if missing is not None and row is None and not origins:
        raise missing
    document: dict[str, Any] = {"id": utterance, "row": None, "status": None, "versions": origins}
    if plan is not None and row is not None:
        document["row"] = plan.manifest[row].row()
        document["status"] = _status(row, plan, causes)
    return document | {"message": None if origins else str(missing)}


def _status(row: int, plan: VersionPlan, causes: list[Cause]) -> str:
    for cause in causes:
        if row in cause.rows and cause.why:
            return f"to extract: {cause.why}"
    if plan.rows.present[row]:
        return "there"
    return "failed before, and is not tried again"


def _print_why(document: dict[str, Any], causes: list[Cause]) -> None:
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
        row = trace["row"] and _cells(trace["row"])
        _say_lines({"row": row, "status": trace["status"], "missing": trace["message"]})
        for origin in trace["versions"]:
            _say_lines(_origin_lines(origin))


def _print_plan(plan: dict[str, Any], causes: list[Cause]) -> None:
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
    if plan["failed_before"]:
        say(f"  {not_tried_again(plan['failed_before'])}")
    if plan["refused"]:
        advise(f"featcache extract refuses this manifest: {plan['refused']}")
