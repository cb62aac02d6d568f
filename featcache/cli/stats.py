"""`featcache stats`: mean and variance of features, for `featcache.Cmvn`; and how codes are used."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import note, note_unfinished, print_json, progress_bar, read_manifest, refuse_output, say
from featcache.errors import ArgumentError, counted
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.loader.cache import Cache
    from featcache.stats import Stats, Usage

_SHOWN = 20


@click.command(short_help="Compute mean and variance of features, or how codes are used.")
@options.version_location
@options.manifest("Count only the utterances of this manifest.")
@options.manifest_format
@click.option(
    "--by", metavar="COLUMN", help="Also compute statistics for each value of this manifest column, such as speaker."
)
@options.output_file("Save the statistics to FILE, such as fbank80.cmvn.npz, for featcache.Cmvn.")
@options.force
@options.threads("[default: every core, at most 8]", default=options.all_cores)
@options.as_json()
def stats(
    path: Location,
    manifest: str | None,
    by: str | None,
    output: Path | None,
    force: bool,
    threads: int,
    as_json: bool,
    reading: dict[str, Any],
) -> None:
    """Compute the mean and variance of every dimension of a version's features in one pass: over all frames and, with
    --by, for each speaker or other group. For codes, report how many are used.

    The same utterances give the same bits, however they are spread over shards, or over the parts of a corpus, and with
    any number of threads.

    \b
    Examples:
      featcache stats features
      featcache stats features --manifest train.csv -o fbank80.cmvn.npz
      featcache stats features/fbank80 --manifest train.csv --by speaker -o speakers.cmvn.npz
    """
    from featcache.loader.cache import Cache
    from featcache.stats import Usage, moments, usage
    from featcache.version.selection import corpus_of, select_version

    if by is not None and manifest is None:
        raise ArgumentError("--by names a column of the manifest: give --manifest too")
    if output is not None:
        refuse_output(output, force)
    corpus = None if corpus_of(path) is None else _open_corpus(path)
    version = select_version(path) if corpus is None else corpus.version
    holds_codes = bool(version.info.spec.codebook_sizes)
    if holds_codes and (by is not None or output is not None):
        raise ArgumentError(f"{version.path}: holds codes, which have no mean: --by and -o are for features")
    if manifest is None and corpus is None:
        note_unfinished(version)
    wanted = read_manifest(manifest, reading, audio=False, carry=by is not None) if manifest is not None else None

    def compute() -> tuple[Cache, Usage | Stats]:
        cache = corpus or Cache(version)
        total = int(cache.lengths.sum()) if wanted is None and corpus is None else None
        with progress_bar(total, "frames", unit_scale=True) as bar:
            if holds_codes:
                return cache, usage(cache, wanted, threads=threads, report=bar.update)
            return cache, moments(cache, wanted, by=by, threads=threads, report=bar.update)

    cache, found = version.reading(compute) if corpus is None else compute()
    if isinstance(found, Usage):
        _show_usage(cache, found, as_json)
        return
    if output is not None:
        found.save(output, overwrite=force)
    _show(cache, found, output, as_json)


def _open_corpus(path: Location) -> Cache:
    """Open a corpus, and say what is unfinished in it."""
    import featcache

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        corpus = featcache.open(str(path))
    for warning in found:
        note(str(warning.message))
    return corpus


def _show(cache: Cache, found: Stats, output: Path | None, as_json: bool) -> None:
    if as_json:
        print_json(_document(cache, found, output))
        return
    _headline(cache, found)
    for what, values in (("means", found.mean), ("standard deviations", found.std)):
        say(f"  {what} of the dimensions from {values.min():.6g} to {values.max():.6g}")
    if still := found.still:
        shown = ", ".join(map(str, still[:_SHOWN])) + (" …" if len(still) > _SHOWN else "")
        say(f"  {len(still):,} of {found.mean.size:,} dimensions hardly vary: {shown}")
    if found.by is not None:
        few, many = int(found.group_frames.argmin()), int(found.group_frames.argmax())
        say(
            f"  {len(found.groups):,} groups by {found.by}, from {found.group_frames[few]:,} frames "
            f"({found.groups[few]}) to {found.group_frames[many]:,} ({found.groups[many]})"
        )
    if output is not None:
        say(f"  saved to {output}")
    else:
        say("  not saved; -o FILE saves them for featcache.Cmvn.load")


def _document(cache: Cache, found: Stats, output: Path | None) -> dict[str, Any]:
    groups = zip(found.groups, found.group_utterances.tolist(), found.group_frames.tolist(), strict=True)
    return {
        "path": str(cache.version.path),
        "output": None if output is None else str(output),
        "fingerprint": found.fingerprint,
        "utterances": found.utterances,
        "frames": found.frames,
        "mean": found.mean.tolist(),
        "std": found.std.tolist(),
        "still": found.still,
        "by": found.by,
        "groups": [{"name": name, "utterances": utterances, "frames": frames} for name, utterances, frames in groups],
    }


def _show_usage(cache: Cache, found: Usage, as_json: bool) -> None:
    sizes = [len(counts) for counts in found.counts]
    columns = zip(sizes, found.used, found.entropy, found.perplexity, strict=True)
    if as_json:
        keys = ("size", "used", "entropy", "perplexity")
        print_json(
            {
                "path": str(cache.version.path),
                "fingerprint": found.fingerprint,
                "utterances": found.utterances,
                "frames": found.frames,
                "codebooks": [dict(zip(keys, column, strict=True)) for column in columns],
            }
        )
        return
    _headline(cache, found)
    for number, (size, used, entropy, perplexity) in enumerate(columns):
        say(
            f"  codebook {number}: {used:,} of {size:,} codes are used; entropy {entropy:.2f} bits, "
            f"perplexity {perplexity:,.1f}"
        )


def _headline(cache: Cache, found: Stats | Usage) -> None:
    utterances, frames = counted(found.utterances, "utterance"), counted(found.frames, "frame")
    say(f"{cache.version.path}: {utterances}, {frames}: {cache.spec.units}")
