"""Weights are found, hashed by their content, and loaded completely, with models of the
real classes."""

import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import saved_models
import torch
from safetensors.torch import load_file
from saved_models import COMMIT, CPU, PREPROCESSOR, digest, edit_json, edit_tensors, fault, located
from transformers import AutoModel, EncodecModel, HubertModel
from transformers.utils import logging

from featcache import weights
from featcache.errors import MissingDependencyError, install_hint
from featcache.weights import models
from featcache.weights.hub import wanted_files

# Where they are


def test_a_folder_and_a_file_in_it_are_found(saved):
    """The file is loaded; its folder has the model's other files."""
    file = saved / "hubert" / "model.safetensors"
    assert located(saved / "hubert") == weights.Located(saved / "hubert")
    assert located(file) == weights.Located(saved / "hubert", file)
    assert digest(file) == digest(saved / "hubert")
    assert weights.read_json(located(file), "preprocessor_config.json") == PREPROCESSOR
    assert weights.read_json(located(file), "none.json") == {}


@pytest.mark.parametrize(
    "name", ["./gone", "/gone", "~/gone", "~no-such-user/gone", "a/b/c", "a/b.pt", "gone", ""]
)
def test_a_path_that_does_not_exist_is_told_from_a_hubs_id(name):
    assert (
        fault(weights.locate, name, COMMIT) == f"params.weights: {name}: there is no "
        "such folder or file"
    )


def test_a_folder_without_a_model_is_refused(tmp_path):
    assert "neither config.json nor weights" in fault(weights.locate, str(tmp_path), None)
    (tmp_path / "README.md").write_text("")
    assert "ends in .safetensors" in fault(weights.locate, str(tmp_path / "README.md"), None)
    (tmp_path / "config.json").write_text("{}")
    assert "holds no weights" in fault(digest, tmp_path)
    for name in ("one.pt", "other.pt"):
        torch.save({}, tmp_path / name)
    assert "name one: one.pt, other.pt" in fault(digest, tmp_path)


@pytest.mark.parametrize("revision", [None, "main", "c1dbe2a", COMMIT.upper()])
def test_a_hubs_id_needs_a_commit(revision, no_hub):
    """A branch may be another model tomorrow."""
    message = fault(weights.locate, "facebook/encodec_24khz", revision)
    assert message.startswith("params.revision:")
    assert message.endswith(": give the commit of facebook/encodec_24khz, in 40 hex digits")
    # it may have been meant as one
    assert ("no folder facebook/encodec_24khz" in message) == (revision is None)


@pytest.mark.parametrize("inside", ["", "speechtokenizer_hubert_avg"])
def test_a_hubs_cache_is_used_without_network(saved, no_hub, inside):
    snapshot = no_hub / "models--org--name" / "snapshots" / COMMIT
    shutil.copytree(saved / "hubert", snapshot / inside)
    found = weights.locate("org/name", COMMIT)
    assert found.folder == snapshot / inside
    assert weights.digest(found) == digest(saved / "hubert")
    assert "hf download" in fault(weights.locate, "org/name", COMMIT[::-1])


def test_a_cache_that_is_not_whole_is_as_good_as_none(saved, no_hub):
    """Reading only a model's config leaves such a cache, and so does a download that was
    interrupted."""
    snapshot = no_hub / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert "hf download org/name" in fault(weights.locate, "org/name", COMMIT)
    HubertModel.from_pretrained(saved / "hubert").save_pretrained(snapshot, max_shard_size="5KB")
    shutil.copy(saved / "hubert" / "preprocessor_config.json", snapshot)
    assert weights.locate("org/name", COMMIT).folder == snapshot
    first, *others = sorted(snapshot.glob("model-*.safetensors"))
    # at last, one file is left
    for lost in (others[0], snapshot / "model.safetensors.index.json", *others[1:]):
        lost.unlink()
        assert "hf download org/name" in fault(weights.locate, "org/name", COMMIT)
    assert first.is_file()


def test_a_cache_need_not_have_what_the_index_of_another_form_lists(saved, no_hub):
    """The files of indexes are downloaded with a repository's other JSON; the weights, in
    one form."""
    snapshot = shutil.copytree(
        saved / "hubert", no_hub / "models--org--name" / "snapshots" / COMMIT
    )
    (snapshot / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"bias": "pytorch_model-1-of-2.bin"}}'
    )
    assert digest(weights.locate("org/name", COMMIT).folder) == digest(saved / "hubert")


def test_one_form_of_the_weights_is_downloaded():
    """Whisper's repository, for example, holds five."""
    names = [
        "config.json",
        "flax_model.msgpack",
        "model.fp32-00001-of-00002.safetensors",
        "pytorch_model.bin",
    ]
    assert wanted_files([*names, "model.safetensors"]) == ["config.json", "model.safetensors"]
    assert wanted_files(names) == ["config.json", "pytorch_model.bin"]
    assert wanted_files(["a/config.json", "a/one.pt", "README.md"]) == ["a/config.json", "a/one.pt"]


def test_what_is_not_installed_is_named(saved, no_hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    located(saved / "hubert")
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("models"))):
        weights.locate("org/name", COMMIT)


# What they hold


def test_copies_have_one_digest(saved, tmp_path):
    """Copies may differ in place, shards, format, the names of weight norm, and
    irrelevant keys of config.json."""
    for name, model in (
        ("encodec", saved_models.encodec_model()),
        ("hubert", saved_models.hubert_model()),
    ):
        expected = digest(saved / name)
        copy = shutil.copytree(saved / name, tmp_path / name / "copy")
        edit_json(
            copy / "config.json",
            transformers_version="4.31.0",
            _name_or_path="/x",
            architectures=["X"],
        )
        edit_json(copy / "config.json", torch_dtype="float16")
        assert digest(copy) == expected

        tensors = load_file(saved / name / "model.safetensors")
        sharded = shutil.copytree(saved / name, tmp_path / name / "sharded")
        (sharded / "model.safetensors").unlink()
        model.load_state_dict(tensors)
        model.save_pretrained(sharded, max_shard_size="5KB")
        assert (sharded / "model.safetensors.index.json").exists()
        assert digest(sharded) == expected

        for form in ("torch", "old torch", "old names"):
            folder = shutil.copytree(saved / name, tmp_path / name / form)
            (folder / "model.safetensors").unlink()
            stored = tensors
            if form == "old names":
                for new, old in (("original0", "weight_g"), ("original1", "weight_v")):
                    stored = {
                        key.replace(f"parametrizations.weight.{new}", old): stored[key]
                        for key in stored
                    }
                assert stored.keys() != tensors.keys()
            torch.save(
                stored,
                folder / "pytorch_model.bin",
                _use_new_zipfile_serialization=form != "old torch",
            )
            assert digest(folder) == expected
            one, other = (
                weights.load(type(model), located(place), CPU) for place in (folder, copy)
            )
            assert torch.equal(next(one.parameters()), next(other.parameters()))


def test_whatever_decides_values_changes_the_digest(hubert):
    """One bit of one tensor, its name, its shape, its dtype; a key of config.json or of
    preprocessor_config.json; code that comes with a model."""
    config, preprocessor, code = (
        hubert / name for name in ("config.json", "preprocessor_config.json", "theirs.py")
    )
    bias, other, scale = (f"encoder.layer_norm.{name}" for name in ("bias", "other", "weight"))
    edits = [
        lambda: edit_tensors(
            hubert, lambda tensors: tensors[bias].view(torch.int32)[3].bitwise_xor_(1)
        ),
        lambda: edit_tensors(hubert, lambda tensors: tensors.update({other: tensors.pop(bias)})),
        lambda: edit_tensors(
            hubert, lambda tensors: tensors.update({other: tensors[other].reshape(4, 4)})
        ),
        lambda: edit_tensors(
            hubert, lambda tensors: tensors.update({scale: tensors[scale].half()})
        ),
        lambda: edit_json(config, layer_norm_eps=1e-6),
        lambda: edit_json(preprocessor, do_normalize=False),
        preprocessor.unlink,
        lambda: edit_json(config, auto_map={"AutoModel": "theirs.Model"}),  # which names code
        lambda: code.write_text("x = 1\n"),
        lambda: code.write_text("x = 2\n"),
    ]
    found = {digest(hubert)}
    for number, edit in enumerate(edits, 2):
        edit()
        found.add(digest(hubert))
        assert len(found) == number


def test_a_digest_is_computed_once(hubert, monkeypatch):
    expected = digest(hubert)
    reads = []
    monkeypatch.setattr(
        models, "state_dict", lambda found, real=weights.state_dict: reads.append(1) or real(found)
    )
    assert digest(hubert) == expected
    assert not reads
    os.utime(hubert / "model.safetensors", ns=(1, 1))
    assert digest(hubert) == expected
    assert reads


# Loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_gives_what_the_original_gives(saved, tmp_path, dtype):
    torch.set_num_threads(1)
    waveform = torch.randn(1, 4000, generator=torch.Generator().manual_seed(1))
    for name, model_class in (("encodec", EncodecModel), ("hubert", HubertModel)):
        folder = saved / name
        if dtype != torch.float32:
            model_class.from_pretrained(folder).to(dtype).save_pretrained(tmp_path / name)
            folder = tmp_path / name
        original = model_class.from_pretrained(folder, dtype=torch.float32).eval()
        loaded = weights.load(model_class, located(folder), CPU)
        assert any("parametrizations" in key for key in original.state_dict())
        assert not any(
            "parametrizations" in key or key.endswith("weight_g") for key in loaded.state_dict()
        )
        assert not loaded.training
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        assert {tensor.dtype for tensor in loaded.parameters()} == {torch.float32}
        with torch.no_grad():
            run = (
                (lambda m: m.encoder(waveform[None]))
                if name == "encodec"
                else (lambda m: m(waveform)[0])
            )
            assert torch.equal(run(loaded), run(original))


def test_weight_norm_is_folded_to_the_same_bits_whatever_the_threads(saved):
    """Threads share the sum of a norm over the last dimension, so its last bits depend on
    their number."""
    loaded = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        loaded.append(weights.load(HubertModel, located(saved / "hubert"), CPU).state_dict())
        assert torch.get_num_threads() == threads
    assert all(torch.equal(loaded[0][name], loaded[1][name]) for name in loaded[0])


def test_old_weight_norm_is_folded_too():
    """SpeechTokenizer's is such a file."""
    torch.manual_seed(0)
    with pytest.warns(FutureWarning):
        layer = torch.nn.utils.weight_norm(torch.nn.Conv1d(3, 5, 2), dim=0)
    model = torch.nn.Sequential(layer)
    batch = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(batch)
        weights.fold_weight_norm(model)
        assert list(dict(model.named_parameters())) == ["0.bias", "0.weight"]
        assert torch.equal(model(batch), before)


def test_an_auto_class_and_a_larger_checkpoint_load_and_nothing_is_said(saved, capfd):
    """The parts that a model for another task has in addition are left out. transformers
    shows no bars and no reports, and is no longer silent afterwards."""
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    assert isinstance(weights.load(AutoModel, located(saved / "hubert"), CPU), HubertModel)
    assert isinstance(weights.load(HubertModel, located(saved / "ctc"), CPU), HubertModel)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_the_file_that_is_named_is_the_one_that_is_loaded(hubert):
    """This holds even if transformers would load another file of the folder."""
    tensors = load_file(hubert / "model.safetensors")
    tensors["encoder.layer_norm.bias"] = torch.full((16,), 7.0)
    torch.save(tensors, hubert / "other.pt")
    assert digest(hubert / "other.pt") != digest(hubert)
    loaded = weights.load(HubertModel, located(hubert / "other.pt"), CPU)
    assert loaded.encoder.layer_norm.bias.unique().tolist() == [7.0]


def test_a_model_does_not_hang_on_its_file(hubert):
    loaded = weights.load(HubertModel, located(hubert), CPU)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    file = hubert / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())


def test_models_are_loaded_by_several_threads(saved):
    with ThreadPoolExecutor(4) as pool:
        assert (
            len(
                [
                    *pool.map(
                        lambda _: weights.load(HubertModel, located(saved / "hubert"), CPU),
                        range(4),
                    )
                ]
            )
            == 4
        )
