"""Runs shard tasks on several devices of this machine, each with a process of its own. A
GPU's process sees no other GPU, and runs on the cores next to its GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait

import torch

from featcache.device import Device
from featcache.engines.dispatch import Dispatch
from featcache.engines.process import ForkedProcess, OtherProcess
from featcache.engines.worker import Died, Event, Message, WorkerSetup, own_code, serve
from featcache.extraction.jobs import Engine, JobGroup, RunControl
from featcache.extraction.options import Options
from featcache.extraction.tasks import ShardTask

_MAIN = "featcache.engines.worker:serve"


def shares_of(threads: int | None, devices: Sequence[str]) -> list[int]:
    """Return each device's share of the budget of threads, at least one."""
    threads = threads or max(Device(name).threads for name in devices)
    share, extra = divmod(threads, len(devices))
    shares = [share + 1] * extra + [share] * (len(devices) - extra)
    return [max(1, share) for share in shares]


def on_devices(options: Options) -> Engine:
    """Return an engine that has a process for each of the options' devices."""
    devices = options.devices
    names = [
        f"{name} (process {number})" if devices.count(name) > 1 else name
        for number, name in enumerate(devices, 1)
    ]
    shares = shares_of(options.threads, devices)
    alone = [_alone(device) for device in devices]

    def begin(worker: int, _: Iterable[Connection]) -> OtherProcess:
        return OtherProcess(_MAIN, alone[worker][1])

    def run(group: JobGroup, tasks: Iterator[ShardTask], control: RunControl) -> None:
        places = [(device, share) for (device, _), share in zip(alone, shares, strict=True)]
        Dispatch(group, tasks, control, _Processes(names, places, begin), options).run()

    return run


def run_forked(
    count: int, group: JobGroup, tasks: Iterator[ShardTask], control: RunControl, options: Options
) -> None:
    """Do shard tasks on the CPU, in so many forked processes of one thread."""
    own_code()  # computed once, for all
    names = [f"process {number}" for number in range(1, count + 1)]
    places = [("cpu", 1)] * count
    team = _Processes(names, places, lambda _, others: ForkedProcess(serve, others))
    Dispatch(group, tasks, control, team, options).run()


class _Processes:
    """A team of processes of this machine, with the device and the threads of each.
    `begin` starts a worker's process, by its number and the connections to others."""

    def __init__(
        self,
        names: Sequence[str],
        places: Sequence[tuple[str, int]],
        begin: Callable[[int, Iterable[Connection]], OtherProcess | ForkedProcess],
    ) -> None:
        self.names = names
        self._places = places
        self._begin = begin
        self._processes: dict[int, OtherProcess | ForkedProcess] = {}

    def start(self, worker: int, setup: WorkerSetup) -> None:
        others = [process.connection for process in self._processes.values()]
        self._processes[worker] = self._begin(worker, others)
        self.send(worker, setup.on(*self._places[worker]))

    def send(self, worker: int, message: WorkerSetup | Message) -> None:
        """Send a message; if the process has died, `wait` tells."""
        if worker in self._processes:
            with suppress(OSError):
                self._processes[worker].connection.send(message)

    def wait(self, seconds: float) -> list[tuple[int, Event]]:
        events: list[tuple[int, Event]] = []
        ready = wait([process.connection for process in self._processes.values()], seconds)
        for worker, process in [*self._processes.items()]:
            is_dead = process.has_ended()
            if process.connection in ready:
                try:
                    events.append((worker, process.connection.recv()))
                except (EOFError, OSError):
                    is_dead = True
            if is_dead:
                events.append((worker, Died(self._processes.pop(worker).end())))
        return events

    def end(self) -> None:
        """Close all connections, and wait for the ends."""
        for process in self._processes.values():
            process.connection.close()
        for process in self._processes.values():
            process.end()
        self._processes.clear()


def _alone(device: str) -> tuple[str, dict[str, str]]:
    """Return a device's name in an environment without other GPUs, and that environment."""
    torch_device = torch.device(device)
    if torch_device.type == "cpu":
        return device, {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = torch_device.index or 0
    name = visible[number] if visible else str(number)
    return "cuda:0", {**os.environ, "CUDA_VISIBLE_DEVICES": name}
