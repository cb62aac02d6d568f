"""One YAML file, validated: which extractor, its parameters, the audio and the stored
dtype."""

from featcache.audio.resample import AudioPolicy as AudioPolicy
from featcache.config.config import Config as Config
from featcache.config.config import StorePolicy as StorePolicy
from featcache.config.config import as_config as as_config
from featcache.config.config import config_from as config_from
from featcache.config.config import load_config as load_config
from featcache.config.config import packaged_configs as packaged_configs
from featcache.config.config import parse_config as parse_config
from featcache.config.config import recorded_config as recorded_config
