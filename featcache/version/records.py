"""Records for people: of each run in `runs/`, and of each probe of the extractor in
`probes/`.

Nothing follows from them: what is there, and what is missing, says the index. A damaged
one is passed over."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from featcache.errors import DamagedError
from featcache.format.documents import AT_MOST_BYTES, encode_line, parse_line
from featcache.manifest.columns import WRITTEN, Values
from featcache.manifest.copies import copies_of
from featcache.manifest.segments import SegmentColumns
from featcache.manifest.utterances import Manifest
from featcache.storage.base import Store
from featcache.strings import Strings
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure, put_failures
from featcache.version.version import Version
from featcache.version.wanted import wanted_failures

_TIME = "%Y%m%dT%H%M%S.%f"


class RunRecord(msgspec.Struct, kw_only=True):
    """The record of a run."""

    name: str = ""
    """Its name, which begins with the time."""
    started: str = ""
    """When it began, in ISO 8601."""
    asked: dict[str, Any] = {}
    """What it was to do: its manifest and root, the config, host and process, device,
    threads."""
    finished: str | None = None
    """When it ended; None if it has not."""
    outcome: dict[str, Any] = {}


class Run:
    """A run of a version, while it records what it does. Its record is there once this
    returns. Raises StoreError: from every method, if it cannot be written."""

    def __init__(self, version: Version, asked: dict[str, Any]) -> None:
        started = datetime.now(UTC)
        self.id = new_name(started)
        self.asked = asked
        """What the run is to do."""
        self._version = version
        self._record = RunRecord(name=self.id, started=started.isoformat(), asked=asked)
        self._ledgers = 0
        self.record()

    def fail(self, failures: Iterable[Failure]) -> None:
        """Enter failures in the ledger."""
        put_failures(self._version, f"{self.id}.{self._ledgers:06}", failures)
        self._ledgers += 1

    def finish(self, outcome: dict[str, Any]) -> None:
        """Record the outcome of the run, which has ended."""
        self._record.outcome = outcome
        self.record(datetime.now(UTC).isoformat())

    def record(self, finished: str | None = None) -> None:
        """Record when it has finished; None if it goes on, also after an end."""
        self._record.finished = finished
        self._version.store.put(
            f"runs/{self.id}.json", encode_line(msgspec.to_builtins(self._record))
        )


def new_name(now: datetime | None = None) -> str:
    """A fresh name that begins with a time, by default now."""
    return f"{now or datetime.now(UTC):{_TIME}}Z-{secrets.token_hex(2)}"


def run_names(store: Store) -> list[str]:
    """The names of the runs of the version in a store, by the clocks of those who began
    them."""
    return [name.removesuffix(".json") for name in store.names("runs") if name.endswith(".json")]


def read_run(store: Store, name: str) -> RunRecord | None:
    """Read the record of a run; None if there is none that can be read."""
    key = f"runs/{name}.json"
    with suppress(FileNotFoundError, DamagedError):
        return parse_line(store.read(key, AT_MOST_BYTES), RunRecord, f"{store.location}/{key}")
    return None


def manifest_roots(version: Version) -> set[str]:
    """The folders that the paths in the manifests of the version's runs were relative to."""
    runs = (read_run(version.store, name) for name in run_names(version.store))
    return {str(run.asked.get("root")) for run in runs if run is not None}


def failures_as_manifest(version: Version) -> Manifest:
    """A version's standing failures, as rows with the columns `reason` and `message`; a
    copy's are of its utterance."""
    copies = copies_of(version.info.config)
    failures = wanted_failures(version, open_index(version))
    rows = {
        id_.removesuffix(copies.copy_of(id_).suffix): failure for id_, failure in failures.items()
    }
    kinds = np.full(len(rows), WRITTEN, np.uint8)
    values = {
        name: Values(Strings.of(getattr(row, name) for row in rows.values()), kinds)
        for name in ("reason", "message")
    }
    segments = vars(SegmentColumns.of(rows.values()))
    return Manifest(
        source=str(version.path), root=Path.cwd(), ids=Strings.of(rows), **segments, values=values
    )


def began(run: str) -> datetime | None:
    """When a run, by its name, began, as its machine's clock had it; None if there is no
    such time."""
    try:
        return datetime.strptime(run.partition("Z")[0], _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


class _Trial(msgspec.Struct):
    policy: str
    precision: str
    error: str | None
    mismatch: Annotated[float, msgspec.Meta(ge=0, le=1)]
    disturbed: Annotated[float, msgspec.Meta(ge=0, le=1)]
    times_real_time: Annotated[float, msgspec.Meta(ge=0)]


class _Probe(msgspec.Struct):
    """The keys of a probe's record that others than its reader use."""

    device: str = ""
    date: str = ""
    fastest: _Trial | None = None
    measured: Annotated[list[_Trial], msgspec.Meta(max_length=1000)] = []


class _ProbeRecord(msgspec.Struct):
    probe: dict[str, Any]


def write_probe(version: Version, document: dict[str, Any]) -> None:
    """Keep what a probe of the version's extractor measured, as JSON. Raises StoreError
    if it cannot be written."""
    version.store.put(f"probes/{new_name()}.json", encode_line({"probe": document}))


def probe_names(version: Version) -> list[str]:
    """The names of the files that `write_probe` has written, the earliest first."""
    return [name for name in version.store.names("probes") if name.endswith(".json")]


def read_probes(version: Version) -> list[dict[str, Any]]:
    """Read the records of all probes, the earliest first. Damaged ones are left out:
    losing one costs another measurement."""
    probes = []
    for name in probe_names(version):
        with suppress(FileNotFoundError, DamagedError, msgspec.ValidationError):
            data = version.store.read(f"probes/{name}", AT_MOST_BYTES)
            probe = parse_line(data, _ProbeRecord, f"{version.path}/probes/{name}").probe
            msgspec.convert(probe, _Probe)
            probes.append(probe)
    return probes
