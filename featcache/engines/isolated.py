"""Extracts suspects, one by one, in a process of their own: if one crashes that process, nothing else is lost.

The run after a crash does this with what was in flight. If memory runs out, the system ends that process rather than
this one. Signals from a terminal or a scheduler do not reach it; it ends when this process does.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from featcache.config import Config
from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, FeatcacheError, Reason
from featcache.extract.decoding import WorkerTimes
from featcache.extract.failures import failure_of
from featcache.extract.features import Extracted
from featcache.extract.from_version import SourceVersion
from featcache.extract.jobs import JobGroup, batch_extractor
from featcache.extract.padded_rows import PendingRows
from featcache.extract.version_plan import BuiltConfig
from featcache.extractors.base import Batching
from featcache.manifest import Utterance
from featcache.store.version import Version
from featcache.trust import allow_remote_code, remote_code_is_allowed

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from featcache.engines.isolated import serve; serve()"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_TO_END = 10


@dataclass(frozen=True)
class _Setup:
    """What the other process needs to extract in the same way; picklable."""

    root: Path
    configs: list[Config]
    batchings: list[Batching]
    """How the rows of each config are put together."""
    device: str
    source: Path | None
    """The folder of the version whose features are used instead of audio."""
    allows_remote_code: bool
    """Whether `--trust-remote-code` was given."""

    @classmethod
    def of(cls, group: JobGroup) -> _Setup:
        return cls(
            root=group.root,
            configs=[job.plan.config for job in group.jobs],
            batchings=[job.plan.batching.batching for job in group.jobs],
            device=str(group.device.torch_device),
            source=None if group.source is None else group.source.version.folder,
            allows_remote_code=remote_code_is_allowed(),
        )


class IsolatedProcess:
    """Extracts utterances in another process, which starts when it is first needed, and again after each crash."""

    def __init__(self, group: JobGroup) -> None:
        self._setup = _Setup.of(group)
        self._specs = [config.spec for config in group.configs]
        self._fatal = group.suspects.fatal
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._obstacle = ""  # why the process cannot begin
        self._turn = threading.Lock()

    def __enter__(self) -> IsolatedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def extract(self, batch: Sequence[Utterance], times: WorkerTimes) -> Iterator[list[Extracted | PendingRows]]:
        """Extract a batch, one utterance after the other. An utterance that crashes the other process fails.

        If the other process cannot even begin (a GPU may have no room for a second model), utterances fail too: in this
        process they might crash everything again.

        Yields:
            For each utterance, what each version gets.

        Raises:
            ExtractorError: The extractor broke its contract in the other process.
        """
        for utterance in batch:
            with self._turn:
                yield [self._extract(number, utterance, times) for number in range(len(self._specs))]

    def _extract(self, number: int, utterance: Utterance, times: WorkerTimes) -> Extracted:
        """Extract an utterance for the config of that number."""
        if utterance.id in self._fatal:
            return self._crashed(
                number, utterance, "it was extracted in a process of its own, and even so the run died"
            )
        if self._connection is None:
            self._begin()
        if self._connection is None:
            return self._crashed(number, utterance, f"a process of its own cannot begin: {self._obstacle}")
        kills = _kills_for_memory()
        try:
            self._connection.send((number, utterance))
            answer = self._connection.recv()
        except (EOFError, OSError):
            ended = self._stop()
            if ended == "SIGKILL" and _kills_for_memory() > kills:
                ended = "out of memory"
            return self._crashed(number, utterance, f"extracting it ended a process: {ended}")
        if isinstance(answer, _Fault):
            raise answer.error()
        extracted, times_there = answer
        times.add(times_there)
        assert isinstance(extracted, Extracted)
        return extracted

    def _crashed(self, number: int, utterance: Utterance, message: str) -> Extracted:
        failure = failure_of(utterance, self._setup.root, AudioError(Reason.CRASHED, message))
        return Extracted.of_failures(self._specs[number], [failure])

    def _begin(self) -> None:
        """Start the other process and wait until it is ready, unless it could not begin before."""
        if self._obstacle:
            return
        ours, theirs = Pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # which the other process inherits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is no result
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._connection = ours
        try:
            ours.send(self._setup)
            answer = ours.recv()
        except (EOFError, OSError):
            self._obstacle = f"it ended: {self._stop()}"
        else:
            if isinstance(answer, _Fault):
                self._stop()
                self._obstacle = answer.message.strip().rpartition("\n")[2]

    def _stop(self) -> str:
        """End the other process, if there is one. Returns how it ended: a signal's name, or its exit code."""
        if self._process is None or self._connection is None:
            return ""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        connection.close()
        try:
            code = process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # it is still extracting, and nobody waits for that any more
            process.kill()
            code = process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@dataclass(frozen=True)
class _Fault:
    """An error in the other process, because not all errors pass through a pipe."""

    message: str
    is_ours: bool

    @classmethod
    def of(cls, error: Exception) -> _Fault:
        is_ours = isinstance(error, FeatcacheError)
        return cls(str(error) if is_ours else "".join(traceback.format_exception(error)), is_ours)

    def error(self) -> Exception:
        return ExtractorError(self.message) if self.is_ours else RuntimeError(self.message)


# In the other process

_Answer = tuple[Extracted, WorkerTimes] | _Fault


def serve() -> None:
    """Be the other process: answer over the connection whose descriptor was given, until it is closed."""
    with suppress(OSError):  # if memory runs out, the system shall end this process, and not the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(int(sys.argv[2]))
    with suppress(EOFError):
        try:
            extract = _prepare(connection.recv())
        except Exception as error:  # noqa: BLE001 (the run is told)
            connection.send(_Fault.of(error))
            return
        connection.send(None)
        while True:
            connection.send(extract(*connection.recv()))


def _prepare(setup: _Setup) -> Callable[[int, Utterance], _Answer]:
    """Build the extractors. Returns a function that extracts an utterance for the config of a number."""
    if setup.allows_remote_code:
        allow_remote_code()
    device = Device(setup.device, 1)
    device.configure_torch()
    source = None if setup.source is None else SourceVersion(Version.open(setup.source))
    extractors = []
    for config, batching in zip(setup.configs, setup.batchings, strict=True):
        built = BuiltConfig.build(config, device.torch_device)
        built.extractor.use_batching(batching)
        extractors.append(batch_extractor(setup.root, [built], device, source))

    def extract(number: int, utterance: Utterance) -> _Answer:
        times = WorkerTimes()
        try:
            ((result,),) = extractors[number]([utterance], times)
            if isinstance(result, PendingRows):
                result.compute(device)
                result = result.extracted()
                times.extract += result.seconds
        except Exception as error:  # noqa: BLE001 (likewise)
            return _Fault.of(error)
        return result, times

    return extract


def _kills_for_memory() -> int:
    """How many processes the system has ended since it started because memory had run out."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
