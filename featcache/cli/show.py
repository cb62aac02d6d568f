"""`featcache show`: one utterance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import print_json, say
from featcache.cli.corpora import version_or_corpus
from featcache.errors import MissingItemError, counted, listing
from featcache.storage.location import Location

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from featcache.loader.cache import Cache
    from featcache.version.version import Version


@click.command(short_help="Show one utterance: its place, its source, its values.")
@version_or_corpus
@click.argument("utterance", metavar="ID")
@options.as_json()
def show(path: Location, utterance: str, as_json: bool) -> None:
    """Show one utterance in each version that has it: its shard, its audio file, the run and the libraries that
    extracted it, and a summary of its values.

    With --json, start, duration (seconds) and channel are those of the manifest's row, and null where it gave none;
    audio_seconds is how much audio was extracted, and num_samples the same at the config's rate; source_rate (Hz), size
    (bytes) and mtime_ns are those of the audio file.

    \b
    Example:
      featcache show features LJ001-0001
    """
    from featcache.version.selection import select_versions

    documents, missing = describe_in_each(select_versions(path), utterance, _document)
    if missing is not None and not documents:
        raise missing
    if as_json:
        print_json({"versions": documents})
        return
    for number, document in enumerate(documents):
        if number:
            say()
        _print(document)


def describe_in_each(
    versions: Iterable[Version], utterance: str, describe: Callable[[Version, str], dict[str, Any]]
) -> tuple[list[dict[str, Any]], MissingItemError | None]:
    """What each version that has an utterance has of it; and the first error of those that do not have it."""
    documents: list[dict[str, Any]] = []
    missing: MissingItemError | None = None
    for version in versions:
        try:
            documents.append(version.reading(partial(describe, version, utterance)))
        except MissingItemError as error:
            missing = missing or error
    return documents, missing


def _document(version: Version, utterance: str) -> dict[str, Any]:
    """What a version has of an utterance."""
    from featcache.loader.cache import Cache
    from featcache.version.join import describe_origin

    cache = Cache(version, check=True)
    features = cache[utterance]
    sides = [spec.name for spec in cache.spec.outputs]
    return {
        **describe_origin(version, utterance),
        **_summary(features),
        **({"quantized": _quantized(cache, utterance)} if cache.spec.is_quantized else {}),
        "side": {name: _summary(cache.side(name, utterance)) for name in sides},
    }


def origin_lines(document: dict[str, Any]) -> dict[str, Any]:
    """What `describe_origin` tells, for people: a value for each name."""
    lines = {name: document[name] for name in ("version", "shard", "id", "path")}
    if document["start"] is not None:
        lines["start"] = f"{document['start']:.3f} s"
    lines["duration"] = f"{document['audio_seconds']:.3f} s"
    if document["channel"] is not None:
        lines["channel"] = document["channel"]
    lines["source rate"] = f"{document['source_rate']} Hz"
    lines["source file"] = counted(document["size"], "byte")
    if document["mtime_ns"] > 0:  # else it follows from an ETag, or the server told no time
        modified = datetime.fromtimestamp(document["mtime_ns"] // 10**9, UTC)
        lines["source file"] += f", modified {modified:%Y-%m-%d %H:%M:%S} UTC"
    if document["by_ffmpeg"]:
        lines["source file"] += ", decoded by FFmpeg"
    if document["run"] is not None:
        lines["run"] = document["run"] + (f", on {document['host']}" if document["host"] else "")
    if document["manifest"] is not None:
        lines["manifest"] = f"{document['manifest']}, relative to {document['root']}"
    if document["from"] is not None:
        lines["from"] = document["from"]
    lines["made by"] = ", ".join(f"{name} {value}" for name, value in document["made_by"].items() if value is not None)
    if document["superseded"]:
        lines["replaces"] = f"older features in {listing(document['superseded'])}"
    return lines


def say_lines(lines: dict[str, Any]) -> None:
    """Print a name and a value on each line."""
    for name, value in lines.items():
        say(f"{name:12} {value}")


def _print(document: dict[str, Any]) -> None:
    """Print an utterance of one version, for people."""
    lines = origin_lines(document)
    lines |= {name: document[name] for name in ("shape", "dtype", "min", "mean", "max") if document[name] is not None}
    if quantized := document.get("quantized"):
        lines["stored"] = f"{quantized['dtype']}, off by at most {quantized['largest_error']:.3g}"
    for name, summary in document["side"].items():
        lines[name] = ", ".join(f"{key} {value}" for key, value in summary.items() if value is not None)
    say_lines(lines)


def _quantized(cache: Cache, utterance: str) -> dict[str, Any]:
    """How an utterance is quantised: dtype of the levels, smallest and largest scale, largest error of a value."""
    scale, _ = cache.quantization([utterance])[0]
    return {
        "dtype": cache.spec.stored_dtype,
        "smallest_scale": float(scale.min()),
        "largest_scale": float(scale.max()),
        "largest_error": float(scale.max()) / 2,
    }


def _summary(array: NDArray[Any]) -> dict[str, Any]:
    """The shape, dtype and range of an array; the range of an empty array is None."""
    import numpy as np

    values = array.astype(np.float64)
    numbers = (values.min(), values.mean(), values.max()) if values.size else (None, None, None)
    least, mean, most = (None if number is None else float(number) for number in numbers)
    return {"shape": list(array.shape), "dtype": array.dtype.name, "min": least, "mean": mean, "max": most}
