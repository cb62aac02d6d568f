"""Extractors of one's own: the example, and the one that the documentation shows."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from processes import run_here

import featcache
from featcache.config import config_from, load_config
from featcache.extractors import Clip
from featcache.testing import ExtractorSuite

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module", autouse=True)
def _importable():
    """Importable, as with PYTHONPATH=examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield


class TestExample(ExtractorSuite):
    config = EXAMPLES / "my_extractor.yaml"


def test_the_example_is_short():
    assert (EXAMPLES / "my_extractor.py").stat().st_size < 2100


@pytest.mark.parametrize("hz", [90, 120, 200, 310])
def test_the_examples_pitch_is_the_pitch(hz):
    """The period of a tone with harmonics is exact to a sample; noise is unvoiced, and
    silence is quiet."""
    extractor = load_config(EXAMPLES / "my_extractor.yaml").build(torch.device("cpu"))
    at = torch.arange(16000) / 16000
    tone = 0.1 * sum(
        torch.sin(2 * torch.pi * hz * harmonic * at) / harmonic for harmonic in range(1, 8)
    )
    noise = torch.randn(16000, generator=torch.Generator().manual_seed(0))
    clips = [Clip("", waveform) for waveform in (tone, 0.1 * noise, torch.zeros(16000))]
    voiced, unvoiced, silent = extractor.extract(clips)
    assert ((16000 / voiced[:, 0] - 16000 / hz).abs() <= 1).all()
    assert (voiced[:, 1] > 0.95).all()
    assert (unvoiced[:, 1] < 0.4).all()
    assert (voiced[:, 2] > -30).all()
    assert (silent[:, 2] < -90).all()


def test_the_example_is_extracted(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    command = "extract examples/manifest.csv -c examples/my_extractor.yaml --device cpu --threads 2"
    run_here(*command.split(), "-o", tmp_path / "features")
    cache = featcache.open(tmp_path / "features", "pitch")
    pitch, voicing, _ = cache["anna-1"].T
    assert cache["anna-1"].dtype == np.float32
    assert 75 < np.median(pitch[voicing > 0.6]) < 350


class TestDocumented(ExtractorSuite):
    """The model of docs/extractors.md, with an encoder whose norm runs over time."""

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls, tmp_path_factory):
        class MyEncoder(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = torch.nn.Conv1d(1, 256, 320, stride=320)
                self.norm = torch.nn.GroupNorm(1, 256)

            def forward(self, waveforms):
                return self.norm(self.conv(waveforms[:, None])).mT

        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("weights")
        torch.save(MyEncoder().state_dict(), folder / "mine.pt")
        page = (ROOT / "docs" / "extractors.md").read_text(encoding="utf-8")
        (code,) = (
            block
            for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
            if "MyEncoder" in block
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "my_package", SimpleNamespace(MyEncoder=MyEncoder))
            module = ModuleType("documented_extractor")
            exec(compile(code, "docs/extractors.md", "exec"), module.__dict__)
            patch.setitem(sys.modules, "documented_extractor", module)
            weights = {"weights": str(folder / "mine.pt")}
            yield config_from(
                {"name": "mine", "extractor": "documented_extractor:Mine", "params": weights}
            )
