"""Options and arguments that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

FOLDER = click.Path(file_okay=False, path_type=Path)


def root(default: str = "the manifest's folder") -> Decorator:
    """`--root`, for every command that takes a manifest; `default` says what it is where it is not given."""
    help_text = f"What relative paths are relative to.  [default: {default}]"
    return click.option("--root", type=FOLDER, metavar="FOLDER", help=help_text)


def device(meaning: str = "cpu, cuda, cuda:1 …") -> Decorator:
    """`--device`, for every command that computes."""
    return click.option("--device", metavar="DEVICE", help=f"{meaning}  [default: cuda where there is one]")


def threads(meaning: str) -> Decorator:
    """`--threads`."""
    return click.option("--threads", type=click.IntRange(min=1), metavar="N", help=meaning)


def cache(meaning: str, **settings: Any) -> Decorator:
    """`-o`, `--output`: a cache, for every command that writes to one; `settings` are click's."""
    return click.option("-o", "--output", "cache", type=FOLDER, metavar="CACHE", help=meaning, **settings)


def as_json(meaning: str) -> Decorator:
    """`--json`, for every command that has something to tell."""
    return click.option("--json", "as_json", is_flag=True, help=meaning)


def _allow_remote_code(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from featcache.weights import allow_remote_code

        allow_remote_code()


trust_remote_code = click.option(
    "--trust-remote-code",
    is_flag=True,
    expose_value=False,
    callback=_allow_remote_code,
    help="Run the Python code that a model brings with its weights. Without it, such a model is refused.",
)
"""For every command that loads models."""

version_path = click.argument("path", metavar="CACHE[/VERSION]", type=click.Path(path_type=Path))
"""For every command that takes one version, or all of a cache."""
