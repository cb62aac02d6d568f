"""One YAML file, validated: which extractor, its parameters, the audio and the stored
dtype."""

from featcache.audio.resample import AudioPolicy
from featcache.config.config import (
    Config,
    StorePolicy,
    config_from,
    load_config,
    load_configs,
    packaged_configs,
    recorded_config,
)

__all__ = [
    "AudioPolicy",
    "Config",
    "StorePolicy",
    "config_from",
    "load_config",
    "load_configs",
    "packaged_configs",
    "recorded_config",
]
