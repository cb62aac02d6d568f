"""What makes a config another version than one that there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

from pydantic import ValidationError

from featcache.errors import FeatcacheError
from featcache.extractors import find
from featcache.extractors.fingerprint import SELECTING_KEYS, revision_of
from featcache.format.differences import differing_keys
from featcache.trust import without_downloads


@dataclass(frozen=True)
class Differences:
    """How a config differs from that of a version."""

    deciding: list[str]
    """What decides values, with both values: keys, as `params.low_freq: 20.0 -> 0.0`; the extractor's revision, or its
    weights. Empty if the fingerprint is the same."""
    others: list[str]
    """Keys that decide no values: the name, where something is, which utterances are refused."""


def find_differences(
    recorded: Mapping[str, Any], recorded_fingerprint: str, config: Mapping[str, Any], fingerprint: str
) -> Differences:
    """How a resolved config differs from the recorded config of a version; both with their fingerprints."""
    keys = differing_keys(dict(recorded), dict(config))
    if recorded_fingerprint == fingerprint:
        return Differences([], keys)
    if recorded.get("extractor") != config["extractor"]:
        return Differences(keys, [])
    locations = find(config["extractor"]).Params.locations
    others = {"name", "augment.noise.manifest", *(f"audio.{key}" for key in SELECTING_KEYS)}
    others |= {f"params.{name}" for name in locations}
    decides = [not any(line.startswith((f"{key}:", f"{key}.")) for key in others) for line in keys]
    deciding = [*compress(keys, decides), *_hidden(recorded, recorded_fingerprint, config)]
    return Differences(
        deciding or ["the extractor's revision, or the content of its weights"],
        [line for line, does in zip(keys, decides, strict=True) if not does],
    )


def _hidden(recorded: Mapping[str, Any], fingerprint: str, config: Mapping[str, Any]) -> list[str]:
    """What differs besides keys, if the recorded config does not give its fingerprint any more, with these weights."""
    extractor = find(config["extractor"])
    locations = extractor.Params.locations
    weights = {name: config["params"][name] for name in locations & config["params"].keys()}
    try:
        with without_downloads():  # of what only the record names
            revision = revision_of({**recorded, "params": {**recorded["params"], **weights}}, fingerprint)
    except (FeatcacheError, ValidationError, KeyError, TypeError, AttributeError):  # odd keys
        return []
    if revision is None:
        return ["the content of the weights" if locations else "the extractor itself"]
    return [] if revision == extractor.revision else [f"the extractor's revision: {revision} -> {extractor.revision}"]
