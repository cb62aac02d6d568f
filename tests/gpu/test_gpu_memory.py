"""Memory that is reused while a GPU may still work on it: pinned buffers, freed blocks,
two batches at once; and what happens when there is too little of it.

On a simulated GPU, every access that nothing orders is found, however fast anything is.
There, tests are also run without what orders accesses, which must be noticed."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from devices import DEVICES
from make_cache import make_features, make_version
from simulated_gpu import simulated_gpu

import featcache
from featcache.device import Device
from featcache.extractors.rows import RowExtractor


def on_devices(*orders: str):
    """Runs a test on devices, on a simulated GPU, and there without each of what orders
    accesses."""
    simulated = ["simulated", *(f"simulated without {order}" for order in orders)]
    return pytest.mark.parametrize("device", [*DEVICES, *simulated], indirect=True)


@pytest.fixture
def device(request, monkeypatch):
    name, _, without = request.param.partition(" without ")
    if name != "simulated":
        yield name
        return
    if without:
        monkeypatch.setattr(f"simulated_gpu.{without}", lambda *_: None)
    with simulated_gpu() as gpu:
        yield "cuda"
    assert gpu.launched
    assert bool(gpu.faults) == bool(without), gpu.faults[:3]


def busy() -> None:
    """Let the current stream of a GPU work for a while; nothing on a CPU."""
    if torch.cuda.is_available():
        # cycles: some 50 ms, in which a host that does not wait is far ahead
        torch.cuda._sleep(100_000_000)


def assert_batch(shared: Device, generator: np.random.Generator, is_busy: bool = False) -> None:
    """Upload waveforms, compute something, download it: everything belongs to these
    waveforms."""
    waveforms = [
        generator.standard_normal(int(n)).astype(np.float32)
        for n in generator.integers(1, 30_000, 6)
    ]
    with shared.slot():
        uploaded = shared.upload(waveforms)
        padded, lengths = shared.upload_rows(waveforms[::-1], 8, 30_000)
        if is_busy:
            busy()
        found = [shared.download(waveform * 2) for waveform in uploaded]
        rows, counts = shared.download(padded + 1), shared.download(lengths)
    for waveform, doubled in zip(waveforms, found, strict=True):
        assert np.array_equal(doubled, waveform * 2)
    filled = [*waveforms[::-1], waveforms[-1], waveforms[-1]]
    assert counts.tolist() == [len(waveform) for waveform in filled]
    for row, waveform in zip(rows, filled, strict=True):
        assert np.array_equal(row[: len(waveform)], waveform + 1)
        assert (row[len(waveform) :] == 1).all()


@on_devices("Stream.synchronize", "Event.synchronize")
def test_batches_of_many_threads_do_not_meet(device):
    """More threads than slots, so each slot's buffers and stream go from one to the other."""
    shared = Device(device, 4)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: assert_batch(shared, np.random.default_rng(seed)), range(60)))


@pytest.mark.gpu
def test_a_download_waits_for_what_computes_it(monkeypatch):
    shared = Device("cuda", 1)
    for seed in range(3):
        assert_batch(shared, np.random.default_rng(seed), is_busy=True)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: None)
    with pytest.raises(AssertionError):  # the test would notice if it did not
        assert_batch(shared, np.random.default_rng(3), is_busy=True)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_batch_that_fails_before_its_download_harms_no_other():
    shared = Device("cuda", 1)

    def fail(seed: int) -> None:
        with shared.slot():
            busy()
            shared.upload([np.full(1 << 20, seed, np.float32)])
            raise ValueError("no such clip")

    for seed in range(6):
        with pytest.raises(ValueError, match="no such clip"):
            fail(seed)
        assert_batch(shared, np.random.default_rng(seed))


@on_devices("Stream.wait_stream")
def test_the_weights_are_there_before_a_slot_uses_them(device):
    """Extractors are built on the default stream, for which a stream of its own does not
    wait by itself."""
    shared = Device(device, 1)
    busy()
    weights = torch.ones(1 << 20, device=device) + 1
    with shared.slot():
        assert (shared.download(weights * 1) == 2).all()


@pytest.mark.parametrize("quantized", [False, True], ids=["float16", "uint8"])
@on_devices("Stream.wait_event", "Stream.wait_stream", "Event.synchronize", "SimulatedGpu.record")
def test_batches_of_the_loader_are_whole_when_training_uses_them_and_until_it_has(
    tmp_path, device, quantized
):
    """Training adds 2 to what the loader gives, and drops each batch, perhaps before the
    GPU has done with it. The copies are slow, and training is slower."""
    make_version(tmp_path, make_features(120, max_frames=300), quantized=quantized)
    cache = featcache.open(tmp_path)
    dataset = featcache.FeatureDataset(cache)
    batches = np.random.default_rng(0).permutation(len(cache)).reshape(-1, 6).tolist() * 2
    added = torch.ones((), device=device) + 1

    add_two = {"transform": lambda batch: {**batch, "features": batch["features"] + added}}
    loader = featcache.DataLoader(
        dataset, batches, device=device, dtype=torch.float32, prefetch=3, **add_two
    )
    found = []
    for number, batch in enumerate(loader):
        busy()
        if device == "cuda" and number % 4 == 0:
            with torch.cuda.stream(loader._transfer._stream):
                busy()
        found.append((batch["features"].double().sum((1, 2)), batch["lengths"] * 1))
        del batch
    for (sums, lengths), rows in zip(found, batches, strict=True):
        expected = dataset.batch(rows)
        assert torch.equal(lengths.cpu(), expected["lengths"])
        wanted = (expected["features"].float() + 2).double().sum((1, 2))
        torch.testing.assert_close(sums.cpu(), wanted, rtol=1e-9, atol=1e-6)


@pytest.fixture
def little_memory():
    """This process may take 256 MiB of the GPU more than it has."""
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (256 << 20)) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_batches_that_do_not_fit_are_halved_and_no_clip_is_lost(
    corpus, little_memory, scratch, monkeypatch, tmp_path
):
    """By a real allocator that refuses, in the middle of a model, and in whatever library."""
    import small_models

    halved = []
    shrink = RowExtractor.shrink
    monkeypatch.setattr(
        RowExtractor, "shrink", lambda *given: halved.append(given[1]) or shrink(*given)
    )
    config = tmp_path / "encodec.yaml"
    weights = small_models.encodec_24khz(tmp_path / "weights")
    config.write_text(
        f"name: e\nextractor: encodec\nparams: {{weights: {weights}}}\naudio: "
        f"{{sample_rate: 24000}}\n"
    )
    summary = featcache.extract(corpus.manifest(), [config], scratch, featcache.Options("cuda", 4))
    assert summary.failed_by_reason == {}
    assert len(featcache.open(scratch)) == len(corpus.rows)
    assert halved
