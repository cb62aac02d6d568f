"""Pictures of what was measured, where matplotlib is there to draw them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def pyplot_for(path: Path) -> Any:
    """matplotlib's pyplot, to save a figure at `path`; without it None, and how to get it on stderr."""
    try:
        import matplotlib
    except ImportError:
        print(f"{path} is left out, as matplotlib is not installed: pip install '.[bench]'", file=sys.stderr)
        return None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot
