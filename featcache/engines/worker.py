"""A process that extracts for another one: it builds extractors once, does chunks of
tasks, and commits their shards.

It has a ledger of its own in each version. Any transport may carry its messages and
events: the connections of `devices.py`, the actors of `ray.py`."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

from featcache import __version__
from featcache.audio.commands import kill_commands
from featcache.device import Device
from featcache.engines.local import run_locally
from featcache.engines.process import Setup, end_with_parent, passable
from featcache.errors import ConfigError, ExtractorError, StoreError
from featcache.extraction.batching import choose_batching
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.jobs import (
    DoneTask,
    JobGroup,
    Progress,
    RunControl,
    VersionCounts,
    VersionJob,
    maker,
)
from featcache.extraction.options import Options
from featcache.extraction.tasks import ShardTask
from featcache.storage.location import Location
from featcache.version.in_flight import Suspects
from featcache.version.records import Run, read_probes
from featcache.version.version import Version

_REPORT_SECONDS = 0.5


@cache
def own_code() -> str:
    """Return this featcache's version, and a hash of its modules, as checkouts may share a
    version."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"\n{path.relative_to(package)}\n".encode() + path.read_bytes())
    return f"{__version__}, code {digest.hexdigest()[:12]}"


@dataclass(frozen=True)
class WorkerSetup(Setup):
    """The input of a worker."""

    versions: Sequence[tuple[Location, dict[str, Any]]]
    """The place of each version, and the record of the run there."""
    options: Options
    featcache: str = field(default_factory=own_code)

    def on(self, device: str, threads: int) -> WorkerSetup:
        """Return the setup with a worker's device and budget of threads."""
        return replace(self, options=replace(self.options, device=device, threads=threads))


@dataclass(frozen=True)
class Work:
    """A message: do these tasks."""

    tasks: Sequence[ShardTask]
    suspects: Suspects


@dataclass(frozen=True)
class Stop:
    """A message: take nothing more, and commit what was begun."""


Message = Work | Stop


@dataclass(frozen=True)
class Ready:
    """An event: the worker has built its extractors."""

    device: str
    threads: int
    runs: Sequence[str]


@dataclass(frozen=True)
class Working:
    """An event: the progress since the worker began."""

    progress: Progress
    works: int = 0
    """The messages `Work` whose tasks it has done since the last event, or was stopped in."""


@dataclass(frozen=True)
class Died:
    """An event of the transport: the worker's process has ended."""

    how: str
    counts: bool = True
    """True if its work may be the cause."""


Event = Ready | Working | DoneTask | str | Exception | Died
"""The events of a worker. A text is a message for the user; an exception ends the worker."""


class Inbox:
    """Messages for a worker; `stop` is set at once, even while it is at work."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._works: deque[Work | None] = deque()
        self._changed = threading.Condition()

    def put(self, message: Message) -> None:
        """Take a message."""
        if isinstance(message, Stop):
            self.stop.set()
        else:
            self._add(message)

    def _add(self, work: Work | None) -> None:
        with self._changed:
            self._works.append(work)
            self._changed.notify()

    def wait(self) -> Work | None:
        """Wait for the next work; returns None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._works)
            return self._works.popleft()

    def more(self, suspects: Suspects) -> Work | None:
        """Return the next work if it is there and has these suspects."""
        with self._changed:
            work = self._works[0] if self._works else None
            return self._works.popleft() if work and work.suspects == suspects else None

    def close(self) -> None:
        """Have the worker commit what was begun, and end; at once if it was stopped
        already."""
        if self.stop.is_set():
            end_process()
        self.stop.set()
        self._add(None)


def end_process() -> None:
    """End this process at once."""
    kill_commands()
    os.kill(os.getpid(), signal.SIGKILL)


def serve(connection: Connection) -> None:
    """Be a worker at the other end of a connection, which brings its setup first."""
    end_with_parent()
    inbox, sending = Inbox(), threading.Lock()

    def receive() -> None:
        with closing(inbox), suppress(EOFError, OSError):
            while True:
                inbox.put(connection.recv())

    def send(event: Event) -> None:
        with sending, suppress(OSError):  # nobody listens
            connection.send(event)

    try:
        setup = connection.recv()
    except Exception as error:  # noqa: BLE001 (the setup may name a class of `__main__`)
        what = f"a worker cannot read what it is sent: {error}"
        send(ConfigError(f"{what}: define extractors in a module of their own"))
        return
    try:
        threading.Thread(target=receive, daemon=True).start()
    except RuntimeError as error:  # there is no room for it
        send(passable(error))
        return
    work(setup, inbox, send)


def work(setup: WorkerSetup, inbox: Inbox, send: Callable[[Event], None]) -> None:
    """Do the work of the messages until the last one, or until an error, which is sent."""
    log = logging.getLogger("featcache")
    log.setLevel(logging.INFO)
    log.handlers = [_Notes(send)]
    worker: _Worker | None = None
    try:
        worker = _Worker(setup, inbox, send)
        send(Ready(worker.device.label, worker.device.threads, [job.run.id for job in worker.jobs]))
        while next_work := inbox.wait():
            worker.do(next_work)
    except Exception as error:  # noqa: BLE001 (whoever has started this is told)
        if worker is not None and worker.device.is_lost():
            send(f"{socket.gethostname()}: {worker.device.label}: {error}")
            end_process()
        send(passable(error))


class _Worker:
    """The extractors, and the versions that they fill. Raises ConfigError if a config means
    something else here; ExtractorError if the run was planned by another featcache."""

    def __init__(self, setup: WorkerSetup, inbox: Inbox, send: Callable[[Event], None]) -> None:
        if setup.featcache != own_code():
            raise ExtractorError(
                f"{socket.gethostname()}: has featcache {own_code()}, and the run was "
                f"planned by {setup.featcache}: install the same everywhere"
            )
        self.device = Device(setup.options.device, setup.options.threads)
        self.device.use_nearby_cores()
        self._setup, self._inbox, self._send = setup, inbox, send
        configs, self._source = setup.build(self.device)
        self.jobs = [
            _begin(setup.options, self.device, built, path, asked)
            for built, (path, asked) in zip(configs, setup.versions, strict=True)
        ]
        progress = Progress(versions={job.name: VersionCounts() for job in self.jobs})
        self._control = RunControl(
            self._report, inbox.stop, done=send, leaves_unread=True, progress=progress
        )
        self._next_report = 0.0

    def do(self, work: Work) -> None:
        """Do tasks, and the tasks that come meanwhile. Records and sends the outcome so
        far."""
        works = 0

        def tasks() -> Iterator[ShardTask]:
            nonlocal works
            more: Work | None = work
            while more is not None:
                works += 1
                yield from more.tasks
                more = self._inbox.more(work.suspects)

        for job in self.jobs:
            job.run.record()
        batch_seconds = self._setup.batch_seconds(self.device)
        group = JobGroup(self.jobs, self._setup.root, self._source, work.suspects, batch_seconds)
        run_locally(group, tasks(), self._control)
        for job in self.jobs:
            job.finish(self._control.progress, self._inbox.stop.is_set())
        self._send(Working(self._control.progress, max(1, works)))

    def _report(self, progress: Progress) -> None:
        now = monotonic()
        if now >= self._next_report:
            self._next_report = now + _REPORT_SECONDS
            self._send(Working(progress))


def _begin(
    options: Options, device: Device, built: BuiltConfig, path: Location, asked: dict[str, Any]
) -> VersionJob:
    host = socket.gethostname()
    if isinstance(path, Path) and not path.is_dir():
        raise StoreError(
            f"{path}: is not there on {host}: machines that fill a cache must share it"
        )
    version = Version.open(path)
    if built.fingerprint != version.info.fingerprint:
        raise ConfigError(
            f"{path}: on {host}, {built.config.name} has the fingerprint "
            f"{built.fingerprint[:12]}: its extractor or its weights are not the same there"
        )
    batching = choose_batching(
        built.extractor,
        read_probes(version),
        device.label,
        options.batching,
        options.allow_mismatch,
    )
    if batching.note is not None:
        logging.getLogger(__name__).info("%s: %s", built.config.name, batching.note)
    built.extractor.chosen_batching = batching.batching
    run = Run(version, {**asked, **maker(device)})
    return VersionJob(built, batching, version, run, has_extracted=bool(version.shard_names()))


class _Notes(logging.Handler):
    def __init__(self, send: Callable[[Event], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(record.getMessage())
