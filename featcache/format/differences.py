"""How resolved configs differ, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["differing_keys", "distinctions"]


def distinctions(configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What tells resolved configs of one name from each other: for each of them, the keys in which not all agree, by
    their dotted paths, with its values: `params.low_freq=20.0`. Keys that it has not are left out.
    """
    flat = [dict(_leaves(config)) for config in configs]
    keys = {key for values in flat for key in values if any(other.get(key) != values[key] for other in flat)}
    return [[f"{key}={json.dumps(values[key])}" for key in sorted(keys & values.keys())] for values in flat]


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted paths at which two resolved configs differ, with both values: `params.low_freq: 20.0 -> 0.0`."""

    def shown(config: dict[str, Any]) -> str:
        return json.dumps(config[key]) if key in config else "not given"

    if not prefix and old.get("extractor") != new.get("extractor"):  # two extractors' parameters cannot be compared
        return [f"extractor: {json.dumps(old.get('extractor'))} -> {json.dumps(new.get('extractor'))}"]
    lines = []
    for key in sorted({*old, *new}):
        path, was, now = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            lines += differing_keys(was, now, f"{path}.")
        elif was != now:
            lines.append(f"{path}: {shown(old)} -> {shown(new)}")
    return lines
