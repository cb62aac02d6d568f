"""`featcache stats`: mean and variance of features, and how codes are used; `featcache
fit-kmeans`: centroids; `featcache vad`: a manifest of the segments of speech."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import (
    Document,
    advise,
    first_few,
    note,
    note_unfinished,
    open_cache,
    say,
    say_json,
)
from featcache.cli.progress import Steps
from featcache.errors import ArgumentError, FeatcacheError, counted, hours, percent
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.spec import FeatureSpec
    from featcache.stats import Stats, Usage

_SHOWN = 20
_SHOWN_VALUES = 8


@options.command()
@options.version_location
@options.manifest(help="Use only the utterances of this manifest.")
@options.manifest_format
@click.option(
    "--by",
    metavar="COLUMN",
    help="Also compute them for each value of this column of --manifest, such as speaker.",
)
@options.output_file(
    help="Also save the statistics to this file, such as fbank80.cmvn.npz, for featcache.Cmvn."
)
@options.force
@options.reading_threads
def stats(
    path: Location,
    manifest: str | None,
    by: str | None,
    output: Path | None,
    force: bool,
    threads: int,
    **reading: Any,
) -> int:
    """Compute mean and variance of features, or how codes are used. With --by, also for each
    speaker or other group. The same utterances always give the same bits; shards, parts and
    threads do not matter.

    Exits with 1 if parts of a corpus are missing.

    \b
    Examples:
      featcache stats features
      featcache stats features/fbank80 --manifest train.csv --by speaker -o speakers.cmvn.npz
      featcache stats features/speaker --manifest train.csv --by speaker --json
    """
    from featcache.loader.cache import Cache
    from featcache.loader.corpus import Corpus
    from featcache.stats import Usage, moments, usage
    from featcache.version.corpus import read_parts

    if output is not None:
        options.refuse_output(output, force)
    opened, lacking = open_cache(path)
    version = opened.version
    holds_codes = bool(version.info.spec.codebook_sizes)
    if holds_codes and (by is not None or output is not None):
        raise ArgumentError(
            f"{version.path}: holds codes, which have no mean: --by and -o are for features"
        )
    wanted = None
    if manifest:
        wanted = options.read_manifest(manifest, reading, audio=False, carry=by is not None)
    is_partial = False
    if isinstance(opened, Corpus):
        is_partial = len(opened.parts) < len(read_parts(version.path.parent))
    elif wanted is not None:
        lacking = []
    for message in lacking:
        note(message)

    is_ragged = version.info.spec.axis.is_ragged
    unit = "frames" if is_ragged else "utterances"

    def compute(cache: Cache) -> Usage | Stats:
        total = None
        if wanted is None:
            total = int(cache.lengths.sum())
        with Steps(total, unit) as bar:
            if holds_codes:
                return usage(cache, wanted, threads=threads, report=bar.update)
            return moments(cache, wanted, by=by, threads=threads, report=bar.update)

    if isinstance(opened, Corpus):
        computed = compute(opened)
    else:
        computed = version.reading(lambda: compute(Cache(version)))
    if output is not None and not isinstance(computed, Usage):
        computed.save(output, overwrite=force)
    counts = [counted(computed.utterances, "utterance")]
    if is_ragged:
        counts.append(counted(computed.frames, "frame"))
    say(f"{version.path}: {', '.join(counts)}: {version.info.spec.units}")
    if isinstance(computed, Usage):
        document = _say_codes(computed)
    else:
        document = _say_features(computed, output, version.info.spec)
    say_json({"path": str(version.path), **document})
    return int(is_partial)


def _say_features(stats: Stats, output: Path | None, spec: FeatureSpec) -> Document:
    """Print mean and variance. Returns them as JSON, with the mean of each group if an
    utterance has one vector."""
    is_ragged = spec.axis.is_ragged
    unit = "frame" if is_ragged else "utterance"
    sizes = (stats.group_frames if is_ragged else stats.group_utterances).tolist()
    named = spec.named_units.items()
    for (name, of), mean, std in zip(named, stats.mean.flat, stats.std.flat, strict=False):
        say(f"  {name}: mean {mean:.4g}, standard deviation {std:.4g} {of}".rstrip())
    if not named:
        for name, values in (("means", stats.mean), ("standard deviations", stats.std)):
            say(f"  {name} of the dimensions from {values.min():.6g} to {values.max():.6g}")
    if stats.still and not named:
        still = first_few(stats.still, _SHOWN)
        say(f"  {len(stats.still):,} of {stats.mean.size:,} dimensions hardly vary: {still}")
    if stats.by is not None:
        ends = [
            f"{counted(count, unit)} ({stats.groups[sizes.index(count)]})"
            for count in (min(sizes), max(sizes))
        ]
        span = f"from {' to '.join(ends)}"
        if min(sizes) == max(sizes):
            span = f"each of {counted(sizes[0], unit)}"
        say(f"  {counted(len(sizes), 'group')} by {stats.by}, {span}")
        if not is_ragged:
            for name, size, mean in zip(stats.groups, sizes, stats.group_mean, strict=True):
                shown = [f"{value:.4g}" for value in mean.ravel().tolist()]
                say(f"    {name}: {counted(size, unit)}, mean {first_few(shown, _SHOWN_VALUES)}")
    saved = "not saved; -o FILE saves them for featcache.Cmvn.load"
    if output is not None:
        saved = f"saved to {output}"
    say(f"  {saved}")
    groups = [
        {
            "name": name,
            "utterances": int(stats.group_utterances[number]),
            "frames": int(stats.group_frames[number]),
            "mean": None if is_ragged else stats.group_mean[number].tolist(),
        }
        for number, name in enumerate(stats.groups)
    ]
    return {
        "output": output and str(output),
        "fingerprint": stats.fingerprint,
        "utterances": stats.utterances,
        "frames": stats.frames,
        "mean": stats.mean.tolist(),
        "std": stats.std.tolist(),
        "still": stats.still,
        "by": stats.by,
        "groups": groups,
    }


def _say_codes(usage: Usage) -> Document:
    codebooks = usage.by_codebook()
    for number, book in enumerate(codebooks):
        used = "{used:,} of {size:,} codes are used".format_map(book)
        shares = "entropy {entropy:.2f} bits, perplexity {perplexity:,.1f}".format_map(book)
        say(f"  codebook {number}: {used}; {shares}")
    return {
        "fingerprint": usage.fingerprint,
        "utterances": usage.utterances,
        "frames": usage.frames,
        "codebooks": codebooks,
    }


@options.command("fit-kmeans")
@options.version_location
@click.option(
    "-k",
    "k",
    type=options.WholeNumber(min=1),
    required=True,
    metavar="K",
    help="The number of units (centroids).",
)
@options.output_file(
    help="The file of centroids to write, such as units.safetensors.", required=True
)
@options.force
@options.number("--seed", "The seed of all random choices.", 0)
@options.number(
    "--frames",
    "Fit to N random frames, with 4 bytes of memory for each value.  [default: 1000 for each unit]",
)
@options.device()
@options.reading_threads
def fit_kmeans(
    path: Location,
    k: int,
    output: Path,
    force: bool,
    seed: int,
    frames: int | None,
    device: str | None,
    threads: int,
) -> None:
    """Fit k-means to a version's frames, for the extractor `units`. On one device, the same
    seed gives the same centroids.

    \b
    Example:
      featcache fit-kmeans features/hubert-base-l6 -k 2000 -o units.safetensors --frames 4000000
    """
    from time import perf_counter

    from featcache.device import Device
    from featcache.stats.kmeans import fit_version
    from featcache.storage.files import write_file
    from featcache.version.selection import select_version

    options.refuse_output(output, force)
    version = select_version(path)
    note_unfinished(version)
    chosen_device = Device(device, threads)
    chosen_device.configure_torch()
    started = perf_counter()
    codebook, fit = fit_version(
        version,
        k,
        seed=seed,
        frames=frames,
        device=chosen_device.torch_device,
        threads=1 if chosen_device.is_cuda else chosen_device.threads,
    )
    write_file(output, codebook.to_bytes())
    document = {
        "path": str(version.path),
        "output": str(output),
        "fingerprint": codebook.fingerprint,
        "k": k,
        "dimensions": codebook.centroids.shape[1],
        "frames": int(fit.sizes.sum()),
        "seed": seed,
        "inertia": fit.inertia,
        "smallest": int(fit.sizes.min()),
        "largest": int(fit.sizes.max()),
        "empty": int((fit.sizes == 0).sum()),
        "iterations": fit.iterations,
        "elapsed_seconds": round(perf_counter() - started, 3),
        "device": chosen_device.label,
    }
    say_json(document)
    say("{output}: {k:,} units of {path}, {dimensions:,} dimensions".format_map(document))
    say(
        "  inertia {inertia:.6g} per frame, over {frames:,} frames; {iterations} iterations in "
        "{elapsed_seconds:.1f} s on {device}".format_map(document)
    )
    clusters = "{smallest:,} to {largest:,}; {empty:,} are empty".format_map(document)
    say(f"  frames in a cluster: {clusters}")
    if document["empty"]:
        advise("there are fewer distinct frames than units: choose a smaller -k")


def _seconds(name: str, default: float | None, meaning: str) -> options.Decorator:
    return click.option(
        name,
        type=options.Number(min=0),
        default=default,
        show_default=default is not None,
        metavar="SECONDS",
        help=meaning,
    )


@options.command()
@options.version_location
@options.output_file(help="The manifest to write: .csv, .jsonl or .parquet.", required=True)
@click.option(
    "--threshold",
    type=options.Number(0, 1, min_open=True),
    default=0.5,
    show_default=True,
    metavar="P",
    help="Speech begins at this probability. It ends if the probability is 0.15 lower.",
)
@_seconds("--min-speech", 0.25, "Leave out shorter segments of speech.")
@_seconds("--min-silence", 0.1, "Shorter pauses do not end a segment.")
@_seconds("--pad", 0.03, "Make each segment longer by this time at both ends.")
@_seconds(
    "--max-speech",
    None,
    "Cut longer segments, at the longest pause if they have one.  [default: no limit]",
)
@options.force
def vad(
    path: Location,
    output: Path,
    threshold: float,
    min_speech: float,
    min_silence: float,
    pad: float,
    max_speech: float | None,
    force: bool,
) -> None:
    """Write a manifest of speech segments. They come from the probabilities of speech in a
    version such as vad-silero, by the rule and defaults of Silero VAD. A row has the path,
    start, duration and channel of a segment, the id UTTERANCE-NUMBER, and the column
    `utterance`.

    \b
    Examples:
      featcache vad features/vad-silero -o segments.csv
      featcache vad features/vad-silero -o segments.csv --threshold 0.7 --max-speech 20
    """
    from featcache.loader.cache import Cache
    from featcache.manifest.read import manifest_of
    from featcache.manifest.write import WRITTEN, format_to_write, packed
    from featcache.stats.speech import SpeechRule, find_speech
    from featcache.storage.files import write_file
    from featcache.version.selection import select_version

    options.refuse_output(output, force)
    kind = format_to_write(output, None, "end it in .csv, .jsonl or .parquet")
    longest = math.inf if max_speech is None else max_speech
    rule = SpeechRule(threshold, min_speech, min_silence, pad, longest)
    version = select_version(path)
    note_unfinished(version)
    cache = Cache(version)
    rows, root = version.reading(lambda: find_speech(cache, rule))
    if not rows:
        what = f"no segment of speech in {counted(len(cache), 'utterance')}"
        raise FeatcacheError(f"{version.path}: {what}: nothing is written")
    write_file(output, packed(WRITTEN[kind](manifest_of(rows, root=root)), output))
    seconds = cache.spec.axis.seconds(int(cache.lengths.sum()))
    speech_seconds = sum(row["duration"] for row in rows)
    with_speech = len({row["utterance"] for row in rows})
    say_json(
        {
            "path": str(version.path),
            "output": str(output),
            "utterances": len(cache),
            "with_speech": with_speech,
            "segments": len(rows),
            "audio_seconds": seconds,
            "speech_seconds": speech_seconds,
        }
    )
    counts = f"{counted(len(rows), 'segment')} of {counted(with_speech, 'utterance')}"
    share = percent(speech_seconds / seconds)
    say(f"{output}: {counts}, {hours(speech_seconds)}: {share} of the audio")
    if with_speech < len(cache):
        say(f"  {counted(len(cache) - with_speech, 'utterance')} without speech")
    if root and not all(os.path.isabs(row["path"]) for row in rows):
        note(f"{output}: relative paths are relative to {root}: give --root {root}")
