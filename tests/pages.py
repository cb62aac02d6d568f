"""The pages of documentation, and the code on them, which tests run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_python_of(name):
    """Run a page's Python blocks, one after the other in one module; returns its names."""
    names = {}
    for block in blocks(text_of(name), "python"):
        exec(compile(block, name, "exec"), names)
    return names
