"""`featcache configs`: the packaged configs."""

from __future__ import annotations

import click

from featcache.errors import ConfigError


@click.command(short_help="List the packaged configs, or print one.")
@click.argument("name", required=False)
def configs(name: str | None) -> None:
    """List the packaged configs; with a NAME, print that config, with comments, as a start for your own.

    \b
    Examples:
      featcache configs
      featcache configs fbank80 > my-config.yaml
    """
    from featcache.config import packaged_configs

    packaged = packaged_configs()
    if name is None:
        width = max(map(len, packaged))
        for known, text in packaged.items():
            click.echo(f"{known:{width}} {text.splitlines()[0].lstrip('# ')}")
    elif name in packaged:
        click.echo(packaged[name], nl=False)
    else:
        raise ConfigError(f"there is no packaged config {name!r}; choose from {', '.join(packaged)}")
