"""The job of an export: finds the utterances, writes them, and lets the output appear whole."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache.errors import ArgumentError, StoreError, did_you_mean, listing
from featcache.export.arrays import write_numpy
from featcache.export.huggingface import load_arrow, write_datasets
from featcache.export.kaldi import write_kaldi
from featcache.export.lhotse import write_lhotse, write_shar
from featcache.export.qwen3_tts import write_qwen3_tts
from featcache.export.rows import Rows, place_of
from featcache.export.webdataset import write_webdataset
from featcache.loader.cache import Cache
from featcache.loader.choices import Choices
from featcache.loader.utterances import find_utterances, flat, versions_of
from featcache.manifest.columns import TEXT, Values
from featcache.manifest.formats.lhotse import SAID
from featcache.manifest.strings import are_distinct
from featcache.manifest.utterances import Manifest
from featcache.storage.files import flush, make_folder


class Format(NamedTuple):
    """A format of exports."""

    write: Callable[[Rows, Path, Path], list[str]]
    """Writes utterances into a new folder or file, that will appear at another path.
    Returns notes on what the format cannot hold. Raises ArgumentError if it cannot hold
    the utterances."""
    is_file: bool = False
    texts: tuple[str, ...] = ()
    """The columns that it holds as text, even if all their cells are numbers."""
    load: Callable[[], object] = lambda: None
    """Imports what `write` needs. An interrupt of an import ends the process at once, and
    would leave the hidden output."""


FORMATS = {
    "lhotse": Format(write_lhotse, is_file=True, texts=SAID),
    "shar": Format(write_shar, texts=SAID),
    "kaldi": Format(write_kaldi, texts=("text", "speaker")),
    "datasets": Format(write_datasets, load=load_arrow),
    "webdataset": Format(write_webdataset),
    "numpy": Format(write_numpy),
    "qwen3-tts": Format(write_qwen3_tts, is_file=True, texts=("text", "ref_audio")),
}


@dataclass(frozen=True)
class Exported:
    """The result of an export: see docs/json.md."""

    output: str
    format: str
    utterances: int
    files: int
    num_bytes: int
    failed: dict[str, int]
    missing: list[str]
    notes: list[str]


def export(
    cache: Cache,
    format: str,  # noqa: A002
    output: Path,
    manifest: Manifest | None = None,
    report: Callable[[int], object] = lambda _: None,
) -> Exported:
    """Write the utterances of a manifest, by default all, in one of `FORMATS`, after
    comparing each with its checksum; `report` is called with 1 after each. The output
    appears when it is whole: a file, which is replaced, or a new or empty folder.

    Raises ArgumentError if there is no such format, it cannot hold these features or ids,
    or the folder is not empty; StoreError if the output cannot be written, or features are
    damaged or missing; ManifestError if rows have features of another row or file."""
    if format not in FORMATS:
        known = listing(FORMATS, len(FORMATS))
        meant = did_you_mean(format, FORMATS)
        raise ArgumentError(f"--to: there is no {format!r}{meant}: choose {known}")
    chosen = FORMATS[format]
    fault = "" if chosen.is_file else _fault_of_folder(output)
    if fault:
        raise ArgumentError(f"-o: {output}: --to {format} makes a folder, {fault}")
    if cache.spec.axis.has_times:
        what = "holds events, which no format here has: read them with featcache.open"
        raise ArgumentError(f"{place_of(cache)}: {what}")
    if manifest is not None:
        manifest = _with_texts(manifest, chosen.texts)
    rows, absent = _select(cache, manifest, report)
    chosen.load()
    with _appearing(output) as staged:
        if not chosen.is_file:
            staged.mkdir()
        notes = chosen.write(rows, staged, output.absolute())
        paths = [staged, *staged.rglob("*")]
        sizes = [path.stat().st_size for path in paths if path.is_file()]
    failures = cache.failures if absent else {}
    return Exported(
        output=str(output),
        format=format,
        utterances=len(rows),
        files=len(sizes),
        num_bytes=sum(sizes),
        failed=dict(Counter(failures[id_].reason for id_ in absent if id_ in failures)),
        missing=[id_ for id_ in absent if id_ not in failures],
        notes=_losses(cache) + notes,
    )


def _fault_of_folder(output: Path) -> str:
    if not output.exists():
        return ""
    if output.is_file() or any(output.iterdir()):
        return "which must be new or empty"
    if output.samefile(os.curdir):  # which would be another, empty one afterwards
        return "and this is the current one: name a new one in it"
    return ""


def _select(
    cache: Cache, manifest: Manifest | None, report: Callable[[int], object]
) -> tuple[Rows, list[str]]:
    """Find the utterances to export. Returns also the ids that the version lacks."""
    choices = Choices(skip_missing=True)
    utterances, absent = find_utterances(versions_of(cache, None, 0), manifest, choices)
    ids = flat(utterances.ids)
    if not are_distinct(ids.hashes()):
        repeated = listing([id_ for id_, count in Counter(ids).items() if count > 1], 3)
        what = "in several rows or parts: give one row for each utterance, or export each part"
        raise ArgumentError(f"{utterances.source}: {repeated}: {what}")
    positions = utterances.versions[0].positions_of(np.arange(len(ids)))
    return Rows(cache, ids, positions, utterances.columns, report), absent


def _with_texts(manifest: Manifest, names: Sequence[str]) -> Manifest:
    """Return a manifest whose columns of these names are text, as the file has it."""
    values = dict(manifest.values)
    for name in values.keys() & {*names}:
        texts = values[name].texts
        values[name] = Values(texts, np.full(len(texts), TEXT, np.uint8))
    return replace(manifest, values=values)


def _losses(cache: Cache) -> list[str]:
    spec = cache.spec
    notes = []
    if spec.is_quantized:
        notes.append("quantised features are float32, as they are read")
    elif spec.dtype != spec.values_dtype.name:
        notes.append(f"{spec.dtype} becomes {spec.values_dtype}, which holds it exactly")
    others = [track.name for track in spec.outputs]
    if others:
        notes.append(f"tracks left out: {listing(others)}")
    return notes


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """Give a hidden name beside the output, which is renamed at the end of the block. After
    an error, what has that name is removed. Raises StoreError if a file cannot be written."""
    target = output.resolve() if output.is_dir() else output.absolute()
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        make_folder(staged.parent)
        yield staged
        os.sync()  # thousands of files, at once
        staged.replace(target)
        flush(target.parent)
    except OSError as error:
        raise StoreError(f"{output}: cannot be written: {error.strerror}") from error
    finally:
        if staged.is_dir():
            shutil.rmtree(staged, ignore_errors=True)
        else:
            staged.unlink(missing_ok=True)
