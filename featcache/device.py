"""The device of extraction: threads, precision, and transfers of waveforms and features."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import MOST_THREADS, ConfigError, require_int

if TYPE_CHECKING:
    from torch import Tensor

Waveforms = Sequence[NDArray[np.float32]]
"""Samples of several clips, each `[num_samples]`."""

MAX_CPU_THREADS = 8
"""The most threads used by default: login nodes are shared, and disks have limits."""

BATCH_SECONDS = {"cpu": 120.0, "cuda": 320.0}
"""Seconds of audio that a worker decodes before it extracts: enough to fill kernels, and
little enough to be shared evenly."""

_CUDA_SLOTS = 2

_LEAST_PINNED = 1 << 20

_SLACK = 1.25

_ALIGNED = 16
"""The number of samples to which torch aligns its own tensors, by 64 bytes."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_VIRTUAL_MEMORY = 102
"""`CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED` of `cuda.h`."""


def parse_device(name: str | torch.device) -> torch.device:
    """Return a torch device of this machine. Raises a ValueError that does not repeat the
    name."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        what = "not a torch device; use cpu, cuda, or cuda:0 and so on"
        raise ValueError(what) from error
    if device.type == "cpu" and device.index:
        raise ValueError("the CPU has no number; use cpu, or cpu,cpu for two processes")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"there is no such device; torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def extraction_device(name: str) -> torch.device:
    """Return a device that extractors run on. Raises ConfigError if there is none."""
    try:
        device = parse_device(name)
    except ValueError as error:
        raise ConfigError(f"device {name!r}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r}: extraction runs on cpu or cuda")
    return device


def on_this_device(device: torch.device) -> torch.device:
    """Return a device with its number: `cuda` is the current one of the calling thread."""
    if str(device) != "cuda":
        return device
    # Without CUDA's context no device was chosen, and asking would take memory of the first.
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    return torch.device("cuda", chosen)


class PinnedMemory:
    """Page-locked memory, and an event after the last copy from it."""

    def __init__(self) -> None:
        # waiting for a blocking event does not spin
        self.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> Tensor:
        """Return so many bytes, uint8, from which nothing is being copied."""
        self.copied.synchronize()
        if len(self._memory) < num_bytes:
            size = int(max(num_bytes, _LEAST_PINNED) * _SLACK)
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._memory[:num_bytes]


@dataclass
class _Slot:
    """The stream, on a GPU, and the staging buffers, by `up` and `down`, of one batch at a
    time."""

    stream: torch.cuda.Stream | None = None
    pinned: dict[str, PinnedMemory] = field(default_factory=lambda: defaultdict(PinnedMemory))


class Device:
    """A torch device as the pipeline's worker threads use it.

    On the CPU each worker computes by itself, with torch's own threads set to one. On a GPU
    each worker that holds device memory has a slot, with a stream and pinned staging
    buffers, so that copies and kernels of different batches overlap. Slots are few, because
    torch keeps memory that was freed on a stream for that stream.

    Args:
        name: The device's name: `cpu`, `cuda`, `cuda:1`. None means cuda if there is one.
        threads: The budget of threads. None means every available core, but at most
            `MAX_CPU_THREADS` on the CPU.

    Attributes:
        batch_seconds: About how many seconds of audio a worker extracts at once.
        workers: The number of worker threads, with those that wait for a GPU.
        slots: The number of workers that may be on the device at once.
        row_workers: The number of workers that only compute padded rows; 0 if every worker
            does everything. On a GPU these are few, since each thread makes its own plans.

    Raises ConfigError if there is no such device; ArgumentError for odd `threads`."""

    def __init__(self, name: str | None = None, threads: int | None = None) -> None:
        if not name:
            name = "cuda" if _has_gpu_driver() and torch.cuda.is_available() else "cpu"
        self._name = name
        self.is_cuda = name != "cpu" and self.torch_device.type == "cuda"
        if threads is not None:
            threads = require_int("threads", threads, 1, MOST_THREADS)
        self.threads = threads or len(os.sched_getaffinity(0))
        if self.is_cuda:
            self.slots = self.row_workers = _CUDA_SLOTS
        else:
            self.threads = threads or min(self.threads, MAX_CPU_THREADS)
            self.slots, self.row_workers = self.threads, 0
        self.workers = self.threads + self.row_workers
        self.batch_seconds = BATCH_SECONDS["cuda" if self.is_cuda else "cpu"]
        self._free: LifoQueue[_Slot] = LifoQueue()
        for _ in range(self.slots):
            self._free.put(_Slot())
        self._entering = threading.Lock()
        self._own = threading.local()

    @cached_property
    def torch_device(self) -> torch.device:
        """The torch device, with its number if it is a GPU."""
        return on_this_device(extraction_device(self._name))

    def configure_torch(self) -> None:
        """Make torch in this process ready for extraction, before extractors are built."""
        torch.set_num_threads(1)
        # fp32 means fp32, on a CPU too, where "medium" would let oneDNN round to bfloat16.
        torch.set_float32_matmul_precision("highest")
        set_tf32(Tf32(False, False, False))
        for part in _with_switch(torch.backends.mkldnn, "matmul", "conv", "rnn"):
            part.fp32_precision = "ieee"
        if self.is_cuda:
            # otherwise cuDNN chooses kernels by trial, and cuBLAS a workspace by what else runs
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.deterministic = True
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            # otherwise torch keeps freed memory for each shape: 32 GiB for EnCodec, not 14
            if "PYTORCH_ALLOC_CONF" not in os.environ and _has_virtual_memory():
                os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        else:
            keep_freed_memory()

    @property
    def label(self) -> str:
        """The device's name, for provenance."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    def use_nearby_cores(self) -> None:
        """Keep this thread, and those that it starts, on the cores next to the GPU."""
        if not self.is_cuda:
            return
        gpu: Any = torch.cuda.get_device_properties(self.torch_device)
        if not hasattr(gpu, "pci_domain_id"):  # an older torch
            return
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        cores = cores_near(address) & os.sched_getaffinity(0)
        if cores:
            os.sched_setaffinity(0, cores)

    def is_lost(self) -> bool:
        """Tell whether this process can no longer use the device, as after some CUDA errors."""
        with suppress(RuntimeError):
            if self.is_cuda:
                torch.cuda.synchronize(self.torch_device)
            return False
        return True

    @contextmanager
    def slot(self, alone: bool = False) -> Iterator[None]:
        """Hold a slot (all slots with `alone`) while a batch is on the device; a GPU works
        on the slot's stream."""
        # one worker at a time, or two that want all slots would get half of them each
        with self._entering:
            held = [self._free.get() for _ in range(self.slots if alone else 1)]
        self._own.slot = slot = held[0]
        try:
            with torch.inference_mode():
                if not self.is_cuda:
                    yield
                    return
                if slot.stream is None:
                    slot.stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
                # extractors are built on the default stream
                slot.stream.wait_stream(torch.cuda.default_stream(self.torch_device))
                with torch.cuda.device(self.torch_device), torch.cuda.stream(slot.stream):
                    yield
        finally:
            for slot in reversed(held):
                self._free.put(slot)

    def upload(self, waveforms: Waveforms, align: bool = True) -> list[Tensor]:
        """Move waveforms to float32 tensors `[num_samples]` on the device; to a GPU, by one
        copy from pinned memory. Each begins at a multiple of `_ALIGNED` samples: a
        vectorised sum that begins elsewhere rounds in another way. With `align` False, a
        CPU copies nothing."""
        if not self.is_cuda:
            tensors = map(torch.from_numpy, waveforms)
            step = 4 * _ALIGNED if align else 1
            return [x.clone() if x.data_ptr() % step else x for x in tensors]
        sizes = [-(-len(waveform) // _ALIGNED) * _ALIGNED for waveform in waveforms]
        staging = self._staging("up", sum(sizes), torch.float32)
        for part, waveform in zip(staging.split_with_sizes(sizes), waveforms, strict=True):
            part.numpy()[: len(waveform)] = waveform
        parts = zip(self._sent(staging).split_with_sizes(sizes), waveforms, strict=True)
        return [part[: len(waveform)] for part, waveform in parts]

    def upload_rows(
        self, waveforms: Waveforms, rows: int, padded_length: int
    ) -> tuple[Tensor, Tensor]:
        """Move waveforms `[n]` to float32 `[rows, padded_length]` on the device, padded
        with zeros and filled up with copies of the first. Returns also their lengths, int64
        `[rows]`."""
        staging = self._staging("up", rows * padded_length, torch.float32)
        staging = staging.view(rows, padded_length)
        lengths = fill_rows(staging.numpy(), waveforms)
        return self._sent(staging), torch.tensor(lengths, device=self.torch_device)

    def download(self, features: Tensor) -> NDArray[np.generic]:
        """Return a contiguous tensor as a numpy array; from a GPU a copy, made after all
        work of the slot's stream."""
        if not self.is_cuda:
            return features.numpy()
        staging = self._staging("down", features.numel(), features.dtype)
        staging.copy_(features.reshape(-1), non_blocking=True)
        self._own.slot.stream.synchronize()
        return staging.numpy().reshape(features.shape).copy()

    def _staging(self, use: str, size: int, dtype: torch.dtype) -> Tensor:
        """Return `size` elements of the CPU's memory; for a GPU, page-locked."""
        if not self.is_cuda:
            return torch.empty(size, dtype=dtype)
        pinned: PinnedMemory = self._own.slot.pinned[use]
        return pinned.take(size * dtype.itemsize).view(dtype)

    def _sent(self, staging: Tensor) -> Tensor:
        if not self.is_cuda:
            return staging
        sent = staging.to(self.torch_device, non_blocking=True)
        self._own.slot.pinned["up"].copied.record(self._own.slot.stream)
        return sent


def fill_rows(rows: Any, waveforms: Sequence[Any]) -> list[int]:
    """Copy waveforms `[n]` into rows `[R, P]`, with zeros after each, and copies of the first
    in the other rows. Returns the length of each row. All are arrays, or all tensors."""
    filled_up = [*waveforms, *[waveforms[0]] * (len(rows) - len(waveforms))]
    for row, waveform in zip(rows, filled_up, strict=True):
        row[: len(waveform)] = waveform
        row[len(waveform) :] = 0
    return [len(waveform) for waveform in filled_up]


def _has_gpu_driver() -> bool:
    """Tell whether there is a driver, without which torch sees no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists() or Path("/dev/dxg").exists()  # AMD; Windows' Linux
    return True


def _has_virtual_memory() -> bool:
    """Tell whether NVIDIA's driver maps a GPU's memory piece by piece. In Windows' Linux,
    some fail at it (https://github.com/pytorch/pytorch/issues/192330)."""
    is_supported = ctypes.c_int(0)
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDeviceGetAttribute(ctypes.byref(is_supported), _VIRTUAL_MEMORY, 0)
    return bool(is_supported.value) and not Path("/dev/dxg").exists()


def cores_near(pci_address: str, system: Path = Path("/sys")) -> set[int]:
    """Return the cores of the NUMA node of a PCI device, such as `0000:3b:00.0`: all if
    none is nearer; none if unknown."""
    cores: set[int] = set()
    with suppress(OSError, ValueError):
        listed = (system / "bus/pci/devices" / pci_address / "local_cpulist").read_text().strip()
        for part in filter(None, listed.split(",")):
            first, _, last = part.partition("-")
            cores |= {*range(int(first), int(last or first) + 1)}
        return cores
    return set()


class Tf32(NamedTuple):
    """The operations in which a GPU may round to ten bits: products of matrices,
    convolutions, and LSTMs."""

    products: bool
    convolutions: bool
    recurrences: bool


def get_tf32() -> Tf32:
    """Return the switches of this process."""
    parts = _tf32_parts()
    if parts:
        return Tf32(*(part.fp32_precision == "tf32" for part in parts))
    in_cudnn = torch.backends.cudnn.allow_tf32
    return Tf32(torch.backends.cuda.matmul.allow_tf32, in_cudnn, in_cudnn)


def set_tf32(allowed: Tf32) -> None:
    """Set the switches of this process.

    The old switches, the only ones before torch 2.9, come first, because torch refuses to
    read them once they disagree with the new ones."""
    torch.backends.cuda.matmul.allow_tf32 = allowed.products
    torch.backends.cudnn.allow_tf32 = allowed.convolutions
    for part, is_allowed in zip(_tf32_parts(), allowed, strict=False):
        part.fp32_precision = "tf32" if is_allowed else "ieee"


def _tf32_parts() -> list[Any]:
    return [
        *_with_switch(torch.backends.cuda, "matmul"),
        *_with_switch(torch.backends.cudnn, "conv", "rnn"),
    ]


def _with_switch(backend: Any, *names: str) -> list[Any]:
    """List those parts of a backend that have a switch; none before torch 2.9."""
    parts = [getattr(backend, name, None) for name in names]
    return [part for part in parts if hasattr(part, "fp32_precision")]


def keep_freed_memory() -> None:
    """Let glibc's malloc reuse freed memory, instead of returning large blocks to the
    kernel."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_ARENA_MAX, 1)  # a thread's own arena could not hold blocks above 64 MB
