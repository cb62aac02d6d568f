"""Corpora of made-up features, recorded as extraction and `featcache index` do, without any audio."""

from make_cache import make_features, make_version

from featcache.version.corpus import Part, PartVersion, put_part, record_version
from featcache.version.index import open_index


def make_corpus(folder, *parts, augment=None, **settings):
    """Make a corpus, whose parts have the given shards each; their ids begin with the names of the parts: `p0-3`.

    Args:
        folder: The corpus.
        parts: The numbers of utterances in the shards of each part, `p0`, `p1` …
        augment: The section of the config, for its copies.
        settings: Those of `make_features`.
    """
    for number, sizes in enumerate(parts):
        name = f"p{number}"
        shards = [
            make_features(size, seed=100 * number + at, prefix=f"{name}-{at}", **settings)
            for at, size in enumerate(sizes)
        ]
        version = make_version(folder / name, *shards, augment=augment)
        put_part(folder, Part(name, f"/manifests/{name}.csv"))
        record_version(version, PartVersion.of(version, open_index(version)))
    return folder
