"""Weights that are refused: incomplete, damaged, another class's, with code in them, or
beside odd JSON."""

import json
import os
import pickle
import struct
import sys

import pytest
import torch
from safetensors.torch import load_file
from saved_models import CPU, digest, edit_json, edit_tensors, fault, load_fault, located
from transformers import AutoModel, EncodecModel, HubertModel

from featcache import trust, weights
from featcache.extractors.units import read_codebook


def test_a_model_that_is_not_whole_is_refused(hubert):
    """transformers would only warn, and draw the missing weights at random."""
    edit_tensors(hubert, lambda tensors: tensors.pop("encoder.layer_norm.bias"))
    assert "lacks encoder.layer_norm.bias" in load_fault(HubertModel, hubert)
    edit_tensors(
        hubert, lambda tensors: tensors.update({"encoder.layer_norm.bias": torch.zeros(5)})
    )
    assert "encoder.layer_norm.bias (5,) for (16,)" in load_fault(HubertModel, hubert)


def test_what_only_training_needs_may_be_missing(hubert):
    """facebook/wav2vec2-base-960h lacks it. Then it is zero, and not random."""
    edit_tensors(hubert, lambda tensors: tensors.pop("masked_spec_embed"))
    assert not weights.load(HubertModel, located(hubert), CPU).masked_spec_embed.any()


def test_a_model_of_another_class_is_refused(saved, hubert):
    assert "holds a model of type 'hubert', not 'encodec'" in load_fault(
        EncodecModel, saved / "hubert"
    )
    edit_json(hubert / "config.json", model_type="")
    assert "config.json names no model_type, not 'hubert'" in load_fault(HubertModel, hubert)
    edit_json(hubert / "config.json", model_type="fancy")
    assert "config.json" in load_fault(AutoModel, hubert)
    edit_json(hubert / "config.json", model_type="hubert", conv_stride="fast")
    load_fault(HubertModel, hubert)
    (hubert / "config.json").write_text("{")
    assert "cannot be read" in load_fault(HubertModel, hubert)
    (hubert / "config.json").write_text("{}")
    assert "holds no config.json that says what the model is" in load_fault(HubertModel, hubert)
    (hubert / "config.json").unlink()
    assert "holds no config.json that says" in load_fault(HubertModel, hubert)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty"])
def test_a_damaged_file_is_refused(hubert, name, damage):
    if name == "pytorch_model.bin":
        torch.save(load_file(hubert / "model.safetensors"), hubert / name)
        (hubert / "model.safetensors").unlink()
    whole = (hubert / name).read_bytes()
    (hubert / name).write_bytes(
        {"truncated": whole[:-100], "garbage": b"garbage" * 100, "empty": b""}[damage]
    )
    assert f"{name}: damaged" in load_fault(HubertModel, hubert)
    assert f"{name}: damaged" in fault(digest, hubert)


def test_a_missing_shard_is_named(saved, tmp_path):
    HubertModel.from_pretrained(saved / "hubert").save_pretrained(tmp_path, max_shard_size="5KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"lacks {shard.name}" in load_fault(HubertModel, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"bias": ["one"], "weight": 2}}'
    )
    assert "lacks 2, ['one'], which its index lists" in load_fault(HubertModel, tmp_path)


class Malicious:
    """If the weights were unpickled, they would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize(
    "pack", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))]
)
@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_no_pickle_is_run(hubert, tmp_path, pack, suffix):
    trace = tmp_path / "it ran"
    file = hubert / f"weights{suffix}"
    pack({"weight": Malicious(trace)}, file)
    for message in (load_fault(HubertModel, file), fault(digest, file)):
        assert "never unpickled: save it as safetensors" in message
    assert not trace.exists()


def test_a_checkpoint_with_more_than_tensors_is_refused(hubert):
    """A trainer's file, for example, has its step beside the weights."""
    torch.save({"step": 5, "model": load_file(hubert / "model.safetensors")}, hubert / "last.ckpt")
    assert "expected tensors by name" in load_fault(HubertModel, hubert / "last.ckpt")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks", "ignore:Validating sparse tensor")
@pytest.mark.parametrize(
    "tensors",
    [
        {0: torch.zeros(2)},
        {"weight": torch.zeros(2).to_sparse()},
        {"weight": torch.zeros(2, device="meta")},
        {"weight": torch.zeros(2, dtype=torch.complex64).conj()},
    ],
    ids=["numbered", "sparse", "meta", "conjugate"],
)
def test_tensors_without_a_name_or_plain_values_are_refused(tmp_path, tensors):
    torch.save(tensors, tmp_path / "odd.pt")
    assert "expected tensors by name" in fault(digest, tmp_path / "odd.pt")


def test_no_remote_code_is_run_unless_the_user_says_so(hubert, tmp_path, monkeypatch):
    trace = tmp_path / "it ran"
    (hubert / "theirs.py").write_text(
        "from transformers import HubertModel\n"
        f"open({str(trace)!r}, 'w').close()\n"
        "class TheirModel(HubertModel):\n    theirs = True\n"
    )
    edit_json(hubert / "config.json", auto_map={"AutoModel": "theirs.TheirModel"})
    for model_class in (AutoModel, HubertModel):
        assert "--trust-remote-code" in load_fault(model_class, hubert)
    assert not trace.exists()

    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(trust, "_remote_code_is_allowed", False)
    trust.allow_remote_code()
    assert weights.load(AutoModel, located(hubert), CPU).theirs
    assert trace.exists()
    edit_json(hubert / "config.json", auto_map={"AutoModel": "org/name--theirs.TheirModel"})
    assert "in another repository" in load_fault(AutoModel, hubert)


# JSON beside the weights, and the file of a codebook

DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.write_text(DEEP), "cannot be read: maximum recursion depth"),
        (lambda path: path.write_text("9" * 10_000), "cannot be read: Exceeds the limit"),
        (lambda path: path.write_text("[1]"), "expected a mapping"),
        (lambda path: os.mkfifo(path), "cannot be read: not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read: not a file"),
        (
            lambda path: path.touch() or os.truncate(path, 7 << 40),
            "cannot be read: more than 33,554,432 bytes",
        ),
    ],
    ids=["deep", "long number", "list", "pipe", "device", "sparse"],
)
def test_odd_json_of_a_model_is_refused(tmp_path, make, words):
    (tmp_path / "config.json").write_text("{}")
    make(tmp_path / "preprocessor_config.json")
    assert words in fault(weights.read_json, located(tmp_path), "preprocessor_config.json")


def codebook(path, config: str, shape: list[int], num_bytes: int) -> None:
    metadata = {
        "format": "featcache units 1",
        "config": config,
        "fingerprint": "0",
        "dtype": "float32",
    }
    centroids = {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": metadata, "centroids": centroids}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(num_bytes))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: codebook(path, DEEP, [2, 2], 16), "incomplete file"),
        (lambda path: codebook(path, "{}", [0, 2], 0), "not finite float32 [k, D]"),
        (lambda path: codebook(path, "{}", [10**12, 2], 16), "incomplete file"),
        (lambda path: path.write_bytes(struct.pack("<Q", 2**63) + b"{}"), "incomplete file"),
        (lambda path: os.mkfifo(path), "not a file"),
    ],
    ids=["deep", "empty", "terabytes", "long header", "pipe"],
)
def test_an_odd_codebook_is_refused(tmp_path, make, words):
    make(tmp_path / "units.safetensors")
    assert words in fault(read_codebook, tmp_path / "units.safetensors")
