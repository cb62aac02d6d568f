"""The contract of extractors, how `extractor:` finds a class, and the fingerprint of what
decides a config's values."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
)

import msgspec
from pydantic import (
    AfterValidator,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    model_serializer,
)

from featcache.errors import ConfigError, ExtractorError, FeatcacheError, listing
from featcache.sections import Section
from featcache.spec import MAIN, FeatureSpec
from featcache.trust import remote_code_is_allowed

if TYPE_CHECKING:
    import torch


Batching = Literal["frames", "padded", "equal_length", "single"]

_OWN = {
    **{
        "dac": "dac:Dac",
        "encodec": "encodec:Encodec",
        "fbank": "kaldi:Fbank",
        "log_mel": "log_mel:LogMel",
    },
    **{
        "mfcc": "kaldi:Mfcc",
        "mimi": "mimi:Mimi",
        "speechtokenizer": "speechtokenizer:SpeechTokenizer",
    },
    **{"ssl": "ssl:SSL", "torchaudio": "torchaudio_ssl:TorchaudioSSL", "units": "units:Units"},
    "xcodec": "xcodec:Xcodec",
}
_BUILT_IN = {name: f"featcache.extractors.{path}" for name, path in _OWN.items()}
_ENTRY_POINTS = "featcache.extractors"

SELECTING_KEYS = frozenset({"max_seconds", "min_source_rate"})
"""Keys of a config's `audio` section that decide which utterances there are, and not
their values."""

_MOST_REVISIONS = 100


@dataclass(frozen=True)
class Clip:
    """One utterance, as passed to an extractor."""

    id: str
    """The id of the utterance, for seeding."""
    waveform: torch.Tensor
    """The samples, float32 `[num_samples]`, mono, at the extractor's rate, nominally in
    [-1, 1], on the extractor's device. Do not write to them."""


class Params(Section):
    """The base of every extractor's parameters."""

    locations: ClassVar[frozenset[str]] = frozenset()
    """Names of parameters that say where something is: the fingerprint has the digest of
    what is there instead."""

    added_later: ClassVar[frozenset[str]] = frozenset()
    """Names of parameters that were added when there were already versions without them.
    Their default is what the extractor did before. While they have their default, they
    are left out of the fingerprint and of the configs in versions, so that older versions
    keep their fingerprint."""

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = serialize(self)
        fields = type(self).model_fields
        left_out = {
            name for name in self.added_later if getattr(self, name) == fields[name].get_default()
        }
        return {name: value for name, value in plain.items() if name not in left_out}


def absolute_path(value: str, info: ValidationInfo) -> str:
    """The absolute path of a parameter that names a file or folder; a relative one is
    relative to the config file. If there is no such file, the value is returned
    unchanged: it may be a hub's id."""
    # Path.expanduser would raise for the home of an unknown user
    path = Path((info.context or {}).get("folder") or "", os.path.expanduser(value))
    return str(path.resolve()) if value and path.exists() else value


LocalPath = Annotated[str, AfterValidator(absolute_path)]
"""A parameter that names a file or folder."""

P = TypeVar("P", bound=Params)

Tracks: TypeAlias = "torch.Tensor | Mapping[str, torch.Tensor]"
"""The features of a clip: the tensor of the only track, or tensors by the tracks' names."""


def main_track(extracted: Tracks) -> torch.Tensor:
    """Return the tensor of the main track."""
    return extracted[MAIN] if isinstance(extracted, Mapping) else extracted


class Extractor(ABC, Generic[P]):
    """Turns waveforms into features.

    A value depends on the clip's samples (and id, for dither), the parameters and the
    weights; never on the other clips of the call. The extractor must ensure this, and
    `batching` declares how: `frames` (computed frame by frame, in blocks of one shape),
    `padded`, `equal_length` or `single`.

    On the CPU, several threads call one instance at once, each with torch's own threads
    set to one: `extract` must not store the state of a call on `self`."""

    Params: ClassVar[type[Params]]
    """The pydantic model of the config's `params`."""
    revision: ClassVar[int]
    """A number that goes up whenever a change to the code changes values; it is part of
    the fingerprint."""
    batchings: ClassVar[tuple[str, ...]] = get_args(Batching)
    """What `batching` may be."""
    batching: Batching
    """How clips may be batched: see above."""
    chosen_batching: Batching | None = None
    """How rows are put together: `padded`, `equal_length` (the padded length is the row's
    own), or `single` (one row alone, at its own length: a model run by hand). It may be
    set after construction, before first use; None means `batching`. It has no effect if
    the extractor takes no rows."""
    spec: FeatureSpec
    """What the features are; set by `__init__`."""
    max_seconds: float | None = None
    """The length of the longest clip that the extractor takes, whatever the config says;
    None for no limit."""
    tf32: bool = False
    """Whether a GPU may round to TF32."""
    needs_aligned_waveforms: bool = True
    """Whether values depend on where in memory a waveform begins. False if `extract`
    copies waveforms first."""
    source_fingerprint: str | None = None
    """The fingerprint of the version from whose features, not audio, these can be made;
    None if from audio only."""

    @abstractmethod
    def __init__(self, params: P, sample_rate: int, device: torch.device) -> None:
        """Build the extractor, for waveforms of this rate in Hz. The parameters have
        their defaults filled in.

        Raises:
            ConfigError: The parameters do not fit each other, the sample rate (for
                example `high_freq` above Nyquist) or the model; or the weights cannot be
                loaded.
            MissingDependencyError: A package that the extractor needs is not installed.
        """

    @abstractmethod
    def num_frames(self, num_samples: int) -> int:
        """The exact number of frames of `num_samples` samples; 0 if the clip is too short
        for one."""

    @abstractmethod
    def extract(self, clips: Sequence[Clip]) -> Sequence[Tracks]:
        """Compute the clips' features, in their order, on the device.

        For each clip, return a tensor of `spec.dtype`: `[frames, *item_shape]`, or of a track
        that is along clips `[*item_shape]`. If the spec has several tracks, return a mapping
        of their names to tensors; the main one is `features`. Others have any number of
        entries.

        Every clip is long enough for a frame. This is called under `torch.inference_mode()`.

        Raises:
            AudioError: One of the clips cannot be extracted. The batch is then halved to
                find it, as it is for whatever else this raises but an `ExtractorError`.
        """

    def check_audio(self, audio: Mapping[str, Any]) -> None:
        """Check the `audio` section of the config, or a part of it.

        Raises:
            ConfigError: Waveforms are made in another way than these features need.
        """

    def chunk_warning(self, name: str) -> str | None:
        """A warning for the user if long clips are cut into chunks, and their values
        differ from the whole clip's. It names the extractor as the config does.

        Raises:
            ConfigError: Clips cannot be cut like this.
        """
        return None

    def from_features(self, features: torch.Tensor) -> torch.Tensor:
        """Make features from frames `[N, D]` of the version `source_fingerprint`, on the
        device: one for each frame.

        An extractor that sets `source_fingerprint` must override this, or `from_items`; they
        are never called for others."""
        raise ExtractorError(f"{type(self).__name__} makes features from audio only")

    def from_items(self, items: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Make the features of several utterances from those that the version
        `source_fingerprint` has of them, each `[frames, *item_shape]`, on the device."""
        import torch

        made = self.from_features(torch.cat([*items]))
        require_tensor(self, "from_features", made, (sum(map(len, items)), *self.spec.item_shape))
        return torch.split(made, [len(item) for item in items])

    @classmethod
    def stored_dtype(cls, params: P) -> str:
        """The stored dtype, as a numpy name, if the config names none."""
        return "float32"

    @classmethod
    def weights_digest(cls, params: P) -> str | None:
        """A hash of the content of the weights, for the fingerprint; None without weights."""
        return None


def find(name: str) -> type[Extractor[Params]]:
    """The extractor class of a registered name, entry point or `package.module:Class`; a
    ConfigError lists the known.

    It imports the module, which may run any code. A name that comes from a cache must
    pass `require_registered` first.
    """
    path = _BUILT_IN.get(name, name)
    if ":" not in path:
        there = registered()
        if name not in there:
            known = ", ".join(sorted(there))
            raise ConfigError(
                f"extractor: there is no {name!r}; choose from {known}, or your own "
                "package.module:Class"
            )
        path = there[name]
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # also of ":Class" and ".module:Class"
        is_absent = (
            isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        )
        hint = "; put the folder of your own module on PYTHONPATH" if is_absent else ""
        raise ConfigError(
            f"extractor: {path} cannot be imported: {describe_raised(error)}{hint}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Extractor)):
        raise ConfigError(f"extractor: {path} is not a featcache.extractors.Extractor")
    if lacking := [name for name in ("Params", "revision") if not hasattr(found, name)]:
        raise ConfigError(f"extractor: {fault(found, _lacks(lacking))}")
    params: object = found.Params
    if not (isinstance(params, type) and issubclass(params, Params)):
        what = "Params does not inherit from featcache.extractors.Params"
        raise ConfigError(f"extractor: {fault(found, what)}")
    return found


def build(
    kind: type[Extractor[P]], params: P, sample_rate: int, device: torch.device
) -> Extractor[P]:
    """Build an extractor, and check what it says of itself. Raises what its `__init__`
    may raise; ExtractorError for whatever else is wrong."""
    if kind.__abstractmethods__:
        raise fault(kind, _lacks(sorted(kind.__abstractmethods__)))
    with blamed_on(kind):
        extractor = kind(params, sample_rate, device)
        bases = [base for base in kind.__mro__ if base.__module__.startswith("featcache.")]
        names = [name for base in bases for name in inspect.get_annotations(base)]
        lacking = [name for name in names if name[0] != "_" and not hasattr(extractor, name)]
        if lacking:
            raise fault(kind, _lacks(lacking))
        if extractor.batching not in kind.batchings:
            choices = listing(kind.batchings)
            raise fault(kind, f"batching is {extractor.batching!r}: choose from {choices}")
        msgspec.convert(msgspec.to_builtins(extractor.spec), FeatureSpec)
    return extractor


# Mistakes in an extractor


def fault(extractor: object, what: str) -> ExtractorError:
    """The error about an extractor, or its class, that names the class and its file."""
    kind = extractor if isinstance(extractor, type) else type(extractor)
    file = getattr(sys.modules.get(kind.__module__), "__file__", kind.__module__)
    return ExtractorError(f"{kind.__name__} ({file}): {what}")


def _lacks(names: Sequence[str]) -> str:
    return f"lacks {listing(names)}: see docs/extractors.md, Your own"


def require_tensor(
    extractor: Extractor[Any], method: str, returned: object, shape: Sequence[int]
) -> None:
    """Raise ExtractorError unless a method has returned a tensor of that shape."""
    import torch

    what = type(returned).__name__
    if isinstance(returned, torch.Tensor):
        if returned.shape == tuple(shape):
            return
        what = f"a tensor {[*returned.shape]}"
    wanted = f"its num_frames and spec say a tensor {[*shape]}"
    raise fault(extractor, f"{method} returned {what}; {wanted}")


_NOT_ITS_OWN = ("featcache", "torch", "contextlib", "importlib")
"""Packages whose frames do not tell where in an extractor an exception was raised."""


def describe_raised(error: BaseException) -> str:
    """An exception in one line, with the line of the extractor's code that raised it."""
    own = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_ITS_OWN
    ]
    where = ""
    if own:
        path = "/".join(Path(own[-1].f_code.co_filename).parts[-2:])
        where = f" ({path}:{own[-1].f_lineno}, in {own[-1].f_code.co_name})"
    message = " ".join(str(error).split())
    return f"{type(error).__name__}{message and ': '}{message}{where}"


@contextmanager
def blamed_on(kind: type) -> Iterator[None]:
    """Turn what somebody's class raises into an ExtractorError. Errors of featcache, faults
    of parameters, and memory that runs out stay what they are."""
    try:
        yield
    except (FeatcacheError, ValidationError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise fault(kind, describe_raised(error)) from error


def require_registered(name: str) -> None:
    """Raise a ConfigError for an extractor that only a cache names, as
    `package.module:Class`, if it is not registered: `find` would import any module.

    featcache's extractors and installed packages' entry points are registered;
    `--trust-remote-code` accepts others."""
    if ":" in name and not remote_code_is_allowed() and name not in registered().values():
        raise ConfigError(
            f"extractor: a cache names {name}, which is not registered; --trust-remote-code "
            "imports it"
        )


def registered() -> dict[str, str]:
    """The class of each registered extractor, as `package.module:Class`, by its name."""
    return {point.name: point.value for point in entry_points(group=_ENTRY_POINTS)} | _BUILT_IN


def fingerprint(config: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of everything that decides a resolved config's values, and of
    nothing else, as canonical JSON.

    It covers the extractor and its revision, its parameters with defaults filled in (but
    without those that were added later, while they have their defaults), the content of
    its weights, the audio policy, the copies and the content of their noise, and the
    stored dtype. Options of the run, such as batch size, threads, shard size, paths and
    the device, are not part of it.

    Raises ConfigError if there is no such extractor or its weights cannot be loaded;
    ValidationError for parameters."""
    with blamed_on(find(config["extractor"])):
        return _hash(_deciding(config))


def revision_of(config: Mapping[str, Any], wanted: str) -> int | None:
    """The extractor's revision that gives a config the wanted fingerprint, or None.
    Raises what `fingerprint` does."""
    decides = _deciding(config)
    revisions = (decides["revision"], *range(1, _MOST_REVISIONS))
    return next((one for one in revisions if _hash(decides | {"revision": one}) == wanted), None)


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    extractor = find(config["extractor"])
    params = extractor.Params.model_validate(config["params"])
    decides = {key: value for key, value in config.items() if key != "name"}
    decides["params"] = _without_locations(params)
    decides["audio"] = {
        key: value for key, value in config["audio"].items() if key not in SELECTING_KEYS
    }
    if "augment" in config:  # the noise's `content` is hashed, but not where it is
        noise = config["augment"].get("noise")
        located = {key: value for key, value in (noise or {}).items() if key != "manifest"}
        decides["augment"] = {**config["augment"], "noise": noise and located}
    decides["revision"] = extractor.revision
    decides["weights"] = extractor.weights_digest(params)
    return decides


def _hash(decides: Mapping[str, Any]) -> str:
    canonical = json.dumps(decides, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_locations(params: Params) -> dict[str, Any]:
    """Parameters as plain JSON values, without those that say where something is."""
    plain: dict[str, Any] = params.model_dump(mode="json", exclude=set(params.locations))
    return plain | {
        name: _without_locations(value) for name, value in params if isinstance(value, Params)
    }
