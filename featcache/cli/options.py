"""Options and arguments that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from featcache.cli.paths import CACHE, EXISTING_FOLDER, FILE, PATH, TEXT

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

manifest_argument = click.argument("manifest", type=TEXT)
"""For every command that needs a manifest."""


def manifest(meaning: str, **settings: Any) -> Decorator:
    """`--manifest`; `settings` are click's."""
    return click.option("--manifest", type=TEXT, metavar="MANIFEST", help=meaning, **settings)


def root(default: str = "the manifest's folder") -> Decorator:
    """`--root`, for every command that takes a manifest; `default` says what it is where it is not given."""
    help_text = f"The folder that relative paths are relative to.  [default: {default}]"
    return click.option("--root", type=EXISTING_FOLDER, metavar="FOLDER", help=help_text)


def device(meaning: str = "cpu, cuda, cuda:1 …") -> Decorator:
    """`--device`, for every command that computes."""
    return click.option("--device", metavar="DEVICE", help=f"{meaning}  [default: cuda if there is one]")


def threads(meaning: str) -> Decorator:
    """`--threads`."""
    return click.option("--threads", type=click.IntRange(min=1), metavar="N", help=meaning)


def cache(meaning: str, **settings: Any) -> Decorator:
    """`-o`, `--output`: a cache, for every command that writes to one; `settings` are click's."""
    return click.option("-o", "--output", "cache", type=CACHE, metavar="CACHE", help=meaning, **settings)


def output_file(meaning: str, **settings: Any) -> Decorator:
    """`-o`, `--output`: one file, for every command that writes one; `settings` are click's."""
    return click.option("-o", "--output", "output", type=FILE, metavar="FILE", help=meaning, **settings)


force = click.option("--force", is_flag=True, help="Replace FILE if it exists.")
"""For every command that writes one file."""


def as_json(meaning: str) -> Decorator:
    """`--json`, for every command that has something to tell."""
    return click.option("--json", "as_json", is_flag=True, help=meaning)


def _allow_remote_code(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from featcache.trust import allow_remote_code

        allow_remote_code()


trust_remote_code = click.option(
    "--trust-remote-code",
    is_flag=True,
    expose_value=False,
    callback=_allow_remote_code,
    help="Run Python code that comes with a model's weights, and import extractors that a cache names and no installed "
    "package registers. Without this option, they are refused.",
)
"""For every command that builds extractors."""

version_path = click.argument("path", metavar="CACHE[/VERSION]", type=PATH)
"""For every command that takes one version, by its folder or its config's name, or all of a cache."""
