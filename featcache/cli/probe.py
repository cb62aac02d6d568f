"""`featcache probe`: how batching and precision change values, and how fast they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import describe_fastest, note, say, say_json, say_table
from featcache.errors import counted, percent
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.probe import Chunks, Measured, Probe


_NEAR = 16
"""The number of frames that are the beginning or end of a clip, in a report."""


@options.command(short_help="Measure how batching and precision change a config's values.")
@click.argument("config", type=options.CONFIG)
@options.manifest_argument
@options.cache(
    help="Save the result in this cache, for `featcache extract`.  [default: ./features, if it "
    "has the version]"
)
@options.root()
@options.manifest_and_config_keys
@options.device()
@options.threads(help="[default: every core; on the CPU at most 8]")
@options.number(
    "--utterances", "Measure with N, from the shortest to the longest; the first 30 s of each.", 32
)
@options.trust_remote_code
@options.as_json()
def probe(
    config: str, manifest: str, cache: Location | None, utterances: int, **reading: Any
) -> None:
    """Measure on this device how batching and precision change the values of CONFIG, with
    utterances of MANIFEST.

    Each utterance is extracted alone, in batches of equal length, and in padded batches,
    at every precision that the device has, and compared with itself alone in fp32. Codes
    that differ are either ties, where the distances of two codewords differ by less than
    rounding, or mismatches. The fastest combination without mismatches is named.

    \b
    Examples:
      featcache probe encodec.yaml train.csv
      featcache probe encodec.yaml train.csv -o /data/features --device cuda --json
    """
    from featcache.care.probe import probe as measure
    from featcache.config import load_config
    from featcache.device import Device
    from featcache.extraction.audio_files import copying_notes
    from featcache.extraction.built_config import version_info
    from featcache.version.records import write_probe
    from featcache.version.version import Version

    if cache is not None:
        options.refuse_unwritable(cache)
    device, threads = reading.pop("device"), reading.pop("threads")
    loaded = load_config(config, options.take_keys(reading))
    wanted = options.read_manifest(manifest, reading, loaded.keys, carry=False)
    for line in copying_notes(wanted):
        note(line)
    result = measure(
        loaded, wanted, Device(device, threads), utterances, lambda step: note(f"measuring {step}")
    )
    info = version_info(loaded, result.spec)
    default = Path("features") / info.folder_name
    version = None
    if cache is not None:
        version = Version.create(cache / info.folder_name, info)
    elif (default / "zarr.json").exists():
        version = Version.open(default)
    document = {**result.document(), "path": None}
    outcome = "not saved: with -o CACHE, extract will use it"
    if version is not None:
        write_probe(version, result.document())
        document["path"] = str(version.path)
        outcome = f"saved in {version.path}"
    say_json(document)
    _print(result)
    say(outcome)


def _print(result: Probe) -> None:
    num_codebooks = len(result.spec.codebook_sizes)
    unit = "codes" if num_codebooks else "frames"
    frames = counted(result.frames, "frame")
    if num_codebooks:
        frames += f" of {num_codebooks} codes"
    say(
        f"{result.config}: {counted(result.utterances, 'utterance')} of {result.shortest:.2f} to "
        f"{result.longest:.2f} s, {result.seconds:.1f} s in all, {frames}; on {result.device}, "
        f"{counted(result.threads, 'thread')}"
    )
    for fault in result.skipped:
        say(f"skipped: {fault}")
    if result.rounding:
        rounding = ", ".join(
            f"{size:.1g} in {precision}" for precision, size in result.rounding.items()
        )
        say(
            f"compared with each utterance alone in fp32; rounding, relative to a frame: {rounding}"
        )
    else:
        say("compared, bit for bit, with each utterance alone")
    say()
    say_table([_row(measured) for measured in result.measured], to_the_right=range(2, 8))
    say()
    say(f"shares of {unit}; largest: the largest difference of a frame, relative to its norm")
    say(
        "disturbed: frames that batching changes by more than rounding, whether or not a "
        "code changes"
    )
    if any(measured.policy == "equal_length" for measured in result.measured):
        say(
            "equal_length batches are only as full as the sample has utterances of one "
            "length; padded ones are full"
        )
    repeatable = [measured.repeatable for measured in result.measured]
    if any(answer is not None for answer in repeatable):
        say(f"bit-identical whatever the neighbours: {'no' if False in repeatable else 'yes'}")
    if result.chunks is not None:
        _print_chunks(result.chunks)
    say(describe_fastest(result.document()["fastest"]))


def _print_chunks(chunks: Chunks) -> None:
    promise = "exact" if chunks.exact else "not exact"
    measured = "no utterance of the sample is longer than a chunk"
    if chunks.utterances:
        measured = (
            f"of {chunks.utterances:,} utterances, {_percent(chunks.differing)} differs from "
            f"the whole clip, {_percent(chunks.mismatch)} by more than rounding"
        )
    say(f"chunks: {promise} by the model's receptive field; {measured}")


def _row(measured: Measured) -> dict[str, str]:
    policy = measured.policy if measured.is_declared else f"{measured.policy} (not declared)"
    row = {
        "precision": measured.precision,
        "batching": policy,
        "differ": _percent(measured.differing),
        "ties": _percent(measured.tied),
        "mismatches": _percent(measured.mismatch),
        "largest": f"{measured.relative:.1e}" if measured.relative else "0",
        "disturbed": _percent(measured.disturbed),
        "× real time": f"{measured.times_real_time:,.0f}",
        "": _where(measured),
    }
    if measured.error is not None:
        row |= dict.fromkeys(list(row)[2:], "")
        row[""] = f"not possible here: {measured.error}"
    return row


def _where(measured: Measured) -> str:
    """Return in words where in clips the disturbed frames are."""
    if not measured.disturbed:
        return ""
    if measured.last <= 1:
        return "in the last frame"
    if measured.last <= _NEAR:
        return f"in the last {measured.last} frames"
    if measured.first <= _NEAR:
        return f"in the first {measured.first} frames"
    return "throughout"


def _percent(share: float) -> str:
    return percent(share) if share else "0"
