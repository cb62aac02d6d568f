"""`featcache show`: one utterance."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import print_json
from featcache.errors import MissingItemError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from featcache.loader import Cache


@click.command(short_help="Show one utterance: where it is, where it came from, its values.")
@options.version_path
@click.argument("utterance", metavar="ID")
@options.as_json("Print it as one JSON document.")
def show(path: Path, utterance: str, as_json: bool) -> None:
    """Show one utterance of each version that has it: its shard, the file it came from, and a summary of its values.

    \b
    Example:
      featcache show features LJ001-0001
    """
    from featcache.loader import Cache
    from featcache.spec import QUANTIZATION
    from featcache.store.version import select_versions
    from featcache.strings import Strings

    documents: list[dict[str, Any]] = []
    missing: MissingItemError | None = None
    for version in select_versions(path):
        cache = Cache(version)
        try:
            features = cache[utterance]
        except MissingItemError as error:
            missing = missing or error
            continue
        index = cache.index
        position = int(index.find(Strings.of([utterance]))[0])
        shard = version.shard(index.shards[int(index.shard[position])])
        (item,) = shard.items([int(index.item[position])])
        side = {
            spec.name: _summary(cache.side(spec.name, utterance))
            for spec in cache.spec.side
            if spec.name != QUANTIZATION
        }
        documents.append(
            {
                "version": str(version.path),
                "shard": shard.name,
                **asdict(item),
                **_summary(features),
                **({"quantized": _quantized(cache, utterance)} if cache.spec.is_quantized else {}),
                "side": side,
            }
        )
    if missing is not None and not documents:
        raise missing
    if as_json:
        print_json({"versions": documents})
        return
    for document in documents:
        side = document.pop("side")
        quantized = document.pop("quantized", None)
        for name, value in document.items():
            if value is not None:
                click.echo(f"{name:12} {value}")
        if quantized:
            click.echo(f"{'stored':12} {quantized['dtype']}, off by at most {quantized['largest_error']:.3g}")
        for name, summary in side.items():
            values = ", ".join(f"{key} {value}" for key, value in summary.items() if value is not None)
            click.echo(f"{name:12} {values}")


def _quantized(cache: Cache, utterance: str) -> dict[str, Any]:
    """How an utterance is quantised: the dtype of its levels, the smallest and the largest scale, and how far a value
    may be off.
    """
    scale, _ = cache.quantization([utterance])[0]
    return {
        "dtype": cache.spec.stored_dtype,
        "smallest_scale": float(scale.min()),
        "largest_scale": float(scale.max()),
        "largest_error": float(scale.max()) / 2,
    }


def _summary(array: NDArray[Any]) -> dict[str, Any]:
    """Shape, dtype and range of an array; nothing for the range of one that is empty."""
    import numpy as np

    values = array.astype(np.float64)
    found = {"min": values.min(), "mean": values.mean(), "max": values.max()} if values.size else {}
    numbers = {name: float(found[name]) if found else None for name in ("min", "mean", "max")}
    return {"shape": list(array.shape), "dtype": array.dtype.name, **numbers}
