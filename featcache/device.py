"""The device of extraction: threads, precision, and the transfer of waveforms and features."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import LifoQueue

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import ConfigError

MAX_CPU_THREADS = 8
"""The default on a CPU stops here: a login node is shared, and beyond it the disk is the limit."""

BATCH_SECONDS = {"cpu": 120.0, "cuda": 320.0}
"""Audio that a worker decodes before it extracts: enough to fill blocks, and kernels; little enough to share out."""

_CUDA_SLOTS = 2
"""Batches on a GPU at once: one computes while another is copied."""

_ALIGNED = 16
"""Samples; 64 bytes, which is what torch aligns its own tensors to."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Of `mallopt(3)`."""


def available_threads() -> int:
    """The cores that this process may use: its affinity, not the machine's count."""
    return len(os.sched_getaffinity(0))


@dataclass
class _Slot:
    """A place on the device: what one batch at a time has there.

    Attributes:
        stream: of a GPU; made when the slot is first taken.
        pinned: staging buffers, uint8, by what they are used for.
    """

    stream: torch.cuda.Stream | None = None
    pinned: dict[str, torch.Tensor] = field(default_factory=dict)


class Device:
    """A torch device as the pipeline's worker threads use it.

    On the CPU each worker computes by itself, with torch's own threads set to one (see `configure_torch`, which must be
    called before extractors are built). On a GPU at most `_CUDA_SLOTS` of them hold device memory at once, each in a
    slot that has a stream and pinned staging buffers, so that copies and kernels of different batches overlap. They are
    the slots' and not the workers', since torch keeps what was freed on a stream for that stream: with one for each
    worker, a GPU's memory would be shared out among all of them.

    Args:
        name: `cpu`, `cuda`, `cuda:1`; None is cuda where there is one.
        threads: the budget; None is every available core, at most `MAX_CPU_THREADS` of them on the CPU.

    Attributes:
        torch_device: the device.
        threads: the budget.
        batch_seconds: of audio that a worker extracts at once, about.
        workers: worker threads to run. On a GPU as many more as wait on it instead of decoding.
        slots: how many of them may be on the device at once.

    Raises:
        ConfigError: there is no such device.
    """

    def __init__(self, name: str | None = None, threads: int | None = None) -> None:
        try:
            device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            raise ConfigError(f"device {name!r}: not a torch device; use cpu, cuda, or cuda:0 and so on") from error
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device {name!r}: extraction runs on cpu or cuda")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device {name!r}: there is no such device; torch sees {torch.cuda.device_count()} CUDA devices"
            )
        self.torch_device = device
        self.is_cuda = device.type == "cuda"
        self.batch_seconds = BATCH_SECONDS[device.type]
        self.threads = threads or min(available_threads(), 1 << 16 if self.is_cuda else MAX_CPU_THREADS)
        self.workers = self.threads + (_CUDA_SLOTS if self.is_cuda else 0)
        self.slots = _CUDA_SLOTS if self.is_cuda else self.workers
        self._free: LifoQueue[_Slot] = LifoQueue()
        for _ in range(self.slots):
            self._free.put(_Slot())
        self._entering = threading.Lock()
        self._own = threading.local()

    def configure_torch(self) -> None:
        """Make torch in this process ready for extraction: one thread of its own, TF32 off, repeatable kernels."""
        torch.set_num_threads(1)
        # fp32 means fp32: TF32 rounds to ten bits, and matrix products and convolutions have a switch each.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if self.is_cuda:
            # cuDNN may otherwise choose kernels by trial, and cuBLAS's workspace by what else runs.
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.deterministic = True
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        else:
            keep_freed_memory()

    @property
    def label(self) -> str:
        """The device's name, for provenance."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    @contextmanager
    def slot(self, alone: bool = False) -> Iterator[None]:
        """Hold a slot while a batch is on the device, or all of them; a GPU's work in it goes to the slot's stream."""
        with self._entering:  # one by one, or two that want all of them would get half each
            held = [self._free.get() for _ in range(self.slots if alone else 1)]
        self._own.slot = slot = held[0]
        try:
            with torch.inference_mode():
                if not self.is_cuda:
                    yield
                    return
                if slot.stream is None:
                    slot.stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
                # Extractors are built on the default stream, which others do not wait for by themselves.
                slot.stream.wait_stream(torch.cuda.default_stream(self.torch_device))
                with torch.cuda.device(self.torch_device), torch.cuda.stream(slot.stream):
                    yield
        finally:
            for one in reversed(held):
                self._free.put(one)

    def upload(self, waveforms: Sequence[NDArray[np.float32]], align: bool = True) -> list[torch.Tensor]:
        """Waveforms as float32 tensors `[num_samples]` on the device; on a GPU, by one copy from pinned memory.

        Each begins at a multiple of `_ALIGNED` samples: a vectorised sum that begins elsewhere rounds in another way.
        On a CPU what does not is copied, unless it is not to be aligned.
        """
        if not self.is_cuda:
            tensors = [torch.from_numpy(waveform) for waveform in waveforms]
            return [one.clone() if align and one.data_ptr() % (4 * _ALIGNED) else one for one in tensors]
        starts = np.cumsum([0, *(-(-len(waveform) // _ALIGNED) * _ALIGNED for waveform in waveforms)]).tolist()
        staging = self._pinned("up", starts[-1], torch.float32)
        filled = staging.numpy()
        for start, waveform in zip(starts, waveforms, strict=False):
            filled[start : start + len(waveform)] = waveform
        samples = staging.to(self.torch_device, non_blocking=True)
        return [samples[start : start + len(one)] for start, one in zip(starts, waveforms, strict=False)]

    def upload_rows(
        self, waveforms: Sequence[NDArray[np.float32]], rows: int, padded_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Waveforms `[n]` as float32 `[rows, padded_length]` on the device, and int64 `[rows]`, their lengths.

        What is missing in a row is zero; rows that are missing are copies of the first.
        """
        lengths = [len(waveform) for waveform in waveforms] + [len(waveforms[0])] * (rows - len(waveforms))
        if self.is_cuda:
            staging = self._pinned("up", rows * padded_length, torch.float32).view(rows, padded_length)
        else:
            staging = torch.empty(rows, padded_length)
        filled = staging.numpy()
        for row, length in enumerate(lengths):
            filled[row, :length] = waveforms[row if row < len(waveforms) else 0]
            filled[row, length:] = 0
        return staging.to(self.torch_device, non_blocking=True), torch.tensor(lengths, device=self.torch_device)

    def download(self, features: torch.Tensor) -> NDArray[np.generic]:
        """A contiguous tensor as a numpy array of its own; on a GPU, waits for all the slot's work on it."""
        if not self.is_cuda:
            return features.numpy()
        staging = self._pinned("down", features.numel(), features.dtype)
        staging.copy_(features.reshape(-1), non_blocking=True)
        self._own.slot.stream.synchronize()
        return staging.numpy().reshape(features.shape).copy()

    def _pinned(self, use: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """The first `size` elements of the slot's pinned buffer for `use`, grown where it is too small.

        Reused without waiting: `download` has waited for everything before it. Where a batch came to grief before that,
        its copy to the device may still be under way; then it copies what nobody will look at, to where no later work
        of the stream writes before it is done.
        """
        num_bytes = size * dtype.itemsize
        pinned: dict[str, torch.Tensor] = self._own.slot.pinned
        if use not in pinned or len(pinned[use]) < num_bytes:
            pinned[use] = torch.empty(max(num_bytes, 1 << 22) * 5 // 4, dtype=torch.uint8, pin_memory=True)
        return pinned[use][:num_bytes].view(dtype)


def keep_freed_memory() -> None:
    """Have malloc keep what is freed, and take it again, where it is glibc's.

    It gives large blocks back to the kernel at once otherwise, and every intermediate result of a model is page-faulted
    in anew: EnCodec on rows of 8 s took half its time there.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_ARENA_MAX, 1)  # a thread's own arena would hold no block above 64 MB
