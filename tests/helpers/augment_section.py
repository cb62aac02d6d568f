"""What the tests of copies share: extractions in this process, and configs with an
`augment` section."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from parsed_configs import parse_config

import featcache
from featcache.config import Config
from featcache.errors import ConfigError
from featcache.extraction.extraction import Summary

SPEEDS = [0.9, 1.0, 1.1]


def section(speed: Sequence[float] = (0.9, 1.0), **changes: Any) -> dict[str, Any]:
    """An `augment` section with noise, from the folder of the fixture `noises`."""
    return {"speed": [*speed], "noise": {"manifest": "noises.csv", "snr": [5.0, 15.0], **changes}}


def config_of(
    augment: dict[str, Any] | None, folder: Path | None = None, **sections: Any
) -> Config:
    """fbank with an `augment` section, and with others; paths in it are relative to
    `folder`."""
    document = {"name": "copies", "extractor": "fbank", **sections} | (
        {"augment": augment} if augment else {}
    )
    return parse_config(yaml.safe_dump(document), "copies.yaml", folder)


def write_config_of(path: Path, augment: dict[str, Any], **sections: Any) -> Path:
    """The same as a file."""
    path.write_text(
        yaml.safe_dump({"name": path.stem, "extractor": "fbank", **sections, "augment": augment})
    )
    return path


def extract(
    manifest: Path, config: Config, cache: Path, *, threads: int = 2, **options: Any
) -> Summary:
    return featcache.extract(manifest, config, cache, featcache.Options("cpu", threads, **options))


def refusal(augment: dict[str, Any], folder: Path | None = None, **sections: Any) -> str:
    """The one line with which such a config is refused."""
    with pytest.raises(ConfigError) as caught:
        config_of(augment, folder, **sections)
    assert "\n" not in str(caught.value)
    return str(caught.value)
