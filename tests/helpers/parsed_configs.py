"""Configs of YAML text, as `load_config` reads them from a file."""

from featcache.config import Config, config_from
from featcache.config.config import _document, _with_values


def parse_config(text, source="<config>", folder=None, set=None) -> Config:  # noqa: A002
    """The config of a text, relative to a folder, after `set` as in `load_config`."""
    return config_from(_with_values(_document(text, source), set or {}), source, folder)
