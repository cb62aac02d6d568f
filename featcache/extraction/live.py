"""The features of audio that is in no cache, with the bits that a cache would hold: for
inference, and for trying."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.config import Config, load_config, recorded_config
from featcache.device import Device
from featcache.errors import (
    ArgumentError,
    AudioError,
    ConfigError,
    Reason,
    first_line,
    require_int,
    require_number,
)
from featcache.extraction.batching import choose_batching
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import WorkerTimes
from featcache.extraction.from_audio import AudioExtractor, Decoded
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import MOST_SECONDS
from featcache.spec import FeatureSpec
from featcache.storage.location import parse_location
from featcache.version.records import read_probes
from featcache.version.selection import select_version

if TYPE_CHECKING:
    from featcache.loader.cache import Cache


class LiveExtractor:
    """Extracts one utterance at a time. `featcache.extractor` makes it. Safe to use from
    several threads.

    The code of `featcache extract` does the work, so the features are those of a cache:
    bit for bit on the same device with the same library versions. In the whole process,
    torch gets one thread of its own, and TF32 is turned off."""

    def __init__(self, built: BuiltConfig) -> None:
        self._built = built
        self._extractor = AudioExtractor(Path(), [built])

    @property
    def config(self) -> Config:
        """The config."""
        return self._built.config

    @property
    def spec(self) -> FeatureSpec:
        """The spec of the features, as in `Cache.spec`: `item_shape`, `axis`, `units`."""
        return self._built.info.spec

    def __call__(self, waveform: ArrayLike, sample_rate: int, id: str = "") -> NDArray[Any]:  # noqa: A002
        """Return the features of a waveform.

        Args:
            waveform: `[num_samples]`, floats in -1 to 1: an array, or a tensor on the
                CPU. It is used as float32.
            sample_rate: Its rate in Hz, from which it is resampled to the config's.
            id: The utterance's id, for dither, and for the copy of an augmented config.

        Returns:
            `[frames, *item_shape]` of the dtype that `Cache.item` gives.

        Raises:
            AudioError: It cannot be extracted; `error.reason` is the failure ledger's.
            ArgumentError: It is no waveform.
        """
        try:
            samples = np.asarray(waveform)
        except (RuntimeError, TypeError, ValueError) as error:
            # A tensor may be on a GPU, or have a gradient.
            raise ArgumentError(f"waveform: {first_line(error)}") from error
        if samples.ndim != 1 or samples.dtype.kind != "f":
            raise ArgumentError(
                f"waveform is {samples.dtype} {samples.shape}: give [num_samples] floats in -1 to 1"
            )
        sample_rate = require_int("sample_rate", sample_rate, 1, 2**31 - 1)
        samples = np.ascontiguousarray(samples, np.float32)
        if not np.isfinite(samples).all():
            raise AudioError(Reason.NON_FINITE_AUDIO, "the waveform has NaN or infinite samples")
        utterance = Utterance(id=_require_text(id), path="")
        return self._features(self._extractor.decoded(utterance, samples[:, None], sample_rate))

    def file(
        self,
        path: str | Path,
        start: float | None = None,
        duration: float | None = None,
        channel: int | None = None,
        id: str = "",  # noqa: A002
    ) -> NDArray[Any]:
        """Return the features of a file, or of a segment of it, as for a row of a
        manifest with these values.

        Args:
            path: The file, or its URL.
            start, duration: The segment, in seconds; None for the file's beginning, and
                for its rest.
            channel: The file's channel, from 0; None for the config's policy.
            id: As in a call.

        Returns:
            As a call does.

        Raises:
            AudioError: As from a call, or it cannot be decoded.
            ArgumentError: The segment is not valid.
        """
        for name, seconds in (("start", start), ("duration", duration)):
            if seconds is not None:
                require_number(name, seconds, 0, MOST_SECONDS)
        if channel is not None:
            require_int("channel", channel, 0)
        utterance = Utterance(
            id=_require_text(id), path=str(path), start=start, duration=duration, channel=channel
        )
        (decoded,) = self._extractor.decode([utterance], WorkerTimes(float))
        return self._features(decoded)

    def _features(self, decoded: Decoded) -> NDArray[Any]:
        extracted = self._extractor.extract_alone(self._built, decoded)
        if extracted.failures:
            failure = extracted.failures[0]
            message, path = failure.message, decoded.utterance.path
            if path and path not in message:
                message = f"{path}: {message}"
            error = AudioError(Reason(failure.reason), message)
            if extracted.traceback:
                error.add_note(extracted.traceback)
            raise error
        (clip,) = extracted.features
        item: NDArray[Any] = self.spec.axis.shape_item(clip.values(self.spec.dtype))
        return item


def _require_text(id_: object) -> str:
    if not isinstance(id_, str):
        raise ArgumentError(f"id is {id_!r}: give text")
    return id_


def extractor(
    version: str | Path | Cache | None = None,
    name: str | None = None,
    *,
    config: str | Path | Config | None = None,
    set: Mapping[str, Any] | None = None,  # noqa: A002
    device: str | None = None,
) -> LiveExtractor:
    """Return an extractor of single utterances, for a version or for a config.

    Args:
        version: A version, as `featcache.open` takes it, or an opened cache or corpus; of
            a corpus that is not opened, a part. Its own config is used. Nothing is
            downloaded for it, and only registered extractors are imported.
        name: The version's name, as `featcache.open` takes it.
        config: A YAML file, the name of a packaged config, or a config; replaces
            `version`.
        set: Values of keys of `config`, by their dotted paths: `{"params.num_mel_bins":
            40}`.
        device: `cpu`, `cuda`, `cuda:1`. None for cuda if there is one.

    Raises:
        ArgumentError: Neither a version nor a config is given, or both are; or `set` of a
            version, `name` of a config.
        ConfigError: The config has faults, its weights cannot be loaded, or there is no
            such device.
        StoreError: There is no such version.
    """
    if (version is None) == (config is None):
        raise ArgumentError(
            "give a version, as in featcache.extractor('features/fbank80'), or config=, not both"
        )
    if (set and config is None) or (name and version is None):
        raise ArgumentError(
            "set= is for config=, since a version has its own; name= is for a version"
        )
    own_device = Device(device)
    if config is not None:
        return _live(load_config(config, set), [], own_device)
    assert version is not None
    if isinstance(version, str | Path):
        opened = select_version(parse_location("version", version), name)
    else:
        opened = version.version
    recorded = recorded_config(opened.info.config, str(opened.path))
    if recorded.fingerprint() != opened.info.fingerprint:
        raise ConfigError(
            f"{opened.path}: its extractor or weights are not the same here as where it was made"
        )
    return _live(recorded, read_probes(opened), own_device)


def _live(config: Config, probes: list[dict[str, Any]], device: Device) -> LiveExtractor:
    built = BuiltConfig(config, device)
    if built.label_files is not None or built.extractor.needs_source:
        raise ConfigError(f"{config.name}: {config.extractor} reads other files, and no audio")
    choice = choose_batching(built.extractor, probes, device.label)
    built.extractor.chosen_batching = choice.batching
    return LiveExtractor(built)
