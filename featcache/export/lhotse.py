"""Lhotse's cuts: over the shards of a cache, or with features in a Shar. Both are written
without Lhotse. Cuts are those of `featcache.adapters.lhotse.cuts`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from featcache.errors import ArgumentError
from featcache.export.rows import NumberedTars, Row, Rows, encode_npy
from featcache.loader.corpus import Corpus
from featcache.manifest.copies import copies_of
from featcache.manifest.formats.lhotse import SAID

_STORAGE = "featcache"
"""The storage type that `featcache.adapters.lhotse` reads."""


def write_lhotse(rows: Rows, file: Path, target: Path) -> list[str]:
    """Write cuts whose features lie in the cache."""
    if not isinstance(rows.cache.version.path, Path) or isinstance(rows.cache, Corpus):
        raise ArgumentError(f"{rows.where}: cuts name one version in a folder: --to shar copies")
    folder = str(rows.cache.version.path.absolute())
    if rows.cache.version.tag:
        folder = f"{folder}@{rows.cache.version.tag}"
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise ArgumentError(f"-o: {target}: Lhotse reads cuts in .jsonl or .jsonl.gz")
    with _opened(file, target.suffix == ".gz") as out:
        for row, cut in _cuts(rows):
            place = {"storage_type": _STORAGE, "storage_path": folder, "storage_key": row.id}
            cut["features"] |= place
            _write_line(out, cut)
    return ["features stay in the cache: import featcache.adapters.lhotse before reading cuts"]


def write_shar(rows: Rows, folder: Path, target: Path) -> list[str]:
    """Write a Shar: `cuts.N.jsonl.gz` and `features.N.tar`, with features as `.npy`."""
    rows.refuse_names()
    with closing(NumberedTars(folder, "features.%06d.tar")) as tars:
        out: TextIO | None = None
        for row, cut in _cuts(rows):
            if out is None or tars.is_full:
                if out is not None:
                    out.close()
                out = _opened(folder / f"cuts.{tars.count:06d}.jsonl.gz", True)
                tars.begin()
            place = {"storage_type": "shar", "storage_path": "", "storage_key": ""}
            cut |= {"start": 0.0}
            cut["features"] |= {**place, "start": 0}
            features = json.dumps(cut["features"]).encode() + b"\n"
            tars.add({f"{row.id}.npy": encode_npy(row.features), f"{row.id}.json": features})
            _write_line(out, cut)
        if out is not None:
            out.close()
    return []


def _opened(file: Path, is_packed: bool) -> TextIO:
    if is_packed:
        return gzip.open(file, "wt", encoding="utf-8")
    return file.open("w", encoding="utf-8")


def _write_line(out: TextIO, cut: dict[str, Any]) -> None:
    out.write(json.dumps(cut, ensure_ascii=False) + "\n")


def _cuts(rows: Rows) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Give each utterance with its cut, whose features have no storage yet."""
    hop, spec = _hop_of(rows), rows.spec
    copies = copies_of(rows.cache.config)
    speeds = copies.speeds[copies.numbers(rows.ids)].tolist()
    kind = rows.cache.config.get("extractor", rows.cache.version.info.name)
    for row, speed in zip(rows, speeds, strict=True):
        columns = dict(row.columns)
        num_frames = len(row.features)
        duration = num_frames * hop / spec.sample_rate
        start = columns.pop("start", 0.0) / speed
        channel = max(0, columns.pop("channel", 0))
        columns.pop("duration", None)
        recording = str(columns.pop("recording_id", columns.pop("path", "")))
        if recording and speed != 1:
            recording += f"_sp{speed:g}"  # the suffix that Lhotse's perturb_speed adds
        recording = recording or row.id
        supervision: dict[str, Any] = {
            "id": row.id,
            "recording_id": recording,
            "start": 0.0,
            "duration": duration,
            "channel": channel,
            **{name: str(columns.pop(name)) for name in SAID if name in columns},
        }
        if columns:
            supervision["custom"] = columns
        features = {
            "type": kind,
            "num_frames": num_frames,
            "num_features": spec.item_shape[0],
            "frame_shift": hop / spec.sample_rate,
            "sampling_rate": spec.sample_rate,
            "start": start,
            "duration": duration,
            "recording_id": recording,
            "channels": channel,
        }
        segment = {"start": start, "duration": duration, "channel": channel}
        lines = {"supervisions": [supervision], "features": features, "type": "MonoCut"}
        yield row, {"id": row.id, **segment, **lines}


def _hop_of(rows: Rows) -> int:
    """Return the samples from one frame to the next. Raises ArgumentError if a
    frame is not one row of numbers, or the number of samples is not whole."""
    spec = rows.spec
    if len(spec.item_shape) != 1 or not spec.axis.exact_rate:
        shape = spec.main.shape_text()
        raise ArgumentError(f"{rows.where}: has features {shape}; Lhotse needs [frames, dims]")
    hop = float(spec.sample_rate / spec.axis.exact_rate)
    if abs(hop - round(hop)) > 1e-6 * hop:
        what = f"{hop:g} samples lie between two frames, and Lhotse needs a whole number"
        raise ArgumentError(f"{rows.where}: {what}")
    return round(hop)
