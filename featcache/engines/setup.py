"""What another process needs to extract as this one does: picklable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from featcache.config import Config
from featcache.device import Device
from featcache.extraction.from_version import SourceVersion
from featcache.extraction.jobs import JobGroup
from featcache.extraction.version_plan import BuiltConfig
from featcache.manifest.audio_locations import AudioLocation
from featcache.storage.location import Location, absolute
from featcache.store.version import Version
from featcache.trust import allow_commands, allow_remote_code, allowed_commands, remote_code_is_allowed


@dataclass(frozen=True)
class Setup:
    """The configs of a group of versions, and where their audio is."""

    root: AudioLocation
    """What paths of audio files are relative to."""
    has_urls: bool
    """Whether audio files have to be fetched."""
    configs: Sequence[Config]
    """The config of each version."""
    source: Location | None
    """The place of the version whose features are used instead of audio."""
    allows_remote_code: bool
    """Whether `--trust-remote-code` was given."""
    allowed_commands: frozenset[str]
    """The manifest's commands, if `--allow-commands` was given."""

    @classmethod
    def of(cls, group: JobGroup) -> Setup:
        """The setup of a group, for processes whose current folder may be another."""
        return cls(
            root=group.root.absolute() if isinstance(group.root, Path) else group.root,
            has_urls=group.has_urls,
            configs=[config.config for config in group.configs],
            source=None if group.source is None else absolute(group.source.version.path),
            allows_remote_code=remote_code_is_allowed(),
            allowed_commands=allowed_commands(),
        )

    def build(self, device: Device) -> tuple[list[BuiltConfig], SourceVersion | None]:
        """Prepare this process, build the extractors, and open the version that they extract from.

        Raises:
            ConfigError: A config does not suit its extractor, or its weights cannot be loaded.
            StoreError: That version cannot be opened.
        """
        if self.allows_remote_code:
            allow_remote_code()
        allow_commands(self.allowed_commands)
        device.configure_torch()
        source = None if self.source is None else SourceVersion(Version.open(self.source))
        return [BuiltConfig.build(config, device.torch_device) for config in self.configs], source
