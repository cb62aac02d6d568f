"""`torchaudio` gives what a bundle's model gives for a clip alone, whatever other clips
are in the batch."""

import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import small_ssl
import torch
from hidden_states import assert_blind_behind_the_end, difference, extract, noise
from processes import python
from torchaudio import models, pipelines

from featcache.config import config_from
from featcache.errors import ConfigError
from featcache.extractors.torchaudio_ssl import TorchaudioSSL

CPU = torch.device("cpu")
BUNDLES = ["HUBERT_BASE", "HUBERT_LARGE", "WAV2VEC2_ASR_BASE_960H", "WAVLM_BASE", "WAVLM_LARGE"]


class Model:
    """A small model like a bundle's, with its weights in a file."""

    def __init__(self, name: str, folder: Path) -> None:
        self.bundle = small_ssl.torchaudio_bundle(name)
        build = models.wavlm_model if self.bundle._model_type == "WavLM" else models.wav2vec2_model
        torch.manual_seed(0)
        self.model = build(**self.bundle._params)
        self.file = small_ssl.save_torchaudio(self.model, folder / f"{name}.pth")
        self.model.eval().aux = None

    @torch.inference_mode()
    def __call__(self, waveform: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """For a clip alone: what each layer gives, `[frames, layers, D]`, and the output
        `[frames, D]`."""
        if self.bundle._normalize_waveform:
            waveform = torch.nn.functional.layer_norm(waveform, waveform.shape)
        hidden, _ = self.model.extract_features(waveform[None])
        return torch.stack(hidden, dim=2)[0].numpy(), self.model(waveform[None])[0][0].numpy()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Small models, which replace the bundles of the same names in `torchaudio.pipelines`."""
    folder, patch = tmp_path_factory.mktemp("torchaudio"), pytest.MonkeyPatch()
    found = {name: Model(name, folder) for name in BUNDLES}
    for name, model in found.items():
        patch.setattr(pipelines, name, model.bundle)
    yield found
    patch.undo()


def build(model: Model, **params) -> TorchaudioSSL:
    name = model.file.stem
    return TorchaudioSSL(
        TorchaudioSSL.Params(bundle=name, weights=str(model.file), **params), 16000, CPU
    )


@pytest.mark.parametrize("name", BUNDLES)
def test_every_layer_is_torchaudios(name, small):
    waveforms = [noise(n) for n in (9001, 400, 720, 719, 9280, 401, 721)]
    layers = extract(build(small[name], layers=[1, 2, 3]), waveforms)
    outputs = extract(build(small[name]), waveforms)
    for waveform, ours, output in zip(waveforms, layers, outputs, strict=True):
        hidden, last = small[name](waveform)
        for layer in range(small_ssl.LAYERS):
            assert difference(ours[:, layer], hidden[:, layer]) < 1e-5
        assert difference(output, last) < 1e-5


@pytest.mark.parametrize("name", ["HUBERT_BASE", "WAVLM_LARGE"])
def test_what_is_behind_the_end_changes_no_bit(name, small):
    assert_blind_behind_the_end(build(small[name], layers=[0, 3]), [9280, 880, 9001])


# Where the weights are


def test_weights_in_torch_hubs_cache(small, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    expected = (
        "download https://download.pytorch.org/torchaudio/models/HUBERT_BASE.pth to "
        f"{tmp_path}/checkpoints/"
    )
    params = TorchaudioSSL.Params(bundle="HUBERT_BASE")
    for attempt in (TorchaudioSSL.weights_digest, lambda params: TorchaudioSSL(params, 16000, CPU)):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            attempt(params)
    file = tmp_path / "checkpoints" / "HUBERT_BASE.pth"
    file.parent.mkdir()
    file.write_bytes(small["HUBERT_BASE"].file.read_bytes())
    found = extract(TorchaudioSSL(params, 16000, CPU), [noise(5000)])[0]
    assert np.array_equal(found, extract(build(small["HUBERT_BASE"]), [noise(5000)])[0])
    named = TorchaudioSSL.Params(bundle="HUBERT_BASE", weights=str(small["HUBERT_BASE"].file))
    assert TorchaudioSSL.weights_digest(params) == TorchaudioSSL.weights_digest(named)


def test_what_is_wrong_is_said_at_once(small):
    file = small["HUBERT_BASE"].file
    for wrong, sample_rate, message in (
        (
            {"bundle": "HUBERT"},
            16000,
            r"params.bundle: torchaudio has no 'HUBERT' .did you mean HUBERT_BASE.*; it has HUBERT_ASR_LARGE, ",
        ),
        ({"layer": 9}, 16000, r"params.layer: 9; the model has layers 0 to 3"),
        ({"bundle": "WAVLM_BASE"}, 16000, r"params.weights: .*: not the bundle's weights: "),
        ({"weights": str(file.parent)}, 16000, r"params.weights: .*: name the file"),
        ({"revision": "a" * 40}, 16000, r"params.revision: should be left out"),
        ({}, 8000, r"audio.sample_rate: 8000; HUBERT_BASE is for 16000"),
    ):
        params = {"bundle": "HUBERT_BASE", "weights": str(file), **wrong}
        config = {
            "name": "a",
            "extractor": "torchaudio",
            "params": params,
            "audio": {"sample_rate": sample_rate},
        }
        with pytest.raises(ConfigError, match=message) as raised:
            config_from(config).build(CPU)
        assert "\n" not in str(raised.value)


def test_a_torchaudio_that_does_not_import_is_needed_by_nothing_else(tmp_path):
    """As one that was built for another torch; transformers imports any that is installed."""
    broken = tmp_path / "torchaudio"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libc10_cuda.so: cannot open')")
    record = tmp_path / "torchaudio-2.11.1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.4\nName: torchaudio\nVersion: 2.11.1\n")
    code = """
import sys
from featcache.config import config_from
from featcache.weights import transformers_class
for name in ("MimiModel", "WavLMModel", "WhisperModel", "AutoModel"):
    print(transformers_class(name, "this").__name__)
print("torchaudio" in sys.modules)
params = {"bundle": "HUBERT_BASE"}
config = config_from({"name": "a", "extractor": "torchaudio", "params": params})
config.build("cpu")
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    told = python("-c", code, env=environment).with_code(1)
    assert told.out.split() == ["MimiModel", "WavLMModel", "WhisperModel", "AutoModel", "False"]
    line = told.err.splitlines()[-1]
    assert "torchaudio 2.11.1 does not import beside torch" in line
    assert "libc10_cuda.so: cannot open: torchaudio 2.11.1 needs torch 2.13 or later" in line
