"""What a version holds before a run, compared with the rows that it should hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from featcache.extraction.audio_files import refuse_another_corpus, refuse_other_paths, with_changed_files
from featcache.extraction.failures import stats_of_failed, would_fail_again
from featcache.extraction.tasks import RowStatus, compare
from featcache.extraction.version_plan import BuiltConfig
from featcache.manifest import Manifest
from featcache.storage.base import MARK, open_store
from featcache.storage.location import Location
from featcache.strings import Strings
from featcache.version.in_flight import Suspects, find_suspects
from featcache.version.index import Index, index_of, open_index
from featcache.version.ledger import Failure, standing_failures
from featcache.version.version import Version


@dataclass(frozen=True, eq=False)
class HeldVersion:
    """What a version holds before the run."""

    version: Version | None
    """The version; None if there is none yet."""
    index: Index
    """Its items."""
    failures: dict[str, Failure]
    """The failures that stand, by id."""
    suspects: Suspects
    """The utterances that may have crashed earlier runs."""


def open_held(path: Location) -> HeldVersion:
    """Open a config's version, if it is there, and what it holds.

    Raises:
        DamagedError: Its metadata or columns are damaged.
    """
    if not open_store(path).exists(MARK):
        return HeldVersion(None, index_of([]), {}, Suspects())
    version = Version.open(path)
    index = open_index(version, keep=False)
    failures = standing_failures(version, index)
    return HeldVersion(version, index, failures, find_suspects(version, failures))


def compare_held(
    built: BuiltConfig,
    manifest: Manifest,
    held: HeldVersion,
    only: Strings | None,
    *,
    retry_failed: bool,
    check_sources: bool,
    replace_all: bool,
) -> RowStatus:
    """Compare rows with what the version holds, and refuse the manifest of another corpus.

    The last three arguments are those of `Options`; with `only`, these ids are to be extracted, and no others.

    Raises:
        ManifestError: The manifest looks like another corpus with the same ids.
    """
    version, index = held.version, held.index
    if version is None:
        return compare(manifest, index, {})
    limit = built.max_seconds
    known = {} if retry_failed else stats_of_failed(manifest, held.failures.values())

    def is_unchanged(failure: Failure) -> bool:
        if retry_failed:
            return False
        max_seconds = None if limit is None else limit * built.waveform_maker.speed(failure.id)
        return would_fail_again(manifest.root, failure, built.config.audio, max_seconds, known)

    rows = compare(manifest, index, held.failures, is_unchanged)
    if check_sources:
        rows = with_changed_files(manifest, rows, index, version)
    elif only is None:
        refuse_another_corpus(manifest, rows, index, version)
    if only is None:
        if not replace_all:
            refuse_other_paths(manifest, rows, index, version, len(built.waveform_maker.copies))
        return rows
    wanted = np.isin(manifest.ids.hashes(), only.hashes())
    # Items that the version still holds of these ids are those that the lost items had replaced.
    older = np.where(wanted, index.find(manifest.ids), rows.replaces)
    return replace(rows, wanted=wanted, present=rows.present & ~wanted, replaces=older)
