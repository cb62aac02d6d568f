"""The contract of extractors, the registry behind `extractor:`, and the fingerprint of a
config."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
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
from pydantic import AfterValidator, SerializerFunctionWrapHandler, ValidationInfo, model_serializer

from featcache.errors import ConfigError, ExtractorError, did_you_mean, listing
from featcache.extractors.faults import blamed_on, describe_raised, fault, keeping_folder, lacking
from featcache.sections import Section
from featcache.spec import MAIN, FeatureSpec
from featcache.trust import remote_code_is_allowed

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Batching = Literal["frames", "padded", "equal_length", "single"]
BATCHINGS: tuple[Batching, ...] = ("single", "equal_length", "padded")
"""The ways in which rows share a batch, from the strictest."""

_OWN = {
    "audio_stats": "audio_stats:AudioStats",
    "crepe": "crepe:Crepe",
    "dac": "dac:Dac",
    "dnsmos": "dnsmos:Dnsmos",
    "encodec": "encodec:Encodec",
    "fbank": "kaldi:Fbank",
    "ge2e": "ge2e:GE2E",
    "higgs2": "xcodec:Higgs2",
    "imported": "imported:Imported",
    "labels": "labels:Labels",
    "log_mel": "log_mel:LogMel",
    "mfcc": "kaldi:Mfcc",
    "mimi": "mimi:Mimi",
    "neucodec": "xcodec2:NeuCodec",
    "onnx": "onnx:Onnx",
    "pocket_tts": "mimi:PocketTTS",
    "snac": "snac:Snac",
    "speechtokenizer": "speechtokenizer:SpeechTokenizer",
    "ssl": "ssl:SSL",
    "swift_f0": "swift_f0:SwiftF0",
    "torchaudio": "torchaudio_ssl:TorchaudioSSL",
    "units": "units:Units",
    "vibevoice": "vibevoice:VibeVoice",
    "wavtokenizer": "wavtokenizer:WavTokenizer",
    "xcodec": "xcodec:Xcodec",
    "xcodec2": "xcodec2:Xcodec2",
}
_BUILT_IN = {name: f"featcache.extractors.{path}" for name, path in _OWN.items()}
_ENTRY_POINTS = "featcache.extractors"

SELECTING_KEYS = frozenset({"max_seconds", "min_source_rate"})
"""Keys of a config's `audio` section that select utterances, and change no values."""

_MOST_REVISIONS = 100


@dataclass(frozen=True)
class Clip:
    """One utterance, as passed to an extractor."""

    id: str
    waveform: Tensor
    """The samples, float32 `[num_samples]`, mono, at the extractor's rate, nominally in
    [-1, 1], on its device. Do not write to them."""


class Params(Section):
    """The base of every extractor's parameters."""

    locations: ClassVar[frozenset[str]] = frozenset()
    """Names of parameters that say where a file is. The fingerprint has the file's hash
    instead."""

    added_later: ClassVar[frozenset[str]] = frozenset()
    """Names of parameters added when versions without them existed. While they have their
    default, which is what the extractor did before, fingerprints and the configs in
    versions leave them out."""

    taken: ClassVar[frozenset[str]] = frozenset()
    """Names of parameters that only choose what is taken from a model's forward pass. The
    versions of a run that differ in nothing else share the pass."""

    @model_serializer(mode="wrap")
    def _without_later_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = serialize(self)
        fields = type(self).model_fields
        left_out = {
            name for name in self.added_later if getattr(self, name) == fields[name].get_default()
        }
        return _without(plain, left_out)


def absolute_path(value: str, info: ValidationInfo) -> str:
    """Return the absolute path of a file or folder, relative to the config file. A value
    that names no file, such as a hub's id, is returned unchanged."""
    # Path.expanduser would raise for the home of an unknown user
    path = Path((info.context or {}).get("folder") or "", os.path.expanduser(value))
    return str(path.resolve()) if value and path.exists() else value


LocalPath = Annotated[str, AfterValidator(absolute_path)]

P = TypeVar("P", bound=Params)

Tracks: TypeAlias = "Tensor | Mapping[str, Tensor]"


def tracks_by_name(extracted: Tracks) -> Mapping[str, Tensor]:
    """Return the tensors of a clip's tracks by name."""
    return extracted if isinstance(extracted, Mapping) else {MAIN: extracted}


def main_track(extracted: Tracks) -> Tensor:
    """Return the tensor of the main track."""
    return tracks_by_name(extracted)[MAIN]


@dataclass(frozen=True)
class Piece:
    """A part of a clip that is one row for the model."""

    start: int
    num_samples: int
    skip: int
    """The number of frames at its beginning that are left out: another piece has them."""
    num_frames: int
    """The number of frames that are kept after them."""

    @property
    def frames(self) -> slice:
        """The frames of the row that are kept."""
        return slice(self.skip, self.skip + self.num_frames)


@dataclass(frozen=True)
class Rows:
    """The output of a batch of rows. Values after a row's last frame are meaningless."""

    features: Tensor
    """The features, `[R, F, *item_shape]` of `spec.dtype`."""
    side: Mapping[str, Tensor] = field(default_factory=dict)
    """The side arrays in `spec.side` by name, `[R, n, *item_shape]`: n entries per piece,
    or the entries of its frames."""
    per_frame: Mapping[str, int] = field(default_factory=dict)
    """The number of entries per frame of side arrays that are along frames."""

    def entries(self, name: str, frames: slice) -> slice:
        """Return which entries of a side array belong to these frames of a piece."""
        if name not in self.per_frame:
            return slice(None)
        count = self.per_frame[name]
        return slice(frames.start * count, frames.stop * count)


class Extractor(ABC, Generic[P]):
    """Turns waveforms into features.

    A value depends on the clip's samples (and id, for dither), the parameters and the
    weights; never on the other clips of the call. `batching` declares how: `frames` (frame
    by frame, in blocks of one shape), `padded`, `equal_length` or `single`.

    On the CPU, several threads call one instance at once, so `extract` must not store
    anything on `self`. Each has torch's own threads set to one.

    The members from `chunks_are_exact` to `run_for` are about rows, which `RowExtractor`
    computes, and those from `quantizes_latents` to `quantize` about codes of latents, which
    `CodecExtractor` makes. Other extractors leave them as they are."""

    Params: ClassVar[type[Params]]
    """The pydantic model of the config's `params`."""
    revision: ClassVar[int]
    """A number that goes up whenever new code changes values."""
    batchings: ClassVar[tuple[str, ...]] = get_args(Batching)
    batching: Batching
    """The way in which clips may be batched."""
    chosen_batching: Batching | None = None
    """The way in which rows are put together: `padded`, `equal_length` (the padded length
    is the row's own), or `single` (one row, at its own length). None means `batching`. It
    may be set between construction and first use."""
    spec: FeatureSpec
    """The description of the features; set by `__init__`."""
    takes_rows: ClassVar[bool] = False
    """True if it computes padded rows, which clips of different calls may share."""
    max_seconds: float | None = None
    """The longest clip that the extractor takes; None for no limit."""
    tf32: bool = False
    """True if a GPU may round to TF32."""
    needs_aligned_waveforms: bool = True
    """False if `extract` copies waveforms before it computes: values depend on where in
    memory a waveform begins."""
    source_fingerprint: str | None = None
    """The fingerprint of the version from whose features these can be made, if any."""
    needs_source: bool = False
    """True if they can only be made from that version, and not from audio."""

    @abstractmethod
    def __init__(self, params: P, sample_rate: int, device: torch.device) -> None:
        """Build the extractor for waveforms of this rate in Hz. The parameters have their
        defaults filled in.

        Raises:
            ConfigError: The parameters do not fit each other, the sample rate (for
                example `high_freq` above Nyquist) or the model; or the weights cannot be
                loaded.
            MissingDependencyError: A package that the extractor needs is not installed.
        """

    @abstractmethod
    def num_frames(self, num_samples: int) -> int:
        """Return the exact number of frames of `num_samples` samples; 0 if they are too few."""

    @abstractmethod
    def extract(self, clips: Sequence[Clip]) -> Sequence[Tracks]:
        """Compute the clips' features, in their order, on the device.

        For each clip, return a tensor of `spec.dtype`: `[frames, *item_shape]`, or for a
        track along clips `[*item_shape]`. If the spec has several tracks, return a
        mapping of their names to tensors. The main track is `features`.

        Every clip is long enough for a frame. This is called under
        `torch.inference_mode()`.

        Raises:
            AudioError: One of the clips cannot be extracted. The batch is then halved to find
                it, as after any exception except ExtractorError.
        """

    def check_audio(self, audio: Mapping[str, Any]) -> None:
        """Check the `audio` section of the config, or a part of it. Raises ConfigError if
        these features need other waveforms."""

    def chunk_warning(self, name: str) -> str | None:
        """Return a warning, with the config's name, if long clips are cut into chunks
        whose values differ from the whole clip's. Raises ConfigError if they cannot be cut
        like this."""
        return None

    @property
    def chunks_are_exact(self) -> bool:
        """True if a frame in a piece sees all that it would see in the whole clip."""
        return False

    def prepare(self, waveform: Tensor) -> Tensor:
        """Return a whole clip `[num_samples]` as it is cut into pieces, for example at
        another level."""
        return waveform

    def pieces(self, num_samples: int) -> list[Piece]:
        """Cut a clip into rows. Their frames, one after another, are the clip's. Raises
        AudioError if it cannot be extracted, for example with the reason TOO_LONG."""
        return [Piece(0, num_samples, 0, self.num_frames(num_samples))]

    def padded_length(self, num_samples: int) -> int:
        """Return the samples in the padded row of a piece of `num_samples`."""
        return num_samples

    def rows(self, padded_length: int, device: torch.device) -> int:
        """Return the number of rows in a batch of rows of `padded_length` samples."""
        return 1

    def shrink(self, rows: int, padded_length: int, device: torch.device) -> bool:
        """Halve all later batches, after one of `rows` rows did not fit on the device.
        Returns False if it had only one row."""
        return False

    def run(self, waveforms: Tensor, num_samples: Tensor) -> Rows:
        """Compute rows, float32 `[R, P]` on the device, zero after each row's end, of
        lengths `num_samples`, int64 `[R]`."""
        return self.run_for([self], waveforms, num_samples)[0]

    def run_for(self, takers: Sequence[Any], waveforms: Tensor, num_samples: Tensor) -> list[Rows]:
        """Compute rows for several extractors of this class, `self` among them, whose
        parameters differ only in `Params.taken`. Each gets the bits of its own `run`."""
        raise ExtractorError(f"{type(self).__name__} takes no rows")

    @property
    def quantizes_latents(self) -> bool:
        """True if the features are codes, which `quantize` makes of latents."""
        return False

    def codes_and_latents(self, clips: Sequence[Clip]) -> list[tuple[Tensor, Tensor]]:
        """Compute each clip's codes `[F, Q]`, and their latents, float `[F, D]`."""
        raise ExtractorError(f"{self.spec.units}: not the codes of latents")

    def quantize(self, latents: Tensor) -> Tensor:
        """Look up codes, int64 `[R, F, Q]`, of latents, float32 `[R, F, D]`."""
        raise ExtractorError(f"{self.spec.units}: not the codes of latents")

    def silence(self) -> Tensor | None:
        """Compute the frame `[*item_shape]` that long silence settles on, which versions
        keep as a value for padding; None for features that need no such value."""
        return None

    def from_features(self, features: Tensor) -> Tensor:
        """Make a feature from each frame `[N, D]` of the version `source_fingerprint`, on
        the device. If that is set, override this."""
        raise ExtractorError(f"{type(self).__name__} makes features from audio only")

    def synthesize(self, tracks: Mapping[str, Tensor]) -> Tensor:
        """Make sound of the features of one clip, as far as that is possible: samples,
        float32 `[num_samples]`, at `spec.sample_rate`, on the device; at the end there may
        be more than the clip had. `tracks` are what `extract` returned for the clip.

        Raises ExtractorError if nothing can be heard of such features."""
        raise ExtractorError(f"{self.spec.units}: cannot be turned into sound")

    @classmethod
    def stored_dtype(cls, params: P) -> str:
        """Return the stored dtype, as a numpy name, for configs that name none."""
        return "float32"

    @classmethod
    def weights_digest(cls, params: P) -> str | None:
        """Return a hash of the weights' content, for the fingerprint; None without
        weights."""
        return None


def declared_batchings(extractor: Extractor[Params]) -> tuple[Batching, ...]:
    """List the batchings that an extractor declares to be safe, from the strictest."""
    return BATCHINGS[: BATCHINGS.index(extractor.batching) + 1]


def require_rate(sample_rate: int, expected: int, model: str) -> None:
    """Raise ConfigError for waveforms at another rate, in Hz, than the model's."""
    if sample_rate != expected:
        raise ConfigError(f"audio.sample_rate: {sample_rate}; {model} is for {expected}")


def find(name: str) -> type[Extractor[Params]]:
    """Import the extractor class of a registered name, entry point or
    `package.module:Class`; raise ConfigError if that fails. Pass a name that comes from a
    cache to `require_registered` first: an import may run any code."""
    path = _BUILT_IN.get(name, name)
    if ":" not in path:
        known = registered()
        if name not in known:
            raise ConfigError(
                f"extractor: there is no {name!r}{did_you_mean(name, known)}; choose from "
                f"{', '.join(sorted(known))}, or your own package.module:Class"
            )
        path = known[name]
    kind = _imported(path)
    if not (isinstance(kind, type) and issubclass(kind, Extractor)):
        raise ConfigError(f"extractor: {path} is not a featcache.extractors.Extractor")
    missing = [name for name in ("Params", "revision") if not hasattr(kind, name)]
    if missing:
        raise ConfigError(f"extractor: {lacking(kind, missing)}")
    params: object = kind.Params
    if not (isinstance(params, type) and issubclass(params, Params)):
        error = fault(kind, "Params does not inherit from featcache.extractors.Params")
        raise ConfigError(f"extractor: {error}")
    return kind


def _imported(path: str) -> object:
    module_name, _, class_name = path.partition(":")
    try:
        with keeping_folder():
            return getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # also of ":Class" and ".module:Class"
        hint = ""
        package = module_name.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            hint = "; put the folder of your own module on PYTHONPATH"
        raise ConfigError(
            f"extractor: {path} cannot be imported: {describe_raised(error)}{hint}"
        ) from error


def build(
    kind: type[Extractor[P]], params: P, sample_rate: int, device: torch.device
) -> Extractor[P]:
    """Build an extractor, and check what it declares. Raises ExtractorError for its
    mistakes."""
    if kind.__abstractmethods__:
        raise lacking(kind, sorted(kind.__abstractmethods__))
    with blamed_on(kind), keeping_folder():
        extractor = kind(params, sample_rate, device)
        bases = [base for base in kind.__mro__ if base.__module__.startswith("featcache.")]
        names = [name for base in bases for name in inspect.get_annotations(base)]
        missing = [name for name in names if name[0] != "_" and not hasattr(extractor, name)]
        if missing:
            raise lacking(kind, missing)
        if extractor.batching not in kind.batchings:
            choices = listing(kind.batchings)
            raise fault(kind, f"batching is {extractor.batching!r}: choose from {choices}")
        msgspec.convert(msgspec.to_builtins(extractor.spec), FeatureSpec)
    return extractor


def require_registered(name: str) -> None:
    """Raise a ConfigError for a `package.module:Class` that a cache names and that is not
    registered, unless `--trust-remote-code` accepts it."""
    if ":" in name and not remote_code_is_allowed() and name not in registered().values():
        raise ConfigError(
            f"extractor: a cache names {name}, which is not registered (see "
            "docs/extractors.md#your-own); commands that extract import it with "
            "--trust-remote-code"
        )


def registered() -> dict[str, str]:
    """Return the classes of registered extractors, as `package.module:Class`, by name."""
    return {point.name: point.value for point in entry_points(group=_ENTRY_POINTS)} | _BUILT_IN


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of everything that decides a resolved config's values:
    the extractor and its revision, parameters, the content of weights, the audio policy,
    the copies and the content of their noise, and the stored dtype; but no options of the
    run. Raises ConfigError if the extractor does not exist or its weights cannot be
    loaded; ValidationError for parameters."""
    with blamed_on(find(config["extractor"])):
        return _hash(_deciding(config))


def revision_of(config: Mapping[str, Any], wanted: str) -> int | None:
    """Find the extractor's revision that gives a config the wanted fingerprint, if any.
    Raises what `fingerprint` does."""
    decides = _deciding(config)
    for revision in (decides["revision"], *range(1, _MOST_REVISIONS)):
        if _hash(decides | {"revision": revision}) == wanted:
            return int(revision)
    return None


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    extractor = find(config["extractor"])
    params = extractor.Params.model_validate(config["params"])
    decides = _without(config, {"name"})
    decides["params"] = _without_locations(params)
    decides["audio"] = _without(config["audio"], SELECTING_KEYS)
    if "augment" in config:
        noise = config["augment"].get("noise")
        if noise:  # its `content` is hashed
            noise = _without(noise, {"manifest"})
        decides["augment"] = {**config["augment"], "noise": noise}
    decides["revision"] = extractor.revision
    decides["weights"] = extractor.weights_digest(params)
    return decides


def _without(section: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


def _hash(decides: Mapping[str, Any]) -> str:
    canonical = json.dumps(decides, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _without_locations(params: Params) -> dict[str, Any]:
    plain: dict[str, Any] = params.model_dump(mode="json", exclude=set(params.locations))
    inner = {name: value for name, value in params if isinstance(value, Params)}
    return plain | {name: _without_locations(value) for name, value in inner.items()}
