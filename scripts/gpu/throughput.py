"""Measure how fast extraction is on a device, end to end from FLAC files, compared with
the model alone; and what its constants cost.

    alone        the model on tensors that lie on the device, in several shapes: the fastest is the limit
    batch        a batch of rows as featcache computes it; `first` is in a new thread, which makes its plans; `waits`
                 counts how often the host waits for the device in a batch
    kernels      what a batch spends its time on
    end to end   files to shards, beside the limit, and beside a loop: read, resample, model, np.save
    sweep        end to end with other constants: ROW_SECONDS, slots, threads

The audio is 16 kHz FLAC. Speeds are × real time. For Whisper and fbank the limit is
featcache's own extractor.
"""

from step import Step, main

# isort: split
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import cycle, islice
from time import perf_counter
from typing import Any
from unittest.mock import patch

import corpus
import numpy as np
import soundfile
import torch
from harness import temporary_folder
from torch.profiler import ProfilerActivity, profile
from training import GpuUse

import featcache
from featcache import device as device_module
from featcache.config import Config
from featcache.engines import local
from featcache.extraction.features import is_out_of_memory
from featcache.extraction.padded_rows import Row
from featcache.extractors import Clip, rows
from featcache.manifest.read import read_manifest
from featcache.manifest.utterances import Manifest

NAMES = ("encodec", "hubert", "mimi", "fbank", "dac", "whisper")
SWEPT = ("hubert", "encodec")
SHAPES = [(8, 10.0), (24, 10.0), (64, 10.0)]
RUNS = {
    "encodec": (
        "EncodecModel",
        lambda model, x: model.encode(x[:, None], bandwidth=6.0).audio_codes,
    ),
    "dac": (
        "DacModel",
        lambda model, x: model.encode(x[:, None, : x.shape[1] // 320 * 320]).audio_codes,
    ),
    "mimi": ("MimiModel", lambda model, x: model.encode(x[:, None], num_quantizers=8).audio_codes),
    "hubert": ("HubertModel", lambda model, x: model(x).last_hidden_state),
}
"""Classes of transformers, and how their models are run on waveforms `[R, P]`."""

SECONDS_OF_A_RUN = 12.0
"""A run ends with batches that few rows fill, which a short one mostly has."""
DECODED_BY_A_CORE = 600.0
"""About as many × real time does a core read, so that a run is not much longer than that."""
KERNELS = 6
SWEEP = {"ROW_SECONDS": (240.0, 480.0), "slots": (1, 3), "threads": (4, 8)}
Function = Callable[[torch.Tensor], object]


def run(step: Step) -> None:
    limits: dict[str, float] = {}
    for name in NAMES:
        step.attempt(
            "throughput", lambda name=name: limits.update({name: measure(step, name)}), model=name
        )
    for name in SWEPT:
        step.attempt("sweep", lambda name=name: sweep(step, name, limits[name]), model=name)


def measure(step: Step, name: str) -> float:
    """A model in all ways; returns the limit."""
    config = step.config(name)
    alone = model_alone(step, name, config)
    limit = max(
        speed_alone(step, name, alone, config.audio.sample_rate, *shape) for shape in shapes(step)
    )
    batch(step, name, config)
    manifest = files(step, limit)
    speed, figures = end_to_end(step, config, manifest)
    looped = loop(step, manifest, config.audio.sample_rate, alone)
    step.record(
        "end to end",
        model=name,
        speed=speed,
        limit=limit,
        of_limit=speed / limit,
        loop=looped,
        **figures,
    )
    return limit


def shapes(step: Step) -> list[tuple[int, float]]:
    return [(1, 1.0)] if step.small else SHAPES


def model_alone(step: Step, name: str, config: Config) -> Function:
    """The model on waveforms `[R, P]` on the device."""
    if name in RUNS:
        import transformers

        folder = config.params.weights  # type: ignore[attr-defined]
        model_class, run_model = RUNS[name]
        model = (
            getattr(transformers, model_class)
            .from_pretrained(folder)
            .eval()
            .to(step.device.torch_device)
        )
        return lambda x: run_model(model, x)
    extractor = config.build(step.device.torch_device)
    return lambda x: extractor.extract([Clip(str(number), row) for number, row in enumerate(x)])


def speed_alone(
    step: Step, name: str, alone: Function, rate: int, count: int, seconds: float
) -> float:
    """Times real time in one shape; 0 where it does not fit."""
    waveforms = 0.1 * torch.randn(count, round(seconds * rate), device=step.device.torch_device)
    try:
        speed = count * seconds / step.time(lambda: alone(waveforms))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        speed = 0.0
    step.record("alone", model=name, rows=count, seconds=seconds, speed=speed)
    return speed


def batch(step: Step, name: str, config: Config) -> None:
    """A batch of rows as featcache computes it, for clips of 10 s."""
    extractor = config.build(step.device.torch_device)
    if not isinstance(extractor, rows.RowExtractor):
        return
    rate = extractor.spec.sample_rate
    length = extractor.padded_length(round((0.5 if step.small else 10) * rate))
    count = extractor.rows(length, step.device.torch_device)
    waveforms = 0.1 * torch.randn(count, length, device=step.device.torch_device)
    lengths = torch.full((count,), length, device=step.device.torch_device)
    taken: list[float] = []

    def in_thread() -> None:
        with step.device.slot():
            for _ in range(2):
                start = perf_counter()
                extractor.run(waveforms, lengths)
                step.wait()
                taken.append(perf_counter() - start)

    in_thread()  # what is loaded once for all threads
    for _ in range(2):
        thread = threading.Thread(target=in_thread)
        thread.start()
        thread.join()

    def compute() -> object:
        return extractor.run(waveforms, lengths)

    again = step.time(compute)
    step.record(
        "batch",
        model=name,
        rows=count,
        seconds=length / rate,
        speed=count * length / rate / again,
        ms=1e3 * again,
        first_ms_in_a_thread=1e3 * taken[-2],
        second_ms=1e3 * taken[-1],
        waits=waits(step, compute),
    )
    step.attempt("kernels", lambda: kernels(step, name, compute), model=name)


def waits(step: Step, function: Callable[[], object]) -> int | None:
    """How often the host waits for the GPU, as torch sees it."""
    if not step.device.is_cuda:
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def kernels(step: Step, name: str, function: Callable[[], object]) -> None:
    """Which kernels a batch spends its time on; on a CPU, which operations."""
    is_cuda = step.device.is_cuda
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as profiled:
        function()
        step.wait()
    taken = {
        each.key: (each.self_device_time_total if is_cuda else each.self_cpu_time_total, each.count)
        for each in profiled.key_averages()
    }
    total = sum(time for time, _ in taken.values()) or 1
    for kernel, (time, count) in sorted(taken.items(), key=lambda each: -each[1][0])[:KERNELS]:
        step.record("kernels", model=name, kernel=kernel[:80], calls=count, share=time / total)


def files(step: Step, speed: float) -> Manifest:
    """Files whose extraction takes some seconds at this speed: the same ones, time and
    again."""
    path = corpus.make_corpus(step.work, "long", 0.003 if step.small else 0.5)
    once = read_manifest(path)
    speed = min(speed, DECODED_BY_A_CORE * step.device.threads)
    wanted = (
        1 if step.small else max(1, round(speed * SECONDS_OF_A_RUN / float(once.duration.sum())))
    )
    repeated = path.with_name(f"{wanted}.csv")
    lines = path.read_text().splitlines()
    rows_of = [f"{number}-{line}" for number in range(wanted) for line in lines[1:]]
    repeated.write_text("\n".join([lines[0], *rows_of]) + "\n")
    return read_manifest(repeated)


def end_to_end(
    step: Step, config: Config, manifest: Manifest, threads: int | None = None
) -> tuple[float, dict[str, Any]]:
    """Times real time from files to shards, once that is planned, and what else there is
    to know: `filled` is the share of what batches of rows hold that is audio."""
    held: Counter[str] = Counter()
    compute = local.compute_rows

    def counting(some: list[Row]) -> list[Any]:
        pending, length = some[0].pending, some[0].padded_length
        on = pending.built.device.torch_device
        held["samples"] += length * pending.extractor.rows(length, on)
        held["audio"] += sum(len(row.waveform) for row in some)
        return compute(some)

    gpu = GpuUse(step.device.torch_device)
    options = featcache.Options(str(step.device.torch_device), threads or step.device.threads)
    if step.device.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with temporary_folder(step.work) as folder, patch.object(local, "compute_rows", counting):
        watching = featcache.Observer(running=gpu.watched)
        summary = featcache.extract(manifest, config, folder, options, observer=watching)
    figures = {
        "threads": options.threads,
        "failed": sum(summary.failed_by_reason.values()),
        "busy": gpu.share,
        "in quarters": gpu.quarters,
        "filled": held["audio"] / held["samples"] if held else None,
        **{f"% {stage}": 100 * it for stage, it in summary.stages.items()},
    }
    if step.device.is_cuda:
        figures["GiB at most"] = torch.cuda.max_memory_reserved() / 2**30
        figures["MiB left"] = (torch.cuda.memory_allocated() - before) / 2**20
    return summary.times_real_time, figures


def loop(step: Step, manifest: Manifest, rate: int, alone: Function) -> float:
    """What people write, over as many files as some seconds allow: times real time."""
    import torchaudio

    done, start = 0.0, perf_counter()
    with temporary_folder(step.work) as folder:
        for row in islice(cycle(range(len(manifest))), 1000):
            if perf_counter() - start > (0.1 if step.small else SECONDS_OF_A_RUN):
                break
            samples, original = soundfile.read(
                manifest.resolve(manifest[row].path), dtype="float32"
            )
            samples = samples[: (2 if step.small else 30) * original]  # Whisper takes no more
            waveform = torch.from_numpy(samples).to(step.device.torch_device)
            found = alone(torchaudio.functional.resample(waveform, original, rate)[None])
            found = found[0] if isinstance(found, list) else found
            np.save(folder / f"{row}.npy", found.cpu().numpy())
            done += len(samples) / original
    return done / (perf_counter() - start)


def sweep(step: Step, name: str, limit: float) -> None:
    """One constant after the other, over the same files; the first line has all of them
    as they are."""
    kind, config = step.device.torch_device.type, step.config(name)
    changed = [
        ("as they are", 0),
        *((constant, value) for constant, values in SWEEP.items() for value in values),
    ]
    manifest = files(step, limit)
    for constant, value in changed[:2] if step.small else changed:
        if step.left < 30 and not step.small:
            step.record("sweep: no time left", model=name, constant=constant)
            return
        threads = int(value) if constant == "threads" else None
        slots = value if constant == "slots" else device_module._CUDA_SLOTS
        with patch.dict(rows.ROW_SECONDS), patch.object(device_module, "_CUDA_SLOTS", slots):
            if constant == "ROW_SECONDS":
                rows.ROW_SECONDS[kind] = value
            found, figures = end_to_end(step, config, manifest, threads)
        shown = {
            figure: figures.get(figure)
            for figure in ("busy", "in quarters", "filled", "GiB at most")
        }
        step.record("sweep", model=name, constant=constant, value=value, speed=found, **shown)


if __name__ == "__main__":
    main(run, __doc__)
