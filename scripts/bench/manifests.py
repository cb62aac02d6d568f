"""How long each format of manifests takes to read, against CSV: `python scripts/bench/manifests.py`.

The same rows (an id, a path, a duration, a text and a speaker) are written in each format that lies in files of text,
and read by `read_manifest` with all columns. Rounds alternate between the formats; the least of each counts. Seconds
are those of the process on a core, so that others on the machine count little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from featcache.manifest import read_manifest

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from foreign_manifests import WRITERS, Clip

_LEFT_OUT = {"folder", "audiofolder", "lhotse recordings", "ljspeech"}
"""A folder has no text; the others are read by the readers of tables that are here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    clips = [
        Clip(f"audio/{number % 1000:03d}/{number:07d}.flac", 12_000 + number % 9000, f"what was said {number}", "anna")
        for number in range(options.rows)
    ]
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        written = {}
        for name in [name for name in WRITERS if name not in _LEFT_OUT]:
            (top := Path(folder, name)).mkdir()
            written[name] = WRITERS[name](top, clips)
        csv = Path(folder, "train.csv")
        rows = (f"{clip.stem},{clip.path},{clip.seconds},{clip.text},{clip.speaker}\n" for clip in clips)
        csv.write_text("id,path,duration,text,speaker\n" + "".join(rows))
        del clips
        for _ in range(options.rounds):
            begin = time.process_time()
            assert len(read_manifest(csv)) == options.rows
            seconds["csv"] = min(seconds.get("csv", 1e9), time.process_time() - begin)
            for name, one in written.items():
                begin = time.process_time()
                assert len(read_manifest(one.manifest, values=one.values, format=one.format)) == options.rows
                seconds[name] = min(seconds.get(name, 1e9), time.process_time() - begin)
    print(f"{options.rows:,} rows")
    for name, least in sorted(seconds.items(), key=lambda item: item[1]):
        print(f"{name:22} {least:7.2f} s  {least / seconds['csv']:5.2f} × csv")


if __name__ == "__main__":
    main()
