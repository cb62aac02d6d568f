"""Counts what the package is made of: rooms, import arrows between them, layers, circles,
files and lines.

A room is a file or folder directly in `featcache/`. Room A has an arrow to room B if any
file of A imports from B, in functions and under TYPE_CHECKING too. A room's layer is one
above the highest layer that it imports from.

    python scripts/house.py                 the package in this checkout
    python scripts/house.py CHECKOUT        the package in another one, made by `git worktree add CHECKOUT COMMIT`
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


def room_of(path: Path) -> str:
    """`store/index.py` is in the room `store`; `errors.py` is the room `errors`."""
    return path.parts[0] if len(path.parts) > 1 else path.stem


def rooms_imported(tree: ast.AST, rooms: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        names = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else []
        )
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        parts = [name.split(".") for name in names]
        yield from (
            part[1]
            for part in parts
            if part[0] == "featcache" and len(part) > 1 and part[1] in rooms
        )


def layers_of(arrows: dict[str, set[str]], rooms: set[str]) -> dict[str, int]:
    """The layer of each room, from 1; rooms in a circle, and those above one, have none."""
    layers: dict[str, int] = {}
    while ready := [room for room in rooms - {*layers} if arrows[room] <= {*layers}]:
        layers |= {
            room: 1 + max((layers[other] for other in arrows[room]), default=0) for room in ready
        }
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    package = parser.parse_args().checkout / "featcache"
    trees = {
        path.relative_to(package): ast.parse(path.read_text(encoding="utf-8"))
        for path in package.rglob("*.py")
    }
    files = [path for path in trees if path.name != "__init__.py"]
    rooms = {room_of(path) for path in trees} - {"__init__"}
    arrows: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        if path != Path("__init__.py"):  # the public face, which hands names on
            arrows[room_of(path)] |= {*rooms_imported(tree, rooms)} - {room_of(path)}
    layers = layers_of(arrows, rooms)
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    documented = [
        node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    docstrings = [node.body[0] for node in documented if ast.get_docstring(node)]
    docstring_lines = sum(node.end_lineno - node.lineno + 1 for node in docstrings)
    counts = {
        path: len((package / path).read_text(encoding="utf-8").splitlines()) for path in trees
    }
    print(f"rooms       {len(rooms)}")
    print(f"arrows      {sum(map(len, arrows.values()))}")
    print(
        f"layers      {max(layers.values())}, in circles: "
        f"{', '.join(sorted(rooms - {*layers})) or 'none'}"
    )
    print(f"files       {len(files)}, and {len(trees) - len(files)} faces (__init__.py)")
    print(f"lines       {sum(counts.values())}, {docstring_lines} of them docstrings")
    for number in range(1, 1 + max(layers.values())):
        print(
            f"{number:>2}  {', '.join(sorted(room for room in layers if layers[room] == number))}"
        )
    for room in sorted(rooms):
        num_files = sum(room_of(path) == room for path in files)
        num_lines = sum(counts[path] for path in trees if room_of(path) == room)
        print(f"{room:>12} {num_files:>3} files {num_lines:>6} lines")


if __name__ == "__main__":
    main()
