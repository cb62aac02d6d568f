"""`featcache probe`: what do batching and precision change, and how fast are they?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import describe_fastest, note, say, say_json, say_table
from featcache.errors import counted, percent
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.probe import Measured, Probe


_NEAR = 16
"""Differences within so many frames of a clip's end or beginning are reported as being
there."""


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
    from featcache.extraction.version_plan import version_info
    from featcache.version.records import write_probe
    from featcache.version.version import Version

    if cache is not None:
        options.refuse_unwritable(cache)
    device, threads = reading.pop("device"), reading.pop("threads")
    loaded = load_config(config, options.take_keys(reading))
    wanted = options.read_manifest(manifest, reading, loaded.keys, carry=False)
    for said in copying_notes(wanted):
        note(said)
    result = measure(
        loaded, wanted, Device(device, threads), utterances, lambda what: note(f"measuring {what}")
    )
    info = version_info(loaded, result.spec)
    version, default = None, Path("features") / info.folder_name
    if cache is not None:
        version = Version.create(cache / info.folder_name, info)
    elif (default / "zarr.json").exists():
        version = Version.open(default)
    if version:
        write_probe(version, result.document())
    say_json({**result.document(), "path": str(version.path) if version else None})
    _print(result)
    say(f"saved in {version.path}" if version else "not saved: with -o CACHE, extract will use it")


def _print(result: Probe) -> None:
    values = counted(result.frames, "frame")
    if result.spec.codebook_sizes:
        values += f" of {len(result.spec.codebook_sizes)} codes"
    sample = (
        f"{counted(result.utterances, 'utterance')} of {result.shortest:.2f} to "
        f"{result.longest:.2f} s"
    )
    where = f"{result.device}, {counted(result.threads, 'thread')}"
    say(f"{result.config}: {sample}, {result.seconds:.1f} s in all, {values}; on {where}")
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
    say_table([*map(_row, result.measured)], to_the_right=range(2, 8))
    say()
    shares = "codes" if result.spec.codebook_sizes else "frames"
    say(f"shares of {shares}; largest: the largest difference of a frame, relative to its norm")
    say(
        "disturbed: frames that batching changes by more than rounding, whether or not a "
        "code changes"
    )
    if any(measured.policy == "equal_length" for measured in result.measured):
        say(
            "equal_length batches are only as full as the sample has utterances of one "
            "length; padded ones are full"
        )
    if batched := [
        measured.repeatable for measured in result.measured if measured.repeatable is not None
    ]:
        say(f"bit-identical whatever the neighbours: {'yes' if all(batched) else 'no'}")
    if (chunks := result.chunks) is not None:
        promise = "exact" if chunks.exact else "not exact"
        found = "no utterance of the sample is longer than a chunk"
        if chunks.utterances:
            found = (
                f"of {chunks.utterances:,} utterances, {_percent(chunks.differing)} differs "
                "from the whole clip"
            )
            found += f", {_percent(chunks.mismatch)} by more than rounding"
        say(f"chunks: {promise} by the model's receptive field; {found}")
    say(describe_fastest(result.document()["fastest"]))


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
        nothing = {
            "precision": measured.precision,
            "batching": policy,
            "": f"not possible here: {measured.error}",
        }
        return dict.fromkeys(row, "") | nothing
    return row


def _where(measured: Measured) -> str:
    """Where the disturbed frames are, in words."""
    if not measured.disturbed:
        return ""
    if measured.last <= _NEAR:
        return f"in the last {measured.last} frames" if measured.last > 1 else "in the last frame"
    return f"in the first {measured.first} frames" if measured.first <= _NEAR else "throughout"


def _percent(share: float) -> str:
    return percent(share) if share else "0"
