"""The fingerprint of a config: a hash of everything that decides its values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from featcache.extractors.base import Params, find

SELECTING_KEYS = frozenset({"max_seconds", "min_source_rate"})
"""Keys of a config's `audio` section that decide which utterances there are, and not their values."""

_MOST_REVISIONS = 100


def fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of everything that decides a resolved config's values, and of nothing else, as canonical JSON.

    It covers the extractor and its revision, its parameters with defaults filled in (but without those that were added
    later, while they have their defaults), the content of its weights, the audio policy, the copies and the content of
    their noise, and the stored dtype. Options of the run, such as batch size, threads, shard size, paths and the
    device, are not part of it.

    Raises ConfigError if there is no such extractor or its weights cannot be loaded, and ValidationError for its
    parameters.
    """
    return _hash(_deciding(config))


def revision_of(config: Mapping[str, Any], wanted: str) -> int | None:
    """The revision of the extractor with which a config has the wanted fingerprint; None if it has it with none. Raises
    what `fingerprint` raises."""
    decides = _deciding(config)
    revisions = (decides["revision"], *range(1, _MOST_REVISIONS))
    return next((one for one in revisions if _hash(decides | {"revision": one}) == wanted), None)


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    extractor = find(config["extractor"])
    params = extractor.Params.model_validate(config["params"])
    decides = {key: value for key, value in config.items() if key != "name"}
    decides["params"] = _without_locations(params)
    decides["audio"] = {key: value for key, value in config["audio"].items() if key not in SELECTING_KEYS}
    if "augment" in config:  # the noise's `content` is hashed, but not where it is
        noise = config["augment"].get("noise")
        located = {key: value for key, value in (noise or {}).items() if key != "manifest"}
        decides["augment"] = {**config["augment"], "noise": noise and located}
    decides["revision"] = extractor.revision
    decides["weights"] = extractor.weights_digest(params)
    return decides


def _hash(decides: Mapping[str, Any]) -> str:
    canonical = json.dumps(decides, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_locations(params: Params) -> dict[str, Any]:
    """Parameters as plain JSON values, without those that say where something is."""
    plain: dict[str, Any] = params.model_dump(mode="json", exclude=set(params.locations))
    return plain | {name: _without_locations(value) for name, value in params if isinstance(value, Params)}
