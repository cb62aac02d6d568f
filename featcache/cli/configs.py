"""`featcache configs`: configs and their schema; `featcache probe`: their values and speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import describe_fastest, note, print_json, say, say_json, say_table
from featcache.errors import ArgumentError, ConfigError, counted, percent, real_time
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.probe import Measured, Probe


@options.command(prints_json=False)
@click.argument("name", required=False)
@click.option(
    "--from",
    "path",
    type=options.LOCATION,
    metavar="CACHE[/VERSION]",
    help="Print the config of this version.",
)
@options.flag("--schema", "Print a JSON Schema, with which editors complete and check configs.")
def configs(name: str | None, path: Location | None, schema: bool) -> None:
    """List the packaged configs; print one, or a version's. With NAME, print that config with
    comments, as a start for your own. With --from, print a config that makes the same version
    again.

    \b
    Examples:
      featcache configs
      featcache configs fbank80 > my-config.yaml
      featcache configs --from features/fbank80 > same.yaml
      featcache configs --schema > featcache.schema.json
    """
    if [name is not None, path is not None, schema].count(True) > 1:
        raise ArgumentError("give one of NAME, --from and --schema")
    from featcache.config.config import packaged_configs, packaged_hint

    packaged = packaged_configs()
    if path is not None:
        _print_recorded(path)
    elif schema:
        from featcache.config.schema import config_schema

        print_json(config_schema())
    elif name is None:
        width = max(map(len, packaged))
        for known, text in packaged.items():
            click.echo(f"{known:{width}} {text.splitlines()[0].lstrip('# ')}")
    elif name in packaged:
        click.echo(packaged[name], nl=False)
    else:
        raise ConfigError(f"there is no packaged config {name!r}; {packaged_hint(name)}")


def _print_recorded(path: Location) -> None:
    import yaml

    from featcache.config.config import ConfigFile
    from featcache.version.selection import select_version

    info = select_version(path).info
    say(f"# The config of {info.folder_name}; its fingerprint is {info.fingerprint}")
    recorded = {key: info.config[key] for key in ConfigFile.model_fields if key in info.config}
    text = yaml.safe_dump(recorded, sort_keys=False, default_flow_style=False, width=120)
    click.echo(text, nl=False)


_NEAR = 16
"""The number of frames that are the beginning or end of a clip, in a report."""


@options.command()
@click.argument("config", type=options.CONFIG)
@options.manifest_argument
@options.cache(
    help="Save the result in this cache, so that `featcache extract` uses it.  [default: "
    "./features, if it has the version]"
)
@options.root()
@options.manifest_and_config_keys
@options.device()
@options.extraction_threads
@options.number(
    "--utterances",
    "Use N utterances, from the shortest to the longest, the first 30 s of each.",
    32,
)
@options.trust_remote_code
def probe(
    config: str, manifest: str, cache: Location | None, utterances: int, **reading: Any
) -> None:
    """Measure how batching and precision change values.

    probe extracts each utterance alone, in batches of equal length, and in padded batches,
    at every precision of the device. It compares each result with the utterance alone in
    fp32. A code that differs is a tie if rounding decides between two codewords, otherwise a
    mismatch. probe prints the fastest way without mismatches.

    \b
    Example:
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
    unit, frames = "frames", counted(result.frames, "frame")
    num_codebooks = len(result.spec.codebook_sizes)
    if num_codebooks:
        unit, frames = "codes", f"{frames} of {num_codebooks} codes"
    say(
        f"{result.config}: {counted(result.utterances, 'utterance')} of {result.shortest:.2f} to "
        f"{result.longest:.2f} s, {result.seconds:.1f} s in all, {frames}; on {result.device}, "
        f"{counted(result.threads, 'thread')}"
    )
    for fault in result.skipped:
        say(f"skipped: {fault}")
    if result.rounding:
        sizes = [f"{size:.1g} in {precision}" for precision, size in result.rounding.items()]
        say("compared with each utterance alone in fp32")
        say(f"rounding, relative to a frame: {', '.join(sizes)}")
    else:
        say("compared, bit for bit, with each utterance alone")
    say()
    say_table([_row(measured) for measured in result.measured], to_the_right=range(2, 8))
    say()
    say(f"shares of {unit}; largest: the largest difference of a frame, relative to its norm")
    say("disturbed: frames that batching changes by more than rounding, even if no code changes")
    if any(measured.policy == "equal_length" for measured in result.measured):
        say("equal_length batches are as full as the sample allows; padded ones are full")
    repeatable = {measured.repeatable for measured in result.measured} - {None}
    if repeatable:
        say(f"bit-identical whatever the neighbours: {'yes' if all(repeatable) else 'no'}")
    chunks = result.chunks
    if chunks is not None:
        measured = "no utterance of the sample is longer than a chunk"
        if chunks.utterances:
            differing, mismatch = _percent(chunks.differing), _percent(chunks.mismatch)
            measured = f"of {chunks.utterances:,} utterances, {differing} differs from "
            measured += f"the whole clip, {mismatch} by more than rounding"
        promise = "exact" if chunks.exact else "not exact"
        say(f"chunks: {promise} by the model's receptive field; {measured}")
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
        "× real time": real_time(measured.times_real_time).split()[0],
        "": _where(measured),
    }
    if measured.error is not None:
        row |= dict.fromkeys(list(row)[2:], "")
        row[""] = f"not possible here: {measured.error}"
    return row


def _where(measured: Measured) -> str:
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
