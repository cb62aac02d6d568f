"""Measure and test everything that needs a GPU, in one command: see docs/gpu.md.

    python scripts/gpu/day.py --out results [--minutes 25] [--device cuda]
                              [--only tests codes …]
    python scripts/gpu/day.py --out results --device cpu --minutes 5
                        to check the script itself

Steps run in the order of their value, each in a process of its own, which is killed when
its time is up. What a step has found until then is kept: in OUT/<step>.jsonl, a result a
line, and for people in OUT/report.md, which is written anew after each step, of all steps
that are in OUT. So a day may be several commands with the same OUT.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from time import perf_counter, strftime
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LAST_LINES = 30

ON_A_GPU = ["gpu", "augment", "test_cmvn.py", "test_masks.py", "loader/test_data_loader.py"]
"""Where, in tests/, those marked gpu are, but for those of `conformance`; the other files
would only be collected."""
PYTEST = [
    sys.executable,
    "-m",
    "pytest",
    "-p",
    "no:cacheprovider",
    "-W",
    "default",
    "--tb=short",
    "-vv",
    "-rfE",
]
WORKERS = (
    ["-n", str(max(1, min(8, len(os.sched_getaffinity(0)) // 2)))] if find_spec("xdist") else []
)


@dataclass(frozen=True)
class Step:
    settles: str
    """The question that it answers."""
    minutes: float
    """Its share of a day of 25 minutes; what it leaves is for those that follow."""
    command: Callable[[argparse.Namespace], list[str] | None]
    """The command, without options of `step.py`; None if it cannot run here."""
    takes_options: bool = True
    """Whether the command takes the options of `step.py`, and writes results."""


def script(name: str) -> Callable[[argparse.Namespace], list[str]]:
    return lambda asked: [sys.executable, str(HERE / f"{name}.py")]


def tests(asked: argparse.Namespace) -> list[str]:
    if asked.device == "cpu":
        return [*PYTEST, *WORKERS, "tests/gpu"]
    return [*PYTEST, *WORKERS, "-m", "gpu", *(f"tests/{name}" for name in ON_A_GPU)]


def conformance(asked: argparse.Namespace) -> list[str] | None:
    if asked.device == "cpu":  # the suite does that
        return None
    return [*PYTEST, *WORKERS, "-m", "gpu", "tests/extractors/test_conformance.py"]


def sanitizer(asked: argparse.Namespace) -> list[str] | None:
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    if asked.device == "cpu" or not (tool := shutil.which("compute-sanitizer", path=path)):
        return None
    # Each tensor has memory of its own, whose ends the sanitizer then sees.
    own_memory = [
        "env",
        "PYTORCH_NO_CUDA_MEMORY_CACHING=1",
        tool,
        "--error-exitcode",
        "9",
        "--target-processes",
        "all",
    ]
    return [
        *own_memory,
        *PYTEST,
        "-m",
        "gpu",
        "tests/gpu/test_gpu_memory.py",
        "-k",
        "threads or loader",
    ]


def tokens(asked: argparse.Namespace) -> list[str] | None:
    if asked.device == "cpu":  # the suite does that, with a small model
        return None
    epochs = ["--epochs", "1", "--more-epochs", "1" if asked.small else "10"]
    limit = "20" if asked.small else "200"
    return story(asked, "train_keywords", ["--folder", str(asked.work), "--limit", limit, *epochs])


def noise(asked: argparse.Namespace) -> list[str]:
    return story(
        asked,
        "train_xvector",
        ["--limit", "60", "--epochs", "2"] if asked.small else ["--epochs", "3"],
    )


def cores(asked: argparse.Namespace) -> list[str]:
    size = ["--hours", "0.1", "--rounds", "1"] if asked.small else ["--hours", "6", "--rounds", "2"]
    command = [
        sys.executable,
        "scripts/bench/extract.py",
        "--no-peers",
        "--folder",
        str(asked.work),
    ]
    return [*command, "--threads", str(min(8, len(os.sched_getaffinity(0)))), *size]


def story(asked: argparse.Namespace, name: str, options: list[str]) -> list[str]:
    return [sys.executable, f"scripts/stories/{name}.py", "--device", asked.device, *options]


STEPS = {
    "tests": Step(
        "whether values and bits are right there, and memory is not reused too early",
        4,
        tests,
        False,
    ),
    "codes": Step(
        "how many codes differ, by batching and precision, and which are ties", 4, script("codes")
    ),
    "throughput": Step(
        "how near to the model alone a run is, and with which constants", 7, script("throughput")
    ),
    "conformance": Step("whether every extractor keeps its guarantees", 2.5, conformance, False),
    "graphs": Step(
        "whether CUDA graphs or torch.compile keep the bits, and what they gain",
        3,
        script("graphs"),
    ),
    "loading": Step("whether the loader keeps a GPU busy", 1.5, script("loading")),
    "tokens": Step("what training gains from codes that are there", 1.5, tokens, False),
    "noise": Step("what noise costs that is drawn on the CPU", 1, noise, False),
    "cores": Step(
        "what threads on the CPU, which has many cores here, lose to the interpreter's lock",
        1,
        cores,
        False,
    ),
    "sanitizer": Step("whether any kernel leaves its memory", 1.5, sanitizer, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of results")
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir(), "featcache-gpu"), help="for models"
    )
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="STEP",
        help=f"some of {', '.join(STEPS)}; none: the report alone",
    )
    parser.add_argument(
        "--small", action="store_true", help="small models and corpora, as on a CPU"
    )
    asked = parser.parse_args()
    if unknown := {*(asked.only or ())} - STEPS.keys():
        parser.error(f"--only: there is no step {', '.join(sorted(unknown))}")
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.small = asked.small or asked.device == "cpu"  # there, more would only take longer
    asked.work.mkdir(parents=True, exist_ok=True)
    asked.out, asked.work = asked.out.resolve(), asked.work.resolve()
    wanted = [name for name in STEPS if asked.only is None or name in asked.only]
    if wanted:
        (asked.out / "machine.json").write_text(json.dumps(machine(asked.device)))
    waiting = {name: command for name in wanted if (command := command_of(name, asked))}
    end = perf_counter() + 60 * asked.minutes
    while waiting:
        shares = sum(STEPS[name].minutes for name in waiting)
        name = next(iter(waiting))
        run(name, waiting.pop(name), (end - perf_counter()) * STEPS[name].minutes / shares, asked)
        write_report(asked.out)
    write_report(asked.out)
    print(f"{asked.out / 'report.md'}", file=sys.stderr)


def command_of(name: str, asked: argparse.Namespace) -> list[str] | None:
    """The command of a step; None, which is told, if it cannot run here."""
    command = STEPS[name].command(asked)
    if command is None:
        results = asked.out / f"{name}.jsonl"
        results.unlink(missing_ok=True)
        write_end(results, "cannot be run here", 0.0, "")
    return command


def run(name: str, command: list[str], seconds: float, asked: argparse.Namespace) -> None:
    """Run a step, and kill it with all that it has started when its time is up."""
    results = asked.out / f"{name}.jsonl"
    results.unlink(missing_ok=True)
    if STEPS[name].takes_options:
        command = [
            *command,
            "--device",
            asked.device,
            "--out",
            str(results),
            "--work",
            str(asked.work),
        ]
        command += ["--seconds", f"{seconds:.0f}", *(["--small"] if asked.small else [])]
    print(f"{name}: at most {seconds:.0f} s", file=sys.stderr)
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "CUDA_LAUNCH_BLOCKING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    start = perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            how = "done" if code == 0 else f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            how = "killed: its time was up"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        said.seek(0)
        write_end(results, how, perf_counter() - start, said.read())


def write_end(results: Path, how: str, seconds: float, said: str) -> None:
    """How a step ended is its last result."""
    lines = [line for line in said.splitlines() if line.strip()]
    # tests, as they ran
    failed = [line for line in lines[:-LAST_LINES] if " FAILED" in line or " ERROR" in line]
    said_last = [*failed[:LAST_LINES], *lines[-LAST_LINES:]]
    with results.open("a") as file:
        file.write(
            json.dumps({"end": how, "seconds": round(seconds, 1), "last lines": said_last}) + "\n"
        )


def machine(device: str) -> dict[str, Any]:
    """What the results were found on."""
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu sees that the script works")
    found = {"date": strftime("%Y-%m-%d %H:%M"), "commit": commit(), "torch": torch.__version__}
    found["cores"] = len(os.sched_getaffinity(0))
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "GiB": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def write_report(out: Path) -> None:
    (out / "report.md").write_text("\n".join(report(out)) + "\n")


def commit() -> str:
    """The commit of this copy; empty where git or its history is missing."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def report(out: Path) -> Iterable[str]:
    """The report of all steps whose results are there, in Markdown."""
    yield "# Results"
    yield ""
    yield ", ".join(
        f"{name} {value}" for name, value in json.loads((out / "machine.json").read_text()).items()
    )
    for name, step in STEPS.items():
        if not (out / f"{name}.jsonl").exists():
            continue
        results = [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]
        yield from ("", f"## {name}", "", f"Settles {step.settles}.")
        found = [result for result in results if "end" not in result]
        for kind, members in groupby(sorted(found, key=itemgetter("what")), key=itemgetter("what")):
            yield from ("", f"### {kind}", "", *table(list(members)))
        for end in (result for result in results if "end" in result):
            yield from ("", f"{end['end']}, after {end['seconds']} s.")
            if end["last lines"] and (end["end"] != "done" or not found):
                yield from ("", "```text", *end["last lines"], "```")


def table(results: list[dict[str, Any]]) -> Iterable[str]:
    columns = list(dict.fromkeys(name for result in results for name in result if name != "what"))
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for result in results:
        cells = ("" if result.get(name) is None else str(result[name]) for name in columns)
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    main()
