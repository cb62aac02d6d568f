"""Runs shard tasks on a Ray cluster: an actor for each GPU, or for so many cores.

Ray starts actors, and starts them again when they die; what they do, and what their
deaths mean, is decided here as for the processes of one machine. An actor's events are
fetched by one call after another, each of which waits for some: Ray Client has no
streams."""

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
from featcache.errors import ArgumentError, ExtractorError, MissingDependencyError
from featcache.extraction.jobs import Engine, JobGroup, RunControl
from featcache.extraction.options import RAY, Options
from featcache.extraction.tasks import ShardTask

_POLL_SECONDS = 1.0
_SECONDS_BETWEEN_TRIES = 1.0
_TRIES = 60
"""How often an actor that cannot be reached is tried before it counts as dead."""

_HOW_ACTORS_LIVE = {"max_restarts": -1, "max_task_retries": 0, "max_concurrency": 4}
"""Ray starts a dead actor again, without its calls; of several at once, one awaits
events, others tell it something."""

_DRAINED = 3
"""What Ray's `NodeDeathInfo` has as the reason if a node was preempted."""


def on_ray(name: str, options: Options) -> Engine:
    """An engine that runs on Ray.

    The name `ray` is for the cluster that this process is connected to, that
    `RAY_ADDRESS` names, or that this machine is in; if there is none, one is started, and
    ended after the run. `ray://host:port` is for Ray Client. Raises ArgumentError if the
    device is not one that Ray chooses; MissingDependencyError if Ray is not installed."""
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
    """Be connected to a cluster."""
    import ray

    if ray.is_initialized():  # by whoever calls this
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # else 15, in a cluster that is started here
    os.environ.setdefault("RAY_worker_niceness", "0")
    is_main = threading.current_thread() is threading.main_thread()
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if is_main
    }
    try:
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        where = address or os.environ.get("RAY_ADDRESS") or "on this machine"
        raise ArgumentError(f"engine ray: no cluster {where}: {str(error).strip()}") from error
    # Ray has a handler of its own for SIGTERM, which ends the process
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
    """How many actors there are on a cluster, and the device and the threads of each: an
    actor for each GPU if there are any; otherwise for every so many cores.

    `nodes` are each node's resources as Ray counts; `device` may forbid or ask for GPUs;
    `threads` is per actor."""
    gpus = [node for node in nodes if node.get("GPU", 0) >= 1]
    if device == "cuda" and not gpus:
        raise ArgumentError("device 'cuda': the Ray cluster has no GPU")
    if gpus and device != "cpu":
        each = threads or max(1, min(int(node.get("CPU", 0) // node["GPU"]) for node in gpus))
        return sum(int(node["GPU"]) for node in gpus), "cuda", each
    cores = [int(node.get("CPU", 0)) for node in nodes]
    each = threads or max(1, min(MAX_CPU_THREADS, max(cores, default=1)))
    if not (actors := sum(count // each for count in cores)):
        raise ArgumentError(f"engine ray: no node of the cluster has {each} cores: fewer --threads")
    return actors, "cpu", each


class _Actors:
    """A team of actors."""

    def __init__(self, options: Options) -> None:
        import ray

        self._ray = ray
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        actors, self._device, self._threads = actors_on(nodes, options.device, options.threads)
        self.names: Sequence[str] = [f"actor {number + 1}" for number in range(actors)]
        self._actors: dict[int, Any] = {}
        self._setup = b""  # the same for all
        self._waiting: dict[Any, int] = {}  # by the call that waits
        self._again: dict[int, float] = {}  # when to try `begin` again
        self._tries: dict[int, int] = {}
        # of those that have begun: the call of another that waits is `begin`
        self._nodes: dict[int, str] = {}

    def start(self, worker: int, setup: WorkerSetup) -> None:
        """Have Ray start an actor, if it does not do so by itself, and send the setup."""
        if worker not in self._actors:
            needs = {"num_cpus": self._threads, "num_gpus": 1 if self._device == "cuda" else 0}
            self._actors[worker] = self._ray.remote(**needs, **_HOW_ACTORS_LIVE)(_Actor).remote()
        self._setup = pickle.dumps(setup.on(self._device, self._threads))
        self._tries[worker] = 0
        self._begin(worker)

    def send(self, worker: int, message: Message) -> None:
        """Tell an actor something; if it has died, the call that waits tells."""
        if worker in self._nodes:
            self._actors[worker].tell.remote(pickle.dumps(message))

    def wait(self, seconds: float) -> list[tuple[int, Event]]:
        for worker in [worker for worker, at in self._again.items() if monotonic() >= at]:
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
        """What a call has brought; then waits for more."""
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
        if is_beginning:
            self._nodes[worker] = answer
        if is_beginning or not any(isinstance(event, Died) for event in answer):
            self._waiting[self._actors[worker].events.remote()] = worker
        return [] if is_beginning else answer

    def _died(self, worker: int, preempted: bool) -> Died:
        """How an actor died, and whether that may be the fault of what it worked on."""
        how, node = "Ray lost its process", self._nodes.pop(worker, None)
        found = next((one for one in self._ray.nodes() if one["NodeID"] == node), None)
        if found is not None and not found["Alive"]:
            how = "its node is gone"
            preempted = preempted or found.get("DeathReason") == _DRAINED
        with suppress(Exception):  # Ray has no public word for it; Ray Client has none at all
            preempted = preempted or node in self._ray._private.state.state.get_draining_nodes()
        return Died("its node was preempted" if preempted else how, counts=not preempted)


class _Actor:
    """A worker, as Ray runs it; its methods are called from several threads."""

    def __init__(self) -> None:
        self._inbox: Inbox | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def begin(self, path: list[str], niceness: int, setup: bytes) -> str:
        """Begin to work, with the modules that are found on this path. Returns the id of
        the node.

        `niceness` is that of the process that planned."""
        import ray

        # the driver has lost sight of this process, and has given its tasks to others
        if self._inbox is not None:
            end_process()
        sys.path += [folder for folder in path if folder not in sys.path]
        faulthandler.disable()  # Ray's; the run's own tells a crash from a kill
        if (own := os.nice(0)) > niceness:
            self._events.put(
                f"{socket.gethostname()}: Ray works at nice {own}: start it with "
                "RAY_worker_niceness=0"
            )
        self._inbox = Inbox()
        threading.Thread(
            target=work, args=[pickle.loads(setup), self._inbox, self._events.put], daemon=True
        ).start()
        return str(ray.get_runtime_context().get_node_id())

    def tell(self, message: bytes) -> None:
        if self._inbox is not None:
            self._inbox.put(pickle.loads(message))

    def events(self) -> list[Event]:
        """What has happened since the last call; waits a while for something."""
        if self._inbox is None:  # Ray has started the process again meanwhile
            return [Died("Ray lost its process")]
        events: list[Event] = []
        with suppress(queue.Empty):
            events.append(self._events.get(timeout=_POLL_SECONDS))
            while True:
                events.append(self._events.get_nowait())
        return events
