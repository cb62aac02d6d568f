"""A process that does what it is told: it builds extractors once, does chunks of tasks,
and commits their shards.

It has a ledger of its own in each version, and holds nothing that is lost with it but the
shards under way. It is told messages and says events, which any transport may carry: the
connections of `devices.py`, the actors of `ray.py`."""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
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
from featcache.engines.process import Setup, passable
from featcache.errors import ConfigError, ExtractorError, StoreError
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
from featcache.extraction.padded_rows import choose_batching
from featcache.extraction.tasks import ShardTask
from featcache.extraction.version_plan import BuiltConfig
from featcache.storage.location import Location
from featcache.version.in_flight import Suspects
from featcache.version.records import Run, read_probes
from featcache.version.version import Version

_REPORT_SECONDS = 0.5

_SECONDS_TO_COMMIT = 30.0
"""How long a worker may take to finish what it has begun once nobody listens any more."""


@cache
def own_code() -> str:
    """The featcache of this process: its version and a hash of its modules, as two
    checkouts may have one version."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(f"\n{path.relative_to(package)}\n".encode() + path.read_bytes())
    return f"{__version__}, code {digest.hexdigest()[:12]}"


@dataclass(frozen=True)
class WorkerSetup:
    """All that a worker needs to begin."""

    setup: Setup
    versions: Sequence[tuple[Location, dict[str, Any]]]
    """The place of each version that it fills, and what it records there of the run that
    it is a part of."""
    options: Options
    """The options of the run; of each worker, with its own device, as it sees it, and
    budget of threads."""
    featcache: str = field(default_factory=own_code)
    """The featcache that planned."""

    def on(self, device: str, threads: int) -> WorkerSetup:
        """The same for a worker with this device and budget of threads."""
        return replace(self, options=replace(self.options, device=device, threads=threads))


@dataclass(frozen=True)
class Work:
    """Tells a worker to do tasks."""

    tasks: Sequence[ShardTask]
    suspects: Suspects


@dataclass(frozen=True)
class Stop:
    """Tells a worker to take nothing more, and to commit what it has."""


Message = Work | Stop


@dataclass(frozen=True)
class Ready:
    """The worker has built its extractors."""

    device: str
    """The name of its device's model."""
    threads: int
    runs: Sequence[str]
    """The names of its runs, one in each version."""


@dataclass(frozen=True)
class Working:
    """What the worker has done since it began."""

    progress: Progress


@dataclass(frozen=True)
class Finished(Working):
    """The worker is done with its tasks, or was stopped."""


@dataclass(frozen=True)
class Died:
    """The worker's process is no longer there; the transport says this."""

    how: str
    """A signal's name, an exit code, or what else is known."""
    counts: bool = True
    """Whether what it worked on may be the cause."""


Event = Ready | Working | DoneTask | str | Exception | Died
"""What a worker says. A text is what the library has to say to a person; a `passable`
exception, why it has ended."""


class Inbox:
    """Messages for a worker; `stop` is set at once, even while it is at work."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        """What is to be done, in order; None at the end."""

    def put(self, message: Message) -> None:
        """Take a message."""
        if isinstance(message, Stop):
            self.stop.set()
        else:
            self.works.put(message)

    def close(self) -> None:
        """Nobody listens any more: commit what was begun, and end; at once if that was
        asked for already."""
        if self.stop.is_set():
            end_process()
        self.stop.set()
        self.works.put(None)
        limit = threading.Timer(_SECONDS_TO_COMMIT, end_process)
        limit.daemon = True
        # this process is at its end, where Python 3.12 starts no thread
        with suppress(RuntimeError):
            limit.start()


def end_process() -> None:
    """End this process at once: what is half-written in `work/` is removed by the next
    run."""
    kill_commands()
    os.kill(os.getpid(), signal.SIGKILL)


def serve(connection: Connection) -> None:
    """Be a worker at the other end of a connection, which brings its setup first, until
    it is closed."""
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
    except Exception as error:  # noqa: BLE001 (what was sent names a class that is not here, as one of `__main__`)
        send(
            ConfigError(
                f"a worker cannot read what it is sent: {error}: define extractors in a module "
                "of their own"
            )
        )
        return
    threading.Thread(target=receive, daemon=True).start()
    work(setup, inbox, send)


def work(setup: WorkerSetup, inbox: Inbox, send: Callable[[Event], None]) -> None:
    """Do what the messages say until there are no more, or until there is an error, which
    is an event."""
    log = logging.getLogger("featcache")
    log.setLevel(logging.INFO)
    log.handlers = [_Notes(send)]
    worker: _Worker | None = None
    try:
        worker = _Worker(setup, inbox.stop, send)
        send(Ready(worker.device.label, worker.device.threads, [job.run.id for job in worker.jobs]))
        while (next_work := inbox.works.get()) is not None:
            worker.do(next_work)
    except Exception as error:  # noqa: BLE001 (whoever has started this is told)
        if worker is not None and worker.device.is_lost():
            send(f"{socket.gethostname()}: {worker.device.label}: {error}")
            end_process()
        send(passable(error))


class _Worker:
    """The extractors, and the versions that they fill.

    Raises:
        ConfigError: A config means something else here than where the run was planned.
        ExtractorError: This is another featcache than the one that planned.
        StoreError: A version cannot be opened or written.
    """

    def __init__(
        self, setup: WorkerSetup, stop: threading.Event, send: Callable[[Event], None]
    ) -> None:
        if setup.featcache != own_code():
            both = (
                f"{socket.gethostname()}: has featcache {own_code()}, and the run was "
                f"planned by {setup.featcache}"
            )
            raise ExtractorError(f"{both}: install the same everywhere")
        self.device = Device(setup.options.device, setup.options.threads)
        self.device.use_nearby_cores()
        self._setup, self._stop, self._send = setup.setup, stop, send
        configs, self._source = setup.setup.build(self.device)
        pairs = zip(configs, setup.versions, strict=True)
        self.jobs = [
            _begin(setup.options, self.device, built, *version) for built, version in pairs
        ]
        progress = Progress(versions={job.name: VersionCounts() for job in self.jobs})
        self._control = RunControl(progress, self._report, stop, leaves_unread=True, done=send)
        self._next_report = 0.0

    def do(self, work: Work) -> None:
        """Do tasks, record what has been done so far as the outcome, as these may be the
        last ones, and say it."""
        for job in self.jobs:
            job.run.record()
        group = JobGroup(self.jobs, self._setup.root, self._source, work.suspects)
        run_locally(group, iter(work.tasks), self._control)
        for job in self.jobs:
            job.finish(self._control.progress, self._stop.is_set())
        self._send(Finished(self._control.progress))

    def _report(self, progress: Progress) -> None:
        if (now := monotonic()) >= self._next_report:
            self._next_report = now + _REPORT_SECONDS
            self._send(Working(progress))


def _begin(
    options: Options, device: Device, built: BuiltConfig, path: Location, asked: dict[str, Any]
) -> VersionJob:
    """Open a version, and a ledger in it."""
    if isinstance(path, Path) and not path.is_dir():
        raise StoreError(
            f"{path}: is not there on {socket.gethostname()}: machines that fill a cache "
            "must share it"
        )
    version = Version.open(path)
    if built.fingerprint != version.info.fingerprint:
        what = (
            f"on {socket.gethostname()}, {built.config.name} has the fingerprint "
            f"{built.fingerprint[:12]}"
        )
        raise ConfigError(f"{path}: {what}: its extractor or its weights are not the same there")
    probes = read_probes(version)
    batching = choose_batching(
        built.extractor, probes, device.label, options.batching, options.allow_mismatch
    )
    if batching.note is not None:
        logging.getLogger(__name__).info("%s: %s", built.config.name, batching.note)
    built.extractor.chosen_batching = batching.batching
    return VersionJob(built, batching, version, Run(version, {**asked, **maker(device)}))


class _Notes(logging.Handler):
    """Sends what the library reports of its work."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send(record.getMessage())
