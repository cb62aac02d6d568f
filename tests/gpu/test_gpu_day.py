"""scripts/gpu/day.py runs without a GPU: each step finds something on the CPU, and each
of its ends is told."""

import json
from pathlib import Path

import pytest
from processes import python, run_script

FOLDER = Path(__file__).parents[2] / "scripts" / "gpu"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_step_finds_something_on_the_cpu(cli, tmp_path):
    steps = """
    import sys
    from pathlib import Path
    from time import perf_counter

    folder, out = sys.argv[1:]
    sys.path.insert(0, folder)
    import codes, graphs, loading, throughput
    import torch
    from featcache.device import Device
    from featcache.extractors import rows
    from step import Step

    codes.CODECS = {"mimi": "mimi"}
    graphs.NAMES = throughput.NAMES = throughput.SWEPT = ("hubert",)
    rows.ROW_SECONDS["cpu"] = 0.5
    device = Device("cpu", 2)
    device.configure_torch()
    for module in (codes, graphs, loading, throughput):
        results = Path(out, module.__name__ + ".jsonl")
        with torch.inference_mode():
            module.run(Step(device, results, Path(out), seconds=60, small=True, started=perf_counter()))
    """
    run_script(cli, steps, FOLDER, tmp_path, ignore=["The PyTorch API of nested tensors"])
    found = {path.stem: read(path) for path in tmp_path.glob("*.jsonl")}
    assert {step: {result["what"] for result in results} for step, results in found.items()} == {
        "codes": {"against the model alone", "against the CPU", "batching"},
        "graphs": {"graph"},
        "loading": {"copy", "loader", "training"},
        "throughput": {"alone", "batch", "kernels", "end to end", "sweep"},
    }
    assert all(result["mismatched"] == 0 for result in found["codes"] if "mismatched" in result)
    assert found["graphs"][0]["same_bits"]


def test_a_step_that_dies_leaves_what_it_had_and_its_last_words(cli, tmp_path):
    day = """
    import sys
    from pathlib import Path

    folder, out = sys.argv[1:]
    sys.path.insert(0, folder)
    import day

    writes = "import json, sys, pathlib as p; p.Path(sys.argv[4]).write_text(json.dumps(dict(what='a', b=1)) + chr(10))"
    code = {"codes": writes, "graphs": writes + "; import time; print('begun'); time.sleep(60)", "loading": "1/0"}
    for name, step in code.items():
        day.STEPS[name] = day.Step("it", 1, lambda asked, step=step: [sys.executable, "-c", step])
    sys.argv = ["day.py", "--out", out, "--device", "cpu", "--minutes", "0.05", "--only", *code, "sanitizer"]
    day.main()
    """
    run_script(cli, day, FOLDER, tmp_path)
    ends = {path.stem: read(path)[-1] for path in tmp_path.glob("*.jsonl")}
    assert {name: end["end"] for name, end in ends.items()} == {
        "codes": "done",
        "graphs": "killed: its time was up",
        "loading": "failed: exit code 1",
        "sanitizer": "cannot be run here",
    }
    assert ends["graphs"]["last lines"] == ["begun"]
    assert read(tmp_path / "graphs.jsonl")[0] == {"what": "a", "b": 1}
    report = (tmp_path / "report.md").read_text()
    assert "ZeroDivisionError" in report
    assert report.count("| 1 |") == 2


@pytest.mark.slow
def test_a_whole_day_on_the_cpu(tmp_path):
    options = [
        "--device",
        "cpu",
        "--minutes",
        "20",
        "--out",
        tmp_path / "out",
        "--work",
        tmp_path / "work",
    ]
    assert python(FOLDER / "day.py", *options).code == 0
    ends = {path.stem: read(path)[-1]["end"] for path in (tmp_path / "out").glob("*.jsonl")}
    assert {ends.pop(step) for step in ("conformance", "tokens", "sanitizer")} == {
        "cannot be run here"
    }
    assert set(ends.values()) == {"done"}, (tmp_path / "out" / "report.md").read_text()
    assert ": failed" not in (tmp_path / "out" / "report.md").read_text()
