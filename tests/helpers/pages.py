"""The pages of documentation, their code blocks, and a reader who runs them one after the
other in one folder."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import yaml
from processes import MOST_SECONDS, TESTS

from featcache.errors import FeatcacheWarning
from featcache.manifest.read import read_manifest

ROOT = Path(__file__).parents[2]

OUTPUT = {"", "text", "hexdump"}
"""What blocks of output, of diagrams and of bytes are marked as: nobody runs them."""

INSTALLS = [
    "python3 -m venv .venv && .venv/bin/pip install --quiet '.[extract]'",
    "python3 -m venv .venv && .venv/bin/pip install -e '.[extract,test]'",
    "pip install '.[extract,models]'",
    "pip install '.[extract,bench]'",
    "pip install '.[extract]'",
    ".ci/run",
    ".venv/bin/ruff check && .venv/bin/ruff format && .venv/bin/mypy",
    ".venv/bin/python scripts/make_docs.py",
    ".venv/bin/pytest",
    ".venv/bin/mkdocs serve --config-file docs/mkdocs.yml",
]
"""Commands that install, check or write the project itself; a reader of the tests has
done that."""

SMALL = {
    "featcache probe encodec24k-6kbps train.csv": "--utterances 2",
    "python scripts/stories/train_keywords.py": "--weights encodec --limit 60 "
    "--epochs 1 --more-epochs 1 --channels 8",
    "python scripts/stories/train_xvector.py": "--limit 60 --epochs 2 --channels 8 --threads 1",
    "python scripts/stories/train_speech_lm.py": "--weights encodec --limit 60 --steps 6 --threads 1",
    "python scripts/gpu/day.py": "--only sanitizer",
    "python scripts/bench/masks.py": "--rounds 1",
    "python scripts/bench/resample.py": "--rounds 1",
}
"""Commands that take long, with options that make them small."""

ALONE = {"docs/tour.md"}
"""Pages that begin in a clone without a cache, and whose output is compared with what
they show."""

VARIES = [
    (r"\d{4}-\d\d-\d\d( \d\d:\d\d(:\d\d)? UTC)?", "DATE"),
    (r"in [\d.]+ s: [\d,.]+ × real time on \S+, \d+ threads?", "in SECONDS"),
    (r"[\d.,]+ [kM]B\b", "BYTES"),
    (r"\b(shard +)[0-9a-f]{16}\b", r"\1NAME"),
    (r"(\d\.\d{3})\d+", r"\1"),
    (r"(?m)^(run|made by) .*", r"\1 …"),
    (r"  +", "  "),
]
"""What of the output differs from one run to the next, and what stands for it in a
comparison."""

SLOW = {"docs/stories.md"}
"""Pages that take a minute even so."""

PACKAGES = {
    "README.md": ["transformers"],
    "docs/adapters.md": ["lightning", "speechbrain", "lhotse", "datasets"],
    "docs/extractors.md": ["transformers"],
    "docs/from-other-tools.md": ["lhotse", "datasets", "torchaudio"],
    "docs/loader.md": ["transformers"],
    "docs/manifest.md": ["lhotse"],
    "docs/packing.md": ["transformers"],
    "docs/stories.md": ["transformers"],
}
"""What pages need beyond featcache[extract]; where one is not installed, the page is not
run."""


def text_of(name: str | Path) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    page: str
    """The page, by its path in the repository."""
    line: int
    """The number of the line where the block begins."""
    language: str
    text: str
    lead: str
    """The last line before the block that is not empty."""
    printed: str | None
    """What it is said to print: the block of output directly below it."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str | Path, language: str | None = None) -> list[Block]:
    """The blocks of a page, in order; or those of a language."""
    lines = text_of(page).splitlines()
    fences = [number for number, line in enumerate(lines) if line.startswith("```")]
    assert len(fences) % 2 == 0, f"{page}: a block is not closed"
    found: list[Block] = []
    for first, last in reversed([*zip(fences[::2], fences[1::2], strict=True)]):
        lead = next((line for line in reversed(lines[:first]) if line.strip()), "")
        text = "".join(f"{line}\n" for line in lines[first + 1 : last])
        below = (
            found[-1]
            if found and found[-1].language == "text" and found[-1].lead == "```"
            else None
        )
        found.append(
            Block(str(page), first + 1, lines[first][3:], text, lead, below and below.text)
        )
    return [block for block in found[::-1] if language in (None, block.language)]


def pages_in_order() -> list[str]:
    """All pages, as README leads to them; those that take long come last."""
    every = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} | {
        "examples/README.md",
        "CONTRIBUTING.md",
    }
    every -= ALONE
    linked = re.findall(r"\]\(([\w/.]+\.md)", text_of("README.md").partition("\n## More")[2])
    in_order = sorted(
        sorted(every), key=lambda page: (page in SLOW, linked.index(page) if page in linked else -1)
    )
    return ["README.md", *in_order]


def without_what_varies(output: str) -> str:
    for pattern, name in VARIES:
        output = re.sub(pattern, name, output)
    return output


@dataclass
class Reader:
    """Somebody with a clone, who has run README's first command, and who has some speech
    of his own."""

    folder: Path
    """The folder where everything is run."""
    env: dict[str, str]
    names: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The names that each page's Python has defined."""
    failed: str = ""
    """That a page did not run to its end: the pages after it may need what it lacks."""

    def read(self, page: str) -> dict[str, Any]:
        """Run a page, and before it those that come before it; gives the names that its
        Python has defined."""
        for name in pages_in_order():
            if (
                name not in self.names
                and not self.failed
                and all(map(find_spec, PACKAGES.get(name, ())))
            ):
                self.names[name] = {"__name__": "__page__"}
                self.failed = f"{name} did not run to its end"
                for block in blocks_of(name):
                    self._run_block(block)
                self.failed = ""
            if name == page:
                break
        assert not self.failed, self.failed
        if page not in self.names:
            pytest.skip(f"{page} needs {PACKAGES[page]}")
        return self.names[page]

    def read_alone(self, page: str) -> None:
        """Run a page by itself, and compare what its blocks print with what it shows."""
        self.names[page] = {"__name__": "__page__"}
        for block in blocks_of(page):
            output = self._run_block(block)
            if block.printed is not None:
                assert without_what_varies(output) == without_what_varies(block.printed), (
                    f"{block} prints\n{output}"
                )
            if entered := re.search(r"&& cd (\w+)\n$", block.text):
                self.folder /= entered[1]

    def _run_block(self, block: Block) -> str:
        """Run a block; what it prints, on stdout and stderr."""
        if block.language in OUTPUT or (
            "needs a GPU" in block.text and not torch.cuda.is_available()
        ):
            return ""
        run = {"sh": self._run_sh, "python": self._run_python}.get(block.language, self._read_file)
        with chdir(self.folder), warnings.catch_warnings():
            # other packages', which a reader sees and goes on
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", FeatcacheWarning)
            return run(block)

    def _run_sh(self, block: Block) -> str:
        """Run commands; the exit code is 0, or what the last line says: `# exit code 3`."""
        text = self._here(block.text)
        for command in sorted(INSTALLS, key=len, reverse=True):
            text = re.sub(rf"(?<![\w./]){re.escape(command)}(?![\w/.-])", "true", text)
        for command, options in SMALL.items():
            text = text.replace(command, f"{command} {options}")
        said = re.search(r"# .*exit code (\d+)", text.rstrip().rpartition("\n")[2])
        command, environment = ["bash", "-euo", "pipefail", "-c", text], {**os.environ, **self.env}
        pipes = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        done = subprocess.run(
            command, cwd=self.folder, env=environment, timeout=MOST_SECONDS, **pipes
        )
        expected = int(said[1]) if said else 0
        assert done.returncode == expected, f"{block}: exit code {done.returncode}\n{done.stdout}"
        return done.stdout

    def _run_python(self, block: Block) -> str:
        # so that a traceback has the page's lines
        code = "\n" * block.line + self._here(block.text)
        with redirect_stdout(StringIO()) as printed:
            exec(compile(code, str(ROOT / block.page), "exec"), self.names[block.page])
        return printed.getvalue()

    def _read_file(self, block: Block) -> str:
        """What a file holds; where the line before it names the file, the reader writes
        it."""
        text = block.text.replace("<commit>", "0" * 40)
        named = re.findall(r"`([\w.-]+\.(?:yaml|csv|jsonl|toml))`", block.lead)
        if block.language == "csv":
            (self.folder / "shown.csv").write_text(text)
            read_manifest(self.folder / "shown.csv")
        else:
            {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}[block.language](
                text
            )
        if named:
            (self.folder / named[-1]).write_text(text)
        return ""

    def _here(self, text: str) -> str:
        """With the reader's disks in his folder."""
        return re.sub(r"(?<![\w.])/(?=(?:data|corpora|network|local)/)", f"{self.folder}/", text)


def make_reader(folder: Path, socket: str) -> Reader:
    """A reader in a folder with the examples, whose `featcache` is that of
    `cli_server.py`."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    _write_program(
        programs / "featcache", f"#!{sys.executable} -SE\nSOCKET = {socket!r}\n{_featcache}"
    )
    _write_program(programs / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    shutil.copytree(ROOT / "examples", folder / "examples")
    path = os.pathsep.join([str(ROOT), str(TESTS)])
    return Reader(
        folder, {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}
    )


def write_speech(folder: Path) -> None:
    """The rest of the clone, and the files of his own that pages speak of."""
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "data").mkdir()
    (folder / "audio").mkdir()
    random = np.random.default_rng(0)
    with (folder / "train.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "path", "text", "speaker", "digit"])
        for number in range(24):
            samples = 0.1 * random.standard_normal(int(16000 * random.uniform(0.45, 0.65)))
            soundfile.write(folder / "audio" / f"{number}.wav", samples, 16000)
            rows.writerow(
                [
                    f"utt-{number}",
                    f"audio/{number}.wav",
                    "a word",
                    f"speaker-{number % 3}",
                    number % 10,
                ]
            )
    with (folder / "noises.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["id", "path"], ["hum", "audio/0.wav"], ["hiss", "audio/1.wav"]]
        )
    (folder / "my-config.yaml").write_text(
        "name: mine\nextractor: fbank\nparams: {num_mel_bins: 40}\n"
    )
    (folder / "units.yaml").write_text(
        "name: units\nextractor: units\nparams: {weights: units.safetensors}\n"
    )
    (folder / "wav.scp").write_text(
        "".join(f"rec-{number} audio/{number}.wav\n" for number in range(3))
    )
    (folder / "segments").write_text("u1 rec-0 0.0 0.3\nu2 rec-1 0.1 0.3\n")
    (folder / "my_package.py").write_text(
        "import torch\n\n\nclass MyEncoder(torch.nn.Module):\n    pass\n"
    )
    if find_spec("lhotse"):
        from lhotse import CutSet, Recording

        recordings = [
            Recording.from_file(folder / "audio" / f"{number}.wav") for number in range(3)
        ]
        CutSet.from_cuts(recording.to_cut() for recording in recordings).to_file(
            folder / "cuts.jsonl.gz"
        )


def _write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


_featcache = """
import json, os, socket, sys

connection = socket.socket(socket.AF_UNIX)
connection.connect(SOCKET)
request = {
    "args": sys.argv[1:],
    "cwd": os.getcwd(),
    "env": {"PYTHONPATH": os.environ["PYTHONPATH"]},
    **{name: f"/proc/{os.getpid()}/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))},
}
connection.sendall(json.dumps(request).encode() + b"\\n")
stream = connection.makefile("r")
stream.readline()
sys.exit(int(stream.readline()))
"""
