"""One YAML file -> a validated config -> its resolved form, from which the fingerprint is
made."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from featcache import extractors
from featcache.audio.noise import read_noise
from featcache.audio.waveform import AudioPolicy, AugmentPolicy
from featcache.config.strict_yaml import load_yaml
from featcache.errors import ConfigError, FeatcacheError, listing, secret_in, without_secrets
from featcache.extractors.base import SELECTING_KEYS, blamed_on, revision_of
from featcache.format.documents import AT_MOST_NAME, differing_keys
from featcache.manifest.copies import Copies, copies_of
from featcache.sections import Section
from featcache.trust import without_downloads

if TYPE_CHECKING:
    import torch

StoredDtype = Literal["float32", "float16", "uint8", "uint16", "uint32", "int64"]

_MOST_BYTES = 256 << 10
"""The size of a config; the largest that featcache brings has 2 kB."""

Values = Mapping[str, Any]
"""Values by the keys of a config, which are dotted where they are to be set in one."""

_Model = TypeVar("_Model", bound=BaseModel)
_NAMELESS = "<config>"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class StorePolicy(Section):
    """The `store` section: how features are stored."""

    dtype: StoredDtype | None = None
    """Default: the extractor's own dtype. `uint8` quantises features, and stores codes as
    they are."""
    pool: Literal["mean", "mean+std"] | None = None
    """Store one vector for each utterance instead of its frames: their mean over time, or
    mean and standard deviation side by side. Frames are rounded to `dtype` before; the
    vector is float32."""


class ConfigFile(BaseModel):
    """The sections of the YAML file; the extractor's own model validates `params`."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        json_schema_extra={"pattern": f"^{_NAME.pattern}$", "maxLength": AT_MOST_NAME}
    )
    """The name of the version."""
    extractor: str
    """A registered name, or `package.module:Class` for your own."""
    params: dict[str, Any] = {}
    """The extractor's parameters."""
    audio: AudioPolicy = AudioPolicy()
    """How a file becomes a waveform."""
    augment: AugmentPolicy | None = None
    """Which copies of utterances are made, at other speeds and with noise."""
    store: StorePolicy = StorePolicy()
    """How features are stored."""


KEYS = frozenset(ConfigFile.model_fields)
"""The keys of a config at its top level."""

SECTIONS = KEYS - {"name", "extractor"}
"""Those that may be left out, or left empty."""


@dataclass(frozen=True)
class Config:
    """A validated config."""

    name: str
    """The name of the version."""
    extractor: str
    """A registered name, or `package.module:Class`."""
    params: extractors.Params
    """All parameters of the extractor, as its own model."""
    audio: AudioPolicy
    """The `audio` section: how an utterance becomes a waveform."""
    dtype: str
    """The stored dtype, by its numpy name."""
    augment: AugmentPolicy | None = None
    """The `augment` section: which copies of utterances are made; None for no others than
    the utterances themselves."""
    pool: str | None = None
    """The vector that is stored of each utterance, `mean` or `mean+std`; None for frames."""
    source: str = field(default="", compare=False)
    """Where the config was read from, for messages: a file, or the name of a packaged
    config; empty if unknown."""
    is_recorded: bool = field(default=False, compare=False)
    """Whether the config comes from a cache, and not from its user: see `recorded_config`."""

    @property
    def extractor_class(self) -> type[extractors.Extractor[extractors.Params]]:
        """The class that `extractor` names."""
        return extractors.find(self.extractor)

    @property
    def copies(self) -> Copies:
        """The copies that are made of every utterance."""
        return copies_of({"augment": self.augment and self.augment.model_dump()})

    def build(self, device: torch.device) -> extractors.Extractor[extractors.Params]:
        """Build the extractor, ready to run on `device`. Raises ConfigError if the
        parameters contradict each other or the sample rate, or weights cannot be
        loaded."""
        try:
            with without_downloads(self.is_recorded):
                return extractors.build(
                    self.extractor_class, self.params, self.audio.sample_rate, device
                )
        except (
            ConfigError
        ) as error:  # a run may have several configs, so the message names the one at fault
            raise ConfigError(f"config {self.source or self.name}: {error}") from error

    @property
    def keys(self) -> list[str]:
        """All keys that such a config may have, by their dotted paths:
        `params.num_mel_bins`."""
        return [*keys_of(ConfigFile), *keys_of(type(self.params), "params.")]

    def resolved(self) -> dict[str, Any]:
        """The config as plain JSON values, with every default filled in, except those of
        `Params.added_later`."""
        return {
            "name": self.name,
            "extractor": self.extractor,
            "params": self.params.model_dump(mode="json"),
            "audio": self.audio.model_dump(mode="json"),
            "store": {"dtype": self.dtype, **({} if self.pool is None else {"pool": self.pool})},
            **({} if self.augment is None else {"augment": self.augment.model_dump(mode="json")}),
        }

    def fingerprint(self) -> str:
        """SHA-256, in hex, of everything that decides the values: see
        `featcache.extractors.fingerprint`."""
        with without_downloads(self.is_recorded):
            return extractors.fingerprint(self.resolved())


def load_config(source: str | Path, set: Values | None = None) -> Config:  # noqa: A002
    """Read a config from a YAML file, or a packaged one by its name; values by their
    dotted keys are `set` in it, as `{"params.num_mel_bins": 40}`. Raises ConfigError,
    which lists all faults, if the file cannot be read or has any."""
    text, folder = packaged_configs().get(str(source)), None
    if text is None:
        folder = Path(source).absolute().parent
        try:
            # which may be a pipe, as bash makes one for <(…)
            with Path(source).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            text = data.decode()
        except (OSError, ValueError) as error:  # a path with a NUL; bytes that are not UTF-8
            hint = "" if Path(source).suffix else f"; {packaged_hint(str(source))}"
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"config {source}: cannot be read: {reason}{hint}") from error
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"config {source}: more than {_MOST_BYTES:,} bytes: is it a config?")
    return parse_config(text, str(source), folder, set)


def as_config(config: str | Path | Config, set: Values | None = None) -> Config:  # noqa: A002
    """A config as the callers of the library give it: one that was made, or what
    `load_config` takes."""
    if not isinstance(config, Config):
        return load_config(config, set)
    if not set:
        return config
    if "augment.noise.manifest" in set:  # the hash of other noise is filled in anew
        set = {"augment.noise.content": None, **set}  # noqa: A001
    make = recorded_config if config.is_recorded else config_from
    return make(_with_values(config.resolved(), set), config.source or _NAMELESS)


def parse_config(
    text: str,
    source: str = _NAMELESS,
    folder: Path | None = None,
    set: Values | None = None,  # noqa: A002
) -> Config:
    """Validate a config's YAML text, in which values by their dotted keys are `set`; see
    `config_from`."""
    try:
        loaded = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"config {source}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"config {source}: expected a mapping with name, extractor, params, audio, "
            "augment and store"
        )
    return config_from(_with_values(loaded, set or {}), source, folder)


def _with_values(document: dict[str, Any], values: Values) -> dict[str, Any]:
    """A config's document with other values of these dotted keys."""
    for key, value in values.items():
        section, dot, rest = key.partition(".")
        if dot:
            inner = document.get(section)
            value = _with_values(inner if isinstance(inner, dict) else {}, {rest: value})
        document = {**document, section: value}
    return document


def config_from(
    document: dict[str, Any],
    source: str = _NAMELESS,
    folder: Path | None = None,
    is_recorded: bool = False,
) -> Config:
    """Validate a user's config, given as plain values. This imports the extractor that
    the config names.

    In messages, the config is called `source`. Relative paths are relative to `folder`,
    or to the current one.

    Raises ConfigError if the config has faults; the message lists all of them, each with
    its dotted path."""
    faults: list[str] = []
    document = {
        key: value for key, value in document.items() if value is not None or key not in SECTIONS
    }
    if not is_recorded:
        faults += _secrets_of(document)
    file = _validated(ConfigFile, document, folder, faults)
    name = document.get("name")
    if isinstance(name, str) and not _NAME.fullmatch(name):
        faults.append(
            f"name: {name!r} may hold letters, digits, '.', '_' and '-', and starts with a "
            "letter or digit"
        )
    if isinstance(name, str) and len(name) > AT_MOST_NAME:
        faults.append(f"name: it has {len(name):,} characters, and may have {AT_MOST_NAME}")
    extractor = params = None
    if isinstance(document.get("extractor"), str):
        try:
            extractor = extractors.find(document["extractor"])
            with blamed_on(extractor):
                params = _validated(
                    extractor.Params, document.get("params", {}), folder, faults, ["params"]
                )
        except ConfigError as error:
            faults.append(str(error))
    if file is not None and file.augment is not None:
        faults += _faults_of_copies(file.augment, file.audio)
    if faults or file is None or extractor is None or params is None:
        lines = list(dict.fromkeys(faults))
        listed = (
            lines[0]
            if len(lines) == 1
            else "\n".join([f"{len(lines)} errors", *(f"  {line}" for line in lines)])
        )
        raise ConfigError(f"config {source}: {listed}")
    try:
        with blamed_on(extractor):
            dtype = file.store.dtype or extractor.stored_dtype(params)
    except ConfigError as error:  # about weights, which decide the dtype of some extractors
        raise ConfigError(f"config {source}: {error}") from error
    known = "" if source == _NAMELESS else source
    return Config(
        file.name,
        file.extractor,
        params,
        file.audio,
        dtype,
        file.augment,
        file.store.pool,
        known,
        is_recorded,
    )


def _validated(
    model: type[_Model],
    document: Any,
    folder: Path | None,
    faults: list[str],
    above: Sequence[str] = (),
) -> _Model | None:
    """What a model makes of a document, whose path in the config is `above`; or None, and
    its faults are added."""
    try:
        return model.model_validate(document, context={"folder": folder})
    except ValidationError as error:
        faults += _faults_of(error, document, model, above)
        return None


def recorded_config(document: Any, source: str = _NAMELESS) -> Config:
    """Validate a resolved config that comes from a cache: from a version, or from a run's
    record.

    A cache is data, whoever made it. So only registered extractors are imported, unless
    `--trust-remote-code` says otherwise, and weights are only looked for on this machine,
    now and whenever the config is used.

    Raises ConfigError if the config names an extractor that is not registered, or has
    faults; the message lists all of them, each with its dotted path."""
    if not isinstance(document, dict):
        raise ConfigError(f"config {source}: expected a mapping")
    if isinstance(name := document.get("extractor"), str):
        try:
            extractors.require_registered(name)
        except ConfigError as error:
            raise ConfigError(f"config {source}: {error}") from error
    with without_downloads():
        return config_from(document, source, is_recorded=True)


def _secrets_of(value: Any, path: str = "") -> Iterator[str]:
    """Find URLs that may give access: a version stores its config, and shows it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _secrets_of(inner, f"{path}.{key}".lstrip("."))
    for inner in value if isinstance(value, list) else ():
        yield from _secrets_of(inner, path)
    if isinstance(value, str) and (fault := secret_in(value)):
        yield f"{path} {fault}, and would be stored in the cache: take it from the environment"


def packaged_configs() -> dict[str, str]:
    """The YAML text of every packaged config, by name."""
    here = Path(__file__).parents[1]
    # Installed, configs/ lies in the package; in a source checkout, beside it.
    folder = here / "configs" if (here / "configs").is_dir() else here.parent / "configs"
    paths = sorted(folder.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def packaged_hint(name: str) -> str:
    """Which packaged config may be meant by a name that none has; of one that is like no
    other, all names."""
    packaged = packaged_configs()
    if alike := difflib.get_close_matches(name, packaged, 1):
        return f"did you mean the packaged config {alike[0]}?"
    return f"the packaged configs are {', '.join(packaged)}"


def _faults_of_copies(augment: AugmentPolicy, audio: AudioPolicy) -> Iterator[str]:
    """Where the sections `augment` and `audio` contradict each other."""
    if audio.resample != "forbid":
        return
    if augment.speed != (1.0,):
        yield "augment.speed: to change it is to resample, which audio.resample forbids"
    if augment.noise is not None:
        rates = {clip.sample_rate for clip in read_noise(augment.noise.manifest)} - {
            audio.sample_rate
        }
        if rates:
            there = listing(f"{rate} Hz" for rate in sorted(rates))
            yield (
                f"augment.noise.manifest: holds noise at {there}, and audio.resample "
                "forbids resampling"
            )


# Faults, in terms of YAML

_SHOULD_BE = "Input should be "
_KINDS = {
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"
    ),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("tuple_type", "list_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping"),
    "string_type": "text",
    "none_required": "left out",
}
"""What a value should be, by pydantic's name of the fault, where pydantic's message is
about Python and not YAML."""

_LONGEST = 40
"""The characters of a value that a message shows."""


def _faults_of(
    error: ValidationError, document: Any, model: type[BaseModel], above: Sequence[str]
) -> Iterator[str]:
    """Describe each fault of a document, which its model has found, in one line."""
    # by path, since a union has a fault for each of its alternatives
    wanted: dict[str, tuple[Any, list[str]]] = {}
    for fault in error.errors():
        parts = _parts(fault["loc"], document)
        path = ".".join([*above, *parts])
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            yield f"{path}: {_no_such_key(parts, model)}"
        elif fault["type"] in _KINDS or message.startswith(_SHOULD_BE):
            _, kinds = wanted.setdefault(path, (fault["input"], []))
            kinds.append(_KINDS.get(fault["type"], message.removeprefix(_SHOULD_BE)))
        else:
            yield f"{path}: {message[0].lower()}{message[1:]}"
    for path, (value, kinds) in wanted.items():
        yield f"{path}: should be {', or '.join(dict.fromkeys(kinds))}, not {_shown(value)}"


def _parts(location: Sequence[str | int], document: Any) -> list[str]:
    """The part of pydantic's location that is in the document: it also names the
    alternatives of unions."""
    parts, here = [], document
    for number, part in enumerate(location):
        inner = {str(key): value for key, value in here.items()} if isinstance(here, dict) else here
        if isinstance(inner, dict) and (str(part) in inner or number == len(location) - 1):
            here = inner.get(str(part))
        elif isinstance(inner, list) and isinstance(part, int):
            here = inner[part]
        else:
            continue
        parts.append(str(part))
    return parts


def _no_such_key(parts: Sequence[str], model: type[BaseModel]) -> str:
    models = [model]
    # numbers of a list's entries, and keys of a mapping's, are names of no field
    for part in parts[:-1]:
        fields = [
            model.model_fields[part].annotation for model in models if part in model.model_fields
        ]
        models = [inner for annotation in fields for inner in _models(annotation)] or models
    keys = list(dict.fromkeys(key for model in models for key in model.model_fields))
    if alike := difflib.get_close_matches(parts[-1], keys, 1):
        return f"there is no such key (did you mean {alike[0]}?)"
    return "there is no such key" + (
        f" (there are {', '.join(keys)})" if keys else ", nor any other"
    )


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """The dotted paths of all keys of a model, and of the models in it."""
    for name, info in model.model_fields.items():
        yield f"{above}{name}"
        for inner in _models(info.annotation):
            yield from keys_of(inner, f"{above}{name}.")


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _shown(value: Any) -> str:
    """A value as YAML writes it, or the beginning of a long one."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    text = without_secrets(
        json.dumps(value, ensure_ascii=False)
        if value is None or isinstance(value, (str, bool))
        else str(value)
    )
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


# How configs differ


@dataclass(frozen=True)
class Differences:
    """How a config differs from that of a version."""

    deciding: list[str]
    """What decides values, with both values: keys, as `params.low_freq: 20.0 -> 0.0`; the
    extractor's revision, or its weights. Empty if the fingerprint is the same."""
    others: list[str]
    """Keys that decide no values: the name, where something is, which utterances are
    refused."""


def find_differences(
    recorded: Values, recorded_fingerprint: str, config: Values, fingerprint: str
) -> Differences:
    """How a resolved config differs from the recorded config of a version; both with
    their fingerprints."""
    keys = differing_keys(dict(recorded), dict(config))
    if recorded_fingerprint == fingerprint:
        return Differences([], keys)
    if recorded.get("extractor") != config["extractor"]:
        return Differences(keys, [])
    locations = extractors.find(config["extractor"]).Params.locations
    names = {"name", "augment.noise.manifest", *(f"audio.{key}" for key in SELECTING_KEYS)}
    names |= {f"params.{name}" for name in locations}
    others = [
        line
        for line in keys
        if line.startswith(tuple(f"{name}{end}" for name in names for end in (":", ".")))
    ]
    deciding = [line for line in keys if line not in others] + _hidden(
        recorded, recorded_fingerprint, config
    )
    return Differences(
        deciding or ["the extractor's revision, or the content of its weights"], others
    )


def _hidden(recorded: Values, fingerprint: str, config: Values) -> list[str]:
    """What differs besides keys, if the recorded config does not give its fingerprint any
    more, with these weights."""
    extractor = extractors.find(config["extractor"])
    locations = extractor.Params.locations
    weights = {name: config["params"][name] for name in locations & config["params"].keys()}
    try:
        with without_downloads():  # of what only the record names
            revision = revision_of(
                {**recorded, "params": {**recorded["params"], **weights}}, fingerprint
            )
    except (FeatcacheError, ValidationError, KeyError, TypeError, AttributeError):  # odd keys
        return []
    if revision is None:
        return ["the content of the weights" if locations else "the extractor itself"]
    return (
        []
        if revision == extractor.revision
        else [f"the extractor's revision: {revision} -> {extractor.revision}"]
    )
