"""JSON lines of codes, as Qwen3-TTS's `prepare_data.py` writes them for its training."""

from __future__ import annotations

from pathlib import Path

from featcache.errors import ArgumentError, listing
from featcache.export.rows import Rows, unfit
from featcache.manifest.columns import json_line

_CODEBOOKS = 16
_NEEDED = ("path", "text", "ref_audio")


def write_qwen3_tts(rows: Rows, file: Path, target: Path) -> list[str]:
    """Write `audio`, `text`, `ref_audio` and `audio_codes`, `[frames][codebooks]`."""
    spec = rows.cache.spec
    if not spec.codebook_sizes or spec.item_shape != (_CODEBOOKS,):
        what = f"but Qwen3-TTS needs {_CODEBOOKS} codes a frame"
        raise unfit(rows.cache, f"{what}: extract -c qwen3-tts-12hz")
    rows.refuse_columns("id", "audio", "audio_codes")
    lacking = [repr(column) for column in _NEEDED if column not in rows.columns]
    if lacking:
        columns = listing(lacking)
        raise ArgumentError(f"--to qwen3-tts needs a manifest with {columns}: give --manifest")
    segments = [repr(name) for name in ("start", "channel") if name in rows.columns]
    if segments:
        what = f"rows are parts of files, by {listing(segments)}"
        raise ArgumentError(f"--to qwen3-tts names whole files, and {what}: cut the audio first")
    with file.open("w", encoding="utf-8") as out:
        for row in rows:
            cells = dict(row.columns)
            missing = [repr(column) for column in _NEEDED if not cells.get(column)]
            if missing:
                absent = listing(missing)
                raise ArgumentError(f"{row.id}: --to qwen3-tts needs {absent} in each row")
            audio = cells.pop("path")
            codes = row.features.tolist()
            line = {"id": row.id, "audio": audio, **cells, "audio_codes": codes}
            out.write(json_line(line))
    return []
