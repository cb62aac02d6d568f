"""Records for people, on which nothing depends: of runs in `runs/`, of probes in `probes/`.
Damaged ones are skipped. Also the versions of libraries, which all records have."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from featcache import __version__
from featcache.errors import DamagedError
from featcache.format.documents import NotNegative, decoder_of, put_document, read_document
from featcache.format.shard import Shard
from featcache.manifest.audio_locations import AudioLocation, Url, is_audio_url
from featcache.manifest.columns import WRITTEN, Values
from featcache.manifest.copies import copies_of
from featcache.manifest.segments import SegmentColumns
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import Manifest
from featcache.storage.base import Store
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure, put_failures, read_failures
from featcache.version.version import Version
from featcache.version.wanted import wanted_failures

_OF_FAILURES = ("reason", "message")
_TIME = "%Y%m%dT%H%M%S.%f"

_LIBRARIES = (
    "numpy",
    "torch",
    "torchaudio",
    "transformers",
    "onnxruntime",
    "soundfile",
    "miniaudio",
    "av",
    "praatio",
    "soxr",
)


class RunRecord(msgspec.Struct, kw_only=True):
    """The record of a run, with times in ISO 8601."""

    name: str = ""
    """Its name, which begins with the time."""
    started: str = ""
    asked: dict[str, Any] = {}
    """Its task: manifest and root, config, host and process, device, threads."""
    finished: str | None = None
    outcome: dict[str, Any] = {}


class Run:
    """A run of a version, which records what it does."""

    def __init__(self, version: Version, asked: dict[str, Any]) -> None:
        started = datetime.now(UTC)
        self.id = new_name(started)
        self.asked = asked
        self._version = version
        self._record = RunRecord(name=self.id, started=started.isoformat(), asked=asked)
        self._ledgers = 0
        self.record()

    def fail(self, failures: Iterable[Failure]) -> None:
        """Enter failures in the ledger."""
        put_failures(self._version, f"{self.id}.{self._ledgers:06}", failures)
        self._ledgers += 1

    def finish(self, outcome: dict[str, Any]) -> None:
        """Record the end and the outcome of the run."""
        self._record.outcome = outcome
        self.record(datetime.now(UTC).isoformat())

    def record(self, finished: str | None = None) -> None:
        """Record when it ended; None if it goes on."""
        self._record.finished = finished
        put_document(self._version.store, f"runs/{self.id}.json", self._record)


@cache
def _installed(library: str) -> str:
    try:
        return version_of(library)
    except PackageNotFoundError:
        return ""


def library_versions() -> dict[str, str]:
    """Return the versions of Python, of libraries that decide values, and of libsndfile,
    which every version and shard records."""
    versions = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "featcache": __version__,
    }
    installed = {library: _installed(library) for library in _LIBRARIES}
    versions |= {library: version for library, version in installed.items() if version}
    try:
        import soundfile
    except ImportError:
        return versions
    return {**versions, "libsndfile": soundfile.__libsndfile_version__}


def new_name(now: datetime | None = None) -> str:
    """Return a new name that begins with a time, by default now."""
    return f"{now or datetime.now(UTC):{_TIME}}Z-{secrets.token_hex(2)}"


def run_names(store: Store) -> list[str]:
    """List the names of a version's runs, in the order of their times."""
    return [name.removesuffix(".json") for name in store.names("runs") if name.endswith(".json")]


def read_run(store: Store, name: str) -> RunRecord | None:
    """Read the record of a run; None if it is missing or damaged."""
    with suppress(FileNotFoundError, DamagedError):
        return read_document(store, f"runs/{name}.json", RunRecord)
    return None


def recorded_root(store: Store, run: str) -> str | None:
    """Return the root of the paths in a run's manifest; None if its record does not tell."""
    record = read_run(store, run)
    root = None if record is None else record.asked.get("root")
    return None if root is None else str(root)


def root_of(version: Version, shard: Shard) -> AudioLocation | None:
    """Return the root of the paths in a shard; None if the record of its run is missing."""
    root = recorded_root(version.store, shard.run)
    if root is None:
        return None
    return Url(root) if is_audio_url(root) else Path(root)


def manifest_roots(version: Version) -> set[str]:
    """List the folders that the paths in the runs' manifests were relative to."""
    roots = {recorded_root(version.store, run) for run in run_names(version.store)}
    return {root for root in roots if root is not None}


def failures_as_manifest(version: Version) -> tuple[Manifest, list[str]]:
    """Return a version's standing failures as rows with the columns `reason` and `message`;
    a copy's failure is its utterance's. Returns also the roots of their paths, as far as
    they are known. If there are several, the column `root` has the root of each row."""
    copies = copies_of(version.info.config)
    failures = wanted_failures(version, open_index(version))
    rows = {
        id_.removesuffix(copies.copy_of(id_).suffix): failure for id_, failure in failures.items()
    }
    known = _failure_roots(version)
    columns = {name: [getattr(row, name) for row in rows.values()] for name in _OF_FAILURES}
    columns["root"] = [known.get(row.id, "") for row in rows.values()]
    roots = sorted({*columns["root"]} - {""})
    if len(roots) < 2:
        del columns["root"]
    kinds = np.full(len(rows), WRITTEN, np.uint8)
    values = {name: Values(Strings.of(texts), kinds) for name, texts in columns.items()}
    segments = vars(SegmentColumns.of(rows.values()))
    manifest = Manifest(
        source=str(version.path), root=Path.cwd(), ids=Strings.of(rows), **segments, values=values
    )
    return manifest, roots


def _failure_roots(version: Version) -> dict[str, str]:
    """Map the ids of failures to the root of the run that recorded the latest."""
    roots = dict[str, str]()
    for run in sorted({name.rpartition(".")[0] for name in version.store.names("failures")}):
        root = recorded_root(version.store, run)
        if root is not None:
            ids = (failure.id for failure in read_failures(version, run=run))
            roots |= dict.fromkeys(ids, root)
    return roots


def began(run: str) -> datetime | None:
    """Return when a run began, by its name; None if it names no time."""
    try:
        return datetime.strptime(run.partition("Z")[0], _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class _Trial(msgspec.Struct):
    policy: str
    precision: str
    error: str | None
    mismatch: _Share
    disturbed: _Share
    times_real_time: NotNegative


class _Probe(msgspec.Struct):
    device: str = ""
    date: str = ""
    fastest: _Trial | None = None
    measured: Annotated[list[_Trial], msgspec.Meta(max_length=1000)] = []


decoder_of(_Probe)  # while this is imported: see the end of `spec`


class _ProbeRecord(msgspec.Struct):
    probe: dict[str, Any]


def write_probe(version: Version, document: dict[str, Any]) -> None:
    """Record what a probe of the version's extractor measured."""
    put_document(version.store, f"probes/{new_name()}.json", {"probe": document})


def probe_names(version: Version) -> list[str]:
    """List the files that `write_probe` has written, the earliest first."""
    return [name for name in version.store.names("probes") if name.endswith(".json")]


def read_probes(version: Version) -> list[dict[str, Any]]:
    """Read the records of all probes, the earliest first. Damaged ones are skipped."""
    probes = []
    for name in probe_names(version):
        with suppress(FileNotFoundError, DamagedError, msgspec.ValidationError):
            probe = read_document(version.store, f"probes/{name}", _ProbeRecord).probe
            msgspec.convert(probe, _Probe)
            probes.append(probe)
    return probes
