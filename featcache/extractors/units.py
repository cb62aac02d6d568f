"""`units`: for each frame of other features, the index of the nearest of k centroids.

The centroids come from `featcache fit-kmeans`, together with the config of the features that they were fitted to. Units
are computed from audio, by that config's extractor, or from a version of those features. Both give the same codes:
computed frames are rounded to the dtype that the version stores, or quantised in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field, ValidationError, ValidationInfo, field_validator

from featcache.errors import AudioError, ConfigError, Reason, listing
from featcache.extractors.base import Batching, Clip, Extractor, Params, absolute, find, require_registered
from featcache.extractors.codebook import Codebook, Nearest, read_codebook
from featcache.extractors.fingerprint import SELECTING, fingerprint
from featcache.extractors.model import computing
from featcache.extractors.rows import Piece, RowExtractor, Rows
from featcache.quantize import dequantize, is_quantized, quantize
from featcache.spec import FeatureSpec


class UnitsParams(Params):
    """The parameters of `units`."""

    locations: ClassVar[frozenset[str]] = frozenset({"weights", "features"})

    weights: str
    """The file written by `featcache fit-kmeans`, with the centroids and the config of the features that they were
    fitted to. A relative path is relative to the config file."""
    features: dict[str, str] = Field(default_factory=dict)
    """The location of the weights of those features, if it has changed since the centroids were fitted: `weights` and
    `revision`, as in their config. The content must be the same."""

    @field_validator("weights")
    @classmethod
    def _absolute(cls, value: str, info: ValidationInfo) -> str:
        return absolute(value, info)

    @field_validator("features")
    @classmethod
    def _absolute_too(cls, value: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        return {**value, "weights": absolute(value["weights"], info)} if "weights" in value else value


class Units(RowExtractor[UnitsParams]):
    """The nearest centroid of each frame, by squared Euclidean distance in float32; of equals, the lowest.

    Codes are int64 `[T, 1]`. How clips are cut, padded and put together is the features' extractor's business.

    Args:
        params: see `UnitsParams`.
        sample_rate: of the waveforms, in Hz.
        device: to compute on.

    Attributes:
        source_name: of the version that the centroids were fitted to.
        source_fingerprint: of that version.
        source_audio: its audio policy, which units from audio need too.

    Raises:
        ConfigError: the file is none of `featcache fit-kmeans`; the features' extractor or its weights are not what
            they were; or `sample_rate` is not theirs.
    """

    Params = UnitsParams
    revision = 1

    def __init__(self, params: UnitsParams, sample_rate: int, device: torch.device) -> None:
        codebook = read_codebook(params.weights)
        config = _config_of(codebook, params)
        self.source_name = str(config["name"])
        self.source_fingerprint = codebook.fingerprint
        self.source_audio: dict[str, Any] = config["audio"]
        self.check_audio({"sample_rate": sample_rate})
        source = _build(config, device)
        self._source = source.as_row_extractor() or _ByRow(source)
        self._dtype: torch.dtype = getattr(torch, codebook.dtype)
        self._is_quantized = is_quantized(source.spec.dtype, config["store"]["dtype"])
        self._nearest = Nearest(codebook.centroids, device)
        self.batching = self._source.batching
        self.granularity = self._source.granularity
        self.max_seconds, self.tf32 = source.max_seconds, source.tf32
        k = len(codebook.centroids)
        self.spec = FeatureSpec(
            item_shape=(1,),
            dtype="int64",
            frame_rate=source.spec.frame_rate,
            frame_length=source.spec.frame_length,
            sample_rate=sample_rate,
            units=f"number of the nearest of {k} centroids of {self.source_name}",
            codebook_sizes=(k,),
            padded_to=source.spec.padded_to,
        )

    @classmethod
    def stored_dtype(cls, params: UnitsParams) -> str:
        """The smallest unsigned integer that holds the codes."""
        return str(np.min_scalar_type(len(read_codebook(params.weights).centroids) - 1))

    @classmethod
    def weights_digest(cls, params: UnitsParams) -> str:
        """A hash of the centroids, and of what they are centroids of."""
        return read_codebook(params.weights).digest()

    def check_audio(self, audio: Mapping[str, Any]) -> None:
        """Hold the `audio` section of a config, or a part of it, against that of the features.

        Raises:
            ConfigError: waveforms are made in another way.
        """
        for key, value in audio.items():
            if key not in SELECTING and value != self.source_audio[key]:
                raise ConfigError(
                    f"audio.{key}: {value}; these units are of {self.source_name}, whose audio.{key} is "
                    f"{self.source_audio[key]}"
                )

    def from_features(self, features: torch.Tensor) -> torch.Tensor:
        """The codes, int64 `[N, 1]`, of frames `[N, D]` as a version of the features gives them, on the device."""
        codes, _ = self._nearest(features)
        return codes[:, None]

    @property
    def chosen_batching(self) -> Batching | None:
        """The features' extractor's."""
        return self._source.chosen_batching

    @chosen_batching.setter
    def chosen_batching(self, batching: Batching | None) -> None:
        self._source.chosen_batching = batching

    def num_frames(self, num_samples: int) -> int:
        """How many frames `num_samples` samples give."""
        return self._source.num_frames(num_samples)

    def pieces(self, num_samples: int) -> list[Piece]:
        """How a clip is cut into rows.

        Raises:
            AudioError: TOO_LONG: it is cut, but the features are quantised over the whole of a clip.
        """
        pieces = self._source.pieces(num_samples)
        if self._is_quantized and len(pieces) > 1:
            raise AudioError(
                Reason.TOO_LONG,
                f"{self.source_name} is quantised over a whole clip, but this clip is computed in "
                f"{len(pieces)} chunks: extract {self.source_name} first, and make the units with --from",
            )
        return pieces

    def padded_length(self, num_samples: int) -> int:
        """Samples of the padded row of a piece of `num_samples`."""
        return self._source.padded_length(num_samples)

    def rows(self, padded_length: int, device: torch.device) -> int:
        """Rows of a batch whose rows have `padded_length` samples."""
        return self._source.rows(padded_length, device)

    def shrink(self, rows: int, padded_length: int, device: torch.device) -> bool:
        """Halve all batches from now on."""
        return self._source.shrink(rows, padded_length, device)

    def run(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """`encode`; where the features take TF32, while no other thread lets a GPU round, or stops it."""
        with computing("tf32" if self.tf32 else "fp32", waveforms.device):
            return self.encode(waveforms, num_samples)

    def encode(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        """Compute the features of rows, and their codes.

        Raises:
            AudioError: NON_FINITE_FEATURES: they are NaN, or infinite as the dtype that the version stores.
        """
        features = self._source.run(waveforms, num_samples).features
        num_frames = [self.num_frames(count) for count in num_samples.tolist()]
        features = _requantized(features, num_frames) if self._is_quantized else features.to(self._dtype)
        there = torch.arange(features.shape[1], device=features.device) < num_samples.new_tensor(num_frames)[:, None]
        features = features.masked_fill(~there[:, :, None], 0)
        if not features.isfinite().all():
            raise AudioError(Reason.NON_FINITE_FEATURES, f"features are NaN or infinite as {self._dtype}")
        with computing("fp32", waveforms.device):
            codes = self.from_features(features.flatten(0, 1))
        return Rows(codes.view(*features.shape[:2], 1))


def _build(config: Mapping[str, Any], device: torch.device) -> Extractor[Params]:
    """The extractor of a resolved config."""
    extractor = find(config["extractor"])
    return extractor(extractor.Params.model_validate(config["params"]), config["audio"]["sample_rate"], device)


def _requantized(features: torch.Tensor, num_frames: Sequence[int]) -> torch.Tensor:
    """Rows' features `[R, F, D]` as they are read where they are stored quantised; zero behind each row's frames."""
    values = torch.zeros_like(features, dtype=torch.float32)
    for row, count in enumerate(num_frames):
        levels, parameters = quantize(features[row, :count], [count])
        values[row, :count] = dequantize(levels[None], parameters)[0]
    return values


class _ByRow(RowExtractor[Params]):
    """An extractor that takes clips, as one that takes rows: of each, its own samples."""

    def __init__(self, extractor: Extractor[Params]) -> None:
        self._extractor = extractor
        self.spec = extractor.spec
        self.granularity = round(extractor.spec.sample_rate / extractor.spec.frame_rate)

    def num_frames(self, num_samples: int) -> int:
        return self._extractor.num_frames(num_samples)

    def encode(self, waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        clips = [Clip("", row[:count]) for row, count in zip(waveforms, num_samples.tolist(), strict=True)]
        return Rows(torch.nn.utils.rnn.pad_sequence(self._extractor.extract(clips), batch_first=True))


def _config_of(codebook: Codebook, params: UnitsParams) -> dict[str, Any]:
    """The resolved config of the features, with their weights where they are now.

    Raises:
        ConfigError: it does not give the features that the centroids are of, or names an extractor that is not
            registered: it comes from the cache that they were fitted to.
    """
    config = codebook.config
    try:
        require_registered(config["extractor"])
    except ConfigError as error:
        raise ConfigError(f"params.weights: {params.weights}: {error}") from error
    where = find(config["extractor"]).Params.locations
    if others := sorted({*params.features} - where):
        raise ConfigError(
            f"params.features: {listing(others)}: the config of the features is in {params.weights}; only the location "
            f"of their weights can be given here{': ' if where else ', and they have none'}{listing(sorted(where))}"
        )
    config = {**config, "params": config["params"] | params.features}
    if config["params"].get("dither"):
        raise ConfigError(f"params.weights: {params.weights}: its features have dither, which differs with each id")
    try:
        found = fingerprint(config)
    except ConfigError as error:
        raise ConfigError(f"{error} (params.features can say where the features' weights are now)") from error
    except ValidationError as error:
        fault = error.errors()[0]
        raise ConfigError(
            f"params.weights: {params.weights}: {config['extractor']} does not accept the config of its features: "
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        ) from error
    if found != codebook.fingerprint:
        name = config["name"]
        raise ConfigError(
            f"params.weights: {params.weights}: its features are {name}-{codebook.fingerprint[:12]}, but here they "
            f"would be {name}-{found[:12]}: the extractor {config['extractor']}, or its weights, have changed; "
            "params.features can say where the right weights are"
        )
    return config
