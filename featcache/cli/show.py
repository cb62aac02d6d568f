"""`featcache show`: one utterance."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from featcache.cli.common import print_json


@click.command(short_help="Show one utterance: where it is, where it came from, its values.")
@click.argument("path", metavar="CACHE[/VERSION]", type=click.Path(path_type=Path))
@click.argument("utterance", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print it as one JSON document.")
def show(path: Path, utterance: str, as_json: bool) -> None:
    """Show one utterance of each version: its shard, the file it came from, and a summary of its values.

    \b
    Example:
      featcache show features LJ001-0001
    """
    import numpy as np

    from featcache.loader import Cache
    from featcache.store.version import select_versions
    from featcache.strings import Strings

    documents = []
    for version in select_versions(path):
        cache = Cache(version)
        features = cache[utterance]
        index = cache.index
        position = int(index.find(Strings.of([utterance]))[0])
        shard = version.shard(index.shards[int(index.shard[position])])
        (item,) = shard.items([int(index.item[position])])
        values = features.astype(np.float64)
        documents.append(
            {
                "version": str(version.path),
                "shard": shard.name,
                **asdict(item),
                "shape": list(features.shape),
                "dtype": features.dtype.name,
                "min": float(values.min()),
                "mean": float(values.mean()),
                "max": float(values.max()),
            }
        )
    if as_json:
        print_json({"versions": documents})
        return
    for document in documents:
        for name, value in document.items():
            click.echo(f"{name:12} {value}")
