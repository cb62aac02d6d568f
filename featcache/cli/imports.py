"""`featcache import`: features of other tools as a version."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import note, say_json
from featcache.cli.extract import Shown, import_torch_when_used
from featcache.errors import ArgumentError, ManifestError
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.config import Config
    from featcache.manifest.utterances import Manifest

_RATE = 16000


@options.command("import")
@click.argument("source", type=options.TEXT)
@options.cache_to_fill
@click.option(
    "--name",
    metavar="NAME",
    required=True,
    help="The name of the new version, such as fbank-kaldi.",
)
@click.option(
    "--made-by",
    metavar="TEXT",
    required=True,
    help="The program, its version and its config that made the features. Another text makes "
    "another version.",
)
@click.option(
    "--frame-rate",
    type=float,
    metavar="HZ",
    help="Frames per second.  [default: Lhotse's; otherwise a file holds one vector of its clip]",
)
@click.option(
    "--units",
    metavar="TEXT",
    help="The meaning of a value, for readers: log mel energy (natural log).",
)
@options.number("--codebook-size", "For codes only: the number of codewords of each codebook.")
@click.option(
    "--sample-rate",
    type=options.WholeNumber(1),
    metavar="HZ",
    help="The sample rate of the audio.  [default: Lhotse's, otherwise 16000]",
)
@options.root()
@options.reading_threads
@options.flag("--check-sources", "Import utterances again whose file has changed.")
@options.flag("--dry-run", "Print what would be imported, and import nothing.")
def import_(
    source: str,
    cache: Location,
    name: str,
    sample_rate: int | None,
    root: Any,
    threads: int,
    check_sources: bool,
    dry_run: bool,
    **described: Any,
) -> int:
    """Import features that another program made. They become a version with checksums.
    SOURCE is a folder of .npy or .pt files, Kaldi's feats.scp, or a Lhotse manifest of
    features or cuts, stored as lilcom, NumPy or HDF5. Nothing in a file is executed.

    Run the command again to import what is missing. A manifest of audio matches such a
    version by id alone. To repair it: `featcache repair CACHE --manifest SOURCE --format
    features`.

    \b
    Examples:
      featcache import exp/feats.scp --name fbank-kaldi --made-by 'Kaldi 5.5' --frame-rate 100
      featcache import xvectors/ --name xvector --made-by 'SpeechBrain spkrec-xvect-voxceleb'
      featcache import cuts.jsonl.gz --name fbank-lhotse --made-by 'Lhotse 1.33, Fbank' --root .
    """
    import_torch_when_used()
    from featcache.engines.main_job import Observer, extract
    from featcache.extraction.options import Options
    from featcache.manifest.read import read_manifest

    manifest = read_manifest(source, root=root, format="features")
    config = _config_of(manifest, name, sample_rate, described)
    shown = Shown(trial=False, progress_kind="bar")
    run_options = Options(
        threads=threads, check_sources=check_sources, dry_run=dry_run, device="cpu"
    )
    observer = Observer(
        running=shown.running, planned=shown.planned, progress=shown.progress, done=shown.done
    )
    extract(manifest, config, cache, run_options, observer=observer, stop=shown.stop)
    say_json(shown.documents[cache])
    return shown.codes[cache]


def _config_of(
    manifest: Manifest, name: str, sample_rate: int | None, described: dict[str, Any]
) -> Config:
    """Make the config of imported features, by the options and the first utterance's array."""
    import numpy as np

    from featcache.config.config import config_from
    from featcache.extraction.from_files import read_first

    first = read_first(manifest)
    codebook_size = described.pop("codebook_size")
    params = {key: value for key, value in described.items() if value is not None}
    if "frame_rate" not in params:
        params["frame_rate"] = _lhotse_s(manifest, "frame_rate")
    shape = first.shape
    if params["frame_rate"] is not None:
        shape = first.shape[1:]
    elif len(shape) > 1:
        what = f"the features of {manifest.ids[0]} have the shape {[*shape]}"
        raise ArgumentError(f"{manifest.source}: {what}: give --frame-rate, in frames per second")
    dtype = first.dtype.name
    if dtype == "float64":
        dtype = "float32"
        note("float64 is stored as float32")
    if codebook_size is not None:
        dtype = str(np.min_scalar_type(codebook_size - 1))
        params["codebook_sizes"] = [codebook_size] * max(1, math.prod(shape))
    document = {
        "name": name,
        "extractor": "imported",
        "params": {**params, "item_shape": [*shape], "dtype": dtype},
        "audio": {"sample_rate": sample_rate or _lhotse_s(manifest, "sample_rate") or _RATE},
    }
    return config_from(document, "of import")


def _lhotse_s(manifest: Manifest, column: str) -> Any:
    """Return the frame rate or sample rate that all features of Lhotse's have; None for
    features of others. Raises ManifestError if there are several."""
    if column not in manifest.values:
        return None
    first, *others = sorted({*manifest.cells(column)})
    if others:
        what = f"a {column.replace('_', ' ')} of {first:g} and of {others[-1]:g} Hz"
        raise ManifestError(f"{manifest.source}: has features with {what}: import them apart")
    return first
