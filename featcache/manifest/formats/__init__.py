"""The formats of manifests: one table of what they are called, how they are recognised,
and what reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from featcache.errors import ArgumentError, ManifestError, listing
from featcache.manifest.formats import folders, kaldi, lhotse, tables, toolkits
from featcache.manifest.formats.source import Batch, Source


class Format(NamedTuple):
    """A format of manifests."""

    read: Callable[[Source], Iterator[Batch]]
    """Gives the rows, by column. Adds faults to the source's, and leaves out rows that
    cannot be read."""
    fits: Callable[[Source], bool] = lambda _: False
    """Whether a source looks like it. Those that never do are what is left if no other
    fits: see `format_of`."""


FORMATS = {
    "folder": Format(folders.read_folder),
    "audiofolder": Format(folders.read_audiofolder, folders.has_metadata),
    "kaldi": Format(kaldi.read_data_folder, kaldi.is_data_folder),
    "csv": Format(tables.read_csv),
    "tsv": Format(tables.read_tsv),
    "jsonl": Format(tables.read_jsonl),
    "parquet": Format(tables.read_parquet),
    "datasets": Format(folders.read_dataset, folders.is_dataset),
    "nemo": Format(toolkits.read_nemo, lambda source: "audio_filepath" in source.first_object),
    "lhotse": Format(lhotse.read_lhotse, lhotse.is_lhotse),
    "speechbrain": Format(toolkits.read_speechbrain, toolkits.is_speechbrain),
    "fairseq": Format(toolkits.read_fairseq, toolkits.fairseq_fits),
    **{
        name: Format(partial(toolkits.read_bars, name), partial(toolkits.bars_fit, name))
        for name in toolkits.BARS
    },
    "paths": Format(toolkits.read_paths, toolkits.paths_fit),
}
"""Every format, by name."""


def format_of(source: Source, name: str | None = None) -> str:
    """The name of a source's format: the one given (an ArgumentError if there is none of
    that name), or the one that it is recognised as (a ManifestError if several fit, or it
    is plainly no manifest).

    A folder that fits none is one of audio files. A file that fits none is a table with a
    header or keys: the suffix says which, or else the first line."""
    if name is not None:
        if name not in FORMATS:
            raise ArgumentError(
                f"--format: there is no {name!r}: choose {listing(FORMATS, len(FORMATS))}"
            )
        if source.no_manifest is None or name in ("datasets", "parquet"):
            return name
    if (what := source.no_manifest) is not None:
        raise ManifestError(what)
    found = [name for name, format_ in FORMATS.items() if format_.fits(source)]
    if len(found) > 1:
        bars = {
            name: f"{name} ({toolkits.bars_reading(name, source)})"
            for name in found
            if name in toolkits.BARS
        }
        readings = [bars.get(name, name) for name in found]
        raise ManifestError(
            f"may be {' or '.join(readings)}: say which with --format {found[0]}, for example"
        )
    return found[0] if found else "folder" if source.is_folder else tables.plain_format(source)
