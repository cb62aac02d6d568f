"""JSON lines of codes: as Qwen3-TTS's `prepare_data.py` writes them, and as Moshi's Mimi
orders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from featcache.errors import ArgumentError, listing
from featcache.export.rows import Row, Rows

_Line = Callable[[Row], dict[str, Any]]


def write_qwen3_tts(rows: Rows, file: Path, target: Path) -> list[str]:
    """Write `audio`, `text`, `ref_audio` and `audio_codes`, `[frames][codebooks]`."""

    def line(row: Row) -> dict[str, Any]:
        columns = dict(row.columns)
        audio = columns.pop("path")
        return {"audio": audio, **columns, "audio_codes": row.features.tolist()}

    return _write(rows, file, "qwen3-tts", ("path", "text", "ref_audio"), line)


def write_moshi(rows: Rows, file: Path, target: Path) -> list[str]:
    """Write `path` and `duration` in seconds, as moshi-finetune reads them, and `codes`,
    `[codebooks][frames]`, the order of Mimi's `encode`."""
    axis = rows.spec.axis

    def line(row: Row) -> dict[str, Any]:
        seconds = {"duration": axis.seconds(len(row.features))}
        return {**seconds, **row.columns, "codes": row.features.T.tolist()}

    return _write(rows, file, "moshi", ("path",), line)


def _write(rows: Rows, file: Path, name: str, needed: tuple[str, ...], line_of: _Line) -> list[str]:
    if not rows.spec.codebook_sizes or len(rows.spec.item_shape) != 1:
        shape = rows.spec.main.shape_text()
        raise ArgumentError(f"{rows.where}: has features {shape}; --to {name} takes codes")
    lacking = [repr(column) for column in needed if column not in rows.columns]
    if lacking:
        columns = listing(lacking)
        raise ArgumentError(f"--to {name} needs a manifest with {columns}: give --manifest")
    segments = [repr(name) for name in ("start", "channel") if name in rows.columns]
    if segments:
        what = f"rows are parts of files, by {listing(segments)}"
        raise ArgumentError(f"--to {name} names whole files, and {what}: cut the audio first")
    with file.open("w", encoding="utf-8") as out:
        for row in rows:
            missing = [repr(column) for column in needed if not row.columns.get(column)]
            if missing:
                raise ArgumentError(f"{row.id}: --to {name} needs {listing(missing)} in each row")
            out.write(json.dumps({"id": row.id, **line_of(row)}, ensure_ascii=False) + "\n")
    return []
