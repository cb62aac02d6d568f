"""`featcache --completion`: the script by which a shell completes commands, options, paths and names of configs."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


def _print_script(context: click.Context, parameter: click.Parameter, shell: str | None) -> None:
    if shell is None or context.resilient_parsing:  # the latter: the shell is being told what may follow
        return
    click.echo(_SHELLS[shell](context.command, {}, "featcache", "_FEATCACHE_COMPLETE").source())
    context.exit()


completion = click.option(
    "--completion",
    type=click.Choice([*_SHELLS]),
    is_eager=True,
    expose_value=False,
    callback=_print_script,
    help='Print the script by which a shell completes commands. In ~/.bashrc: eval "$(featcache --completion bash)"',
)
"""`--completion`, of the whole command line."""
