"""The command `featcache`, and `python -m featcache`, where that is not on the path."""

import gc
import sys

_GARBAGE_AFTER = 20_000
"""Objects between two collections of garbage: importing torch makes a million that stay,
and Python's own 700 would have them walked through again and again, for a tenth of the
time of a short run."""


def main() -> None:
    """Run the command line. An interrupt that comes while it is being imported ends it as
    later ones do."""
    gc.set_threshold(_GARBAGE_AFTER)
    try:
        from featcache.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("featcache: interrupted\n")
        sys.exit(130)
    run(prog_name="featcache")


if __name__ == "__main__":
    main()
