"""Runs shard tasks on several devices of this machine, each with a process of its own. A
GPU's process sees no other GPU, and runs on the cores next to its GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait

import torch

from featcache.device import Device
from featcache.engines.dispatch import Dispatch
from featcache.engines.process import OtherProcess
from featcache.engines.worker import Died, Event, Message, WorkerSetup
from featcache.extraction.jobs import Engine
from featcache.extraction.options import Options

_MAIN = "featcache.engines.worker:serve"


def shares_of(threads: int | None, devices: Sequence[str]) -> list[int]:
    """Return each device's share of the budget of threads, at least one."""
    threads = threads or max(Device(name).threads for name in devices)
    share, extra = divmod(threads, len(devices))
    shares = [share + 1] * extra + [share] * (len(devices) - extra)
    return [max(1, share) for share in shares]


def on_devices(options: Options) -> Engine:
    """Return an engine that has a process for each of the options' devices."""
    return lambda group, tasks, control: Dispatch(
        group, tasks, control, _Processes(options), options
    ).run()


class _Processes:
    """A team of processes of this machine."""

    def __init__(self, options: Options) -> None:
        devices = options.devices
        self.names: Sequence[str] = [
            f"{name} (process {number})" if devices.count(name) > 1 else name
            for number, name in enumerate(devices, 1)
        ]
        self._devices = devices
        self._shares = shares_of(options.threads, devices)
        self._processes: dict[int, OtherProcess] = {}

    def start(self, worker: int, setup: WorkerSetup) -> None:
        device, environment = _alone(self._devices[worker])
        self._processes[worker] = OtherProcess(_MAIN, environment)
        self.send(worker, setup.on(device, self._shares[worker]))

    def send(self, worker: int, message: WorkerSetup | Message) -> None:
        """Send a message; if the process has died, `wait` tells."""
        if worker in self._processes:
            with suppress(OSError):
                self._processes[worker].connection.send(message)

    def wait(self, seconds: float) -> list[tuple[int, Event]]:
        events: list[tuple[int, Event]] = []
        ready = wait([process.connection for process in self._processes.values()], seconds)
        for worker, process in [*self._processes.items()]:
            if process.connection in ready:
                try:
                    events.append((worker, process.connection.recv()))
                except (EOFError, OSError):
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
