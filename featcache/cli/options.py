"""The options and arguments that several commands share, and checks of their values."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from featcache.cli.common import note, printing
from featcache.errors import (
    MOST_THREADS,
    ArgumentError,
    FeatcacheError,
    StoreError,
    did_you_mean,
    listing,
    refuse_url,
)
from featcache.storage.location import Location, ObjectPath, as_location

if TYPE_CHECKING:
    from featcache.manifest.utterances import Manifest

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Command(click.Command):
    """A command that refuses an option that is given twice: click would take the last. Its
    paths are relative to a folder, which may have been removed. With its option `--json`,
    `say_json` prints, and `say` does not."""

    def __init__(self, *args: Any, prints_json: bool = True, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if prints_json:
            as_json = click.Option(
                ["--json", "as_json"],
                is_flag=True,
                expose_value=False,
                callback=_set_json,
                help="Print the result as one JSON document.",
            )
            self.params.append(as_json)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            *_, options = self.make_parser(ctx).parse_args([*args])
            for option, count in Counter(options).items():
                is_flag = getattr(option, "is_flag", False) and not option.secondary_opts
                if count > 1 and not (is_flag or option.multiple):
                    raise ArgumentError(f"{_name(option)}: it is given twice")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            os.getcwd()
        except FileNotFoundError:
            what = "the current folder has been removed: change to another, with cd"
            raise ArgumentError(what) from None
        return super().invoke(ctx)


command = functools.partial(click.command, cls=_Command)


class WholeNumber(click.IntRange):
    """A whole number, in the words of errors."""

    name = "whole number"


class Number(click.FloatRange):
    """A number, in the words of errors."""

    name = "number"


class _LocalPath(click.Path):
    """A path, which may begin with `~/`, and is neither empty (as an unset variable of the
    shell would make it) nor a URL; nor `-`, unless `allow_dash` is set."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = os.fspath(value)
        if not path:
            raise ArgumentError(f"{_name(param)} is empty")
        refuse_url(_name(param), path)
        if path == "~" or path.startswith("~/"):
            path = os.path.expanduser(path)
        exists, fault = os.path.exists(path), ""  # another run may make it meanwhile
        if path == "-":
            fault = "" if self.allow_dash else "- is no path here: give another, or ./-"
        elif exists and not self.file_okay and not os.path.isdir(path):
            fault = f"{path} is not a folder"
        elif exists and not self.dir_okay and not os.path.isfile(path):
            fault = f"{path} is not a file"
        elif not exists and self.exists:
            fault = f"there is no folder {path}"
        elif not exists and not self.file_okay and os.path.islink(path):
            fault = f"{path} is a link to {os.readlink(path)}, which is not there"
        if fault:
            raise ArgumentError(f"{_name(param)}: {fault}")
        return super().convert(path, param, ctx)


def _name(param: Any) -> str:
    if isinstance(param, click.Option):
        return param.opts[0]
    return str(param.human_readable_name).removesuffix("...")


class _Config(_LocalPath):
    """A config: a YAML file, or the name of a packaged one, which a shell completes too."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        items = super().shell_complete(ctx, param, incomplete)
        with suppress(ImportError):  # of pydantic
            from featcache.config import packaged_configs

            names = [name for name in packaged_configs() if name.startswith(incomplete)]
            # Names last: in bash, files replace what was before them.
            items += map(CompletionItem, names)
        return items


class _Location(_LocalPath):
    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        folder, _, begun = incomplete.rpartition("/")
        place = Path(folder or ".").expanduser()
        names = set[str]()
        with suppress(OSError):
            for version in place.iterdir():
                if (version / "shards").exists():
                    names |= {version.name, version.name.rpartition("-")[0]}
        begins = f"{folder}/" if folder else ""
        completed = sorted(name for name in names - {""} if name.startswith(begun))
        items = [CompletionItem(f"{begins}{name}") for name in completed]
        return super().shell_complete(ctx, param, incomplete) + items

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value:
            location = as_location(_name(param), value)
            if isinstance(location, ObjectPath):
                return location
        return super().convert(value, param, ctx)


class _Root(_LocalPath):
    """A folder that exists, a container, or the beginning of URLs."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from featcache.manifest.audio_locations import as_root, is_audio_url, names_container

        path = os.fspath(value)
        if is_audio_url(path) or (names_container(f"{path}/") and os.path.isfile(path)):
            return as_root(path)
        return super().convert(value, param, ctx)


TEXT = _LocalPath(allow_dash=True)
"""A manifest's path, as text (`-` is standard input)."""
CONFIG = _Config()
LOCATION = _Location(path_type=Path)
_OUTPUTS = ("output", "plot", "wav")
"""Parameters that are files to write."""

_FILE = _LocalPath(dir_okay=False, path_type=Path)
FILE_OR_STREAM = _LocalPath(dir_okay=False, path_type=Path, allow_dash=True)
_CACHE = _Location(file_okay=False, path_type=Path)
_ROOT = _Root(exists=True, file_okay=False, path_type=Path)

manifest_argument = click.argument("manifest", type=TEXT)


def complete_ids(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete an id of the version that is given before it."""
    from featcache.version.index import load_index
    from featcache.version.selection import select_versions

    with suppress(FeatcacheError, OSError):
        version = select_versions(context.params["path"])[0]
        index = load_index(version, version.shard_names())
        if index is not None:
            return [*map(CompletionItem, index.ids.beginning_with(incomplete, _COMPLETED))]
    return []


utterance_argument = click.argument("utterance", metavar="ID", shell_complete=complete_ids)

version_location = click.argument("path", metavar="CACHE[/VERSION]", type=LOCATION)


def flag(names: str, meaning: str, **settings: Any) -> Decorator:
    """Make an option that takes no value."""
    return click.option(*names.split(), is_flag=True, help=meaning, **settings)


def number(name: str, meaning: str, default: int | None = None) -> Decorator:
    """Make an option that takes a whole number: at least 1, or 0 if that is the default."""
    return click.option(
        name,
        type=WholeNumber(min=0 if default == 0 else 1),
        default=default,
        show_default=True,
        metavar="N",
        help=meaning,
    )


force = flag("--force", "Replace the output file if it exists.")
dry_run = flag("--dry-run", "Print what would be removed, and remove nothing.")
yes = flag("--yes", "Remove without asking. Required without a terminal.")

_COMPLETED = 100
"""The most ids that a shell offers."""

READING = ("root", "format", "values", "allow_commands", "allow_queries")
"""Parameters of commands that are arguments of `read_manifest`."""

CONFIGS = "A YAML file, or the name of a packaged config, as `featcache configs` lists them."
_OF_MANIFEST = "Fill a placeholder of a SpeechBrain manifest: data_root=/corpora."
_OF_CONFIGS = (
    "Change a key of the config: params.low_freq=0. The value is YAML. Or fill a placeholder "
    "of a SpeechBrain manifest: data_root=/corpora."
)

config = functools.partial(click.option, "-c", "--config", type=CONFIG, metavar="CONFIG")
manifest = functools.partial(click.option, "--manifest", type=TEXT, metavar="MANIFEST")
threads = functools.partial(
    click.option, "--threads", type=WholeNumber(1, MOST_THREADS), metavar="N"
)
extraction_threads = threads(
    help="Threads for decoding, computing and writing together.  [default: every core; on the "
    "CPU at most 8]"
)
retry_failed = flag(
    "--retry-failed", "Try failed utterances again, even if their files are unchanged."
)
check_sources = flag(
    "--check-sources",
    "Re-extract utterances whose audio file has another size or modification time, or is "
    "decoded differently now.",
)
cache = functools.partial(click.option, "-o", "--output", "cache", type=_CACHE, metavar="CACHE")
cache_to_fill = cache(
    help="The cache: a folder, created if missing, or a URL such as s3://bucket/features.",
    default="features",
    show_default=True,
)
_output = functools.partial(click.option, "-o", "--output", "output")
output_file = functools.partial(_output, type=_FILE, metavar="FILE")
output_target = functools.partial(_output, type=_LocalPath(path_type=Path), metavar="OUT")


def written(name: str, meaning: str) -> Decorator:
    """Make an option that names a file to write."""
    return click.option(name, type=_FILE, metavar="FILE", help=meaning)


def root(default: str = "the manifest's folder") -> Decorator:
    """Make the option `--root`."""
    meaning = f"The folder or URL where relative paths of audio begin.  [default: {default}]"
    return click.option("--root", type=_ROOT, metavar="FOLDER", help=meaning)


def manifest_format(command: Callable[..., Any], setting: str = _OF_MANIFEST) -> Callable[..., Any]:
    """Add the options of `READING` but `--root` to a command that reads a manifest."""
    for add in (
        flag("--allow-queries", _QUERIES),
        flag("--allow-commands", _COMMANDS),
        pairs("--set", "values", "data_root=/corpora/librispeech", setting),
        click.option("--format", metavar="NAME", help=_FORMATS),
    ):
        command = add(command)
    return command


manifest_and_config_keys = functools.partial(manifest_format, setting=_OF_CONFIGS)
"""Adds the same options to a command that also reads configs; see `take_keys`."""


def take_keys(reading: dict[str, Any]) -> dict[str, Any]:
    """Move the keys of configs, with their values, out of the values of `--set`."""
    from featcache.config.config import KEYS
    from featcache.config.strict_yaml import load_yaml

    keys, placeholders = {}, {}
    for name, value in reading["values"].items():
        if name.partition(".")[0] not in KEYS:
            placeholders[name] = value
            continue
        try:
            keys[name] = load_yaml(value)
        except ValueError as error:
            raise ArgumentError(f"--set: the value of {name}: {error}") from error
    # The other parts of a corpus get the same dictionary of values, so that one stays.
    reading["values"] = placeholders
    return keys


def pairs(
    option: str, name: str, example: str, meaning: str, metavar: str = "NAME=VALUE"
) -> Decorator:
    """Make an option that sets values by names, as the `example`, and may be repeated."""

    def read(
        context: click.Context, parameter: click.Parameter, settings: tuple[str, ...]
    ) -> dict[str, str]:
        values: dict[str, str] = {}
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not (key and equals):
                raise ArgumentError(f"{option}: {setting!r} is not NAME=VALUE, as {example}")
            if key in values:
                raise ArgumentError(f"{option} {key}: it is given twice")
            values[key] = text
        return values

    return click.option(option, name, multiple=True, callback=read, metavar=metavar, help=meaning)


_FORMATS = (
    "How to read MANIFEST: kaldi, nemo, lhotse … A wrong name lists all.  "
    "[default: recognised from the content]"
)
_COMMANDS = (
    "Run the commands in MANIFEST: paths that end in |, as in Kaldi's wav.scp. They have "
    "all your rights, so read them first."
)
_QUERIES = (
    "Accept URLs with a query or a fragment, such as ?id=7. featcache stores and prints "
    "them, so they must not contain a password or token."
)


def device(meaning: str = "Compute on cpu, cuda, cuda:1 …") -> Decorator:
    """Make the option `--device`."""
    return click.option(
        "--device", metavar="DEVICE", help=f"{meaning}  [default: cuda if there is one]"
    )


reading_threads = threads(
    help="Threads to use.  [default: every core, at most 8]",
    default=lambda: min(8, len(os.sched_getaffinity(0))),
)


def _set_json(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    printing.as_json = value


def _allow_remote_code(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from featcache.trust import allow_remote_code

        allow_remote_code()


trust_remote_code = flag(
    "--trust-remote-code",
    "Run Python code that comes with weights. Import the extractor that a cache names, even "
    "if no installed package registers it.",
    expose_value=False,
    callback=_allow_remote_code,
)


def read_manifest(
    source: str, reading: Mapping[str, Any], keys: Sequence[str] = (), **options: Any
) -> Manifest:
    """Read a manifest by the options `READING`, and print its notes; see `refuse_unused`."""
    from featcache.manifest.read import read_manifest as read

    manifest = read(source, **reading, **options)
    for line in manifest.notes:
        note(line)
    refuse_unused(reading["values"], keys, manifest)
    return manifest


def refuse_unused(
    values: Iterable[str], keys: Sequence[str], manifest: Manifest | None = None
) -> None:
    """Raise ArgumentError if a name of `--set` is no placeholder of the manifest, with the
    key of a config that may be meant."""
    placeholders: frozenset[str] = frozenset()
    if manifest is not None:
        placeholders = manifest.placeholders
    for name in sorted({*values} - placeholders):
        # `low_freq` may stand for `params.low_freq`
        same = [key for key in keys if key.rpartition(".")[2] == name]
        similar = did_you_mean(name, same) or did_you_mean(name, keys)
        choices = []
        if keys:
            choices.append(f"a key of the config{similar}")
        if manifest is not None:
            if printing.is_part and not similar:
                continue  # another part's manifest may have it
            choice = f"a placeholder of {manifest.source}"
            if placeholders:
                choice += f", which has {listing(sorted(placeholders))}"
            choices.append(choice)
        no_choice = f"not {choices[0]}"
        if len(choices) > 1:
            no_choice = f"neither {' nor '.join(choices)}"
        raise ArgumentError(f"--set {name}: it is {no_choice}")


def refuse_corpus(path: Location, option: str) -> None:
    """Raise ArgumentError if a location is a corpus, or a version in it."""
    from featcache.version.selection import corpus_of

    if corpus_of(path) is not None:
        raise ArgumentError(f"{path}: is a corpus: {option} is about one part, a folder in it")


def refuse_output(path: Path, force: bool) -> None:
    """Raise ArgumentError if a file exists and `force` is not set, if this command reads
    it, or if it is a version's; StoreError if it cannot be written."""
    from featcache.stats.mean_variance import refuse_to_replace

    if path.exists():
        context = click.get_current_context()
        for param in context.command.params:
            source = context.params.get(param.name or "")
            if param.name in _OUTPUTS or not isinstance(param.type, click.Path):
                continue
            if not isinstance(source, str | Path) or not os.path.exists(source):
                continue
            if path.samefile(source):
                raise ArgumentError(f"{path}: is what this command reads: give another file")
        for folder in path.resolve().parents:
            if (folder / "shards" / "zarr.json").exists():
                raise ArgumentError(
                    f"{path}: is a file of the version {folder}, which only featcache writes"
                )
    refuse_to_replace(path, force)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise StoreError(f"{path}: cannot be written: there is no folder {path.parent}")
    refuse_unwritable(folder, path)


def refuse_unwritable(place: Location, path: Location | None = None) -> None:
    """Raise StoreError, about `path` or the place itself, if nothing can be made in a place on
    this machine."""
    if not isinstance(place, Path):
        return
    ancestors = (place, *place.absolute().parents)
    folder = next(ancestor for ancestor in ancestors if os.path.lexists(ancestor))
    probe = f"{folder}/.featcache-{os.urandom(4).hex()}"
    try:
        try:
            os.mkdir(probe)
        finally:  # also after an interrupt
            with suppress(OSError):
                os.rmdir(probe)
    except OSError as error:
        fault = f"nothing can be made in {folder}: {error.strerror}"
        raise StoreError(f"{path or place}: cannot be written: {fault}") from error


def is_agreed(question: str, yes: bool) -> bool:
    """Tell whether to go ahead: by `--yes`, or by asking on the terminal. Raises
    ArgumentError if nobody can be asked."""
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
