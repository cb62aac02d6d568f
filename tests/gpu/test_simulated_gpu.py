"""CUDA's code paths on a simulated GPU, on which every access that nothing orders is found, however fast anything is.

Each test also takes away what orders accesses, and sees that this is noticed."""

import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread
from unittest.mock import patch

import numpy as np
import pytest
import torch
from make_cache import make_features, make_version
from simulated_gpu import simulated_gpu as as_gpu
from test_gpu_memory import assert_batch, assert_batches_are_whole
from test_gpu_values import make_config

import featcache
from featcache.device import Device
from featcache.engines import local
from featcache.engines.delivery import Delivery
from featcache.extractors import rows


@pytest.fixture
def gpu(request, monkeypatch):
    """A simulated GPU; what orders accesses is taken away if a test is parametrized with its name, which is noticed."""
    if without := getattr(request, "param", None):
        monkeypatch.setattr(f"simulated_gpu.{without}", lambda *_: None)
    with as_gpu() as simulated:
        yield simulated
    assert bool(simulated.faults) == bool(without), simulated.faults[:3]


@pytest.mark.parametrize("gpu", [None, "Stream.synchronize", "Event.synchronize"], indirect=True)
def test_page_locked_memory_is_not_touched_while_it_is_copied(gpu):
    shared = Device("cuda", 4)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda seed: assert_batch(shared, np.random.default_rng(seed)), range(20)))
    assert gpu.launched > 100


@pytest.mark.parametrize("gpu", [None, "Stream.wait_stream"], indirect=True)
def test_a_slot_waits_for_the_weights(gpu):
    shared = Device("cuda", 1)
    weights = torch.ones(1 << 10, device="cuda") + 1
    with shared.slot():
        assert (shared.download(weights * 1) == 2).all()


def test_cuda_is_the_gpu_that_the_thread_has_chosen(gpu):
    """The threads of a run, and its processes, would take the first."""
    with pytest.MonkeyPatch.context() as patch:  # undone before the GPU is taken away
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        assert Device("cuda").torch_device == torch.device("cuda", 0)
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        assert Device("cuda").torch_device == torch.device("cuda", 1)
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert Device("cuda").torch_device == torch.device("cuda", 0)


@pytest.mark.parametrize("given", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
@pytest.mark.parametrize("can", [True, False])
def test_its_memory_grows_in_segments_if_it_can_unless_the_user_says_otherwise(gpu, monkeypatch, given, can):
    monkeypatch.setattr("featcache.device._has_virtual_memory", lambda: can)
    with patch.dict(os.environ, {given: "it"} if given else {}):
        Device("cuda").configure_torch()
        said = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    assert said == {"PYTORCH_CUDA_ALLOC_CONF": "it", None: "expandable_segments:True" if can else None}.get(given)


@pytest.mark.parametrize("quantized", [False, True], ids=["float16", "uint8"])
@pytest.mark.parametrize(
    "gpu", [None, "Stream.wait_event", "Stream.wait_stream", "Event.synchronize", "SimulatedGpu.record"], indirect=True
)
def test_a_batch_is_whole_when_training_uses_it_and_until_it_has(gpu, tmp_path, quantized):
    make_version(tmp_path, make_features(60, max_frames=30), quantized=quantized)
    assert_batches_are_whole(featcache.open(tmp_path), "cuda")


QUICK = ("fbank80", "hubert")
"""The others are like them, but for what their models do."""
SLOW = ("whisper-mel80", "encodec-24", "mimi", "xcodec", "w2v-bert-relative", "whisper")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_whole_extraction_is_in_order(corpus, tmp_path, monkeypatch, name):
    """With two threads that compute rows and nothing else, and two that decode; values are those of the CPU, to
    rounding."""
    config = make_config(name, tmp_path / "weights", **({"precision": "tf32"} if name == "hubert" else {}))
    for constant, value in (("ROW_SECONDS", 2.0), ("MAX_ROWS", 8)):
        monkeypatch.setitem(getattr(rows, constant), "cuda", value)
    manifest = corpus.manifest(corpus.rows[:8])
    expected = featcache.extract(manifest, [config], tmp_path / "cpu", featcache.Options("cpu", 2))
    did, write, compute = defaultdict(set), Delivery.append, local.compute_rows
    monkeypatch.setattr(Delivery, "append", lambda *it: (did["append"].add(current_thread()), write(*it))[1])
    monkeypatch.setattr(local, "compute_rows", lambda *it: (did["compute"].add(current_thread()), compute(*it))[1])
    with as_gpu() as gpu:
        summary = featcache.extract(manifest, [config], tmp_path / "gpu", featcache.Options("cuda", 2))
    assert did["append"]
    assert not did["append"] & did["compute"], "while it appends, the GPU waits"
    assert gpu.launched > 10
    assert gpu.faults == []
    assert summary.failed_by_reason == expected.failed_by_reason
    there, here = featcache.open(tmp_path / "gpu"), featcache.open(tmp_path / "cpu")
    assert there.ids == here.ids
    found, wanted = (np.concatenate([cache[id_] for id_ in here.ids]) for cache in (there, here))
    if found.dtype.kind == "f":
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
    else:
        assert (found == wanted).mean() > 0.95  # small models have ties
