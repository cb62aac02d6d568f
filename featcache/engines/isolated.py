"""Extracts suspects, one by one, in a separate process. A crash, or the system if memory
runs out, ends that process, not this."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from featcache.audio.members import copy_of
from featcache.audio.remote import StoppedError
from featcache.device import Device
from featcache.engines.process import (
    OtherProcess,
    Setup,
    end_with_parent,
    kills_for_memory,
    last_line,
    passable,
)
from featcache.errors import AudioError, Reason
from featcache.extraction.batching import BatchingChoice
from featcache.extraction.features import Extracted, WorkerTimes
from featcache.extraction.jobs import BatchExtractor, JobGroup, batch_extractor
from featcache.extraction.padded_rows import Part, compute_now
from featcache.manifest.segments import Utterance

_MAIN = "featcache.engines.isolated:serve"
_POLL_SECONDS = 0.2


class IsolatedProcess:
    """Extracts utterances in another process, which starts when it is first needed, and
    again after each crash."""

    def __init__(self, group: JobGroup, stop: threading.Event) -> None:
        self._group, self._stop = group, stop
        self._process: OtherProcess | None = None
        self._obstacle = ""  # why the process cannot begin
        self._turn = threading.Lock()

    def close(self) -> str:
        """End the other process. Returns how it ended."""
        process, self._process = self._process, None
        return "" if process is None else process.end()

    def extract(self, batch: Sequence[Utterance], times: WorkerTimes) -> Iterator[Part]:
        """Yield each version's results for each utterance. An utterance fails if the other
        process crashes or cannot begin: in this process, it might crash the run again.
        Raises StoppedError if the run is being stopped, and the audio takes long to
        come."""
        for utterance in batch:
            with self._turn:
                yield [
                    self._extract(number, utterance, times)
                    for number in range(len(self._group.jobs))
                ]

    def _extract(self, number: int, utterance: Utterance, times: WorkerTimes) -> Extracted:
        crashed = partial(self._crashed, number, utterance)
        if utterance.id in self._group.suspects.fatal:
            return crashed("it was extracted in a process of its own, and the run died again")
        process = self._process or self._begin()
        if process is None:
            return crashed(f"a process of its own cannot begin: {self._obstacle}")
        kills = kills_for_memory()
        try:
            answer = self._ask(process, (number, utterance))
        except (EOFError, OSError):
            ended = self.close()
            if ended == "SIGKILL" and kills_for_memory() > kills:
                ended = "out of memory"
            return crashed(f"extracting it ended a process: {ended}")
        if isinstance(answer, Exception):
            raise answer
        extracted, process_times = answer
        for stage, seconds in process_times.items():
            times[stage] += seconds
        return extracted

    def _ask(self, process: OtherProcess, question: tuple[int, Utterance]) -> _Answer:
        """Ask the other process. A None tells it that the run is being stopped. Raises
        EOFError or OSError if it ends."""
        process.connection.send(question)
        is_told = False
        while not process.connection.poll(_POLL_SECONDS):
            if process.has_ended():
                raise EOFError
            if self._stop.is_set() and not is_told:
                process.connection.send(None)
                is_told = True
        answer: _Answer = process.connection.recv()
        return answer

    def _crashed(self, number: int, utterance: Utterance, message: str) -> Extracted:
        error = AudioError(Reason.CRASHED, message)
        return Extracted.of(self._group.configs[number], self._group.root).fail(utterance, error)

    def _begin(self) -> OtherProcess | None:
        """Start the other process; None if it cannot begin."""
        if self._obstacle:
            return None
        choices = [job.batching for job in self._group.jobs]
        setup = Setup.of(self._group), choices, str(self._group.device.torch_device)
        self._process = OtherProcess(_MAIN)
        try:
            self._process.connection.send(setup)
            error = self._process.connection.recv()
            if error is not None:
                self.close()
                self._obstacle = last_line(error)
        except (EOFError, OSError):
            self._obstacle = f"it ended: {self.close()}"
        return self._process


_Answer = tuple[Extracted, WorkerTimes] | Exception


# In the other process


def serve(connection: Connection) -> None:
    """Answer over the connection until it is closed."""
    end_with_parent()
    # If memory runs out, the system shall end this process, and not the run.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(EOFError, ConnectionError):
        try:
            device, extractors = _prepare(connection, *connection.recv())
        except Exception as error:  # noqa: BLE001 (the run is told)
            connection.send(passable(error))
            return
        connection.send(None)
        while True:
            question = connection.recv()
            if question is not None:  # None stops an answer that was sent already
                number, utterance = question
                connection.send(_extract(extractors[number], utterance, device))


def _prepare(
    connection: Connection, setup: Setup, choices: Sequence[BatchingChoice], device_name: str
) -> tuple[Device, list[BatchExtractor]]:
    def wait(seconds: float) -> None:
        if connection.poll(seconds):
            raise StoppedError

    device = Device(device_name, 1)
    configs, source = setup.build(device)
    for built, choice in zip(configs, choices, strict=True):
        built.extractor.chosen_batching = choice.batching
    fetched = partial(copy_of, wait=wait)
    extractors = [batch_extractor(setup.root, [built], source, fetched, wait) for built in configs]
    return device, extractors


def _extract(extract: BatchExtractor, utterance: Utterance, device: Device) -> _Answer:
    times = WorkerTimes(float)
    try:
        ((result,),) = extract([utterance], times)
        (extracted,) = compute_now([result])
    except StoppedError as error:
        return error
    except Exception as error:
        if device.is_lost():
            raise SystemExit(f"{utterance.id}: {error}") from error
        return passable(error)
    return extracted, times
