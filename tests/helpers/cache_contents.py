"""What is in a cache that a test has made: its versions, shards and items, and what runs
are writing."""

from pathlib import Path
from typing import Any

from featcache.care.report import Report
from featcache.care.verify import verify
from featcache.format.shard import Item
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure, read_failures
from featcache.version.selection import version_folders
from featcache.version.version import Version

WORK = "work"
"""Where a version holds what is being written."""


def being_written(cache: Path) -> list[Path]:
    """What runs have begun to write in the versions of a cache, and what they are at."""
    return [path for path in cache.glob(f"[!.]*/{WORK}/**/*") if path.name != "desk"]


def only_version(cache: Path, name: str = "") -> Version:
    """The one version in a cache, or the one whose folder's name begins like this."""
    (folder,) = (folder for folder in version_folders(cache) if folder.name.startswith(name))
    return Version.open(folder)


def items(cache: Path, name: str = "") -> dict[str, tuple]:
    """Every item of a version, as `only_version` finds it, as `items_of` gives them."""
    return items_of(only_version(cache, name))


def items_of(version: Version) -> dict[str, tuple]:
    """Every item of a version that counts: id -> dtype, shape and bytes of its features."""
    index = open_index(version)
    found = {}
    for position, id_ in enumerate(index.ids):
        first, count = int(index.first_frame[position]), int(index.num_frames[position])
        features = version.shard(index.shards[int(index.shard[position])]).features[
            first : first + count
        ]
        found[id_] = (features.dtype.name, features.shape, features.tobytes())
    return found


def ledger(cache: Path) -> dict[str, Failure]:
    """What the ledger of a cache's one version holds, by the ids of the utterances."""
    return {failure.id: failure for failure in read_failures(only_version(cache))}


def values_of(opened: Any) -> dict[str, bytes]:
    """The features of every utterance, as an opened cache gives them."""
    return {id_: opened[id_].tobytes() for id_ in opened.ids}


def shard_folders(cache: Path) -> list[Path]:
    """The shards of all versions of a cache, also while a run makes them; a name with a
    dot is no version yet."""
    return list(cache.glob("[!.]*/shards/*/"))


def chunk_files(cache: Path) -> dict[str, bytes]:
    """The `features` chunk file of every shard of a cache's one version."""
    version = only_version(cache)
    dimensions = 1 + len(version.info.spec.item_shape)
    chunk = "/".join(["features", "c", *["0"] * dimensions])
    return {
        name: (version.path / "shards" / name / chunk).read_bytes()
        for name in version.shard_names()
    }


def check(cache: Path, **options: Any) -> Report:
    """Verify a cache's one version in this process."""
    return verify(only_version(cache), **options)


def versions_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def provenance(cache: Path) -> dict[str, Item]:
    """What a cache's one version keeps of each utterance besides its features."""
    version = only_version(cache)
    index = open_index(version)
    found = {name: list(version.shard(name).items()) for name in index.shards}
    where = zip(index.shard.tolist(), index.item.tolist(), strict=True)
    return {
        item.id: item for item in (found[index.shards[shard]][number] for shard, number in where)
    }
