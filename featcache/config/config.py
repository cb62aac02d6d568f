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
    """How features are stored; the `store` section."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: StoredDtype | None = None
    """Default: the extractor's own dtype. `uint8` quantises features, and stores codes as they are."""


class _File(BaseModel):
    """The shape of the YAML file; `params` is validated by the extractor's own model."""

    model_config = ConfigDict(extra="forbid")

    name: str
    extractor: str
    params: dict[str, Any] = {}
    audio: AudioPolicy = AudioPolicy()
    augment: AugmentPolicy | None = None
    store: StorePolicy = StorePolicy()


@dataclass(frozen=True)
class Config:
    """A validated config.

    Attributes:
        name: names the version.
        extractor: a registered name, or `package.module:Class`.
        params: the extractor's parameters, all of them, as its own model.
        audio: how an utterance becomes a waveform.
        dtype: numpy name of the stored dtype.
        augment: which further copies of utterances are made; None for no others.
        source: what it was read from, for messages: a file, or a packaged config's name; empty where that is unknown.
        is_recorded: whether it comes from a cache, and not from its user: see `recorded_config`.
    """

    name: str
    extractor: str
    params: extractors.Params
    audio: AudioPolicy
    dtype: str
    augment: AugmentPolicy | None = None
    source: str = field(default="", compare=False)
    is_recorded: bool = field(default=False, compare=False)

    @property
    def extractor_class(self) -> type[extractors.Extractor[extractors.Params]]:
        """The class that `extractor` names."""
        return extractors.find(self.extractor)

    @property
    def copies(self) -> Copies:
        """The utterances that are made of every utterance."""
        return copies_of({"augment": self.augment and self.augment.model_dump()})

    def build(self, device: torch.device) -> extractors.Extractor[extractors.Params]:
        """The extractor, ready to run on `device`.

        Raises:
            ConfigError: the parameters go neither with the sample rate nor with each other, or weights cannot be had.
        """
        try:
            with _weights(self.is_recorded):
                return self.extractor_class(self.params, self.audio.sample_rate, device)
        except ConfigError as error:  # of several configs, it is to be said which
            raise ConfigError(f"config {self.source or self.name}: {error}") from error

    def resolved(self) -> dict[str, Any]:
        """The config as plain JSON values, with every default filled in, except of `Params.added_later`."""
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
        with _weights(self.is_recorded):
            return extractors.fingerprint(self.resolved())


def load_config(source: str | Path) -> Config:
    """Read a config from a YAML file, or a packaged one by its name.

    Raises:
        ConfigError: the file cannot be read, or has faults; all of them in one message.
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
        text: the YAML.
        source: names it in messages.
        folder: what relative paths in it are relative to; None for the current folder.

    Raises:
        ConfigError: every fault, each with its dotted path.
    """
    try:
        loaded = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise ConfigError(f"config {source}:{where} not valid YAML: {getattr(error, 'problem', error)}") from error
    except ValueError as error:  # what looks like a date and is none
        raise ConfigError(f"config {source}: not valid YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"config {source}: expected a mapping with name, extractor, params, audio, augment and store")
    return config_from(loaded, source, folder)


def config_from(document: dict[str, Any], source: str = _NAMELESS, folder: Path | None = None) -> Config:
    """Validate a config of its user's own, given as plain values; it imports the extractor that it names.

    Args:
        document: the values.
        source: names it in messages.
        folder: what relative paths in it are relative to; None for the current folder.

    Raises:
        ConfigError: every fault, each with its dotted path.
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
    except ConfigError as error:  # of weights, which it may have to look at
        raise ConfigError(f"config {source}: {error}") from error
    known = "" if source == _NAMELESS else source
    return Config(file.name, file.extractor, params, file.audio, dtype, file.augment, known)


def recorded_config(document: Any, source: str = _NAMELESS) -> Config:
    """Validate a resolved config that comes from a cache: a version's, or that of a run's record.

    A cache is data, whoever made it. So only registered extractors are imported, unless `--trust-remote-code` says
    otherwise, and weights are looked for on this machine only, then and whenever the config is used.

    Args:
        document: the values.
        source: names it in messages.

    Raises:
        ConfigError: it names another extractor; or every fault, each with its dotted path.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"config {source}: expected a mapping")
    if isinstance(name := document.get("extractor"), str):
        try:
            extractors.require_registered(name)
        except ConfigError as error:
            raise ConfigError(f"config {source}: {error}") from error
    with _weights(is_recorded=True):
        return replace(config_from(document, source), is_recorded=True)


def _weights(is_recorded: bool) -> AbstractContextManager[None]:
    """Around whatever may look for the weights of a config."""
    return without_downloads() if is_recorded else nullcontext()


def packaged_configs() -> dict[str, str]:
    """The YAML text of every packaged config, by name."""
    here = Path(__file__).parents[1]
    # Installed, configs/ lies in the package; in a source checkout, beside it.
    folder = here / "configs" if (here / "configs").is_dir() else here.parent / "configs"
    paths = sorted(folder.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def _faults_of_copies(augment: AugmentPolicy, audio: AudioPolicy) -> Iterator[str]:
    """What of two sections does not go together."""
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
    """yaml.safe_load, but a key given twice is an error instead of the last one winning."""

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
