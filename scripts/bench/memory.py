"""Whether a run's memory grows with its manifest: 10^5 and 10^6 clips of 0.1 s, planned, extracted and asked for again.

    python scripts/bench/memory.py [--rows 100000 1000000] [--threads 2] [--json]

The clips are 64 WAV files, each named by many rows of the manifest under an id of its own; every row is decoded and
extracted by itself. Commands run in processes of their own, whose resident memory is read 20 times a second. Peaks
are beyond what `import torch` takes. A run that does not grow has much the same at a quarter, at half, at three
quarters of its time and at its end.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, sleep

import soundfile
from corpus import make_corpus
from harness import KEPT, columns, options, present, status_bytes

from featcache.config import load_config
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest import read_manifest

FILES, SECONDS, RATE = 64, 0.1, 16000


@dataclass(frozen=True)
class Watched:
    """What a command took."""

    seconds: float
    """Seconds from start to end."""
    peak: int
    """The peak of its resident memory, in bytes."""
    quarters: list[int]
    """Its resident memory after each quarter of its time, in bytes."""


def watch(command: list[str]) -> Watched:
    """Run a command, and read its memory all the while."""
    start = perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    resident, peak = [0], 0
    while process.poll() is None:
        if size := status_bytes("VmRSS", process.pid):  # it has none when it has just ended
            resident.append(size)
            peak = max(peak, status_bytes("VmHWM", process.pid))
        sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    quarters = [resident[(len(resident) - 1) * quarter // 4] for quarter in (1, 2, 3, 4)]
    return Watched(perf_counter() - start, peak, quarters)


def make_manifest(folder: Path, rows: int) -> Path:
    """A manifest of that many rows over a few short clips, under `folder`."""
    home = folder / "clips-0.1s"
    if not home.is_dir():
        speech = make_corpus(folder, "long", hours=0.01).parent / "audio" / "000000.flac"
        samples, _ = soundfile.read(speech, dtype="int16")
        (home / "audio").mkdir(parents=True)
        for number in range(FILES):
            start = number * 160 % (len(samples) - 1600)
            soundfile.write(home / "audio" / f"{number}.wav", samples[start : start + int(SECONDS * RATE)], RATE)
    manifest = home / f"{rows}.csv"
    with manifest.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("id", "path", "duration"))
        table.writerows((f"utterance-{row:08d}", f"audio/{row % FILES}.wav", SECONDS) for row in range(rows))
    return manifest


def measure(folder: Path, rows: int, threads: int) -> dict:
    """A manifest of that many rows: read, planned, extracted, and asked for again."""
    manifest = make_manifest(folder, rows)
    cache = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "featcache", "extract", str(manifest), "-o", str(cache), "--device", "cpu"]
    command += ["--threads", str(threads)]
    try:
        start = perf_counter()
        read = read_manifest(manifest, carry=False)
        reading = perf_counter() - start
        plan_extraction(read, [load_config("fbank80")], cache, Options("cpu", threads))
        planning = perf_counter() - start - reading
        del read
        first, again = watch(command), watch(command)
        size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(cache)
    return {
        "rows": rows,
        "reading_seconds": reading,
        "planning_seconds": planning,
        "extract": asdict(first),
        "again": asdict(again),
        "cache_bytes": size,
    }


def show(result: dict) -> str:
    rows = []
    for found in result["manifests"]:
        name = f"{found['rows']:,} rows"
        for what, part in (("extract", found["extract"]), ("nothing to do", found["again"])):
            sizes = (f"{(size - result['torch_bytes']) / 1e6:,.0f}" for size in (part["peak"], *part["quarters"]))
            rows.append([f"{name}: {what}", f"{part['seconds']:.1f}", *sizes])
        for what in ("reading", "planning"):
            rows.append([f"{name}: {what}", f"{found[f'{what}_seconds']:.2f}", *[""] * 5])
    head = ["MB beyond torch", "seconds", "peak", "at 1/4", "1/2", "3/4", "the end"]
    about = f"{SECONDS} s clips, {result['threads']} threads; import torch takes {result['torch_bytes'] / 1e6:,.0f} MB"
    return f"{about}\n{columns(head, *rows)}"


def main() -> None:
    asked = options(__doc__, folder=KEPT, rows=[100_000, 1_000_000], threads=2)
    asked.folder.mkdir(parents=True, exist_ok=True)
    torch_alone = max(watch([sys.executable, "-c", "import torch, time; time.sleep(0.5)"]).peak for _ in range(2))
    found = [measure(asked.folder, rows, asked.threads) for rows in asked.rows]
    present({"torch_bytes": torch_alone, "threads": asked.threads, "manifests": found}, show, asked)


if __name__ == "__main__":
    main()
