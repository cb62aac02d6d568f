"""Measure the blocks of docs/from-other-tools.md as they stand there: a loop of one's
own, Lhotse, Hugging Face, featcache.

    pip install '.[extract,bench]'
    python scripts/bench/from_other_tools.py [--hours 0.7] [--rounds 3] [--json]

The corpus is that of `extract.py`, FLAC at 16 kHz, 12.3 s on average, in the page cache.
Each tool runs in a process of its own, pinned to one core, first on 20 utterances, which
imports what it needs, and then on all: the block that extracts, and the block that makes
ten epochs of batches. In each round the tools take turns. Figures are the best of the
rounds, in CPU seconds of all threads and processes, as the machine may be at work for
others; waiting for the disk is not in them, and only featcache flushes what it has
written. `seconds` are by the clock. Ratios are medians of the ratios within a round.
Megabytes are those of all files that a tool has written."""

import contextlib
import csv
import json
import os
import re
import subprocess
import sys
import warnings
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from corpus import make_corpus, write_manifest
from harness import KEPT, Table, Timed, Turns, options, present, remark, temporary_folder, timed

PAGE = Path(__file__).parents[2] / "docs" / "from-other-tools.md"
STEPS = ("extract", "train")
EPOCHS, WARM = 10, 20


def blocks_by_tool() -> dict[str, list[str]]:
    """The first two blocks of Python of each section that has them."""
    sections = (
        section.partition("\n") for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    )
    found = {
        title: re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for title, _, text in sections
    }
    return {title: blocks[:2] for title, blocks in found.items() if blocks}


def run_blocks(tool: str, rows: list[dict[str, str]], folder: Path) -> dict:
    """Run a tool's blocks in an empty folder."""
    folder.mkdir()
    said = [(row["id"], row["path"], "what is said") for row in rows]
    write_manifest(folder / "train.csv", said, ("id", "path", "text"))
    os.chdir(folder)
    spent: dict = {}
    for step, block in zip(STEPS, blocks_by_tool()[tool], strict=True):
        code = compile(block, f"{tool}, {step}", "exec")
        taken = timed(lambda code=code: exec(code, {"__name__": "page"}), patience=2.0)
        spent[step] = asdict(taken)
    spent["bytes"] = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return spent


def one_tool(tool: str, manifest: Path) -> None:
    """What the process of one tool does; prints a JSON object."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with manifest.open(newline="") as file:
        rows = [row | {"path": str(manifest.parent / row["path"])} for row in csv.DictReader(file)]
    with (
        temporary_folder() as folder,
        contextlib.redirect_stdout(sys.stderr),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        os.environ |= {"HF_HOME": str(folder), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        run_blocks(tool, rows[:WARM], folder / "warm")
        spent = run_blocks(tool, rows, folder / "all")
        os.chdir("/")
    print(json.dumps(spent))


def measure(manifest: Path, rounds: int) -> tuple[Turns, dict[str, int]]:
    """What each step of each tool took, in rounds in which tools took turns; and the
    bytes of what each wrote."""
    taken: dict[str, list[Timed]] = defaultdict(list)
    num_bytes = {}
    for number in range(rounds):
        for tool in blocks_by_tool():
            print(f"round {number + 1} of {rounds}: {tool}", file=sys.stderr)
            command = [sys.executable, __file__, "--tool", tool, "--manifest", str(manifest)]
            spent = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            num_bytes[tool] = spent["bytes"]
            for step in STEPS:
                taken[f"{tool}, {step}"].append(Timed(**spent[step]))
    return Turns(taken), num_bytes


def main() -> None:
    if sys.argv[1:2] == ["--tool"]:
        return one_tool(sys.argv[2], Path(sys.argv[4]))
    asked = options(__doc__, folder=KEPT, hours=0.7, rounds=3)
    manifest = make_corpus(asked.folder, "long", asked.hours)
    with manifest.open(newline="") as file:
        lengths = [float(row["duration"]) for row in csv.DictReader(file)]
    turns, num_bytes = measure(manifest, asked.rounds)
    amounts = {
        "extract": ("× real time", sum(lengths)),
        "train": ("utterances/s", len(lengths) * EPOCHS),
    }
    formats = {}
    for step, (unit, _) in amounts.items():
        formats |= {
            f"{step}, {unit}": "{:,.0f}",
            f"{step}: featcache is": "{:.1f} ×",
            f"{step}, seconds": "{:.2f}",
        }
    about = (
        f"{sum(lengths) / 3600:.2f} h in {len(lengths):,} files; one core, CPU seconds, "
        f"best of {asked.rounds}"
    )
    table = Table(f"{about} rounds", {**formats, "MB on disk": "{:,.0f}"})
    for tool, size in num_bytes.items():
        figures = []
        for step, (_, amount) in amounts.items():
            run = f"{tool}, {step}"
            ratio = turns.ratio(run, f"featcache, {step}", "cpu_seconds")
            figures += [amount / turns.best(run, "cpu_seconds"), ratio, turns.best(run)]
        table.add(tool, *figures, size / 1e6)
    present(asked, table, remark(turns.others))
    return None


if __name__ == "__main__":
    main()
