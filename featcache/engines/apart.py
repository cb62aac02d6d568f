"""Extracts utterances one by one in a process of its own, so that one that crashes it takes nothing else along.

The run after a crash does this with what was in flight. If memory runs out, the system ends that process before this
one; signals from a terminal or a scheduler do not reach it: it ends when this process does.
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
from types import TracebackType

from featcache.config import Config
from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, FeatcacheError, Reason
from featcache.extract.decoding import failure_of
from featcache.extract.derived import Source, producer
from featcache.extract.rows import Pending, compute_alone
from featcache.extract.target import Extracted, Spent, Target
from featcache.extractors.base import Batching
from featcache.extractors.rows import RowExtractor
from featcache.manifest import Utterance
from featcache.store.in_flight import Suspects
from featcache.store.version import Version
from featcache.trust import allow_remote_code, remote_code_is_allowed

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from featcache.engines.apart import serve; serve()"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_TO_END = 10


@dataclass(frozen=True)
class Recipe:
    """What another process needs to build the same extractors; picklable.

    Attributes:
        root: the folder that relative paths are relative to.
        configs: the configs of the versions that are filled together.
        versions: the folders of these versions.
        batching: how each extractor's rows are put together; None for one that takes no rows.
        device: the name of the device.
        source: the folder of the version that features are made from instead of audio; None for audio.
        remote_code: whether `--trust-remote-code` was given.
    """

    root: Path
    configs: list[Config]
    versions: list[Path]
    batching: list[Batching | None]
    device: str
    source: Path | None
    remote_code: bool

    @classmethod
    def of(cls, root: Path, targets: Sequence[Target], device: Device, source: Source | None) -> Recipe:
        """The recipe of a run that fills these targets."""
        extractors = [target.extractor for target in targets]
        return cls(
            root=root,
            configs=[target.config for target in targets],
            versions=[target.version.path for target in targets],
            batching=[one.policy if isinstance(one, RowExtractor) else None for one in extractors],
            device=str(device.torch_device),
            source=None if source is None else source.version.path,
            remote_code=remote_code_is_allowed(),
        )

    def targets(self, device: Device) -> list[Target]:
        """The same targets, in this process."""
        targets = []
        for config, version, batching in zip(self.configs, self.versions, self.batching, strict=True):
            extractor = config.build(device.torch_device)
            if isinstance(extractor, RowExtractor):
                extractor.policy = batching
            targets.append(Target(config, extractor, Version.open(version)))
        return targets


class Apart:
    """Extracts suspects in another process, which starts when it is first needed, and anew after each crash.

    Args:
        targets: the versions that get the features.
        recipe: how the other process extracts for them.
        suspects: the utterances.

    Attributes:
        suspects: as given.
    """

    def __init__(self, targets: Sequence[Target], recipe: Recipe, suspects: Suspects) -> None:
        self.suspects = suspects
        self._targets = targets
        self._recipe = recipe
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._obstacle = ""  # why there can be none
        self._turn = threading.Lock()

    def __enter__(self) -> Apart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def extract(self, batch: Sequence[Utterance], spent: Spent) -> Iterator[list[Extracted | Pending]]:
        """What every target gets of each utterance of a batch: a failure, where it crashes the other process.

        Where the other process cannot even begin (a GPU without room for a second model, say), suspects fail: in this
        process they may crash everything again.

        Raises:
            ExtractorError: the extractor broke its contract there.
        """
        for utterance in batch:
            with self._turn:
                yield [self._extract(number, utterance, spent) for number in range(len(self._targets))]

    def _extract(self, number: int, utterance: Utterance, spent: Spent) -> Extracted:
        if utterance.id in self.suspects.fatal:
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
        extracted, spent_there = answer
        spent.add(spent_there)
        assert isinstance(extracted, Extracted)
        return extracted

    def _crashed(self, number: int, utterance: Utterance, message: str) -> Extracted:
        failure = failure_of(utterance, self._recipe.root, AudioError(Reason.CRASHED, message))
        return Extracted.of_failures(self._targets[number], [failure])

    def _begin(self) -> None:
        """Start the other process, and wait until it is ready, unless it could not begin before."""
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
            ours.send(self._recipe)
            answer = ours.recv()
        except (EOFError, OSError):
            self._obstacle = f"it ended: {self._stop()}"
        else:
            if isinstance(answer, _Fault):
                self._stop()
                self._obstacle = answer.message.strip().rpartition("\n")[2]

    def _stop(self) -> str:
        """End the other process, if there is one; how it ended: a signal's name, or its exit code."""
        if self._process is None or self._connection is None:
            return ""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        connection.close()
        try:
            code = process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:  # it is at work, and nobody waits for that any more
            process.kill()
            code = process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


@dataclass(frozen=True)
class _Fault:
    """An error in the other process; errors themselves do not all pass through a pipe."""

    message: str
    is_ours: bool

    @classmethod
    def of(cls, error: Exception) -> _Fault:
        is_ours = isinstance(error, FeatcacheError)
        return cls(str(error) if is_ours else "".join(traceback.format_exception(error)), is_ours)

    def error(self) -> Exception:
        return ExtractorError(self.message) if self.is_ours else RuntimeError(self.message)


def serve() -> None:
    """Be the other process: answer over the connection of this descriptor until it is closed."""
    with suppress(OSError):  # where memory runs out, the system shall end this process, and not the run
        Path("/proc/self/oom_score_adj").write_text("1000")
    connection = Connection(int(sys.argv[2]))
    with suppress(EOFError):
        try:
            extract = _from_recipe(connection.recv())
        except Exception as error:  # noqa: BLE001 (it is told to who is waiting)
            connection.send(_Fault.of(error))
            return
        connection.send(None)
        while True:
            connection.send(extract(*connection.recv()))


def _from_recipe(recipe: Recipe) -> Callable[[int, Utterance], tuple[Extracted, Spent] | _Fault]:
    if recipe.remote_code:
        allow_remote_code()
    device = Device(recipe.device, 1)
    source = None if recipe.source is None else Source(Version.open(recipe.source))
    targets = recipe.targets(device)

    def extract(number: int, utterance: Utterance) -> tuple[Extracted, Spent] | _Fault:
        spent = Spent()
        try:
            ((result,),) = producer(recipe.root, [targets[number]], device, source)([utterance], spent)
            if isinstance(result, Pending):
                with spent.extracting(targets[number]):
                    compute_alone(result, device)
                result = result.extracted()
        except Exception as error:  # noqa: BLE001 (likewise)
            return _Fault.of(error)
        return result, spent

    return extract


def _kills_for_memory() -> int:
    """How many processes the system has ended because memory had run out, since it was started."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
