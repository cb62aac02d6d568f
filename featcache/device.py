"""The device of extraction: threads, precision, and the transfer of waveforms and
features."""

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
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import MOST_THREADS, ConfigError, require_int

Waveforms = Sequence[NDArray[np.float32]]
"""The samples of several clips, each `[num_samples]`."""

MAX_CPU_THREADS = 8
"""The most threads that are used by default on a CPU: login nodes are shared, and with
more the disk is the limit."""

BATCH_SECONDS = {"cpu": 120.0, "cuda": 320.0}
"""Seconds of audio that a worker decodes before it extracts: enough to fill blocks and
kernels, and little enough to be shared evenly among workers."""

_CUDA_SLOTS = 2
"""The number of batches on a GPU at once: one is computed while another is copied."""

_LEAST_PINNED = 1 << 20
"""Bytes of page-locked memory that are taken at least, since taking it is slow."""

_SLACK = 1.25
"""How much more page-locked memory is taken than a batch needs, since batches differ in
length."""

_ALIGNED = 16
"""The number of samples in 64 bytes, to which torch aligns its own tensors."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Parameters of `mallopt(3)`."""

_VIRTUAL_MEMORY = 102
"""`CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED` of `cuda.h`."""


def parse_device(name: str | torch.device) -> torch.device:
    """A torch device of this machine by its name: `cpu`, `cuda`, `cuda:1`, or another
    that torch knows. A ValueError says why there is none, without the name."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError("not a torch device; use cpu, cuda, or cuda:0 and so on") from error
    if device.type == "cpu" and device.index:
        raise ValueError("the CPU has no number; use cpu, or cpu,cpu for two processes")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"there is no such device; torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def extraction_device(name: str) -> torch.device:
    """A device of this machine that extractors run on, by its name. Raises ConfigError if
    there is none."""
    try:
        device = parse_device(name)
    except ValueError as error:
        raise ConfigError(f"device {name!r}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r}: extraction runs on cpu or cuda")
    return device


def on_this_device(device: torch.device) -> torch.device:
    """A device with its number: `cuda` is the current one of the thread that asks, and in
    another thread, the first."""
    if str(device) != "cuda":
        return device
    # A process that has not touched CUDA has chosen none; asking would take memory of the
    # first.
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    return torch.device("cuda", chosen)


class PinnedMemory:
    """Page-locked memory, and an event after the last copy from it."""

    def __init__(self) -> None:
        self.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits does not spin
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> torch.Tensor:
        """So many bytes, uint8, that nothing is being copied from any more."""
        self.copied.synchronize()
        if len(self._memory) < num_bytes:
            size = int(max(num_bytes, _LEAST_PINNED) * _SLACK)
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._memory[:num_bytes]


@dataclass
class _Slot:
    """What one batch at a time uses on the device."""

    stream: torch.cuda.Stream | None = None
    """The stream on a GPU; made when the slot is first taken."""
    pinned: dict[str, PinnedMemory] = field(default_factory=lambda: defaultdict(PinnedMemory))
    """The staging buffers by their use: `up` or `down`."""


class Device:
    """A torch device as the pipeline's worker threads use it.

    `configure_torch` must be called before extractors are built.

    On the CPU each worker computes by itself, with torch's own threads set to one. On a
    GPU at most `_CUDA_SLOTS` workers hold device memory at once. Each of them holds a
    slot, which has a stream and pinned staging buffers, so that copies and kernels of
    different batches overlap. Streams belong to slots and not to workers because torch
    keeps memory that was freed on a stream for that stream: with a stream for each
    worker, all would divide the GPU's memory.

    Args:
        name: The device's name: `cpu`, `cuda`, `cuda:1`. None means cuda if there is one.
        threads: The budget of threads. None means every available core, but at most
            `MAX_CPU_THREADS` on the CPU.

    Attributes:
        batch_seconds: About how many seconds of audio a worker extracts at once.
        workers: The number of worker threads to run. On a GPU it is larger than `threads`
            by the number of workers that wait for the GPU instead of decoding.
        slots: The number of workers that may be on the device at once.
        row_workers: The number of workers that compute all padded rows, and do nothing
            else; 0 if every worker does everything. On a GPU these are few, since cuDNN's
            plans and cuBLAS's workspaces belong to threads: each thread makes a plan for
            each convolution and padded length, and takes 32 MiB for each stream.

    Raises:
        ConfigError: There is no such device.
        ArgumentError: That is no number of threads.
    """

    def __init__(self, name: str | None = None, threads: int | None = None) -> None:
        self._name = name or ("cuda" if _has_gpu_driver() and torch.cuda.is_available() else "cpu")
        self.is_cuda = self._name != "cpu" and self.torch_device.type == "cuda"
        self.batch_seconds = BATCH_SECONDS["cuda" if self.is_cuda else "cpu"]
        if threads is not None:
            threads = require_int("threads", threads, 1, MOST_THREADS)
        # that this process may use, which may be fewer than the machine has
        cores = len(os.sched_getaffinity(0))
        self.threads = threads or (cores if self.is_cuda else min(cores, MAX_CPU_THREADS))
        self.workers = self.threads + (_CUDA_SLOTS if self.is_cuda else 0)
        self.slots = _CUDA_SLOTS if self.is_cuda else self.workers
        self.row_workers = _CUDA_SLOTS if self.is_cuda else 0
        self._free: LifoQueue[_Slot] = LifoQueue()
        for _ in range(self.slots):
            self._free.put(_Slot())
        self._entering = threading.Lock()
        self._own = threading.local()

    @cached_property
    def torch_device(self) -> torch.device:
        """The device for torch, with its number if it is a GPU. To know that it is the
        CPU needs no torch."""
        return on_this_device(extraction_device(self._name))

    def configure_torch(self) -> None:
        """Make torch in this process ready for extraction: one thread of its own, TF32
        off, repeatable kernels."""
        torch.set_num_threads(1)
        # fp32 means fp32, on a CPU too, where "medium" would let oneDNN round to bfloat16.
        torch.set_float32_matmul_precision("highest")
        set_tf32(Tf32(False, False, False))
        for part in _with_switch(torch.backends.mkldnn, "matmul", "conv", "rnn"):
            part.fp32_precision = "ieee"
        if self.is_cuda:
            # Otherwise cuDNN may choose kernels by trial, and cuBLAS its workspace by
            # what else runs.
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.deterministic = True
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            # Otherwise torch keeps freed memory for each shape by itself: 32 GiB for
            # EnCodec, and not 14.
            if "PYTORCH_ALLOC_CONF" not in os.environ and _has_virtual_memory():
                os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        else:
            keep_freed_memory()

    @property
    def label(self) -> str:
        """The device's name, for provenance."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    def use_nearby_cores(self) -> None:
        """Keep this thread, and those that it starts, on the cores that are next to the
        GPU, if that is known."""
        if self.is_cuda:
            found: Any = torch.cuda.get_device_properties(self.torch_device)
            if not hasattr(found, "pci_domain_id"):  # an older torch
                return
            address = (
                f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
            )
            if cores := cores_near(address) & os.sched_getaffinity(0):
                os.sched_setaffinity(0, cores)

    def is_lost(self) -> bool:
        """Whether this process can no longer use the device: some CUDA errors stay until
        the process ends."""
        with suppress(RuntimeError):
            if self.is_cuda:
                torch.cuda.synchronize(self.torch_device)
            return False
        return True

    @contextmanager
    def slot(self, alone: bool = False) -> Iterator[None]:
        """Hold a slot (all slots with `alone`) while a batch is on the device; a GPU
        works on the slot's stream."""
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
                # Extractors are built on the default stream, and other streams do not
                # wait for it by themselves.
                slot.stream.wait_stream(torch.cuda.default_stream(self.torch_device))
                with torch.cuda.device(self.torch_device), torch.cuda.stream(slot.stream):
                    yield
        finally:
            for slot in reversed(held):
                self._free.put(slot)

    def upload(self, waveforms: Waveforms, align: bool = True) -> list[torch.Tensor]:
        """Waveforms as float32 tensors `[num_samples]` on the device; on a GPU, by one
        copy from pinned memory.

        Each tensor begins at a multiple of `_ALIGNED` samples, since a vectorised sum
        that begins elsewhere rounds in another way. On a CPU, a waveform that begins
        elsewhere is copied, unless `align` is False."""
        if not self.is_cuda:
            tensors = [torch.from_numpy(waveform) for waveform in waveforms]
            return [
                tensor.clone() if align and tensor.data_ptr() % (4 * _ALIGNED) else tensor
                for tensor in tensors
            ]
        starts = np.cumsum(
            [0, *(-(-len(waveform) // _ALIGNED) * _ALIGNED for waveform in waveforms)]
        ).tolist()
        staging = self._pinned("up", starts[-1], torch.float32)
        filled = staging.numpy()
        for start, waveform in zip(starts, waveforms, strict=False):
            filled[start : start + len(waveform)] = waveform
        samples = self._sent(staging)
        return [
            samples[start : start + len(waveform)]
            for start, waveform in zip(starts, waveforms, strict=False)
        ]

    def upload_rows(
        self, waveforms: Waveforms, rows: int, padded_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Waveforms `[n]` as float32 `[rows, padded_length]` on the device, padded with
        zeros and filled up with copies of the first, and their lengths, int64
        `[rows]`."""
        filled_up = [*waveforms, *[waveforms[0]] * (rows - len(waveforms))]
        if self.is_cuda:
            staging = self._pinned("up", rows * padded_length, torch.float32).view(
                rows, padded_length
            )
        else:
            staging = torch.empty(rows, padded_length)
        for row, waveform in zip(staging.numpy(), filled_up, strict=True):
            row[: len(waveform)] = waveform
            row[len(waveform) :] = 0
        padded = self._sent(staging) if self.is_cuda else staging
        return padded, torch.tensor(
            [len(waveform) for waveform in filled_up], device=self.torch_device
        )

    def download(self, features: torch.Tensor) -> NDArray[np.generic]:
        """A contiguous tensor as a numpy array; on a GPU it is a copy, made after all
        work of the slot's stream."""
        if not self.is_cuda:
            return features.numpy()
        staging = self._pinned("down", features.numel(), features.dtype)
        staging.copy_(features.reshape(-1), non_blocking=True)
        self._own.slot.stream.synchronize()
        return staging.numpy().reshape(features.shape).copy()

    def _pinned(self, use: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for `size` elements in the slot's page-locked memory for `use`."""
        pinned: PinnedMemory = self._own.slot.pinned[use]
        return pinned.take(size * dtype.itemsize).view(dtype)

    def _sent(self, staging: torch.Tensor) -> torch.Tensor:
        """What lies in the slot's memory for `up`, on its way to the GPU."""
        sent = staging.to(self.torch_device, non_blocking=True)
        self._own.slot.pinned["up"].copied.record(self._own.slot.stream)
        return sent


def _has_gpu_driver() -> bool:
    """Whether there is a driver of NVIDIA's or AMD's, without which torch sees no GPU,
    and need not be asked."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        # the latter in Windows' Linux
        return Path("/dev/kfd").exists() or Path("/dev/dxg").exists()
    return True


def _has_virtual_memory() -> bool:
    """Whether NVIDIA's driver maps a GPU's memory piece by piece: that of some virtual
    GPUs does not, and in Windows' Linux, some fail at it
    (https://github.com/pytorch/pytorch/issues/192330)."""
    found = ctypes.c_int(0)
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDeviceGetAttribute(ctypes.byref(found), _VIRTUAL_MEMORY, 0)
    return bool(found.value) and not Path("/dev/dxg").exists()


def cores_near(pci_address: str, system: Path = Path("/sys")) -> set[int]:
    """The cores of the NUMA node that a PCI device is attached to, by `/sys`: all of them
    if none is nearer; empty if that is not known. The address is domain, bus, device and
    function, as `0000:3b:00.0`."""
    with suppress(OSError, ValueError):
        listed = (system / "bus/pci/devices" / pci_address / "local_cpulist").read_text().strip()
        ranges = [[int(end) for end in part.split("-")] for part in listed.split(",") if part]
        return {core for ends in ranges for core in range(ends[0], ends[-1] + 1)}
    return set()


class Tf32(NamedTuple):
    """What a GPU may round to ten bits before it multiplies."""

    products: bool
    """The factors of matrix products."""
    convolutions: bool
    """The inputs and weights of convolutions."""
    recurrences: bool
    """The inputs and weights of LSTMs."""


def get_tf32() -> Tf32:
    """The switches of this process."""
    if parts := _tf32_parts():
        return Tf32(*(part.fp32_precision == "tf32" for part in parts))
    in_cudnn = torch.backends.cudnn.allow_tf32
    return Tf32(torch.backends.cuda.matmul.allow_tf32, in_cudnn, in_cudnn)


def set_tf32(allowed: Tf32) -> None:
    """Set the switches of this process. Before torch 2.9, convolutions and LSTMs have one.

    The old ones come first, because torch refuses to read them once they disagree with
    the new ones. Alone they would not do: False leaves convolutions and LSTMs to
    `torch.backends.fp32_precision`, which may say TF32."""
    torch.backends.cuda.matmul.allow_tf32 = allowed.products
    torch.backends.cudnn.allow_tf32 = allowed.convolutions
    for part, is_allowed in zip(_tf32_parts(), allowed, strict=False):
        part.fp32_precision = "tf32" if is_allowed else "ieee"


def _tf32_parts() -> list[Any]:
    """What has switches of its own, in the order of `Tf32`."""
    return [
        *_with_switch(torch.backends.cuda, "matmul"),
        *_with_switch(torch.backends.cudnn, "conv", "rnn"),
    ]


def _with_switch(backend: Any, *parts: str) -> list[Any]:
    """Those parts of a backend that have a switch of their own; none before torch 2.9."""
    found = (getattr(backend, part, None) for part in parts)
    return [part for part in found if hasattr(part, "fp32_precision")]


def keep_freed_memory() -> None:
    """Let glibc's malloc keep freed memory and reuse it; other allocators are left as
    they are.

    Otherwise malloc returns large blocks to the kernel at once, and every intermediate
    result of a model causes page faults again: EnCodec on rows of 8 s spent half its time
    on them."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_ARENA_MAX, 1)  # the arena of a thread could not hold blocks above 64 MB
