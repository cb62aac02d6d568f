"""`featcache fit-kmeans`: centroids of a version's frames, for the extractor `units`."""

from __future__ import annotations

from pathlib import Path

import click

from featcache.cli import options
from featcache.cli.common import note, note_unfinished, print_json
from featcache.errors import StoreError


@click.command("fit-kmeans", short_help="Fit k-means to a version's frames, for the extractor `units`.")
@options.version_path
@click.option("-k", "k", type=click.IntRange(min=1), required=True, metavar="K", help="How many units.")
@click.option(
    "-o",
    "output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    metavar="FILE",
    help="Where to write them: units.safetensors, say.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random choices.")
@click.option(
    "--frames",
    type=click.IntRange(min=1),
    metavar="N",
    help="Fit to so many frames, drawn at random; each value of a frame takes 4 bytes of memory.  [default: 1000 for "
    "each unit]",
)
@options.device()
@options.threads("[default: every core, at most 8]")
@options.as_json("Print what came of it as one JSON document.")
def fit_kmeans(
    path: Path,
    k: int,
    output: Path,
    seed: int,
    frames: int | None,
    device: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Fit k-means to the frames of a version, and write the centroids to a file, which is the `weights` of the
    extractor `units`.

    Frames are drawn uniformly from the whole version. On one device, the same seed gives the same centroids.

    \b
    Examples:
      featcache fit-kmeans features -k 500 -o units.safetensors
      featcache fit-kmeans features/hubert-l6-3f9c21ab04de -k 2000 -o units.safetensors --frames 4000000
    """
    from time import perf_counter

    from featcache.device import Device
    from featcache.kmeans import fit_version, write_codebook
    from featcache.store.version import select_version

    version = select_version(path)
    if not output.parent.is_dir():  # said before the work, not after it
        raise StoreError(f"{output}: cannot be written: there is no folder {output.parent}")
    note_unfinished(version)
    on = Device(device, threads)
    started = perf_counter()
    codebook, fit = fit_version(
        version, k, seed=seed, frames=frames, device=on.torch_device, threads=1 if on.is_cuda else on.threads
    )
    write_codebook(codebook, output)
    document = {
        "path": str(output),
        "version": str(version.path),
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
        "seconds": round(perf_counter() - started, 3),
        "device": on.label,
    }
    if as_json:
        print_json(document)
        return
    click.echo(f"{output}: {k:,} units of {version.path}, {document['dimensions']:,} dimensions")
    click.echo(
        f"  inertia {fit.inertia:.6g} per frame, over {document['frames']:,} frames; "
        f"{fit.iterations} iterations in {document['seconds']:.1f} s on {on.label}"
    )
    click.echo(
        f"  frames in a cluster: {document['smallest']:,} to {document['largest']:,}; {document['empty']:,} are empty"
    )
    if document["empty"]:
        note("there are fewer different frames than units: take a smaller -k")
