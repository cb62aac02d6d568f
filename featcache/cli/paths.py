"""Paths on the command line, checked, with one-line errors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from featcache.arguments import refuse_url
from featcache.errors import ArgumentError


class _Given(click.Path):
    """A path: not empty, as a variable of the shell's that is not set makes it, and no URL.

    A leading `~/` is the home folder, also where the shell leaves it alone, as in `--root=~/audio`.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        given = os.fspath(value)
        if not given:
            raise ArgumentError(f"{_name(param)} is empty")
        refuse_url(_name(param), given)
        if given == "~" or given.startswith("~/"):
            given = os.path.expanduser(given)
        if (fault := self.fault(given)) is not None:
            raise ArgumentError(f"{_name(param)}: {fault}")
        return super().convert(given, param, ctx)

    def fault(self, path: str) -> str | None:
        """What is wrong with it, if anything."""
        return None


class _ExistingFolder(_Given):
    """A folder that is there."""

    def fault(self, path: str) -> str | None:
        if os.path.isdir(path):
            return None
        return f"{path} is not a folder" if os.path.exists(path) else f"there is no folder {path}"


class _Cache(_Given):
    """A folder, or a place for one."""

    def fault(self, path: str) -> str | None:
        if os.path.isdir(path) or not os.path.lexists(path):
            return None
        if os.path.islink(path) and not os.path.exists(path):
            return f"{path} is a link to {os.readlink(path)}, which is not there"
        return f"{path} is not a folder"


class _File(_Given):
    """A file, or a place for one."""

    def fault(self, path: str) -> str | None:
        return f"{path} is not a file" if os.path.exists(path) and not os.path.isfile(path) else None


def _name(param: click.Parameter | None) -> str:
    """As a user knows it: `-o`, `--root`, `MANIFEST`."""
    if param is None:
        return "a path"
    return param.opts[0] if isinstance(param, click.Option) else param.human_readable_name


TEXT = _Given()
"""A path as it is: of a manifest, where `-` is standard input, or of a config, which may be a name."""
PATH = _Given(path_type=Path)
EXISTING_FOLDER = _ExistingFolder(file_okay=False, path_type=Path)
CACHE = _Cache(file_okay=False, path_type=Path)
FILE = _File(dir_okay=False, path_type=Path)
