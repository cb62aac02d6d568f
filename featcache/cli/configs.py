"""`featcache configs`: the packaged configs, those of versions, and their JSON Schema."""

from __future__ import annotations

import click

from featcache.cli import options
from featcache.cli.common import print_json, say
from featcache.errors import ArgumentError, ConfigError
from featcache.storage.location import Location


@options.command(short_help="List the packaged configs; print one, or a version's.")
@click.argument("name", required=False)
@click.option(
    "--from",
    "path",
    type=options.LOCATION,
    metavar="CACHE[/VERSION]",
    help="Print this version's config.",
)
@options.flag("--schema", "Print a JSON Schema of configs, for editors.")
def configs(name: str | None, path: Location | None, schema: bool) -> None:
    """List the packaged configs; with a NAME, print that config, with comments, as a
    start for your own. The config that --from prints makes the same version again.

    \b
    Examples:
      featcache configs
      featcache configs fbank80 > my-config.yaml
      featcache configs --from features/fbank80 > same.yaml
      featcache configs --schema > featcache.schema.json
    """
    if [name is not None, path is not None, schema].count(True) > 1:
        raise ArgumentError("give one of NAME, --from and --schema")
    from featcache.config.config import packaged_configs, packaged_hint

    packaged = packaged_configs()
    if path is not None:
        _print_recorded(path)
    elif schema:
        from featcache.config.schema import config_schema

        print_json(config_schema())
    elif name is None:
        width = max(map(len, packaged))
        for known, text in packaged.items():
            click.echo(f"{known:{width}} {text.splitlines()[0].lstrip('# ')}")
    elif name in packaged:
        click.echo(packaged[name], nl=False)
    else:
        raise ConfigError(f"there is no packaged config {name!r}; {packaged_hint(name)}")


def _print_recorded(path: Location) -> None:
    import yaml

    from featcache.config.config import ConfigFile
    from featcache.version.selection import select_version

    info = select_version(path).info
    say(f"# The config of {info.folder_name}; its fingerprint is {info.fingerprint}")
    recorded = {key: info.config[key] for key in ConfigFile.model_fields if key in info.config}
    text = yaml.safe_dump(recorded, sort_keys=False, default_flow_style=False, width=120)
    click.echo(text, nl=False)
