"""One YAML file -> a validated config -> its resolved form, from which the fingerprint is made."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from featcache import extractors
from featcache.audio.noise import read_noise
from featcache.audio.sections import AudioPolicy, AugmentPolicy
from featcache.config.faults import faults_of
from featcache.errors import ConfigError, listing
from featcache.manifest.copies import Copies, copies_of
from featcache.trust import without_downloads

if TYPE_CHECKING:
    import torch

StoredDtype = Literal["float32", "float16", "uint8", "uint16", "uint32", "int64"]

_NAMELESS = "<config>"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class StorePolicy(BaseModel):
    """The `store` section: how features are stored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: StoredDtype | None = None
    """Default: the extractor's own dtype. `uint8` quantises features, and stores codes as they are."""


class _File(BaseModel):
    """The sections of the YAML file; the extractor's own model validates `params`."""

    model_config = ConfigDict(extra="forbid")

    name: str
    extractor: str
    params: dict[str, Any] = {}
    audio: AudioPolicy = AudioPolicy()
    augment: AugmentPolicy | None = None
    store: StorePolicy = StorePolicy()


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
    """The `augment` section: which copies of utterances are made; None for no others than the utterances themselves."""
    source: str = field(default="", compare=False)
    """Where the config was read from, for messages: a file, or the name of a packaged config; empty if unknown."""
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
        """Build the extractor, ready to run on `device`.

        Raises:
            ConfigError: The parameters contradict each other or the sample rate, or weights cannot be loaded.
        """
        try:
            with _weights_access(self.is_recorded):
                return self.extractor_class(self.params, self.audio.sample_rate, device)
        except ConfigError as error:  # a run may have several configs, so the message names the one at fault
            raise ConfigError(f"config {self.source or self.name}: {error}") from error

    def resolved(self) -> dict[str, Any]:
        """The config as plain JSON values, with every default filled in, except those of `Params.added_later`."""
        return {
            "name": self.name,
            "extractor": self.extractor,
            "params": self.params.model_dump(mode="json"),
            "audio": self.audio.model_dump(mode="json"),
            "store": {"dtype": self.dtype},
            **({} if self.augment is None else {"augment": self.augment.model_dump(mode="json")}),
        }

    def fingerprint(self) -> str:
        """SHA-256, in hex, of everything that decides the values: see `featcache.extractors.fingerprint`."""
        with _weights_access(self.is_recorded):
            return extractors.fingerprint(self.resolved())


def load_config(source: str | Path) -> Config:
    """Read a config from a YAML file, or a packaged one by its name.

    Raises:
        ConfigError: The file cannot be read, or has faults; the message lists all of them.
    """
    text, folder = packaged_configs().get(str(source)), None
    if text is None:
        folder = Path(source).absolute().parent
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            hint = "" if Path(source).suffix else f"; the packaged configs are {', '.join(packaged_configs())}"
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"config {source}: cannot be read: {reason}{hint}") from error
    return parse_config(text, str(source), folder)


def parse_config(text: str, source: str = _NAMELESS, folder: Path | None = None) -> Config:
    """Validate a config's YAML text.

    Args:
        text: The YAML.
        source: The config's name in messages.
        folder: The folder that relative paths are relative to; None for the current folder.

    Raises:
        ConfigError: The config has faults; the message lists all of them, each with its dotted path.
    """
    try:
        loaded = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ConfigError(f"config {source}:{where} not valid YAML: {getattr(error, 'problem', error)}") from error
    except ValueError as error:  # text that looks like a date, but is none
        raise ConfigError(f"config {source}: not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"config {source}: expected a mapping with name, extractor, params, audio, augment and store")
    return config_from(loaded, source, folder)


def config_from(document: dict[str, Any], source: str = _NAMELESS, folder: Path | None = None) -> Config:
    """Validate a user's config, given as plain values. This imports the extractor that the config names.

    Args:
        document: The sections of the config.
        source: The config's name in messages.
        folder: The folder that relative paths are relative to; None for the current folder.

    Raises:
        ConfigError: The config has faults; the message lists all of them, each with its dotted path.
    """
    faults: list[str] = []
    file = None
    try:
        file = _File.model_validate(document, context={"folder": folder})
    except ValidationError as error:
        faults += faults_of(error, document, _File)
    name = document.get("name")
    if isinstance(name, str) and not _NAME.fullmatch(name):
        faults.append(f"name: {name!r} may hold letters, digits, '.', '_' and '-', and starts with a letter or digit")
    found = params = None
    if isinstance(document.get("extractor"), str):
        try:
            found = extractors.find(document["extractor"])
        except ConfigError as error:
            faults.append(str(error))
    if found is not None:
        given = document.get("params") or {}
        try:
            params = found.Params.model_validate(given, context={"folder": folder})
        except ValidationError as error:
            faults += faults_of(error, given, found.Params, ["params"])
    if file is not None and file.augment is not None:
        faults += _faults_of_copies(file.augment, file.audio)
    if faults or file is None or found is None or params is None:
        lines = list(dict.fromkeys(faults))
        listed = lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} errors", *(f"  {line}" for line in lines)])
        raise ConfigError(f"config {source}: {listed}")
    try:
        dtype = file.store.dtype or found.stored_dtype(params)
    except ConfigError as error:  # about weights, which decide the dtype of some extractors
        raise ConfigError(f"config {source}: {error}") from error
    known = "" if source == _NAMELESS else source
    return Config(file.name, file.extractor, params, file.audio, dtype, file.augment, known)


def recorded_config(document: Any, source: str = _NAMELESS) -> Config:
    """Validate a resolved config that comes from a cache: from a version, or from a run's record.

    A cache is data, whoever made it. So only registered extractors are imported, unless `--trust-remote-code` says
    otherwise, and weights are only looked for on this machine, now and whenever the config is used.

    Args:
        document: The sections of the config.
        source: The config's name in messages.

    Raises:
        ConfigError: The config names an extractor that is not registered, or has faults; the message lists all of them,
            each with its dotted path.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"config {source}: expected a mapping")
    if isinstance(name := document.get("extractor"), str):
        try:
            extractors.require_registered(name)
        except ConfigError as error:
            raise ConfigError(f"config {source}: {error}") from error
    with _weights_access(is_recorded=True):
        return replace(config_from(document, source), is_recorded=True)


def _weights_access(is_recorded: bool) -> AbstractContextManager[None]:
    """The context in which a config's weights are looked for: for a recorded config, without downloads."""
    return without_downloads() if is_recorded else nullcontext()


def packaged_configs() -> dict[str, str]:
    """The YAML text of every packaged config, by name."""
    here = Path(__file__).parents[1]
    # Installed, configs/ lies in the package; in a source checkout, beside it.
    folder = here / "configs" if (here / "configs").is_dir() else here.parent / "configs"
    paths = sorted(folder.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def _faults_of_copies(augment: AugmentPolicy, audio: AudioPolicy) -> Iterator[str]:
    """Where the sections `augment` and `audio` contradict each other."""
    if audio.resample != "forbid":
        return
    if augment.speed != (1.0,):
        yield "augment.speed: to change it is to resample, which audio.resample forbids"
    if augment.noise is not None:
        rates = {clip.sample_rate for clip in read_noise(augment.noise.manifest)} - {audio.sample_rate}
        if rates:
            there = listing(f"{rate} Hz" for rate in sorted(rates))
            yield f"augment.noise.manifest: holds noise at {there}, and audio.resample forbids resampling"


class _StrictLoader(yaml.SafeLoader):
    """Loads YAML as yaml.safe_load does, but a key that is given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    problem="a list or mapping cannot be a key", problem_mark=key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
