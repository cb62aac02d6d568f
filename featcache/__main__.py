"""The command `featcache`, and `python -m featcache`."""

import gc
import os
import sys

_GARBAGE_AFTER = 50_000
"""The number of new objects after which garbage is collected. Importing torch makes a
million objects that stay. With Python's own 700, walking through them takes a tenth of a
short run."""


def main() -> None:
    """Run the command line. An interrupt while it is imported ends it as later ones do."""
    gc.set_threshold(_GARBAGE_AFTER)
    # Pydantic would search all installed packages for plugins that watch its models.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    try:
        from featcache.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("featcache: interrupted\n")
        sys.exit(130)
    run(prog_name="featcache")


if __name__ == "__main__":
    main()
