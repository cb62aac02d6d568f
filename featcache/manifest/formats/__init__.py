"""The table of the formats of manifests: how each is recognised and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from featcache.errors import ArgumentError, ManifestError, did_you_mean, listing
from featcache.manifest.formats import (
    features,
    folders,
    kaldi,
    lhotse,
    tables,
    toolkits,
    webdataset,
)
from featcache.manifest.formats.source import Batch, Source


class Format(NamedTuple):
    """A format of manifests."""

    read: Callable[[Source], Iterator[Batch]]
    """Reads the rows, by column, and adds those that cannot be read to the faults."""
    fits: Callable[[Source], bool] = lambda _: False
    """Tells whether a source looks like this format."""


FORMATS = {
    "folder": Format(folders.read_folder),
    "audiofolder": Format(folders.read_audiofolder, folders.has_metadata),
    "kaldi": Format(kaldi.read_data_folder, kaldi.is_data_folder),
    "csv": Format(partial(tables.read_text, ",")),
    "tsv": Format(partial(tables.read_text, "\t")),
    "jsonl": Format(lambda source: tables.json_batches(tables.json_rows(source.text), source)),
    "parquet": Format(
        lambda source: tables.parquet_batches(tables.parquet_table(source.stream), source)
    ),
    "webdataset": Format(webdataset.read_tar, webdataset.is_tar),
    "datasets": Format(folders.read_dataset, folders.is_dataset),
    "nemo": Format(
        lambda source: tables.json_batches(toolkits.nemo_rows(source), source),
        lambda source: "audio_filepath" in source.first_object,
    ),
    "lhotse": Format(lhotse.read_lhotse, lhotse.is_lhotse),
    "speechbrain": Format(toolkits.read_speechbrain, toolkits.is_speechbrain),
    "fairseq": Format(toolkits.read_fairseq, toolkits.fairseq_fits),
    **{name: Format(partial(toolkits.read_bars, name)) for name in toolkits.BARS},
    "features": Format(features.read_features),  # never recognised: `import` means it
    "paths": Format(toolkits.read_paths, toolkits.paths_fit),
}


def format_of(source: Source, name: str | None = None) -> str:
    """Return the name of a source's format: the given one (an ArgumentError if it does not
    exist), or the recognised one (a ManifestError if several fit, or none can).

    If none fits, a folder is one of audio files, and a file a table with a header or keys."""
    if name is not None:
        if name not in FORMATS:
            known = listing(FORMATS, len(FORMATS))
            meant = did_you_mean(name, FORMATS)
            raise ArgumentError(f"--format: there is no {name!r}{meant}: choose {known}")
        if source.no_manifest is None or name in ("datasets", "parquet", "webdataset"):
            return name
    if webdataset.is_tar(source):
        if name is not None:
            raise ManifestError(f"is a tar, which --format {name} does not read: leave it out")
        return "webdataset"
    if source.no_manifest is not None:
        raise ManifestError(source.no_manifest)
    fitting = [name for name, format_ in FORMATS.items() if format_.fits(source)]
    fitting += toolkits.fitting_bars(source)
    if len(fitting) > 1:
        readings = " or ".join(toolkits.reading_of(name, source) for name in fitting)
        raise ManifestError(f"may be {readings}: say which with --format {fitting[0]}, for example")
    if fitting:
        return fitting[0]
    if source.is_folder:
        return "folder"
    return tables.plain_format(source)
