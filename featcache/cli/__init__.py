"""The command line: a file for each command, which parses, calls the library, prints, and
returns the exit code.

Results go to stdout, progress and messages to stderr. The library imports nothing from
here. Nothing heavy is imported before a command runs, so `featcache --help` answers at
once."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from traceback import walk_tb
from typing import Any, NoReturn

import click

from featcache import __version__
from featcache.cli.common import complain, note, print_json, printing
from featcache.cli.process import INTERRUPTED, signals_handled, standard_streams, stdout_for_results
from featcache.errors import FeatcacheError, MissingDependencyError, StoreError, without_secrets

_COMMANDS = (
    *("extract", "verify", "repair", "index", "ls", "info", "diff", "tag", "rm"),
    *("prune", "show", "why", "stats", "copy", "manifest", "probe", "configs", "fit-kmeans"),
)
_IN_FILES = {"ls": "info", "why": "show", "fit-kmeans": "stats", "rm": "prune"}
_IN_FILES |= dict.fromkeys(("index", "tag", "copy"), "versions")
"""The files of commands that are in no file of their own name."""

_EXTRACT_ONLY = {"pydantic", "soundfile", "soxr", "torch", "yaml"}
"""Packages that come with the extra `extract`, and that commands which read a cache do
without."""

_NOBODY_READS = 128 + signal.SIGPIPE
"""The exit code if the reader of our output has gone: what a shell reports of most
programs then."""

_FILES = 16
"""That may be open at least. With fewer, zarr-python's event loop does not begin, and
says so in lines of its own."""

_NO_THREAD = "can't start new thread"
"""What a RuntimeError says if there is no room for another thread."""


class _Commands(click.Group):
    """Imports a command when it is asked for. Turns errors into one clear line and their
    exit code."""

    def main(self, *args: Any, **settings: Any) -> Any:
        with standard_streams():
            try:
                return super().main(*args, **settings)
            finally:
                printing.end()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # for errors in options; the option itself knows, once it is parsed
        printing.as_json = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with stdout_for_results(), signals_handled():
                code = super().invoke(ctx)
                if printing.document is not None:
                    print_json(printing.document)
        except click.ClickException as error:
            message = without_secrets(error.format_message())
            _print_error("UsageError", message, error.exit_code)
            if message != error.format_message():
                raise click.UsageError(message, ctx) from None
            raise  # click prints it
        except FeatcacheError as error:
            _fail(ctx, type(error).__name__, str(error), error.exit_code)
        except ImportError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _EXTRACT_ONLY:
                raise
            missing = MissingDependencyError(package, f"featcache {ctx.invoked_subcommand}")
            _fail(ctx, type(missing).__name__, str(missing), missing.exit_code)
        except BrokenPipeError:
            _drop_output()
            ctx.exit(_NOBODY_READS)
        except OSError as error:
            where = (
                f"{os.fsdecode(error.filename)}: "
                if isinstance(error.filename, (str, bytes))
                else ""
            )
            if _is_from_printing(error):
                where = "standard output: "
                _drop_output()
            _fail(ctx, "OSError", f"{where}{error.strerror or error}", 1)
        except (KeyboardInterrupt, click.Abort):  # the latter at a question
            _fail(ctx, "Interrupted", "interrupted", INTERRUPTED)
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and _NO_THREAD not in str(error):
                raise
            # what zarr had begun
            warnings.filterwarnings("ignore", "coroutine .* was never awaited")
            reason = str(error) or "out of memory"
            _fail(
                ctx,
                "MemoryError",
                f"{reason}: give the process more (ulimit -v, ulimit -u), or --threads 1",
                1,
            )
        ctx.exit(code or 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # of all, click says which may be meant
        for known in [cmd_name] if cmd_name in _COMMANDS else _COMMANDS:
            module = import_module(f"featcache.cli.{_IN_FILES.get(known, known)}")
            self.add_command(getattr(module, known.replace("-", "_")))
        return super().get_command(ctx, cmd_name)


class _Notes(logging.Handler):
    """Shows on stderr what the library reports of its work."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def _fail(ctx: click.Context, kind: str, message: str, exit_code: int) -> NoReturn:
    """Say what is wrong, and end with that exit code."""
    message = without_secrets(message)
    complain(message)
    _print_error(kind, message, exit_code)
    ctx.exit(exit_code)


def _print_error(kind: str, message: str, exit_code: int) -> None:
    """Print an error as the document of `--json`; its kind is a class of
    `featcache.errors`, or another word."""
    try:
        if printing.as_json:
            print_json({"error": {"type": kind, "message": message, "exit_code": exit_code}})
    except (
        OSError
    ):  # it is on stderr, too, and more worth telling than that stdout cannot be written
        _drop_output()


def _drop_output() -> None:
    """Discard what stdout still holds, so that the process does not fail when it ends."""
    with suppress(OSError, ValueError):  # if stdout is not a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _is_from_printing(error: BaseException) -> bool:
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") == click.echo.__module__


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="featcache")
def main() -> None:
    """Extract speech features once, into Zarr shards that training can trust.

    \b
    featcache extract train.csv              80-bin Kaldi fbank into ./features
    featcache verify features                is every byte what was written?
    python -c 'import featcache; print(featcache.open("features"))'

    CACHE/VERSION is the folder of a version, or its config's name: features/fbank80.
    Where CACHE is a corpus, made of several manifests, commands that look at caches do
    each of its parts in turn, and exit with the worst code.

    Exit codes: 0 success; 1 failed, or verify found damage; 2 wrong usage, config or
    manifest; 3 finished, but some utterances failed (see the failure ledger); 130
    interrupted."""
    log = logging.getLogger("featcache")
    log.setLevel(logging.INFO)
    log.handlers = [_Notes()]
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FILES:
        raise StoreError(
            f"only {files} files may be open at a time: allow some hundred, with ulimit -n"
        )
