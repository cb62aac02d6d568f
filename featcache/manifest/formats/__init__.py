"""The formats of manifests: one table of what they are called, how they are recognised, and what reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from featcache.errors import ArgumentError, ManifestError, listing
from featcache.manifest.formats.folders import has_metadata, is_dataset, read_audiofolder, read_dataset, read_folder
from featcache.manifest.formats.kaldi import is_data_folder, read_data_folder
from featcache.manifest.formats.lhotse import is_shar, kind_of, read_lhotse
from featcache.manifest.formats.lists import (
    BARS,
    bars_fit,
    bars_reading,
    fairseq_fits,
    paths_fit,
    read_bars,
    read_fairseq,
    read_paths,
)
from featcache.manifest.formats.source import Batch, Source
from featcache.manifest.formats.tables import (
    plain_format,
    read_csv,
    read_jsonl,
    read_parquet,
    read_tsv,
)
from featcache.manifest.formats.toolkits import is_speechbrain, read_nemo, read_speechbrain

__all__ = ["FORMATS", "Format", "format_of"]


class Format(NamedTuple):
    """A format of manifests."""

    read: Callable[[Source], Iterator[Batch]]
    """Gives the rows, by column. Adds faults to the source's, and leaves out rows that cannot be read."""
    fits: Callable[[Source], bool]
    """Whether a source looks like it. Those that never do are what is left if no other fits: see `format_of`."""
    reading: Callable[[Source], str] | None = None
    """Says how its first row is read, for a message; None if the format's name says enough."""


def _never(source: Source) -> bool:
    return False


FORMATS = {
    "folder": Format(read_folder, _never),
    "audiofolder": Format(read_audiofolder, has_metadata),
    "kaldi": Format(read_data_folder, is_data_folder),
    "csv": Format(read_csv, _never),
    "tsv": Format(read_tsv, _never),
    "jsonl": Format(read_jsonl, _never),
    "parquet": Format(read_parquet, _never),
    "datasets": Format(read_dataset, is_dataset),
    "nemo": Format(read_nemo, lambda source: "audio_filepath" in source.first_object),
    "lhotse": Format(read_lhotse, lambda source: is_shar(source) or kind_of(source.first_object) is not None),
    "speechbrain": Format(read_speechbrain, is_speechbrain),
    "fairseq": Format(read_fairseq, fairseq_fits),
    **{name: Format(partial(read_bars, name), partial(bars_fit, name), partial(bars_reading, name)) for name in BARS},
    "paths": Format(read_paths, paths_fit),
}
"""Every format, by name."""


def format_of(source: Source, name: str | None = None) -> str:
    """The name of a source's format: the one given (an ArgumentError if there is none of that name), or the one that it
    is recognised as (a ManifestError if several fit, or it is plainly no manifest).

    A folder that fits none is one of audio files. A file that fits none is a table with a header or keys: the suffix
    says which, or else the first line.
    """
    if name is not None:
        if name not in FORMATS:
            raise ArgumentError(f"--format: there is no {name!r}: choose {listing(FORMATS, len(FORMATS))}")
        if source.no_manifest is None or name in ("datasets", "parquet"):
            return name
    if (what := source.no_manifest) is not None:
        raise ManifestError(what)
    found = [name for name, format_ in FORMATS.items() if format_.fits(source)]
    if len(found) > 1:
        readings = [
            f"{name} ({read(source)})" if (read := FORMATS[name].reading) is not None else name for name in found
        ]
        raise ManifestError(f"may be {' or '.join(readings)}: say which with --format {found[0]}, for example")
    return found[0] if found else "folder" if source.is_folder else plain_format(source)
