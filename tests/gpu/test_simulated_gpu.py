"""CUDA's code paths on a simulated GPU, where every access that nothing orders is found,
however fast anything is."""

import os
from collections import defaultdict
from threading import current_thread
from unittest.mock import patch

import numpy as np
import pytest
import torch
from simulated_gpu import simulated_gpu as as_gpu
from test_gpu_values import make_config

import featcache
from featcache.device import Device
from featcache.engines import local
from featcache.engines.delivery import Delivery
from featcache.extractors import rows


def test_cuda_is_the_gpu_that_the_thread_has_chosen():
    """The threads of a run, and its processes, would take the first."""
    with as_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        assert Device("cuda").torch_device == torch.device("cuda", 0)
        patch.setattr(torch.cuda, "current_device", lambda: 1)
        assert Device("cuda").torch_device == torch.device("cuda", 1)
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert Device("cuda").torch_device == torch.device("cuda", 0)


@pytest.mark.parametrize("given", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", None])
@pytest.mark.parametrize("can", [True, False])
def test_its_memory_grows_in_segments_if_it_can_unless_the_user_says_otherwise(
    monkeypatch, given, can
):
    monkeypatch.setattr("featcache.device._has_virtual_memory", lambda: can)
    with as_gpu(), patch.dict(os.environ, {given: "it"} if given else {}):
        Device("cuda").configure_torch()
        said = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    assert said == {
        "PYTORCH_CUDA_ALLOC_CONF": "it",
        None: "expandable_segments:True" if can else None,
    }.get(given)


QUICK = ("fbank80", "hubert")
"""The others are like them, but for what their models do."""
SLOW = ("whisper-mel80", "encodec-24", "mimi", "xcodec", "w2v-bert-relative", "whisper")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_whole_extraction_is_in_order(corpus, tmp_path, monkeypatch, name):
    """With two threads that compute rows and nothing else, and two that decode; values
    are those of the CPU, to rounding."""
    config = make_config(
        name, tmp_path / "weights", **({"precision": "tf32"} if name == "hubert" else {})
    )
    for constant, value in (("ROW_SECONDS", 2.0), ("MAX_ROWS", 8)):
        monkeypatch.setitem(getattr(rows, constant), "cuda", value)
    manifest = corpus.manifest(corpus.rows[:8])
    expected = featcache.extract(manifest, [config], tmp_path / "cpu", featcache.Options("cpu", 2))
    did, write, compute = defaultdict(set), Delivery.append, local.compute_rows
    monkeypatch.setattr(
        Delivery, "append", lambda *it: (did["append"].add(current_thread()), write(*it))[1]
    )
    monkeypatch.setattr(
        local, "compute_rows", lambda *it: (did["compute"].add(current_thread()), compute(*it))[1]
    )
    with as_gpu() as gpu:
        summary = featcache.extract(
            manifest, [config], tmp_path / "gpu", featcache.Options("cuda", 2)
        )
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
