"""The first second: what `featcache extract` of eight clips takes beyond `import torch`.

    python scripts/bench/start.py [--rounds 11] [--json]
    python scripts/bench/start.py --package CHECKOUT    another one too, by `git worktree add`

Each line is a whole process, started anew. All take turns; the figures are medians. The
clips are noise of 6 s. A run that finds nothing to do does not import torch."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import soundfile
from harness import Table, options, present, remark, take_turns, temporary_folder

IMPORT, CLIPS = "import torch", 8


def make_manifest(folder: Path) -> Path:
    """Write the clips, and a manifest of them."""
    random = np.random.default_rng(0)
    lines = ["id,path"]
    for number in range(CLIPS):
        soundfile.write(folder / f"{number}.flac", random.normal(0, 0.1, 6 * 16000), 16000)
        lines.append(f"clip-{number},{number}.flac")
    manifest = folder / "clips.csv"
    manifest.write_text("\n".join(lines) + "\n")
    return manifest


def python(*arguments: object, package: Path) -> None:
    """Run Python with another current folder: the package is the one that it begins with."""
    command = [sys.executable, *map(str, arguments)]
    subprocess.run(command, check=True, cwd=package, capture_output=True)


def main() -> None:
    asked = options(__doc__, rounds=11, package=(Path, "another checkout"))
    packages = {"": Path(__file__).parents[2]}
    if asked.package:
        packages[f", in {asked.package.name}"] = asked.package.resolve()
    with temporary_folder() as folder:
        manifest, numbers = make_manifest(folder), count()
        extract = ["-m", "featcache", "extract", manifest, "-c", "fbank80", "-o"]
        runs: dict[str, Callable[[], object]] = {
            IMPORT: partial(python, "-c", "import torch", package=folder)
        }
        for name, package in packages.items():
            full = folder / f"full{package.name}"
            python(*extract, full, package=package)

            def into_new_cache(package: Path = package) -> None:
                python(*extract, folder / f"cache-{next(numbers)}", package=package)

            runs[f"featcache extract, 8 clips{name}"] = into_new_cache
            runs[f"featcache extract, nothing to do{name}"] = partial(
                python, *extract, full, package=package
            )
        turns = take_turns(runs, asked.rounds)
    columns = {"s": "{:.2f}", "s of CPU": "{:.2f}", "s of CPU beyond torch": "{:.2f}"}
    table = Table(f"Python {sys.version.split()[0]}", columns)
    of_torch = turns.median(IMPORT, "cpu_seconds")
    for name in runs:
        cpu = turns.median(name, "cpu_seconds")
        table.add(name, turns.median(name), cpu, cpu - of_torch)
    present(asked, table, remark(turns.others))


if __name__ == "__main__":
    main()
