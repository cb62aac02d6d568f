"""The main job: from a manifest and configs to shards of features.

`featcache.extract(...)` does all of it. A package has one thing of each name, so this one is a function too: that of
`featcache.engines.main_job`, where its arguments are described.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """A package that can be called."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Extract the features of a manifest's utterances into a cache."""
        import featcache

        return featcache._extract(*args, **options)


sys.modules[__name__].__class__ = _Package
