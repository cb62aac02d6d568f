"""The command `featcache`, and `python -m featcache`, where that is not on the path."""

import sys


def main() -> None:
    """Run the command line. An interrupt that comes while it is being imported ends it as later ones do."""
    try:
        from featcache.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("featcache: interrupted\n")
        sys.exit(130)
    run(prog_name="featcache")


if __name__ == "__main__":
    main()
