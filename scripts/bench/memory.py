"""Whether a run's memory grows with its manifest: 10^5 and 10^6 clips of 0.1 s, planned,
extracted and asked for again.

    python scripts/bench/memory.py [--rows 100000 1000000] [--threads 2] [--json]

The clips are 64 WAV files, each named by many rows of the manifest under an id of its
own; every row is decoded and extracted by itself. Commands run in processes of their own,
whose resident memory is read 20 times a second. Peaks are beyond what `import torch`
takes; a run with nothing to do imports none."""

import argparse
import subprocess
import sys
from pathlib import Path
from time import perf_counter, sleep

import soundfile
from corpus import make_corpus, write_manifest
from harness import KEPT, Table, options, present, status_bytes, temporary_folder

from featcache.config import load_config
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest.read import read_manifest

FILES, SECONDS, RATE = 64, 0.1, 16000


def watch(command: list[str]) -> tuple[float, float]:
    """Run a command: its seconds, and the peak of its resident memory, in MB."""
    start, peak = perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, status_bytes("VmHWM", process.pid))
        sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return perf_counter() - start, peak / 1e6


def make_manifest(folder: Path, rows: int) -> Path:
    """A manifest of that many rows over a few short clips, under `folder`."""
    home = folder / "clips-0.1s"
    if not home.is_dir():
        speech = make_corpus(folder, "long", 0.01).parent / "audio" / "000000.flac"
        samples, _ = soundfile.read(speech, dtype="int16")
        (home / "audio").mkdir(parents=True)
        for number in range(FILES):
            start = number * 160 % (len(samples) - 1600)
            soundfile.write(
                home / "audio" / f"{number}.wav", samples[start : start + int(SECONDS * RATE)], RATE
            )
    clips = ((f"utterance-{row:08d}", f"audio/{row % FILES}.wav", SECONDS) for row in range(rows))
    return write_manifest(home / f"{rows}.csv", clips)


def measure(rows: int, asked: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    """A manifest of that many rows: read, planned, extracted, and asked for again."""
    manifest = make_manifest(asked.folder, rows)
    with temporary_folder(asked.folder) as cache:
        command = [
            sys.executable,
            "-m",
            "featcache",
            "extract",
            str(manifest),
            "-o",
            str(cache),
            "--device",
            "cpu",
        ]
        command += ["--threads", str(asked.threads)]
        start = perf_counter()
        read = read_manifest(manifest, carry=False)
        reading = perf_counter() - start
        plan_extraction(read, [load_config("fbank80")], cache, Options("cpu", asked.threads))
        planning = perf_counter() - start - reading
        del read
        watched = {"extract": watch(command), "nothing to do": watch(command)}
    return {**watched, "reading": (reading,), "planning": (planning,)}


def main() -> None:
    asked = options(__doc__, folder=KEPT, rows=[100_000, 1_000_000], threads=2)
    of_torch = max(
        watch([sys.executable, "-c", "import torch, time; time.sleep(0.5)"])[1] for _ in range(2)
    )
    table = Table("what", {"seconds": "{:.2f}", "MB beyond torch": "{:,.0f}"})
    for rows in asked.rows:
        for what, (seconds, *peak) in measure(rows, asked).items():
            imported = of_torch if what == "extract" else 0.0
            table.add(
                f"{rows:,} rows: {what}", seconds, *([size - imported for size in peak] or [None])
            )
    present(
        asked,
        f"{SECONDS} s clips, {asked.threads} threads; import torch takes {of_torch:,.0f} MB",
        table,
    )


if __name__ == "__main__":
    main()
