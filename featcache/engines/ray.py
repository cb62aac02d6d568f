"""Runs shard tasks on a Ray cluster: an actor for each GPU, or for so many cores.

Ray starts actors, again when they die; `Dispatch` decides what they do. One call after
another waits for an actor's events, as Ray Client has no streams."""

from __future__ import annotations

import faulthandler
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Any

from featcache.device import MAX_CPU_THREADS
from featcache.engines.dispatch import Dispatch
from featcache.engines.process import last_line
from featcache.engines.worker import Died, Event, Inbox, Message, WorkerSetup, end_process, work
from featcache.errors import ArgumentError, ExtractorError, MissingDependencyError, StoreError
from featcache.extraction.jobs import Engine, JobGroup, RunControl
from featcache.extraction.options import RAY, Options
from featcache.extraction.tasks import ShardTask

_POLL_SECONDS = 1.0
_SECONDS_BETWEEN_TRIES = 1.0
_TRIES = 60

_HOW_ACTORS_LIVE = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 4}
"""Ray starts a dead actor again, without its calls. One call waits for events."""

_DRAINED = 3
"""The reason in Ray's `NodeDeathInfo` if a node was preempted."""


def on_ray(options: Options) -> Engine:
    """Return an engine that runs on Ray. Raises ArgumentError for a device that only Ray
    chooses; MissingDependencyError if Ray is not installed."""
    name = str(options.engine)
    if options.device not in (None, "cpu", "cuda"):
        raise ArgumentError(
            f"device {options.device!r}: with --engine ray, it is cpu or cuda: Ray chooses which"
        )
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("ray", f"--engine {name}", "ray") from error

    def run(group: JobGroup, tasks: Iterator[ShardTask], control: RunControl) -> None:
        with _connected(None if name == RAY else name):
            Dispatch(group, tasks, control, _Actors(options), options).run()

    return run


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    import ray

    if ray.is_initialized():  # by whoever calls this
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # a new cluster's default is 15
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        where = address or os.environ.get("RAY_ADDRESS") or "on this machine"
        raise ArgumentError(f"engine ray: no cluster {where}: {str(error).strip()}") from error
    # Ray's own handler for SIGTERM ends the process.
    for number, handler in before.items():
        if handler is not None:
            signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def actors_on(
    nodes: Sequence[dict[str, float]], device: str | None, threads: int | None
) -> tuple[int, str, int]:
    """Return the number of actors on a cluster, and the device and the threads of each:
    an actor for each GPU if there are any; otherwise for every so many cores. `nodes` are
    each node's resources as Ray counts; `threads` is per actor."""
    gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    if device == "cuda" and not gpus:
        raise ArgumentError("device 'cuda': the Ray cluster has no GPU")
    if gpus and device != "cpu":
        each = threads or max(1, min(int(node.get("CPU", 0) // node["GPU"]) for node in gpus))
        return sum(int(node["GPU"]) for node in gpus), "cuda", each
    cores = [int(node.get("CPU", 0)) for node in nodes]
    each = threads or max(1, min(MAX_CPU_THREADS, max(cores, default=1)))
    actors = sum(count // each for count in cores)
    if not actors:
        raise ArgumentError(f"engine ray: no node of the cluster has {each} cores: fewer --threads")
    return actors, "cpu", each


class _Actors:
    def __init__(self, options: Options) -> None:
        import ray

        self._ray = ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        actors, self._device, self._threads = actors_on(nodes, options.device, options.threads)
        self.names: Sequence[str] = [f"actor {number + 1}" for number in range(actors)]
        self._actors: dict[int, Any] = {}
        self._setup = b""
        self._waiting: dict[Any, int] = {}  # actors by the call that waits
        self._again: dict[int, float] = {}  # when to try `begin` again
        self._tries: dict[int, int] = {}
        self._nodes: dict[int, str] = {}  # of the actors that have begun

    def start(self, worker: int, setup: WorkerSetup) -> None:
        """Have Ray start an actor, unless it does so already, and send the setup."""
        if worker not in self._actors:
            needs = {"num_cpus": self._threads, "num_gpus": 1 if self._device == "cuda" else 0}
            self._actors[worker] = self._ray.remote(**needs, **_HOW_ACTORS_LIVE)(_Actor).remote()
        self._setup = pickle.dumps(setup.on(self._device, self._threads))
        self._tries[worker] = 0
        self._begin(worker)

    def send(self, worker: int, message: Message) -> None:
        if worker in self._nodes:
            self._actors[worker].tell.remote(pickle.dumps(message))

    def wait(self, seconds: float) -> list[tuple[int, Event]]:
        for worker, time in [*self._again.items()]:
            if monotonic() >= time:
                del self._again[worker]
                self._begin(worker)
        if not self._waiting:
            sleep(seconds)
            return []
        ready, _ = self._ray.wait([*self._waiting], num_returns=1, timeout=seconds)
        if not ready:
            return []
        worker = self._waiting.pop(ready[0])
        return [(worker, event) for event in self._answer(worker, ready[0])]

    def end(self) -> None:
        for worker in self._actors:
            with suppress(Exception):
                self._ray.kill(self._actors[worker])

    def _begin(self, worker: int) -> None:
        self._nodes.pop(worker, None)
        self._waiting[self._actors[worker].begin.remote(sys.path, os.nice(0), self._setup)] = worker

    def _answer(self, worker: int, call: Any) -> list[Event]:
        """Return the events of a call, and wait for more."""
        exceptions = self._ray.exceptions
        is_beginning = worker not in self._nodes
        try:
            answer = self._ray.get(call)
        except exceptions.ActorUnavailableError:
            if is_beginning and self._tries[worker] < _TRIES:
                self._tries[worker] += 1
                self._again[worker] = monotonic() + _SECONDS_BETWEEN_TRIES
                return []
            return [self._died(worker, False)]
        except exceptions.RayActorError as error:
            if error.actor_init_failed:
                raise ExtractorError(
                    f"{self.names[worker]}: it cannot begin: {last_line(error)}"
                ) from error
            return [self._died(worker, error.preempted)]
        except exceptions.RayTaskError as error:
            raise ExtractorError(f"{self.names[worker]}: {last_line(error)}") from error
        events: list[Event] = []
        if is_beginning:
            self._nodes[worker] = answer
        else:
            events = answer
        if not any(isinstance(event, Died) for event in events):
            self._waiting[self._actors[worker].events.remote()] = worker
        return events

    def _died(self, worker: int, preempted: bool) -> Died:
        """Describe how an actor died, and whether its work may be the cause."""
        how, node_id = "Ray lost its process", self._nodes.pop(worker, None)
        for node in self._ray.nodes():
            if node["NodeID"] == node_id and not node["Alive"]:
                how = "its node is gone"
                preempted = preempted or node.get("DeathReason") == _DRAINED
        with suppress(Exception):  # Ray has no public function for it; Ray Client has none at all
            preempted = preempted or node_id in self._ray._private.state.state.get_draining_nodes()
        if preempted:
            how = "its node was preempted"
        return Died(how, counts=not preempted)


class _Actor:
    """A worker, as Ray runs it; its methods are called from several threads."""

    def __init__(self) -> None:
        self._inbox: Inbox | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def begin(self, path: list[str], niceness: int, setup: bytes) -> str:
        """Begin to work, with the planning process's modules and `niceness`. Returns the id
        of the node."""
        import ray

        # The driver has lost this process, and has given its tasks to others.
        if self._inbox is not None:
            end_process()
        sys.path += [folder for folder in path if folder not in sys.path]
        faulthandler.disable()  # Ray's, not the run's
        own_niceness = os.nice(0)
        if own_niceness > niceness:
            self._events.put(
                f"{socket.gethostname()}: Ray works at nice {own_niceness}: start it with "
                "RAY_worker_niceness=0"
            )
        self._inbox = Inbox()
        arguments = pickle.loads(setup), self._inbox, self._send
        threading.Thread(target=work, args=arguments, daemon=True).start()
        return str(ray.get_runtime_context().get_node_id())

    def _send(self, event: Event) -> None:
        if isinstance(event, StoreError) and "://" in str(event):
            where = f"Ray's worker on {socket.gethostname()}, with the environment of `ray start`"
            event = StoreError(f"{where}: {event}")
        self._events.put(event)

    def tell(self, message: bytes) -> None:
        if self._inbox is not None:
            self._inbox.put(pickle.loads(message))

    def events(self) -> list[Event]:
        """Return the events since the last call; waits a while for one."""
        if self._inbox is None:  # Ray has started the process again meanwhile
            return [Died("Ray lost its process")]
        events: list[Event] = []
        with suppress(queue.Empty):
            events.append(self._events.get(timeout=_POLL_SECONDS))
            while True:
                events.append(self._events.get_nowait())
        return events
