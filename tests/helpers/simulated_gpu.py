"""A GPU that is none: CUDA's code paths run on the CPU, and every access to memory that
nothing orders is a fault.

Tensors "on" the GPU are in CPU memory and are computed at once, so values are always
right. What is simulated is order: each stream, and the host, is a line of time with a
vector clock (Lamport's happened-before); launches, events, waits and synchronisations
pass clocks on, as in CUDA. Two accesses of which one writes, on different lines, must be
ordered. Memory that is given back while a stream may still use it is a fault, too, unless
that stream was recorded. So a missing wait is found however fast anything is. The host's
threads are one line: what one has waited for is over for all.

Operations are seen by a mode of torch functions, which is per thread: a thread is watched
while it works on a stream (`torch.cuda.stream`), and the thread of the test always."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from featcache.device import PinnedMemory

CUDA = torch.device("cuda", 0)
Clock = dict[str, int]
Access = tuple[str, int]
"""A line, and its time there."""

_HOST_READS = {
    "cpu",
    "numpy",
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "equal",
    "nonzero",
}
_HOST = "the host"


@dataclass
class _Memory:
    """What is known of a storage."""

    owner: str
    """The stream that it was taken on; the host, if it is page-locked."""
    there: StorageWeakRef
    written: Access | None = None
    read: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


class SimulatedGpu:
    """The state of a simulated GPU: in `faults`, what was not ordered, and how many
    operations were watched."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.launched = 0
        self.clocks: dict[str, Clock] = defaultdict(dict)
        self._memories: dict[int, _Memory] = {}
        self._lock = threading.RLock()
        self._own = threading.local()
        self._streams = 0
        self.default = self.stream()

    def stream(self, device: object = None) -> Stream:
        self._streams += 1
        return Stream(self, f"stream {self._streams - 1}")

    @property
    def current(self) -> Stream:
        """The stream of this thread."""
        return getattr(self._own, "stream", self.default)

    @contextmanager
    def working_on(self, stream: Stream) -> Iterator[None]:
        before, self._own.stream = self.current, stream
        try:
            with nullcontext() if getattr(self._own, "is_watched", False) else self.watched():
                yield
        finally:
            self._own.stream = before

    @contextmanager
    def watched(self) -> Iterator[None]:
        self._own.is_watched = True
        try:
            with _Watch(self):
                yield
        finally:
            self._own.is_watched = False

    def join(self, line: str, other: Clock) -> None:
        """What the other clock has seen comes before what follows on a line."""
        with self._lock:
            clock = self.clocks[line]
            for name, time in other.items():
                clock[name] = max(clock.get(name, 0), time)

    def memory(self, tensor: Any) -> _Memory | None:
        found = (
            self._memories.get(tensor.untyped_storage()._cdata)
            if isinstance(tensor, torch.Tensor)
            else None
        )
        return None if found is None or found.there.expired() else found

    def on_gpu(self, tensor: Any) -> bool:
        found = self.memory(tensor)
        return found is not None and found.owner != _HOST

    def take(self, tensor: torch.Tensor, pinned: bool = False) -> torch.Tensor:
        """Count a tensor's memory as the GPU's, taken on the current stream; or as
        page-locked."""
        storage = tensor.untyped_storage()
        with self._lock:
            owner = _HOST if pinned else self.current.name
            self._memories[storage._cdata] = _Memory(owner, StorageWeakRef(storage))
        return tensor

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """As `Tensor.record_stream`."""
        found = self.memory(tensor)
        assert found is not None
        found.recorded.add(stream.name)

    def launch(self, what: str, reads: list[Any], writes: list[Any]) -> None:
        """An operation on the current stream."""
        with self._lock:
            self._give_back()
            self.launched += 1
            self.join(self.current.name, self.clocks[_HOST])
            self.access(self.current.name, what, reads, writes)

    def access(
        self, line: str, what: str, reads: Sequence[Any] = (), writes: Sequence[Any] = ()
    ) -> None:
        """A line reads and writes memory."""
        with self._lock:
            clock = self.clocks[line]
            clock[line] = clock.get(line, 0) + 1
            now = line, clock[line]
            for found in filter(None, map(self.memory, reads)):
                self._require_over(clock, [found.written], f"{what} on {line} reads")
                found.read.append(now)
            for found in filter(None, map(self.memory, writes)):
                self._require_over(clock, [found.written, *found.read], f"{what} on {line} writes")
                found.written, found.read = now, []

    def _require_over(self, clock: Clock, accesses: Sequence[Access | None], what: str) -> None:
        for line, time in filter(None, accesses):
            if clock.get(line, 0) < time:
                self.faults.append(f"{what} what {line} may still be using")

    def _give_back(self) -> None:
        """Memory that nobody has any more goes to later work of the stream that it was
        taken on."""
        for key, found in list(self._memories.items()):
            if found.there.expired():
                del self._memories[key]
                clocks = [self.clocks[found.owner], self.clocks[_HOST]]
                for line, time in filter(None, [found.written, *found.read]):
                    is_over = found.owner == _HOST or line in found.recorded
                    if not (is_over or any(clock.get(line, 0) >= time for clock in clocks)):
                        self.faults.append(
                            f"memory of {found.owner} was given back while {line} may use it"
                        )


@dataclass(eq=False)
class Stream:
    """As `torch.cuda.Stream`."""

    gpu: SimulatedGpu
    name: str

    def synchronize(self) -> None:
        self.gpu.join(_HOST, self.gpu.clocks[self.name])

    def wait_stream(self, other: Stream) -> None:
        self.gpu.join(self.name, self.gpu.clocks[other.name])

    def wait_event(self, event: Event) -> None:
        self.gpu.join(self.name, event.clock)

    def record_event(self) -> Event:
        event = Event(self.gpu)
        event.record(self)
        return event


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, gpu: SimulatedGpu, blocking: bool = False) -> None:
        self.gpu, self.clock = gpu, Clock()

    def record(self, stream: Stream) -> None:
        with self.gpu._lock:
            self.clock = dict(self.gpu.clocks[stream.name])

    def synchronize(self) -> None:
        self.gpu.join(_HOST, self.clock)


class _Watch(TorchFunctionMode):
    """Carries out functions of torch, and tells the GPU what they read and write."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs, name = self._gpu, dict(kwargs or {}), getattr(func, "__name__", "")
        if func is torch.device:
            return func(*args, **kwargs)
        if name == "__get__" and args and isinstance(args[0], torch.Tensor) and gpu.on_gpu(args[0]):
            owner = func.__self__
            if owner is torch.Tensor.is_cuda:
                return True
            if owner is torch.Tensor.device:
                return CUDA
        asked = {
            torch.device(value).type for value in (*args, *kwargs.values()) if _is_device(value)
        }
        to_cpu, to_gpu = "cpu" in asked, "cuda" in asked
        args = tuple(torch.device("cpu") if _is_device(value) else value for value in args)
        kwargs = {
            key: torch.device("cpu") if _is_device(value) else value
            for key, value in kwargs.items()
        }
        is_pinned = kwargs.pop("pin_memory", False) or name == "pin_memory"
        given = list(_tensors((args, kwargs)))
        result = args[0].clone() if name == "pin_memory" else func(*args, **kwargs)
        if is_pinned:
            gpu.take(result, pinned=True)
            gpu.access(_HOST, name, writes=[result])
            return result
        to_host = name in _HOST_READS or (name == "to" and to_cpu)
        if not (to_gpu or any(map(gpu.on_gpu, given))):
            if name in _HOST_READS and any(map(gpu.memory, given)):
                gpu.access(_HOST, name, reads=given)
            return result
        if to_host:
            gpu.launch(name, given, [])
            gpu.current.synchronize()
            return result.clone() if isinstance(result, torch.Tensor) else result
        if to_gpu and name == "to" and not gpu.on_gpu(args[0]):
            result = result.clone()
        made = list(_tensors(result))
        new = [tensor for tensor in made if gpu.memory(tensor) is None]
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name in (
            "__setitem__",
            "__set__",
        )
        is_in_place = (
            is_in_place
            or (name.startswith("__i") and name not in ("__invert__",))
            or "out" in kwargs
        )
        if not (new or is_in_place):  # a view
            return result
        changed = [kwargs["out"]] if "out" in kwargs else [args[0]] if is_in_place else []
        for tensor in new:
            gpu.take(tensor)
        read = [tensor for tensor in given if not any(tensor is each for each in changed)]
        gpu.launch(name, read, [*new, *_tensors(changed)])
        if (
            to_gpu
            and not kwargs.get("non_blocking")
            and any(gpu.memory(tensor) is None for tensor in given)
        ):
            gpu.current.synchronize()  # from memory that is not page-locked
        return result


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device | str) and str(value).partition(":")[0] in ("cpu", "cuda")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """In the block, `torch.cuda` is a simulated GPU, `cuda:0`."""
    gpu = SimulatedGpu()
    stands_in: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "a simulated GPU",
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: None,
        "synchronize": lambda device=None: [
            gpu.join(_HOST, clock) for clock in [*gpu.clocks.values()]
        ],
        "Stream": gpu.stream,
        "Event": partial(Event, gpu),
        "current_stream": lambda device=None: gpu.current,
        "default_stream": lambda device=None: gpu.default,
        "device": lambda device: nullcontext(),
        "stream": gpu.working_on,
    }
    empty = torch.empty

    def without_mode(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        """Page-locked memory may be taken where nobody watches."""
        made = empty(*args, **options)
        return gpu.take(made, pinned=True) if pin_memory else made

    take = PinnedMemory.take

    def handed_out(memory: PinnedMemory, num_bytes: int) -> torch.Tensor:
        """The host writes what it is given."""
        found = take(memory, num_bytes)
        if gpu.memory(found) is not None:  # nothing is taken for nothing
            gpu.access(_HOST, "filling it", writes=[found])
        return found

    with (
        patch.multiple(torch.cuda, **stands_in),
        patch.object(torch, "empty", without_mode),
        patch.object(torch.Tensor, "record_stream", lambda *given: gpu.record(*given)),
        patch.object(PinnedMemory, "take", handed_out),
        gpu.watched(),
    ):
        yield gpu
