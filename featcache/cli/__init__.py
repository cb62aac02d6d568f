"""The command line: a file for each command, which parses, calls the library, prints, and
returns the exit code. Results go to stdout, progress and messages to stderr. Nothing heavy
is imported before a command runs."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
import sys
from contextlib import suppress
from importlib import import_module
from keyword import iskeyword
from traceback import walk_tb
from typing import Any, NoReturn

import click

from featcache import __version__
from featcache.cli.common import as_error, complain, note, print_json, printing
from featcache.cli.process import (
    INTERRUPTED,
    end_at_once,
    ignore_signals,
    signals_handled,
    standard_streams,
    stdout_for_results,
)
from featcache.errors import (
    NO_THREAD,
    FeatcacheError,
    MissingDependencyError,
    StoreError,
    without_secrets,
)

_FILES_OF_COMMANDS = {
    "extract": "extract",
    "verify": "verify",
    "repair": "verify",
    "index": "versions",
    "ls": "info",
    "info": "info",
    "diff": "show",
    "tag": "versions",
    "rm": "prune",
    "prune": "prune",
    "show": "show",
    "why": "show",
    "stats": "stats",
    "report": "report",
    "copy": "versions",
    "export": "export",
    "import": "imports",
    "manifest": "manifest",
    "probe": "configs",
    "configs": "configs",
    "fit-kmeans": "stats",
    "vad": "stats",
}

_EXTRACT_ONLY = {"pydantic", "soundfile", "soxr", "torch", "yaml"}
"""Packages of the extra `extract`, which only some commands need."""

_NOBODY_READS = 128 + signal.SIGPIPE
"""The exit code if the reader of our output has gone, as of most programs in a shell."""

_NOT_MAPPED = "failed to map segment from shared object"
"""The text of an ImportError if the address space has no room for a library."""

_FEWEST_FILES = 16
"""The number of open files that commands need."""

_LIMITS = {errno.EAGAIN: "ulimit -u", errno.EMFILE: "ulimit -n"}
"""The command that shows a limit, by the error of a call that the limit ends."""


class _Commands(click.Group):
    """Imports a command when it is needed. Prints each error, and ends with its exit code."""

    def main(self, *args: Any, **settings: Any) -> Any:
        with standard_streams(), signals_handled(end_at_once):
            try:
                return super().main(*args, **settings)
            finally:
                printing.end()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # for errors in options, before `--json` itself is parsed
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
            _fail_for_memory(ctx, error)
            package = (error.name or "").partition(".")[0]
            if package not in _EXTRACT_ONLY:
                raise
            missing = MissingDependencyError(package, f"featcache {ctx.invoked_subcommand}")
            _fail(ctx, "MissingDependencyError", str(missing), missing.exit_code)
        except BrokenPipeError:
            _drop_output()
            ctx.exit(_NOBODY_READS)
        except OSError as error:
            where = ""
            *_, (frame, _) = walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__") == click.echo.__module__:
                _drop_output()
                where = "standard output: "
            elif isinstance(error.filename, str | bytes):
                where = f"{os.fsdecode(error.filename)}: "
            what = f"{where}{error.strerror or error}"
            if not where and error.errno in _LIMITS:
                what += f": allow more, with {_LIMITS[error.errno]}"
            _fail(ctx, "OSError", what)
        except (KeyboardInterrupt, click.Abort):  # the latter at a question
            ignore_signals()  # the interrupt is reported once
            _fail(ctx, "Interrupted", "interrupted", INTERRUPTED)
        except (MemoryError, RuntimeError) as error:
            _fail_for_memory(ctx, error)
            raise
        ctx.exit(code or 0)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_FILES_OF_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        names = [cmd_name]
        if cmd_name not in _FILES_OF_COMMANDS:
            names = self.list_commands(ctx)  # click says which may be meant
        for name in names:
            module = import_module(f"featcache.cli.{_FILES_OF_COMMANDS[name]}")
            function = f"{name}_" if iskeyword(name) else name.replace("-", "_")
            self.add_command(getattr(module, function))
        return super().get_command(ctx, cmd_name)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


def _fail(ctx: click.Context, kind: str, message: str, exit_code: int = 1) -> NoReturn:
    message = without_secrets(message)
    complain(message)
    _print_error(kind, message, exit_code)
    ctx.exit(exit_code)


def _fail_for_memory(ctx: click.Context, error: Exception) -> None:
    """Report an error if the process may have too little memory or too few threads."""
    lines = [line for line in str(error).splitlines() if NO_THREAD in line or _NOT_MAPPED in line]
    if lines or isinstance(error, MemoryError):
        what = (lines or [str(error) or "out of memory"])[0]
        remedy = "give the process more (ulimit -v, ulimit -u), or --threads 1"
        _fail(ctx, "MemoryError", f"{what}: {remedy}")


def _print_error(kind: str, message: str, exit_code: int) -> None:
    try:
        if printing.as_json:
            print_json(as_error(kind, message, exit_code))
    except OSError:  # the error itself, which is on stderr, matters more
        _drop_output()


def _drop_output() -> None:
    """Discard what stdout still holds, so that the process does not fail when it ends."""
    with suppress(OSError, ValueError):  # if stdout is not a file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="featcache")
def main() -> None:
    """Extract speech features once, into Zarr shards that training can trust.

    \b
    featcache extract train.csv              Kaldi fbank, 80 bins, to ./features
    featcache verify features                check every byte
    python -c 'import featcache; print(featcache.open("features"))'

    A CACHE is a folder of versions. A version holds the features of one config.
    CACHE/VERSION names it by its folder or by its config: features/fbank80. If CACHE is a
    corpus, made of several manifests, commands do each of its parts in turn, and exit with
    the worst code.

    Exit codes: 0 success; 1 failed, or verify found damage; 2 wrong usage, config or
    manifest; 3 finished, but some utterances failed (`featcache info --failures` lists
    them); 130 interrupted."""
    log = logging.getLogger("featcache")
    log.setLevel(logging.INFO)
    log.handlers = [_Notes()]
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files < _FEWEST_FILES:
        raise StoreError(
            f"only {most_files} files may be open at a time: allow some hundred, with ulimit -n"
        )
