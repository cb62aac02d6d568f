"""Counts what the package is made of: rooms, arrows, layers, circles, files, bytes, and how dense
its lines are.

A room is a file or folder directly in `featcache/`. Room A has an arrow to room B if any file of A
imports from B, in functions and under TYPE_CHECKING too. A room's layer is one above the highest
layer that it imports from. Files of one room form a circle if they import each other.

    python scripts/house.py            the package in this checkout
    python scripts/house.py CHECKOUT   another one, made by `git worktree add CHECKOUT COMMIT`
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LONG = 95
"""A line of more characters is long."""

RIDDLE = re.compile(r"(What|That|Whether|Which|Who|Whom|Whose|Where|How|Why)\b")
"""Docstrings that open so have to be solved: no verb or noun says what the thing is."""

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def room_of(path: Path) -> str:
    """`store/index.py` is in the room `store`; `errors.py` is the room `errors`."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def names_imported(tree: ast.AST) -> Iterator[list[str]]:
    """The parts of each dotted name that a file imports from the package."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        for name in names:
            package, *parts = name.split(".")
            if package == "featcache" and parts:
                yield parts


def layers_of(arrows: dict[str, set[str]], nodes: set[str]) -> dict[str, int]:
    """The layer of each node, from 1; nodes in a circle, and those above one, have none."""
    layers: dict[str, int] = {}
    while ready := [node for node in nodes - {*layers} if arrows[node] <= {*layers}]:
        for node in ready:
            layers[node] = 1 + max((layers[other] for other in arrows[node]), default=0)
    return layers


def circles_inside(trees: dict[Path, ast.Module]) -> dict[str, list[str]]:
    """The files of each room that import each other in a circle, without type-checking imports."""
    circles = {}
    for room in {room_of(path) for path in trees if len(path.parts) > 1}:
        names = {".".join(path.with_suffix("").parts): path for path in trees}
        inside = {name for name, path in names.items() if room_of(path) == room}
        arrows: dict[str, set[str]] = defaultdict(set)
        for name in inside:
            for parts in names_imported(trees[names[name]]):
                targets = {".".join(parts), ".".join(parts[:-1])} & inside
                arrows[name] |= targets - {name, f"{room}.__init__"}
        layers = layers_of(arrows, inside)
        # what a circle stands on has a layer; of what has none, leave out what no circle needs
        rest = inside - {*layers}
        while outer := {name for name in rest if not any(name in arrows[other] for other in rest)}:
            rest -= outer
        if rest:
            circles[room] = sorted(rest)
    return circles


def density(sources: list[str], trees: list[ast.Module]) -> dict[str, float]:
    """How dense the code is to read, by the measures that a test keeps."""
    lines = [line for source in sources for line in source.splitlines() if line.strip()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    docstrings = [ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED)]
    docstrings = [text for text in docstrings if text]
    of_thousand = 1000 / len(lines)
    return {
        "bytes": sum(len(source.encode()) for source in sources),
        "mean line, characters": sum(map(len, lines)) / len(lines),
        f"lines above {LONG}, %": 100 * sum(len(line) > LONG for line in lines) / len(lines),
        "assignments in expressions in 1,000 lines": of_thousand
        * sum(isinstance(node, ast.NamedExpr) for node in nodes),
        "conditional expressions in 1,000 lines": of_thousand
        * sum(isinstance(node, ast.IfExp) for node in nodes),
        "docstrings that open with a riddle, %": 100
        * sum(bool(RIDDLE.match(text)) for text in docstrings)
        / len(docstrings),
    }


def read_package(checkout: Path) -> tuple[dict[Path, str], dict[Path, ast.Module]]:
    """The source and the syntax tree of each file of the package, by its path in it."""
    package = checkout / "featcache"
    sources = {
        path.relative_to(package): path.read_text(encoding="utf-8")
        for path in sorted(package.rglob("*.py"))
    }
    return sources, {path: ast.parse(source) for path, source in sources.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    sources, trees = read_package(parser.parse_args().checkout)
    files = [path for path in trees if path.name != "__init__.py"]
    rooms = {room_of(path) for path in trees} - {"__init__"}
    arrows: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        if path != Path("__init__.py"):  # the public face, which hands names on
            imported = {parts[0] for parts in names_imported(tree)}
            arrows[room_of(path)] |= (imported & rooms) - {room_of(path)}
    layers = layers_of(arrows, rooms)
    circles = circles_inside(trees)
    num_lines = {path: len(source.splitlines()) for path, source in sources.items()}
    num_bytes = {path: len(source.encode()) for path, source in sources.items()}
    print(f"rooms       {len(rooms)}")
    print(f"arrows      {sum(map(len, arrows.values()))}")
    in_circles = ", ".join(sorted(rooms - {*layers})) or "none"
    print(f"layers      {max(layers.values())}, in circles: {in_circles}")
    print(f"files       {len(files)}, and {len(trees) - len(files)} faces (__init__.py)")
    print(f"lines       {sum(num_lines.values())}")
    for name, value in density([*sources.values()], [*trees.values()]).items():
        print(f"{name:<43} {value:,.{0 if name == 'bytes' else 2}f}")
    for room, names in sorted(circles.items()):
        print(f"circle in {room}: {', '.join(names)}")
    for number in range(1, 1 + max(layers.values())):
        print(
            f"{number:>2}  {', '.join(sorted(room for room in layers if layers[room] == number))}"
        )
    for room in sorted(rooms):
        inside = [path for path in trees if room_of(path) == room]
        num_files = sum(path in files for path in inside)
        bytes_inside = sum(num_bytes[path] for path in inside)
        print(
            f"{room:>12} {num_files:>3} files {sum(num_lines[path] for path in inside):>6} lines",
            end="",
        )
        print(f" {bytes_inside:>8,} bytes")


if __name__ == "__main__":
    main()
