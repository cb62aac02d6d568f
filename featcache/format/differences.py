"""How resolved configs differ, key by key."""

from __future__ import annotations

import json
from typing import Any


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
