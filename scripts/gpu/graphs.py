"""Measure whether CUDA graphs and torch.compile pay off, over batches of constant shape.

A run computes batches of a few shapes, one for each padded length, and each shape many
times. `Graphs` is how that might look in featcache: a graph for each shape, captured when
it is first met. Every line compares with eager: the bits, the speed, the memory that is
held, and the seconds that the first call takes. On a CPU there are no graphs: eager is
compared with itself."""

from step import Step, main

# isort: split
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from featcache.extractors.rows import RowExtractor

# what is least likely to be captured comes last
NAMES = ("encodec", "hubert", "dac", "whisper", "mimi")
SECONDS = (1.0, 4.0, 12.0)
"""Lengths of the clips."""
Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Graphs:
    """Runs a function of tensors through a graph for each shape.

    Args:
        function: The function, which must launch the same kernels each time and never
            wait for the device.
    """

    def __init__(self, function: Run) -> None:
        self._function = function
        self._graphs: dict[
            torch.Size, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...], torch.Tensor]
        ] = {}
        self._pool = None

    def __call__(self, waveforms: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """The function's result, which the next call with this shape overwrites."""
        if waveforms.shape not in self._graphs:
            self._capture(waveforms, lengths)
        graph, inputs, output = self._graphs[waveforms.shape]
        for kept, given in zip(inputs, (waveforms, lengths), strict=True):
            kept.copy_(given)
        graph.replay()
        return output

    def _capture(self, *given: torch.Tensor) -> None:
        inputs = tuple(tensor.clone() for tensor in given)
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):  # plans are made, and workspaces taken, before the capture
                self._function(*inputs)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._function(*inputs)
        self._pool = self._pool or graph.pool()
        self._graphs[given[0].shape] = graph, inputs, output


def run(step: Step) -> None:
    is_cuda = step.device.is_cuda
    lengths = (0.3,) if step.small else SECONDS
    for name in NAMES:
        way = Graphs if is_cuda else lambda eager: eager
        step.attempt(
            "graphs",
            lambda name=name, way=way: measure(step, "graph", name, way, lengths),
            model=name,
        )
    for name in NAMES[:2] if is_cuda else ():
        step.attempt(
            "compile",
            lambda name=name: measure(step, "compile", name, torch.compile, SECONDS[1:2]),
            model=name,
        )


def measure(
    step: Step, what: str, name: str, way: Callable[[Run], Run], lengths: Sequence[float]
) -> None:
    """A model in this way, on batches of clips of these lengths."""
    extractor = step.config(name).build(step.device.torch_device)
    assert isinstance(extractor, RowExtractor)

    def eager(*given: torch.Tensor) -> torch.Tensor:
        return extractor.run(*given).features

    other = way(eager)
    for seconds in lengths:
        compare(step, what, name, extractor, seconds, eager, other)


def compare(
    step: Step,
    what: str,
    name: str,
    extractor: RowExtractor,
    seconds: float,
    eager: Run,
    other: Run,
) -> None:
    """Two ways to compute a batch of clips of this length."""
    device, rate = step.device.torch_device, extractor.spec.sample_rate
    length = extractor.padded_length(round(seconds * rate))
    count = extractor.rows(length, device)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(length * 7 // 8, length + 1, (count,), device=device)
        return 0.1 * torch.randn(count, length, device=device), lengths

    first, second = batch(), batch()
    expected = [eager(*first).clone(), eager(*second).clone()]
    step.wait()
    before, start = memory(step), perf_counter()
    found = [other(*first).clone()]
    step.wait()
    first_seconds, held = perf_counter() - start, memory(step) - before
    found.append(other(*second).clone())
    shortest = min(int(lengths.min()) for _, lengths in (first, second))
    frames = extractor.num_frames(shortest)  # after a row's end is no value
    same = all(
        torch.equal(a[:, :frames], b[:, :frames]) for a, b in zip(found, expected, strict=True)
    )
    times = [step.time(lambda run=run: run(*second)) for run in (eager, other, eager, other)]
    step.record(
        what,
        model=name,
        rows=count,
        seconds=length / rate,
        same_bits=same,
        eager_ms=1e3 * min(times[::2]),
        ms=1e3 * min(times[1::2]),
        faster=min(times[::2]) / min(times[1::2]),
        first_call_seconds=first_seconds,
        MiB_held=held / 2**20,
    )


def memory(step: Step) -> int:
    return torch.cuda.memory_reserved() if step.device.is_cuda else 0


if __name__ == "__main__":
    main(run, __doc__)
