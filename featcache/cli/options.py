"""The options and arguments that several commands share, and what is made of their
values, with one-line errors."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from featcache.cli.common import note, printing
from featcache.errors import MOST_THREADS, ArgumentError, StoreError, listing, refuse_url
from featcache.storage.location import Location, ObjectPath, as_location

if TYPE_CHECKING:
    from featcache.manifest.utterances import Manifest

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Command(click.Command):
    """A command that refuses an option that is given twice: click would take the last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            *_, given = self.make_parser(ctx).parse_args([*args])
            for option, count in Counter(given).items():
                is_flag = getattr(option, "is_flag", False) and not option.secondary_opts
                if count > 1 and not (is_flag or option.multiple):
                    raise ArgumentError(f"{_name(option)}: it is given twice")
        return super().parse_args(ctx, args)


command = functools.partial(click.command, cls=_Command)
"""`click.command`, for every command."""


class _LocalPath(click.Path):
    """A path that is not empty (as an unset variable of the shell would make it) and not
    a URL.

    A leading `~/` is the home folder, even where the shell leaves it alone, as in
    `--root=~/audio`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        given = os.fspath(value)
        if not given:
            raise ArgumentError(f"{_name(param)} is empty")
        refuse_url(_name(param), given)
        if given == "~" or given.startswith("~/"):
            given = os.path.expanduser(given)
        if (fault := self._fault(given)) is not None:
            raise ArgumentError(f"{_name(param)}: {fault}")
        return super().convert(given, param, ctx)

    def _fault(self, path: str) -> str | None:
        """What is wrong with a path, if anything: in a line, where click would print its
        usage."""
        # asked once, and first: another run may make it meanwhile
        is_there = os.path.exists(path)
        if is_there and not self.file_okay and not os.path.isdir(path):
            return f"{path} is not a folder"
        if is_there and not self.dir_okay and not os.path.isfile(path):
            return f"{path} is not a file"
        if is_there or self.file_okay:
            return None
        if self.exists:
            return f"there is no folder {path}"
        return (
            f"{path} is a link to {os.readlink(path)}, which is not there"
            if os.path.islink(path)
            else None
        )


def _name(param: Any) -> str:
    """The name of a parameter for users: `-o`, `--root`, `MANIFEST`."""
    return (
        param.opts[0]
        if isinstance(param, click.Option)
        else param.human_readable_name.removesuffix("...")
    )


class _Config(_LocalPath):
    """A config: a YAML file, or the name of a packaged one, which a shell completes too."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        found = super().shell_complete(ctx, param, incomplete)
        with suppress(ImportError):  # of what reads configs
            from featcache.config import packaged_configs

            # Names last: in bash, files take the place of what was before them, and are
            # listed if no name fits.
            found += [
                CompletionItem(name) for name in packaged_configs() if name.startswith(incomplete)
            ]
        return found


class _Location(_LocalPath):
    """A cache or a version, by its folder or its URL; a location."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value and isinstance(location := as_location(_name(param), value), ObjectPath):
            return location
        return super().convert(value, param, ctx)


class _Root(_LocalPath):
    """A folder that exists, a container, or the beginning of URLs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from featcache.manifest.audio_locations import as_root, is_audio_url, names_container

        given = os.fspath(value)
        if is_audio_url(given) or (names_container(f"{given}/") and os.path.isfile(given)):
            return as_root(given)
        return super().convert(value, param, ctx)


TEXT = _LocalPath()
"""A path as text: that of a manifest (`-` is standard input)."""

CONFIG = _Config()
"""A config, as text."""

FILE = _LocalPath(dir_okay=False, path_type=Path)
"""A file to be written."""

LOCATION = _Location(path_type=Path)
"""A cache or a version, in a folder or an object store, that the command itself checks
further."""

_CACHE = _Location(file_okay=False, path_type=Path)
_ROOT = _Root(exists=True, file_okay=False, path_type=Path)

manifest_argument = click.argument("manifest", type=TEXT)

version_location = click.argument("path", metavar="CACHE[/VERSION]", type=LOCATION)
"""One version (by its place or its config's name), or a whole cache."""


def flag(name: str, meaning: str, **settings: Any) -> Decorator:
    """An option that is given or not."""
    return click.option(name, is_flag=True, help=meaning, **settings)


def number(name: str, meaning: str, default: int | None = None) -> Decorator:
    """An option that takes a whole number of at least 1, or of 0 if that is the default."""
    least = click.IntRange(min=0 if default == 0 else 1)
    return click.option(
        name, type=least, default=default, show_default=True, metavar="N", help=meaning
    )


force = flag("--force", "Replace FILE if it exists.")
dry_run = flag("--dry-run", "Say what would be removed, and remove nothing.")
yes = flag("--yes", "Do not ask. Needed where nobody can be asked: not on a terminal.")

READING = ("root", "format", "values", "allow_commands", "allow_queries")
"""What a command is given that are arguments of `read_manifest`."""

_OF_MANIFEST = (
    "What stands for a placeholder in a table of SpeechBrain's: data_root=/corpora/librispeech."
)
_OF_CONFIGS = (
    "A config's key, its value in YAML: params.low_freq=0. Or SpeechBrain's placeholder: "
    "data_root=/corpora."
)


def config(name: str, meaning: str, **settings: Any) -> Decorator:
    """`-c`, `--config`; `settings` are click's, here and below."""
    return click.option(
        "-c", "--config", name, type=CONFIG, metavar="CONFIG", help=meaning, **settings
    )


def manifest(meaning: str, **settings: Any) -> Decorator:
    """`--manifest`."""
    return click.option("--manifest", type=TEXT, metavar="MANIFEST", help=meaning, **settings)


def root(default: str = "the manifest's folder") -> Decorator:
    """`--root`; `default` describes the default."""
    help_text = (
        "The folder or URL (s3://bucket/folder) that relative paths are relative to.  "
        f"[default: {default}]"
    )
    return click.option("--root", type=_ROOT, metavar="FOLDER", help=help_text)


def manifest_format(command: Callable[..., Any], setting: str = _OF_MANIFEST) -> Callable[..., Any]:
    """`--format`, `--set`, `--allow-commands` and `--allow-queries`, for every command
    that reads a manifest: arguments of `read_manifest`, as is `--root`, if it has that.
    They may be gathered as `**reading`."""
    values = click.option(
        "--set", "values", multiple=True, callback=_values, metavar="NAME=VALUE", help=setting
    )
    return _FORMAT(values(_ALLOW_COMMANDS(_ALLOW_QUERIES(command))))


manifest_and_config_keys = functools.partial(manifest_format, setting=_OF_CONFIGS)
"""The same, for every command that reads a manifest and configs; see `take_keys`."""


def take_keys(reading: dict[str, Any]) -> dict[str, Any]:
    """Take the keys of configs out of what `--set` gives: an argument of `load_config`."""
    from featcache.config.config import KEYS
    from featcache.config.strict_yaml import load_yaml

    # for the other parts of a corpus, it stays as it was
    values = reading["values"] = {**reading["values"]}
    keys = {}
    for name in [name for name in values if name.partition(".")[0] in KEYS]:
        try:
            keys[name] = load_yaml(values.pop(name))
        except ValueError as error:
            raise ArgumentError(f"--set: the value of {name}: {error}") from error
    return keys


def _values(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    values: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not (name and equals):
            raise ArgumentError(
                f"--set: {one!r} is not NAME=VALUE, as data_root=/corpora/librispeech"
            )
        if name in values:
            raise ArgumentError(f"--set {name}: it is given twice")
        values[name] = value
    return values


_FORMATS = (
    "The MANIFEST's format, if several fit: kaldi, nemo, lhotse … (docs/manifest.md).  "
    "[default: recognised]"
)
_FORMAT = click.option("--format", metavar="NAME", help=_FORMATS)
_COMMANDS = (
    "Run the MANIFEST's commands: paths that end in |, as in Kaldi's wav.scp. They may do "
    "whatever you may."
)
_ALLOW_COMMANDS = flag("--allow-commands", _COMMANDS)
_QUERIES = (
    "Take URLs with a query or a fragment (?id=7). They are stored and shown: they must "
    "give access to nothing."
)
_ALLOW_QUERIES = flag("--allow-queries", _QUERIES)


def device(meaning: str = "cpu, cuda, cuda:1 …") -> Decorator:
    """`--device`."""
    return click.option(
        "--device", metavar="DEVICE", help=f"{meaning}  [default: cuda if there is one]"
    )


def threads(meaning: str, **settings: Any) -> Decorator:
    """`--threads`."""
    return click.option(
        "--threads", type=click.IntRange(1, MOST_THREADS), metavar="N", help=meaning, **settings
    )


def all_cores() -> int:
    """The number of cores that this process may use, at most 8: a default for `--threads`."""
    return min(8, len(os.sched_getaffinity(0)))


def cache(meaning: str, **settings: Any) -> Decorator:
    """`-o`, `--output`: a cache."""
    return click.option(
        "-o", "--output", "cache", type=_CACHE, metavar="CACHE", help=meaning, **settings
    )


def output_file(meaning: str, **settings: Any) -> Decorator:
    """`-o`, `--output`: a file."""
    return click.option(
        "-o", "--output", "output", type=FILE, metavar="FILE", help=meaning, **settings
    )


def as_json(meaning: str = "Print the result as one JSON document.") -> Decorator:
    """`--json`: what the command says with `say_json` is printed, and what it says with
    `say` is not."""
    return click.option(
        "--json", "as_json", is_flag=True, expose_value=False, callback=_set_json, help=meaning
    )


def _set_json(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    printing.as_json = value


def _allow_remote_code(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from featcache.trust import allow_remote_code

        allow_remote_code()


_REMOTE_CODE = (
    "Run code that comes with weights, and import extractors that a cache names and no "
    "package registers."
)
trust_remote_code = flag(
    "--trust-remote-code", _REMOTE_CODE, expose_value=False, callback=_allow_remote_code
)


def read_manifest(
    source: str, reading: Mapping[str, Any], keys: Sequence[str] = (), **options: Any
) -> Manifest:
    """Read a manifest, and say on stderr what there is to say about it. Raises
    ArgumentError if a name that `--set` gives is none of its placeholders.

    Args:
        reading: What `manifest_format` gives.
        keys: The keys of configs that `--set` could have meant.
        options: Other arguments of `featcache.manifest.read_manifest`.
    """
    from featcache.manifest.read import read_manifest as read

    manifest = read(source, **reading, **options)
    for line in manifest.notes:
        note(line)
    refuse_unused(reading["values"], keys, manifest)
    return manifest


def refuse_unused(
    values: Iterable[str], keys: Sequence[str], manifest: Manifest | None = None
) -> None:
    """Refuse names that `--set` gives, and that are no placeholders of the manifest; see
    `read_manifest`. Raises ArgumentError if there is such a name; the message says which
    key may be meant."""
    placeholders = manifest.placeholders if manifest else frozenset()
    for name in sorted({*values} - placeholders):
        meant = [key for key in keys if key.rpartition(".")[2] == name] or get_close_matches(
            name, keys, 1, 0.8
        )
        if manifest is not None and printing.is_part and not meant:
            continue  # another part's may have it
        what = (
            [f"a key of the config{f' (did you mean {meant[0]}?)' if meant else ''}"]
            if keys
            else []
        )
        if manifest is not None:
            there = f", which has {listing(sorted(placeholders))}" if placeholders else ""
            what.append(f"a placeholder of {manifest.source}{there}")
        raise ArgumentError(
            f"--set {name}: it is {'not' if len(what) == 1 else 'neither'} {' nor '.join(what)}"
        )


def refuse_output(path: Path, force: bool) -> None:
    """Refuse a file that cannot be written, before the work and not after it. Raises
    ArgumentError if the file exists, and `force` is not set, or it is read by this
    command, or a version's; StoreError if its folder does not exist, or cannot be written
    to."""
    from featcache.stats.mean_variance import refuse_to_replace

    if path.exists():
        context = click.get_current_context()
        paths = [
            one.name or "" for one in context.command.params if isinstance(one.type, click.Path)
        ]
        read = [context.params[name] for name in paths if name != "output"]
        if any(
            isinstance(given, str | Path) and os.path.exists(given) and path.samefile(given)
            for given in read
        ):
            raise ArgumentError(f"{path}: is what this command reads: give another file")
        if versions := [
            folder
            for folder in path.resolve().parents
            if (folder / "shards" / "zarr.json").exists()
        ]:
            raise ArgumentError(
                f"{path}: is a file of the version {versions[0]}, which only featcache writes"
            )
    refuse_to_replace(path, force)
    if not path.resolve().parent.is_dir():
        raise StoreError(f"{path}: cannot be written: there is no folder {path.parent}")
    refuse_unwritable(path.resolve().parent, path)


def refuse_unwritable(place: Location, path: Location | None = None) -> None:
    """Refuse a place on this machine in which nothing can be made, before the work: by
    trying it. Raises StoreError, about the `path` that was given."""
    if isinstance(place, Path):
        folder = next(one for one in (place, *place.absolute().parents) if os.path.lexists(one))
        try:
            os.rmdir(tempfile.mkdtemp(prefix=".featcache-", dir=folder))
        except OSError as error:
            what = f"nothing can be made in {folder}: {error.strerror}"
            raise StoreError(f"{path or place}: cannot be written: {what}") from error


def is_agreed(question: str, yes: bool) -> bool:
    """Whether what has been said is to be done: by `--yes`, or by who is asked on the
    terminal. Raises ArgumentError if there is no `--yes`, and nobody can be asked; or
    nothing has been said, because of `--json`."""
    if yes:
        return True
    if printing.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ArgumentError(
            "nothing has been removed: nobody can be asked here: add --yes, or --dry-run"
        )
    is_agreed = click.confirm(question, err=True)
    if not is_agreed:
        note("nothing has been removed")
    return is_agreed
