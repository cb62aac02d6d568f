"""`units`: for each frame of other features, the index of the nearest of k centroids.

`featcache fit-kmeans` writes the centroids, with the config of the features. Units are
computed from audio or from a version of those features, with the same codes."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from featcache.errors import AudioError, ConfigError, MissingDependencyError, Reason, listing
from featcache.extractors.base import (
    SELECTING_KEYS,
    Batching,
    Clip,
    Extractor,
    LocalPath,
    Params,
    Piece,
    Rows,
    build,
    find,
    fingerprint,
    main_track,
    require_registered,
)
from featcache.extractors.codec import code_dtype
from featcache.extractors.frames import BLOCK_ROWS, with_whole_columns
from featcache.extractors.model import computing
from featcache.extractors.ragged import is_inside
from featcache.extractors.rows import RowExtractor
from featcache.spec.quantize import dequantize, is_quantized, quantize
from featcache.weights import weights_error

FORMAT = "featcache units 1"


class UnitsParams(Params):
    """The parameters of `units`."""

    locations: ClassVar[frozenset[str]] = frozenset({"weights", "features"})

    weights: LocalPath
    """The file that `featcache fit-kmeans` wrote. It has the centroids, and the config of
    the features that they were fitted to. A relative path is relative to the config
    file."""
    features: dict[str, LocalPath] = Field(default_factory=dict)
    """The new location of the weights of those features, if it has changed since the
    centroids were fitted: `weights` and `revision`, as in their config. The content must be
    the same."""


class Units(RowExtractor[UnitsParams]):
    """The nearest centroid of each frame, by squared Euclidean distance in float32; of
    equals, the lowest.

    Codes are int64 `[T, 1]`. The features' extractor decides how clips are cut, padded and
    batched. If that extractor or its weights have changed since the fit, units are
    refused."""

    Params = UnitsParams
    revision = 1
    granularity = 1  # the features' extractor pads

    def __init__(self, params: UnitsParams, sample_rate: int, device: torch.device) -> None:
        codebook = read_codebook(params.weights)
        config = _resolved_config(codebook, params)
        self._source_name = str(config["name"])
        self.source_fingerprint = codebook.fingerprint
        self.needs_source = config["extractor"] == "imported"
        self._source_audio: dict[str, Any] = config["audio"]
        self.check_audio({"sample_rate": sample_rate})
        kind = find(config["extractor"])
        source_params = kind.Params.model_validate(config["params"])
        source = build(kind, source_params, sample_rate, device)
        if source.spec.kind != "frames" or config["store"].get("pool"):
            what = "its centroids are of whole utterances, and units are of frames"
            raise weights_error(params.weights, what)
        self._source: Extractor[Params] = source if source.takes_rows else _RowsOfClips(source)
        self._dtype: torch.dtype = getattr(torch, codebook.dtype)
        self._is_quantized = is_quantized(source.spec.dtype, config["store"]["dtype"])
        self._nearest = Nearest(codebook.centroids, device)
        self.batching = self._source.batching
        self.max_seconds, self.tf32 = source.max_seconds, source.tf32
        k = len(codebook.centroids)
        units = f"number of the nearest of {k} centroids of {self._source_name}"
        self.spec = replace(
            source.spec, item_shape=(1,), dtype="int64", units=units, codebook_sizes=(k,), side=()
        )

    @classmethod
    def stored_dtype(cls, params: UnitsParams) -> str:
        return code_dtype(len(read_codebook(params.weights).centroids))

    @classmethod
    def weights_digest(cls, params: UnitsParams) -> str:
        return read_codebook(params.weights).digest()

    def check_audio(self, audio: Mapping[str, Any]) -> None:
        for key, value in audio.items():
            if key not in SELECTING_KEYS and value != self._source_audio[key]:
                raise ConfigError(
                    f"audio.{key}: {value}; these units are of {self._source_name}, whose "
                    f"audio.{key} is {self._source_audio[key]}"
                )

    def from_features(self, features: Tensor) -> Tensor:
        codes, _ = self._nearest(features)
        return codes[:, None]

    @property
    def chosen_batching(self) -> Batching | None:
        return self._source.chosen_batching

    @chosen_batching.setter
    def chosen_batching(self, batching: Batching | None) -> None:
        self._source.chosen_batching = batching

    def num_frames(self, num_samples: int) -> int:
        return self._source.num_frames(num_samples)

    def prepare(self, waveform: Tensor) -> Tensor:
        return self._source.prepare(waveform)

    def pieces(self, num_samples: int) -> list[Piece]:
        pieces = self._source.pieces(num_samples)
        if self._is_quantized and len(pieces) > 1:
            name = self._source_name
            raise AudioError(
                Reason.TOO_LONG,
                f"{name} is quantised over a whole clip, and this one is in {len(pieces)} chunks: "
                f"extract {name} first, and make units with --from",
            )
        return pieces

    def padded_length(self, num_samples: int) -> int:
        return self._source.padded_length(num_samples)

    def rows(self, padded_length: int, device: torch.device) -> int:
        return self._source.rows(padded_length, device)

    def shrink(self, rows: int, padded_length: int, device: torch.device) -> bool:
        return self._source.shrink(rows, padded_length, device)

    def run_for(self, takers: Sequence[Any], waveforms: Tensor, num_samples: Tensor) -> list[Rows]:
        # if the features take TF32, no other thread switches it meanwhile
        with computing("tf32" if self.tf32 else "fp32", waveforms.device):
            return super().run_for(takers, waveforms, num_samples)

    def encode(self, waveforms: Tensor, num_samples: Tensor) -> Rows:
        x_RFD = self._source.run(waveforms, num_samples).features
        num_frames = [self.num_frames(count) for count in num_samples.tolist()]
        x_RFD = _requantized(x_RFD, num_frames) if self._is_quantized else x_RFD.to(self._dtype)
        outside_RF = ~is_inside(num_samples.new_tensor(num_frames), x_RFD.shape[1])
        x_RFD = x_RFD.masked_fill(outside_RF[..., None], 0)
        if not x_RFD.isfinite().all():
            raise AudioError(
                Reason.NON_FINITE_FEATURES, f"features are NaN or infinite as {self._dtype}"
            )
        with computing("fp32", waveforms.device):
            codes = self.from_features(x_RFD.flatten(0, 1))
        return Rows(codes.view(*x_RFD.shape[:2], 1))


def _requantized(x_RFD: Tensor, num_frames: Sequence[int]) -> Tensor:
    """Round features as in a quantised version; zero after each row's frames."""
    values_RFD = torch.zeros_like(x_RFD, dtype=torch.float32)
    for row, count in enumerate(num_frames):
        levels, parameters = quantize(x_RFD[row, :count], [count])
        values_RFD[row, :count] = dequantize(levels[None], parameters)[0]
    return values_RFD


class _RowsOfClips(RowExtractor[Params]):
    """Pads and batches clips as rows for an extractor that takes none."""

    def __init__(self, extractor: Extractor[Params]) -> None:
        self._extractor = extractor
        self.spec = extractor.spec
        self.granularity = round(extractor.spec.sample_rate / extractor.spec.frame_rate)

    def num_frames(self, num_samples: int) -> int:
        return self._extractor.num_frames(num_samples)

    def encode(self, waveforms: Tensor, num_samples: Tensor) -> Rows:
        lengths = num_samples.tolist()
        clips = [Clip("", row[:count]) for row, count in zip(waveforms, lengths, strict=True)]
        features = [*map(main_track, self._extractor.extract(clips))]
        return Rows(torch.nn.utils.rnn.pad_sequence(features, batch_first=True))


def _resolved_config(codebook: Codebook, params: UnitsParams) -> dict[str, Any]:
    """Return the features' resolved config, with the present location of their weights.
    Refuses one with another fingerprint, or an extractor that is not registered, since a
    cache names it."""
    extractor = codebook.config["extractor"]
    try:
        require_registered(extractor)
    except ConfigError as error:
        raise weights_error(params.weights, str(error)) from error
    locations = find(extractor).Params.locations
    others = sorted({*params.features} - locations)
    if others:
        can = f"only {listing(sorted(locations))} can" if locations else "nothing can"
        raise ConfigError(
            f"params.features: {listing(others)}: {can} be given here; the rest is in "
            f"{params.weights}"
        )
    config = {**codebook.config, "params": codebook.config["params"] | params.features}
    if config["params"].get("dither"):
        what = "its features have dither, which differs with each id"
        raise weights_error(params.weights, what)
    try:
        present = fingerprint(config)
    except ConfigError as error:
        raise ConfigError(
            f"{error} (params.features can say where the features' weights are now)"
        ) from error
    except ValidationError as error:
        fault = error.errors()[0]
        refused = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        what = f"{extractor} does not accept the config of its features: {refused}"
        raise weights_error(params.weights, what) from error
    if present != codebook.fingerprint:
        raise weights_error(
            params.weights,
            f"its features, {config['name']}-{codebook.fingerprint[:12]}, would be "
            f"{present[:12]} here: the extractor {extractor}, or its weights, have changed; "
            "params.features can say where the right weights are",
        )
    return config


@dataclass(frozen=True)
class Codebook:
    """Centroids, and the version to whose frames they were fitted."""

    centroids: Tensor
    """The centroids, float32 `[k, D]`, finite."""
    config: dict[str, Any]
    fingerprint: str
    dtype: str
    """The numpy name of the stored dtype, to which frames are rounded."""
    fitted: dict[str, str]
    """Notes about the fit: `seed`, `frames`, `inertia` and others."""

    def digest(self) -> str:
        digest = hashlib.sha256(f"{self.fingerprint} {list(self.centroids.shape)} ".encode())
        digest.update(self.centroids.numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    def to_bytes(self) -> bytes:
        """Return a safetensors file: `centroids`, and the rest in its metadata, which the
        library would put in a random order."""
        k, dimensions = self.centroids.shape
        metadata = {
            **self.fitted,
            "format": FORMAT,
            "k": str(k),
            "dimensions": str(dimensions),
            "name": str(self.config["name"]),
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            "config": json.dumps(self.config, ensure_ascii=False),
        }
        data = self.centroids.numpy().astype("<f4").tobytes()
        centroids = {"dtype": "F32", "shape": [k, dimensions], "data_offsets": [0, len(data)]}
        document = {"__metadata__": metadata, "centroids": centroids}
        header = json.dumps(document, sort_keys=True).encode()
        header += b" " * (-len(header) % 8)
        return struct.pack("<Q", len(header)) + header + data


def read_codebook(path: str | Path) -> Codebook:
    """Read a file that `featcache fit-kmeans` wrote; raise ConfigError for others."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependencyError("safetensors", "the extractor units") from error
    try:
        # a pipe would wait for its writer
        if Path(path).exists() and not Path(path).is_file():
            raise weights_error(path, "not a file")
        with safe_open(str(path), framework="pt") as file:
            fitted = dict(file.metadata() or {})
            if fitted.pop("format", None) != FORMAT:
                raise weights_error(path, "not a file written by `featcache fit-kmeans`")
            centroids = file.get_tensor("centroids")
        is_matrix = centroids.dtype == torch.float32 and centroids.ndim == 2
        if not (is_matrix and centroids.numel() and centroids.isfinite().all()):
            what = f"{centroids.dtype} {list(centroids.shape)}, not finite float32 [k, D]"
            raise ValueError(f"centroids are {what}")
        config = json.loads(fitted.pop("config"))
        return Codebook(centroids, config, fitted.pop("fingerprint"), fitted.pop("dtype"), fitted)
    except OSError as error:
        raise weights_error(path, f"cannot be read: {error.strerror or error}") from error
    except (SafetensorError, KeyError, ValueError, RecursionError) as error:
        what = f"an incomplete file of `featcache fit-kmeans`: {error}"
        raise weights_error(path, what) from error


class Nearest:
    """Finds each frame's nearest centroid, of float32 `[k, D]`, as `Units` does, in blocks
    of one shape.

    Distances are `|x|² - 2xc + |c|²`, after the centroids' mean was subtracted from both:
    far from zero, float32 has few digits left for the differences."""

    def __init__(self, centroids: Tensor, device: torch.device) -> None:
        exact = centroids.to(device, torch.float64)
        self._middle = exact.mean(0).float()
        exact = exact - self._middle
        self._minus_2_centroids = with_whole_columns(-2 * exact.float().T).contiguous()
        self._squares = torch.full((self._minus_2_centroids.shape[1],), torch.inf, device=device)
        self._squares[: len(exact)] = exact.square().sum(1).float()
        self._rows = BLOCK_ROWS[device.type]

    def __call__(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes, int64 `[N]`, and the squared distances, float32 `[N]`, of
        frames `[N, D]`."""
        codes, distances = [], []
        for frames in torch.split(features, self._rows):
            centred = frames.float() - self._middle
            block = torch.nn.functional.pad(centred, (0, 0, 0, self._rows - len(frames)))
            nearest = torch.addmm(self._squares, block, self._minus_2_centroids).min(1)
            codes.append(nearest.indices[: len(frames)])
            distances.append((nearest.values + block.square().sum(1))[: len(frames)])
        return torch.cat(codes), torch.cat(distances).clamp_(min=0)
