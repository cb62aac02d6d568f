"""What a power cut may leave of a folder, drawn from a record of what a process did to it.

The model is POSIX's, and stricter than common file systems:

* The bytes of a file are on disk once `fsync` of the file has returned; the names in a
  folder once `fsync` of the folder has. Nothing else makes anything last: not closing,
  not renaming, not flushing the file in place of its folder.
* Of all that came later, anything may be there: each write whole, in part, as zeros, or
  not at all; each new name, removal or rename or not; later ones without earlier ones. A
  rename is there whole or not at all, and lasts once the folder that it leads into was
  flushed.
* What an `fsync` could not write is gone, and the next one does not bring it back.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shim import Call

FATES = ("kept", "gone", "zeroed", "torn")
POLICIES = ("nothing", "names", "names and zeros", "names and beginnings", "removals", "any")
"""What is left of what was not flushed: `nothing`; all names and no bytes; all names, and
zeros for bytes; all names, and the beginnings of files; only removals and renames;
anything, each by chance."""


@dataclass(eq=False)
class Node:
    """A file, or a folder."""

    is_folder: bool
    data: bytes = b""
    entries: dict[str, Node] = field(default_factory=dict)
    writes: list[tuple[int, Call]] = field(default_factory=list)
    """Writes and changes of the size, each with its time: the number of the call."""
    flushed: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    """When a flush failed."""


@dataclass(frozen=True)
class Change:
    """A change of names: from a place, which is a folder and a path, from none, or to
    none."""

    time: int
    node: Node
    source: tuple[Node, Path] | None
    target: tuple[Node, Path] | None

    def lasts(self, moment: int) -> bool:
        """Whether its folder was flushed between it and that moment."""
        place = self.target or self.source
        assert place is not None
        return any(self.time < time < moment for time in place[0].flushed)


class Disk:
    """A folder as it was on disk when a process began, just before which this is made,
    and what that did to it."""

    def __init__(self, folder: Path) -> None:
        self._nodes: dict[int, Node] = {}
        self.root = self._read(folder)
        self.changes: list[Change] = []
        self.end = 0

    def _read(self, path: Path) -> Node:
        node = Node(path.is_dir(), b"" if path.is_dir() else path.read_bytes())
        self._nodes[path.stat().st_ino] = node
        if node.is_folder:
            node.entries = {entry.name: self._read(Path(entry.path)) for entry in os.scandir(path)}
        return node

    def play(self, calls: Sequence[Call]) -> None:
        """Take in what the process did."""
        for time, call in enumerate(calls):
            place = self._place(call.parent, call.path)
            if call.kind == "mkdir" or (call.kind == "open" and call.offset):
                node = self._nodes[call.inode] = Node(call.kind == "mkdir")
                self.changes.append(Change(time, node, None, place))
            elif call.kind == "rename":
                target = self._place(call.other_parent, call.other_path)
                self.changes.append(Change(time, self._nodes[call.inode], place, target))
            elif call.kind in ("unlink", "rmdir"):
                self.changes.append(Change(time, self._nodes[call.inode], place, None))
            elif call.kind == "sync":
                node = self._nodes[call.inode]
                (node.flushed if call.ok else node.refused).append(time)
            elif (
                call.kind in ("write", "truncate", "allocate") or call.length
            ):  # an `open` that empties the file
                self._nodes[call.inode].writes.append((time, call))
        self.end = len(calls)

    def _place(self, parent: int, path: str) -> tuple[Node, Path]:
        return self._nodes.get(parent, self.root), Path(path)

    def lasting(self, moment: int, parent: str) -> set[str]:
        """The names that were renamed into folders called `parent` and must be there
        after a power cut then."""
        renamed = [
            change
            for change in self.changes
            if change.source and change.target and change.lasts(moment)
        ]
        return {
            path.name
            for _, path in (change.target for change in renamed)
            if path.parent.name == parent
        }

    def cut(self, moment: int, chance: random.Random, policy: str, folder: Path) -> None:
        """Write what a power cut just before call number `moment` may leave into a
        folder, which is made."""
        names: dict[int, dict[str, Node]] = {}

        def entries(node: Node) -> dict[str, Node]:
            return names.setdefault(id(node), dict(node.entries))

        likely = chance.choice((0.1, 0.5, 0.9))
        for change in self.changes:
            if change.time >= moment:
                break
            if not (change.lasts(moment) or _stays(change, policy, chance, likely)):
                continue
            if (
                change.source
                and entries(change.source[0]).get(change.source[1].name) is change.node
            ):
                del entries(change.source[0])[change.source[1].name]
            if change.target:
                entries(change.target[0])[change.target[1].name] = change.node

        def write(node: Node, path: Path) -> None:
            if not node.is_folder:
                path.write_bytes(_bytes(node, moment, policy, chance, likely))
                return
            path.mkdir()
            for name, child in entries(node).items():
                write(child, path / name)

        write(self.root, folder)


def _stays(change: Change, policy: str, chance: random.Random, likely: float) -> bool:
    if policy == "nothing":
        return False
    if policy == "removals":
        return change.source is not None
    return policy != "any" or chance.random() < likely


def _bytes(node: Node, moment: int, policy: str, chance: random.Random, likely: float) -> bytes:
    flushed = max((time for time in node.flushed if time < moment), default=-1)
    data = bytearray(node.data)
    for time, call in node.writes:
        if time >= moment:
            break
        refused = [at for at in node.refused if time < at < moment]
        if time < flushed and not refused:
            fate = "kept"
        elif refused and time < min(refused):
            fate = "gone"
        else:
            fate = _fate(policy, chance, likely)
        _apply(data, call, fate, chance)
    return bytes(data)


def _fate(policy: str, chance: random.Random, likely: float) -> str:
    fixed = {"names and zeros": "zeroed", "names and beginnings": "torn", "any": ""}.get(
        policy, "gone"
    )
    return fixed or ("kept" if chance.random() < likely else chance.choice(FATES))


def _apply(data: bytearray, call: Call, fate: str, chance: random.Random) -> None:
    if fate == "gone":
        return
    if call.kind == "open":
        data.clear()
    elif call.kind == "truncate":
        del data[call.offset :]
        data.extend(bytes(call.offset - len(data)))
    elif call.kind == "allocate":
        data.extend(bytes(max(0, call.offset + call.length - len(data))))
    else:
        written = call.data[: chance.randrange(call.length)] if fate == "torn" else call.data
        if fate == "zeroed":
            written = bytes(call.length)
        data.extend(bytes(max(0, call.offset - len(data))))
        data[call.offset : call.offset + len(written)] = written
