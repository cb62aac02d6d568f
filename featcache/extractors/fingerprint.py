"""The fingerprint: a hash of everything that decides the *values*, and of nothing else.

It covers the extractor and its revision, its parameters with defaults filled in (but for parameters that were added
later, while they have their default), the content of its weights, the audio policy, the copies and the content of their
noise, and the stored dtype. Batch size, threads, shard size, paths and device are options of the run, and not included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from featcache.extractors.base import Params, find

SELECTING = frozenset({"max_seconds", "min_source_rate"})
"""Keys of a config's `audio` section that decide which utterances there are, and not their values."""


def fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of what decides the values of a config, as canonical JSON.

    Args:
        config: resolved, as a version keeps it: plain values, every default filled in.

    Raises:
        ConfigError: there is no such extractor, or its weights cannot be had.
        pydantic.ValidationError: the parameters are not the extractor's.
    """
    extractor = find(config["extractor"])
    params = extractor.Params.model_validate(config["params"])
    decides = {key: value for key, value in config.items() if key != "name"}
    decides["params"] = _deciding(params)
    decides["audio"] = {key: value for key, value in config["audio"].items() if key not in SELECTING}
    if "augment" in config:
        decides["augment"] = _without_places(config["augment"])
    decides["revision"] = extractor.revision
    decides["weights"] = extractor.weights_digest(params)
    canonical = json.dumps(decides, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_places(augment: Mapping[str, Any]) -> dict[str, Any]:
    """The section without where its noise is; `content` says what that is."""
    noise = augment.get("noise")
    return {**augment, "noise": noise and {key: value for key, value in noise.items() if key != "manifest"}}


def _deciding(params: Params) -> dict[str, Any]:
    """Parameters as plain JSON values, without those that say where something is."""
    plain: dict[str, Any] = params.model_dump(mode="json", exclude=set(params.locations))
    return plain | {name: _deciding(value) for name, value in params if isinstance(value, Params)}
