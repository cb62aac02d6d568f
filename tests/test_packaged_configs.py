"""The packaged configs of models, whose weights are on the hub: they hold together here, where there are none."""

import re

import pytest
import yaml
from click.testing import CliRunner

from featcache.cli import main as cli
from featcache.config import load_config, packaged_configs
from featcache.extractors import find
from featcache.extractors.base import _BUILT_IN

DOCUMENTS = {name: yaml.safe_load(text) for name, text in packaged_configs().items()}
OF_HUB = {name for name, document in DOCUMENTS.items() if document["params"].get("revision")}

WITHOUT_HUB = {"fbank", "log_mel", "mfcc", "torchaudio", "units"}
"""Extractors without weights, with torchaudio's own, or with yours."""

every_config = pytest.mark.parametrize("name", sorted(OF_HUB))


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """An empty hub cache, and a hub that cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_there_is_one_for_each_extractor_of_models():
    """And each names a commit."""
    assert {DOCUMENTS[name]["extractor"] for name in OF_HUB} == set(_BUILT_IN) - WITHOUT_HUB


@every_config
def test_it_is_read_without_its_weights(name, no_hub):
    """Its parameters are checked; its revision is a commit; what is stored holds what is extracted."""
    config = load_config(name)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", config.params.weights)
    assert re.fullmatch(r"[0-9a-f]{40}", config.params.revision)
    assert config.params.precision == "fp32"
    is_codec = "codebooks" in find(config.extractor).Params.model_fields
    assert config.dtype == ("uint16" if is_codec else "float16")


def line_of(name, folder) -> str:
    """What `featcache extract` says of the config, and nothing more, before it ends with 2 and without a cache."""
    manifest, cache = folder / "manifest.csv", folder / "features"
    manifest.write_text("id,path\na,a.wav\n")
    result = CliRunner().invoke(cli, ["extract", str(manifest), "-c", name, "-o", str(cache), "--device", "cpu"])
    assert result.exit_code == 2
    assert not cache.exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"featcache: config {name}: params.weights: ")
    return line


@every_config
def test_extraction_without_its_weights_says_what_to_download(name, no_hub, tmp_path):
    params = DOCUMENTS[name]["params"]
    assert f"hf download {params['weights']} --revision {params['revision']}" in line_of(name, tmp_path)


def test_extraction_without_torchaudios_weights_says_what_to_download(tmp_path, monkeypatch):
    """torchaudio's are no hub's, but a file of its own."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    line = line_of("torchaudio-hubert-base", tmp_path)
    assert "download https://download.pytorch.org/torchaudio/models/hubert_fairseq_base_ls960.pth to " in line
    assert str(tmp_path / "torch") in line
