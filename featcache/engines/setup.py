"""What another process needs to extract as this one does: picklable."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from featcache.config import Config
from featcache.device import Device
from featcache.errors import ManifestError, counted
from featcache.extraction.audio_files import paths_there
from featcache.extraction.from_version import SourceVersion
from featcache.extraction.jobs import JobGroup
from featcache.extraction.version_plan import BuiltConfig
from featcache.manifest.audio_locations import AudioLocation, locate
from featcache.storage.location import Location, absolute
from featcache.trust import allow_commands, allow_remote_code, allowed_commands, remote_code_is_allowed
from featcache.version.version import Version


@dataclass(frozen=True)
class Setup:
    """The configs of a group of versions, and where their audio is."""

    root: AudioLocation
    """What paths of audio files are relative to."""
    has_urls: bool
    """Whether audio files have to be fetched."""
    paths_there: Sequence[str]
    """The paths of some files that are there where the run was planned; empty if they are at URLs."""
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
            paths_there=[] if group.has_urls else paths_there(group.root, group.some_paths),
            configs=[config.config for config in group.configs],
            source=None if group.source is None else absolute(group.source.version.path),
            allows_remote_code=remote_code_is_allowed(),
            allowed_commands=allowed_commands(),
        )

    def build(self, device: Device) -> tuple[list[BuiltConfig], SourceVersion | None]:
        """Prepare this process, build the extractors, and open the version that they extract from.

        Raises:
            ManifestError: None of the audio files is there.
            ConfigError: A config does not suit its extractor, or its weights cannot be loaded.
            StoreError: That version cannot be opened.
        """
        if self.paths_there and not paths_there(self.root, self.paths_there):
            raise ManifestError(
                f"{socket.gethostname()}: none of {counted(len(self.paths_there), 'audio file')} checked exists there, "
                f"for example {locate(self.root, self.paths_there[0])}; where the run was planned, they do: audio must "
                "be on a file system that all machines share, or at URLs"
            )
        if self.allows_remote_code:
            allow_remote_code()
        allow_commands(self.allowed_commands)
        device.configure_torch()
        source = None if self.source is None else SourceVersion(Version.open(self.source))
        return [BuiltConfig.build(config, device.torch_device) for config in self.configs], source
