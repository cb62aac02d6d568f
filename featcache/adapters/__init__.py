"""Adapters to other toolkits, a file each. Each imports only its toolkit."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["huggingface", "lhotse", "speechbrain", "to_hf"]


def __getattr__(name: str) -> Any:
    """Import an adapter, and its toolkit, when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "to_hf":
        return importlib.import_module(f"{__name__}.huggingface").to_hf
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
