"""Configs: one YAML file, validated, and resolved to what the fingerprint is a hash of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from featcache import extractors
from featcache.audio.noise import read_noise
from featcache.audio.resample import AudioPolicy
from featcache.audio.waveform import AugmentPolicy
from featcache.config.strict_yaml import load_yaml
from featcache.errors import (
    AT_MOST_NAME,
    ConfigError,
    FeatcacheError,
    did_you_mean,
    differing_keys,
    listing,
    nearest,
    secret_in,
    without_secrets,
)
from featcache.extractors.base import SELECTING_KEYS, revision_of
from featcache.extractors.faults import blamed_on
from featcache.sections import Section
from featcache.trust import without_downloads

if TYPE_CHECKING:
    import torch

_MOST_BYTES = 256 << 10

Values = Mapping[str, Any]
"""Values by the keys of a config, or by dotted paths to be set in one."""

_Model = TypeVar("_Model", bound=BaseModel)
_NAMELESS = "<config>"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class StorePolicy(Section):
    """The `store` section: how features are stored."""

    dtype: (
        Literal["float64", "float32", "float16", "bfloat16", "uint8", "uint16", "uint32", "int64"]
        | None
    ) = None
    """Default: the extractor's own dtype. `uint8` quantises features, but does not change
    codes. `bfloat16` has the range of float32, and two or three digits. Then tensors are
    bfloat16, and numpy arrays float32."""
    pool: Literal["mean", "mean+std"] | None = None
    """Store one float32 vector for each utterance instead of its frames: their mean over
    time, or mean and standard deviation side by side. Frames are rounded to `dtype`
    first."""


class ConfigFile(BaseModel):
    """The sections of the YAML file; the extractor's own model validates `params`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

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

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if len(name) > AT_MOST_NAME:
            raise ValueError(f"it has {len(name):,} characters, and may have {AT_MOST_NAME}")
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} may hold letters, digits, '.', '_' and '-', and starts with a "
                "letter or digit"
            )
        return name


KEYS = frozenset(ConfigFile.model_fields)
SECTIONS = KEYS - {"name", "extractor"}
"""Keys that may be left out, or left empty."""


@dataclass(frozen=True)
class Config:
    """A validated config."""

    name: str
    extractor: str
    params: extractors.Params
    audio: AudioPolicy
    dtype: str
    """The stored dtype, by its numpy name."""
    augment: AugmentPolicy | None = None
    pool: str | None = None
    """The vector that is stored of each utterance, `mean` or `mean+std`; None for frames."""
    source: str = field(default="", compare=False)
    """The file or packaged config, for messages; empty if unknown."""
    is_recorded: bool = field(default=False, compare=False)
    """True if the config comes from a cache: see `recorded_config`."""

    @property
    def extractor_class(self) -> type[extractors.Extractor[extractors.Params]]:
        """The class that `extractor` names."""
        return extractors.find(self.extractor)

    @property
    def makes_sound(self) -> bool:
        """True if the extractor turns features into sound."""
        return self.extractor_class.synthesize is not extractors.Extractor.synthesize

    def build(self, device: torch.device) -> extractors.Extractor[extractors.Params]:
        """Build the extractor, ready to run on `device`. Raises ConfigError if the parameters
        contradict each other or the sample rate, or weights cannot be loaded."""
        with _about(self.source or self.name), without_downloads(self.is_recorded):
            return extractors.build(
                self.extractor_class, self.params, self.audio.sample_rate, device
            )

    @property
    def keys(self) -> list[str]:
        """All keys of such a config, by their dotted paths: `params.num_mel_bins`."""
        return [*keys_of(ConfigFile), *keys_of(type(self.params), "params.")]

    def resolved(self) -> dict[str, Any]:
        """Return the config as JSON values, with every default filled in, except those of
        `Params.added_later`."""
        resolved: dict[str, Any] = {
            "name": self.name,
            "extractor": self.extractor,
            "params": self.params.model_dump(mode="json"),
            "audio": self.audio.model_dump(mode="json"),
            "store": {"dtype": self.dtype},
        }
        if self.pool is not None:
            resolved["store"]["pool"] = self.pool
        if self.augment is not None:
            resolved["augment"] = self.augment.model_dump(mode="json")
        return resolved

    def fingerprint(self) -> str:
        """Return the SHA-256, in hex, of everything that decides the values."""
        with without_downloads(self.is_recorded):
            return extractors.fingerprint(self.resolved())


@contextmanager
def _about(source: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"config {source}: {error}") from error


def load_config(source: str | Path | Config, set: Values | None = None) -> Config:  # noqa: A002
    """Read a config from a YAML file, or a packaged config by its name, or take a Config.
    `set` values in it by their dotted keys, as `{"params.num_mel_bins": 40}`. Raises
    ConfigError, which lists all faults; also for a file of several configs."""
    configs = load_configs(source, set)
    if len(configs) > 1:
        names = listing(config.name for config in configs)
        raise ConfigError(
            f"config {source}: is {len(configs)} configs, {names}: set one value where it "
            "lists several, and the name"
        )
    return configs[0]


def load_configs(source: str | Path | Config, set: Values | None = None) -> list[Config]:  # noqa: A002
    """Read the configs of a file, as `load_config` does: one for each value of the
    parameters in `Params.taken` that are lists of values, as `layer: [6, 12]`. The name of
    each then ends in its values."""
    values = dict(set or {})
    if not isinstance(source, Config):
        text, folder = _read(source)
        document = _with_values(_document(text, str(source)), values)
        return [config_from(single, str(source), folder) for single in _single_documents(document)]
    if not values:
        return [source]
    if "augment.noise.manifest" in values:  # the hash of the old noise goes
        values = {"augment.noise.content": None, **values}
    make = recorded_config if source.is_recorded else config_from
    return [make(_with_values(source.resolved(), values), source.source or _NAMELESS)]


def _read(source: str | Path) -> tuple[str, Path | None]:
    packaged = packaged_configs().get(str(source))
    if packaged is not None:
        return packaged, None
    if source == "":
        raise ConfigError("the name of a config is empty")
    try:
        with Path(source).open("rb") as file:  # perhaps a pipe
            data = file.read(_MOST_BYTES + 1)
        text = data.decode()
    except (OSError, ValueError) as error:  # a path with a NUL; bytes that are not UTF-8
        reason = getattr(error, "strerror", error)
        message = f"config {source}: cannot be read: {reason}"
        if isinstance(error, IsADirectoryError):
            message += "; `featcache configs --from` prints a version's config"
        elif not Path(source).suffix:
            message += f"; {packaged_hint(str(source))}"
        raise ConfigError(message) from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"config {source}: more than {_MOST_BYTES:,} bytes: is it a config?")
    return text, Path(source).absolute().parent


def _single_documents(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a document for each combination of values that a document lists."""
    extractor, params = document.get("extractor"), document.get("params")
    if not isinstance(extractor, str) or not isinstance(params, dict):
        return [document]
    try:
        listable = listable_params(extractors.find(extractor).Params)
    except ConfigError:  # `config_from` reports it, with other faults
        return [document]
    listed = {
        key: values for key, values in params.items() if key in listable and type(values) is list
    }
    if not listed or not all(listed.values()):
        return [document]
    singles = []
    for values in product(*listed.values()):
        chosen = dict(zip(listed, values, strict=True))
        single = {**document, "params": {**params, **chosen}}
        if "name" in document:
            single["name"] = "-".join([str(document["name"]), *map(_name_of_value, chosen, values)])
        singles.append(single)
    return singles


def listable_params(params: type[extractors.Params]) -> set[str]:
    """Return the parameters of which a config may list several values, to be several
    configs: those in `taken` whose values are no lists."""
    fields = params.model_fields
    return {name for name in params.taken & {*fields} if not _takes_lists(fields[name].annotation)}


def _takes_lists(annotation: Any) -> bool:
    return any(get_origin(kind) in (tuple, list) for kind in (annotation, *get_args(annotation)))


def _name_of_value(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{key}{'null' if value is None else value}"


def _document(text: str, source: str) -> dict[str, Any]:
    try:
        loaded = load_yaml(text)
    except ValueError as error:
        raise ConfigError(f"config {source}: {error}") from error
    if not isinstance(loaded, dict):
        keys = ", ".join(ConfigFile.model_fields)
        raise ConfigError(f"config {source}: expected a mapping with {keys}")
    return loaded


def _with_values(document: Any, values: Values) -> dict[str, Any]:
    changed = dict(document) if isinstance(document, dict) else {}
    for key, value in values.items():
        section, dot, below = key.partition(".")
        if dot:
            value = _with_values(changed.get(section), {below: value})
        changed[section] = value
    return changed


def config_from(
    document: dict[str, Any],
    source: str = _NAMELESS,
    folder: Path | None = None,
    is_recorded: bool = False,
) -> Config:
    """Validate a user's config, given as plain values, and import its extractor.

    `source` names the config in messages. Relative paths are relative to `folder`, by
    default the current one. Raises ConfigError, which lists all faults, each with its
    dotted path."""
    document = {
        key: value for key, value in document.items() if value is not None or key not in SECTIONS
    }
    faults = [] if is_recorded else [*_secrets_of(document)]
    file = _validated(ConfigFile, document, folder, faults)
    extractor = params = None
    if isinstance(document.get("extractor"), str):
        try:
            extractor = extractors.find(document["extractor"])
            with blamed_on(extractor):
                values = document.get("params", {})
                params = _validated(extractor.Params, values, folder, faults, "params")
        except ConfigError as error:
            faults.append(str(error))
    if file is not None and file.augment is not None:
        faults += _faults_of_copies(file.augment, file.audio)
    if faults or file is None or extractor is None or params is None:
        raise ConfigError(f"config {source}: {_listed(faults)}")
    with _about(source), blamed_on(extractor):  # weights decide the dtype of some extractors
        dtype = file.store.dtype or extractor.stored_dtype(params)
    return Config(
        file.name,
        file.extractor,
        params,
        file.audio,
        dtype,
        file.augment,
        file.store.pool,
        "" if source == _NAMELESS else source,
        is_recorded,
    )


def _listed(faults: Iterable[str]) -> str:
    lines = list(dict.fromkeys(faults))
    if len(lines) > 1:
        lines.insert(0, f"{len(lines)} errors")
    return "\n  ".join(lines)


def _validated(
    model: type[_Model], document: Any, folder: Path | None, faults: list[str], *above: str
) -> _Model | None:
    """Return the model of a document at the path `above`; or None, after adding its faults."""
    try:
        return model.model_validate(document, context={"folder": folder})
    except ValidationError as error:
        faults += _faults_of(error, document, model, above)
        return None


def recorded_config(document: Any, source: str = _NAMELESS) -> Config:
    """Validate a resolved config that a cache, maybe a stranger's, has recorded.

    Only registered extractors are imported, unless `--trust-remote-code` is given, and
    weights are only looked for on this machine, now and whenever the config is used. Raises
    ConfigError for another extractor, or as `config_from` does."""
    if not isinstance(document, dict):
        raise ConfigError(f"config {source}: expected a mapping")
    name = document.get("extractor")
    if isinstance(name, str):
        with _about(source):
            extractors.require_registered(name)
    with without_downloads():
        return config_from(document, source, is_recorded=True)


def _secrets_of(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _secrets_of(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for inner in value:
            yield from _secrets_of(inner, path)
    elif isinstance(value, str):
        fault = secret_in(value)
        if fault:
            yield f"{path} {fault}, and would be stored in the cache: take it from the environment"


def packaged_configs() -> dict[str, str]:
    """Return the YAML text of every packaged config, by name."""
    package = Path(__file__).parents[1]
    folder = package / "configs"
    if not folder.is_dir():  # in a source checkout
        folder = package.parent / "configs"
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.yaml")}
    return dict(sorted(texts.items()))


def packaged_hint(name: str) -> str:
    """Suggest the packaged config of the most similar name, or list all."""
    packaged = packaged_configs()
    similar = nearest(name, packaged)
    if similar:
        return f"did you mean the packaged config {similar}?"
    return f"the packaged configs are {', '.join(packaged)}"


def _faults_of_copies(augment: AugmentPolicy, audio: AudioPolicy) -> Iterator[str]:
    if audio.resample != "forbid":
        return
    if augment.speed != (1.0,):
        yield "augment.speed: to change it is to resample, which audio.resample forbids"
    if augment.noise is not None:
        rates = {clip.sample_rate for clip in read_noise(augment.noise.manifest)}
        others = listing(f"{rate} Hz" for rate in sorted(rates - {audio.sample_rate}))
        if others:
            what = f"holds noise at {others}, and audio.resample forbids resampling"
            yield f"augment.noise.manifest: {what}"


# Faults, in terms of YAML

_SHOULD_BE = "Input should be "
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "string": "text",
    "none": "left out",
}
"""Kinds of values by the first words of pydantic's faults, where its messages are about Python."""

_NOT_OF_KIND = {"type", "parsing", "from_float", "parsing_size", "attributes_type", "required"}
"""The other words of these faults."""

_LONGEST = 40
"""The characters of a value that a message shows."""


def _faults_of(
    error: ValidationError, document: Any, model: type[BaseModel], above: Sequence[str]
) -> Iterator[str]:
    """Describe each fault of a document, which its model has found, in one line."""
    # A union has a fault for each of its alternatives, all with the same path.
    kinds: dict[str, list[str]] = {}
    inputs: dict[str, Any] = {}
    for fault in error.errors():
        parts = _parts(fault["loc"], document)
        path = ".".join([*above, *parts])
        message = fault["msg"].removeprefix("Value error, ")
        kind, _, what = fault["type"].partition("_")
        if kind in _KINDS and what in _NOT_OF_KIND:
            message = _SHOULD_BE + _KINDS[kind]
        if fault["type"] == "extra_forbidden":
            yield f"{path}: {_no_such_key(parts, model)}"
        elif message.startswith(_SHOULD_BE):
            kinds.setdefault(path, []).append(message.removeprefix(_SHOULD_BE))
            inputs.setdefault(path, fault["input"])
        else:
            yield f"{path}: {message[0].lower()}{message[1:]}"
    for path, alternatives in kinds.items():
        expected = ", or ".join(dict.fromkeys(alternatives))
        yield f"{path}: should be {expected}, not {_shown(inputs[path])}"


def _parts(location: Sequence[str | int], document: Any) -> list[str]:
    """Return the part of pydantic's location that is in the document, without the
    alternatives of unions."""
    parts, inner = [], document
    for number, part in enumerate(location):
        if isinstance(inner, dict):
            by_name = {str(key): value for key, value in inner.items()}
            if str(part) not in by_name and number < len(location) - 1:
                continue
            inner = by_name.get(str(part))
        elif isinstance(inner, list) and isinstance(part, int):
            inner = inner[part]
        else:
            continue
        parts.append(str(part))
    return parts


def _no_such_key(parts: Sequence[str], model: type[BaseModel]) -> str:
    models = [model]
    for part in parts[:-1]:  # which may also be a list's number, or a mapping's key
        fields = [inner.model_fields[part] for inner in models if part in inner.model_fields]
        models = [inner for field in fields for inner in _models(field.annotation)] or models
    keys = list(dict.fromkeys(key for inner in models for key in inner.model_fields))
    meant = did_you_mean(parts[-1], keys)
    if meant:
        return f"there is no such key{meant}"
    if keys:
        return f"there is no such key (there are {', '.join(keys)})"
    return "there is no such key, nor any other"


def keys_of(
    model: type[BaseModel], above: str = "", outer: tuple[type[BaseModel], ...] = ()
) -> Iterator[str]:
    """List the dotted paths of all keys of a model, and of the models in it. A model that
    contains itself, or one of the `outer` models, is listed once."""
    for name, info in model.model_fields.items():
        yield f"{above}{name}"
        for inner in _models(info.annotation):
            if inner not in (model, *outer):
                yield from keys_of(inner, f"{above}{name}.", (model, *outer))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _shown(value: Any) -> str:
    """Return a value as YAML writes it, or the beginning of a long one."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = str(value)
    if value is None or isinstance(value, str | bool):
        text = json.dumps(value, ensure_ascii=False)
    text = without_secrets(text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


# How configs differ


@dataclass(frozen=True)
class Differences:
    """The differences between a config and the config of a version."""

    deciding: list[str]
    """Differences that change values: keys, as `params.low_freq: 20.0 -> 0.0`; the
    extractor's revision, or its weights. Empty if the fingerprint is the same."""
    others: list[str]
    """Differences that change no values: in names, locations, and utterances to refuse."""


def find_differences(
    recorded: Values, recorded_fingerprint: str, config: Values, fingerprint: str
) -> Differences:
    """Compare a resolved config with the recorded config of a version."""
    lines = differing_keys(dict(recorded), dict(config))
    if recorded_fingerprint == fingerprint:
        return Differences([], lines)
    if recorded.get("extractor") != config["extractor"]:
        return Differences(lines, [])
    locations = extractors.find(config["extractor"]).Params.locations
    keys = ["name", "augment.noise.manifest", *(f"audio.{key}" for key in SELECTING_KEYS)]
    keys += [f"params.{key}" for key in locations]
    prefixes = tuple(key + end for key in keys for end in ":.")
    others = [line for line in lines if line.startswith(prefixes)]
    deciding = [line for line in lines if line not in others]
    deciding += _hidden(recorded, recorded_fingerprint, config)
    unknown = ["the extractor's revision, or the content of its weights"]
    return Differences(deciding or unknown, others)


def _hidden(recorded: Values, fingerprint: str, config: Values) -> list[str]:
    """Return all differences, except keys and the locations of weights."""
    extractor = extractors.find(config["extractor"])
    locations = extractor.Params.locations
    weights = {name: config["params"][name] for name in locations & config["params"].keys()}
    try:
        params = {**recorded["params"], **weights}
        with without_downloads():  # of what only the record names
            revision = revision_of({**recorded, "params": params}, fingerprint)
    except (FeatcacheError, ValidationError, KeyError, TypeError, AttributeError):  # odd keys
        return []
    if revision is None:
        return ["the content of the weights" if locations else "the extractor itself"]
    if revision == extractor.revision:
        return []
    return [f"the extractor's revision: {revision} -> {extractor.revision}"]
