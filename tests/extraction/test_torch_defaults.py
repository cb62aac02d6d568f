"""Torch's default dtype and device, autocast and inference mode, which a user sets,
change nothing."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from make_cache import make_features, make_version
from processes import run_script

import featcache
from featcache.augment import GaussianNoise, MixEnergies, Mixup, SpecAugment
from featcache.cmvn import Cmvn, normalize_utterances
from featcache.device import PinnedMemory, Tf32
from featcache.extractors import model

AUGMENTATIONS = {
    "mask": SpecAugment(time_warp=3, max_time_fraction=0.37, probability=0.5),
    "mixup": Mixup(probability=0.5),
    "energies": MixEnergies(),
    "noise": GaussianNoise((0.1, 0.5)),
    "noise at a ratio": GaussianNoise(snr_db=(5, 20)),
    "mixup, in evaluation": Mixup().eval(),
}


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(
    params=[
        lambda: default_dtype(torch.float64),
        lambda: default_dtype(torch.bfloat16),
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode,
    ],
    ids=["float64", "bfloat16", "autocast", "inference"],
)
def setting(request):
    return request.param


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    make_version(folder, make_features(30, (8,)), quantized=True)
    return featcache.open(folder)


def values_of(tensors):
    """Their dtypes and bytes, to be compared as they are."""
    return [
        (one.dtype, one.shape, one.contiguous().view(torch.uint8).numpy().tobytes())
        for one in tensors
    ]


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_augmentations_draw_the_same(setting, name):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(16, 300, 8, generator=generator)
    lengths = torch.arange(16) * 20

    def run():
        found = AUGMENTATIONS[name](features, lengths, step=7)
        return found if isinstance(found, tuple) else (found,)

    expected = run()
    with setting():
        found = run()
    assert values_of(found) == values_of(expected)


def test_batches_and_their_normalisation_are_the_same(setting, cache):
    def run():
        dataset = featcache.FeatureDataset(cache, crop=9)
        (batch,) = featcache.DataLoader(dataset, [[3, 1, 4]])
        items = dataset.collate([dataset[3], dataset[1], dataset[4]])
        cmvn = Cmvn([0.3] * 8, [1.7] * 8)
        return (
            batch["features"], batch["lengths"], items["features"], items["lengths"],
            normalize_utterances(batch["features"], batch["lengths"]), cmvn(batch["features"], batch["lengths"]),
        )  # fmt: skip

    expected = run()
    with setting():
        found = run()
    assert values_of(found) == values_of(expected)


def test_another_default_device_leaves_batches_and_the_names_of_groups_where_they_are(cache):
    dataset = featcache.FeatureDataset(cache)
    statistics = {
        "groups": ["a", "b"],
        "group_mean": np.zeros((2, 8)),
        "group_std": np.ones((2, 8)),
    }
    with torch.device("meta"):  # stands for a GPU
        cmvn = Cmvn(np.zeros(8), np.ones(8), **statistics)
        numbers = cmvn.find(["b", "a"])
        assert PinnedMemory().take(0).device.type == "cpu"
        batches = [dataset.batch([3, 1]), dataset.collate([dataset[3], dataset[1]])]
    assert cmvn.groups == ["a", "b"]
    assert numbers.tolist() == [1, 0]
    for batch in batches:
        assert batch["lengths"].tolist() == dataset.lengths[[3, 1]].tolist()
        assert batch["features"].device.type == "cpu"


EXTRACT_IN_FP32 = """
    import sys
    from hashlib import sha256
    import torch
    from featcache.config import config_from
    from featcache.device import Device, get_tf32
    from featcache.extractors import Clip

    weights, *settings = sys.argv[1:]
    config = config_from({"name": "hubert", "extractor": "ssl", "params": {"weights": weights}})
    waveform = torch.randn(16_000, generator=torch.Generator().manual_seed(0))
    for setting in settings:
        exec(setting)
        device = Device("cpu")
        device.configure_torch()
        with device.slot():
            (features,) = config.build(device.torch_device).extract([Clip("a", waveform)])
        print(sha256(features.numpy().tobytes()).hexdigest())
        assert not any(get_tf32()), (setting, get_tf32())
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32  # torch raises where they disagree
"""


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="torch has one way before 2.9"
)
def test_what_a_process_lets_torch_round_changes_no_bit(cli, tmp_path):
    """fp32 means fp32, though torch has an old and a new way of saying so, and a CPU can
    round too."""
    import small_ssl  # brings transformers

    settings = (
        "",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True",
        "torch.backends.cuda.matmul.fp32_precision = "
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'tf32'",
    )
    printed = run_script(
        cli, EXTRACT_IN_FP32, small_ssl.save("hubert", tmp_path), *settings
    ).split()
    assert len(printed) == len(settings)
    assert len(set(printed)) == 1


def test_threads_that_switch_tf32_do_not_see_each_others_switches(monkeypatch):
    """As where a user lets a GPU round, and threads of theirs extract at once: one is
    inside when the other comes."""
    switches = [Tf32(True, True, True)]
    monkeypatch.setattr(model, "get_tf32", lambda: switches[-1])
    monkeypatch.setattr(model, "set_tf32", switches.append)
    inside, left = threading.Event(), threading.Event()

    def compute_first():
        with model.computing("fp32", torch.device("cuda")):
            inside.set()
            entered.wait(0.2)
        left.set()

    def compute_second():
        inside.wait()
        with model.computing("fp32", torch.device("cuda")):
            entered.set()
            left.wait()
            return switches[-1]

    entered = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(compute_first)
        assert not any(pool.submit(compute_second).result())
    assert all(switches[-1])
