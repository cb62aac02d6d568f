"""`featcache info`: what a cache holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import best, hours, megabytes, note, print_json
from featcache.errors import DamagedError, counted
from featcache.spec import QUANTIZATION

if TYPE_CHECKING:
    from featcache.store.version import Version


@click.command(short_help="Say what a cache holds.")
@options.version_path
@click.option("--failures", is_flag=True, help="List the failure ledger: each utterance with its reason.")
@options.as_json("Print it as one JSON document.")
@click.pass_context
def info(ctx: click.Context, path: Path, failures: bool, as_json: bool) -> None:
    """Say what each version of a cache holds: utterances, hours, bytes, config, who made it, failures.

    \b
    Examples:
      featcache info features
      featcache info features --failures
      featcache info features/fbank80-3f9c21ab04de --json
    """
    from featcache.store.version import Version, version_folders

    documents, is_damaged = [], False
    for folder in version_folders(path):
        try:
            documents.append(_describe(Version.open(folder)))
        except DamagedError as error:
            note(f"featcache: {error}: featcache repair {folder} --manifest MANIFEST")
            is_damaged = True
    if as_json:
        print_json({"versions": documents})
    else:
        for document in documents:
            _print(document, failures)
    ctx.exit(DamagedError.exit_code if is_damaged else 0)


def _describe(version: Version) -> dict[str, Any]:
    import math
    from dataclasses import asdict

    from featcache.store.index import open_index
    from featcache.store.runs import latest_failures
    from featcache.store.unfinished import find_unfinished
    from featcache.strings import Strings

    index = open_index(version)
    ledger = latest_failures(version)
    standing = index.find(Strings.of(ledger)) < 0
    failures = [asdict(failure) for failure, stands in zip(ledger.values(), standing, strict=True) if stands]
    spec = version.info.spec
    frames = int(index.num_frames.sum())
    shards = [version.shard(name).info for name in index.shards]
    batched = {(made_by.get("batching"), made_by.get("mismatch")) for made_by in (shard.made_by for shard in shards)}
    newest = {probe["device"]: probe for probe in version.probes()}
    return {
        "path": str(version.path),
        **asdict(version.info),
        "utterances": len(index),
        "frames": frames,
        "seconds": round(sum(shard.seconds for shard in shards), 3),
        "bytes": frames * math.prod(spec.item_shape) * version.dtype.itemsize,
        "shards": len(index.shards),
        "batching": [
            {"policy": policy, "mismatch": mismatch} for policy, mismatch in sorted(batched, key=str) if policy
        ],
        "probes": list(newest.values()),
        "unfinished": [{**asdict(run), "message": str(run)} for run in find_unfinished(version, index)],
        "failures": failures,
    }


def _print(document: dict[str, Any], failures: bool) -> None:
    spec, config = document["spec"], document["config"]
    shape = ", ".join(["frames", *map(str, spec["item_shape"])])
    click.echo(document["path"])
    utterances, shards = counted(document["utterances"], "utterance"), counted(document["shards"], "shard")
    click.echo(
        f"  {utterances}, {hours(document['seconds'])} of audio, {megabytes(document['bytes'])} in {shards}; "
        f"{len(document['failures']):,} failed"
    )
    for run in document["unfinished"]:
        click.echo(f"  {run['message']}")
    side_arrays = {side["name"]: side for side in spec["side"]}
    quantized = ", quantised to uint8 with a scale and an offset for each utterance and dimension"
    stored = quantized if side_arrays.pop(QUANTIZATION, None) else ""
    click.echo(f"  {spec['dtype']} [{shape}], {spec['frame_rate']:g} frames/s: {spec['units']}{stored}")
    for side in side_arrays.values():
        entry = ", ".join(["entries", *map(str, side["item_shape"])])
        click.echo(f"  beside them {side['name']}, {side['dtype']} [{entry}]: {side['units']}")
    click.echo(f"  extractor {config['extractor']}, audio at {spec['sample_rate']:,} Hz")
    if "augment" in config:
        click.echo(f"  copies {_copies(config['augment'])}")
    click.echo(f"  fingerprint {document['fingerprint']}")
    click.echo("  made by " + ", ".join(f"{name} {version}" for name, version in document["made_by"].items()))
    for batching in document["batching"]:
        mismatch = batching["mismatch"]
        if mismatch is None and batching["policy"] == "frames":
            continue  # what works frame by frame needs no probe
        measured = "not probed" if mismatch is None else f"{100 * mismatch:.2g} % mismatched when probed"
        click.echo(f"  batching {batching['policy']}: {measured}")
    for probe in document["probes"]:
        click.echo(f"  probed on {probe['device']}, {probe['date']}: {best(probe['fastest'])}")
    if failures:
        for failure in document["failures"]:
            click.echo(f"  {failure['id']}\t{failure['reason']}\t{failure['path']}\t{failure['message']}")


def _copies(augment: dict[str, Any]) -> str:
    """What copies there are of each utterance, for a person."""
    line = f"at speed {', '.join(f'{speed:g}' for speed in augment['speed'])}"
    if noise := augment["noise"]:
        snrs = ", ".join(f"{snr:g}" for snr in noise["snr"])
        line += f", clean and with noise of {noise['manifest']} (seed {noise['seed']}) at {snrs} dB"
    return line
