"""`featcache fit-kmeans`: centroids of a version's frames, for the extractor `units`."""

from __future__ import annotations

from pathlib import Path

import click

from featcache.cli import options
from featcache.cli.common import note, note_unfinished, print_json, refuse_output, say
from featcache.storage.location import Location


@click.command("fit-kmeans", short_help="Fit k-means to a version's frames, for the extractor `units`.")
@options.version_location
@click.option("-k", "k", type=click.IntRange(min=1), required=True, metavar="K", help="Number of units.")
@options.output_file("Where to write the centroids, such as units.safetensors.", required=True)
@options.force
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random choices.")
@click.option(
    "--frames",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of frames to fit to, drawn at random; each value of a frame takes 4 bytes of memory."
    "  [default: 1000 per unit]",
)
@options.device()
@options.threads("[default: every core, at most 8]")
@options.as_json()
def fit_kmeans(
    path: Location,
    k: int,
    output: Path,
    force: bool,
    seed: int,
    frames: int | None,
    device: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Fit k-means to the frames of a version, and write the centroids to a file: the `weights` of the extractor
    `units`.

    Frames are drawn uniformly from the whole version. On one device, the same seed gives the same centroids.

    \b
    Examples:
      featcache fit-kmeans features -k 500 -o units.safetensors
      featcache fit-kmeans features/hubert-base-l6 -k 2000 -o units.safetensors --frames 4000000
    """
    from time import perf_counter

    from featcache.device import Device
    from featcache.stats.kmeans import fit_version
    from featcache.storage.files import write_file
    from featcache.version.selection import select_version

    refuse_output(output, force)
    version = select_version(path)
    note_unfinished(version)
    used = Device(device, threads)
    used.configure_torch()
    started = perf_counter()
    codebook, fit = fit_version(
        version, k, seed=seed, frames=frames, device=used.torch_device, threads=1 if used.is_cuda else used.threads
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
        "device": used.label,
    }
    if as_json:
        print_json(document)
        return
    say(f"{output}: {k:,} units of {version.path}, {document['dimensions']:,} dimensions")
    say(
        f"  inertia {fit.inertia:.6g} per frame, over {document['frames']:,} frames; "
        f"{fit.iterations} iterations in {document['elapsed_seconds']:.1f} s on {used.label}"
    )
    say(f"  frames in a cluster: {document['smallest']:,} to {document['largest']:,}; {document['empty']:,} are empty")
    if document["empty"]:
        note("there are fewer distinct frames than units: choose a smaller -k")
