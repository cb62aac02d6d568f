"""Lines worth telling a user before a run begins."""

from __future__ import annotations

from pathlib import Path

from featcache.config import Config
from featcache.errors import FeatcacheError
from featcache.extractors import Extractor, Params, find
from featcache.extractors.model import ModelExtractor
from featcache.store.version import VersionInfo, differing_keys, select_versions


def about_siblings(cache: Path, info: VersionInfo) -> list[str]:
    """What is different where there is a version of the same name under another fingerprint."""
    try:
        siblings = select_versions(cache, info.name)
    except FeatcacheError:
        return []  # no cache yet, or damage elsewhere in it, which is verify's to tell
    places = [f"params.{name}:" for name in find(info.config["extractor"]).Params.locations]
    places.append("augment.noise.manifest:")
    notes = []
    for sibling in siblings:
        keys = differing_keys(sibling.info.config, info.config)
        deciding = [key for key in keys if not key.startswith(tuple(places))]
        notes.append(
            f"{info.folder_name} is a new version beside {sibling.path.name}: "
            + (", ".join(deciding) or "the extractor's revision, or what its weights hold, differs")
        )
    return notes


def about_chunks(config: Config, extractor: Extractor[Params]) -> list[str]:
    """That long clips will be cut into chunks whose values are not quite those of the whole, if so.

    Raises:
        ConfigError: such chunks leave nothing of a clip.
    """
    if not isinstance(extractor, ModelExtractor) or extractor.params.chunk is None:
        return []
    chunk = extractor.params.chunk
    extractor.pieces(round(3 * chunk.seconds * extractor.spec.sample_rate))  # which refuses them now, and not later
    if extractor.chunks_are_exact:
        return []
    return [
        f"{config.name}: chunks with {chunk.overlap:g} s of overlap are not exact for {config.extractor}, whose frames "
        "look further: `featcache probe` says by how much"
    ]
