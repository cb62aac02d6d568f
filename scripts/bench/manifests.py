"""Measure how long each format of manifests takes to read, compared with CSV.

    python scripts/bench/manifests.py [--rows 1000000] [--rounds 2] [--formats kaldi ...]

The same rows (an id, a path, a duration, a text and a speaker, as far as a format has
them) are written in each format that lies in files of text, and read by `read_manifest`
with all columns. CSV is read in turn with each; the least of the rounds counts. Seconds
are those of the process on a core, so that others on the machine count little."""

from collections.abc import Sequence
from pathlib import Path

import harness
from foreign_manifests import WRITERS, Clip, Written, objects, table

from featcache.manifest.read import read_manifest

_COLUMNS = {
    "id": "{id}",
    "path": "{path}",
    "duration": "{seconds}",
    "text": "{text}",
    "speaker": "{speaker}",
}


def _jsonl_row(clip: Clip) -> dict[str, object]:
    return dict(
        zip(_COLUMNS, (clip.stem, clip.path, clip.seconds, clip.text, clip.speaker), strict=True)
    )


def _wav_scp(top: Path, clips: Sequence[Clip]) -> Written:
    written = WRITERS["kaldi"](top, clips)
    return written._replace(manifest=written.manifest / "wav.scp")


def _unpacked_cuts(top: Path, clips: Sequence[Clip]) -> Written:
    written = WRITERS["lhotse cuts"](top, clips)
    return written._replace(manifest=written.manifest.with_suffix(""))


_WRITERS = {
    name: write for name, write in WRITERS.items() if name not in ("folder", "audiofolder")
} | {
    "lhotse cuts": _unpacked_cuts,
    "lhotse cuts, gzip": WRITERS["lhotse cuts"],
    "kaldi wav.scp": _wav_scp,
    "tsv": table("tsv", "train.tsv", "\t".join(_COLUMNS), "\t".join(_COLUMNS.values())),
    "jsonl": objects("jsonl", "train.jsonl", _jsonl_row),
}
"""What is written. A folder has no text, and an AudioFolder is the plain tables."""


def main() -> None:
    formats = ([""], f"some of {', '.join(_WRITERS)}; default: all")
    asked = harness.options(__doc__, rows=1_000_000, rounds=2, formats=formats)
    clips = [
        Clip(
            f"audio/{number % 1000:03d}/{number:07d}.flac",
            12_000 + number % 9000,
            f"what was said {number}",
            "anna",
        )
        for number in range(asked.rows)
    ]
    title = f"{asked.rows:,} rows, seconds on a core"
    figures = harness.Table(title, dict.fromkeys(("it", "csv", "ratio"), "{:.2f}"))
    with harness.temporary_folder() as folder:
        csv = table("csv", "train.csv", ",".join(_COLUMNS), ",".join(_COLUMNS.values()))(
            folder, clips
        )
        for name in [name for name in asked.formats if name] or _WRITERS:
            with harness.temporary_folder(folder) as top:
                written = _WRITERS[name](top, clips)
                reads = {"csv": lambda: _read(csv), "it": lambda it=written: _read(it)}
                turns = harness.take_turns(reads, asked.rounds)
            ours, theirs = (turns.best(which, "cpu_seconds") for which in ("csv", "it"))
            figures.add(name, theirs, ours, theirs / ours)
    harness.present(asked, figures)


def _read(written: Written) -> None:
    read_manifest(written.manifest, values=written.values, format=written.format)


if __name__ == "__main__":
    main()
