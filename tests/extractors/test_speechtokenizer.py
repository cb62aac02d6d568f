"""SpeechTokenizer's codes are those of its own package's model, run on each clip alone."""

import json
import re
import warnings

import codes
import pytest
import torch
from codec_checks import CodecChecks, cut
from processes import run_script

from featcache.errors import ConfigError, MissingDependencyError, install_hint
from featcache.extractors import speechtokenizer
from featcache.extractors.speechtokenizer import SpeechTokenizer, SpeechTokenizerParams

with warnings.catch_warnings(action="ignore"):  # of its dependencies, as they are imported
    theirs = pytest.importorskip("speechtokenizer.model", exc_type=ImportError)


MODEL, RATE, HOP = "speechtokenizer", 16000, 320


def load(folder):
    # torch's old weight norm
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        files = (str(folder / name) for name in ("config.json", "SpeechTokenizer.pt"))
        return theirs.SpeechTokenizer.load_from_checkpoint(*files).eval()


def alone(model, clip):
    found = model.encode(clip[None, None])[:, 0].T
    return codes.Reference(found, model.encoder(clip[None, None])[0].T)


def batched(model, clips):
    return model.encode(clips[:, None]).permute(1, 2, 0)


class TestCodes(CodecChecks):
    codec = SpeechTokenizer
    rate, hop, strides = RATE, HOP, (2, 8, 40)
    load, alone, batched = map(staticmethod, (load, alone, batched))


build = TestCodes.build


def test_the_published_model_with_snakes(folder, tmp_path):
    """`speechtokenizer_snake` has another activation, with a weight for each channel."""
    config = json.loads((folder / "config.json").read_text()) | {"activation": "Snake"}
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model = theirs.SpeechTokenizer(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("alpha"):
            torch.nn.init.uniform_(parameter, 0.5, 3)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save(model.state_dict(), tmp_path / "SpeechTokenizer.pt")
    clips = cut([6000, 1, 7 * HOP, 3001], RATE)
    for (latents, _), clip in zip(
        codes.encode(build(tmp_path), clips, 20 * HOP), clips, strict=True
    ):
        with torch.inference_mode():
            codes.assert_close(latents, model.encoder(clip[None, None])[0].T)


def test_weights_are_a_folder_or_the_file_in_it(folder):
    clips = cut([5000], RATE)
    both = [folder, folder / "SpeechTokenizer.pt"]
    (one,), (other,) = (codes.extract(build(path), clips) for path in both)
    assert torch.equal(one, other)
    digests = [
        SpeechTokenizer.weights_digest(SpeechTokenizerParams(weights=str(path))) for path in both
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "holds no config.json"),
        ({"model_type": "hubert"}, "holds a model of type 'hubert', not a SpeechTokenizer's"),
        ({"dimension": 16}, "not a SpeechTokenizer's: .*size mismatch"),
        ({"n_q": 9}, "not a SpeechTokenizer's: .*Missing key"),
    ],
)
def test_weights_that_do_not_go_with_their_config_are_refused(folder, tmp_path, config, message):
    (tmp_path / "SpeechTokenizer.pt").write_bytes((folder / "SpeechTokenizer.pt").read_bytes())
    if config is not None:
        own = {} if "model_type" in config else json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(own | config))
    with pytest.raises(ConfigError, match=message):
        build(tmp_path)


def test_the_package_may_be_missing(folder, monkeypatch):
    monkeypatch.setattr(speechtokenizer, "_PACKAGE", "no_such_package")
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("speechtokenizer"))):
        build(folder)


def test_its_trainer_is_not_imported(cli):
    """Importing it takes as long as everything else, and needs packages that the model
    does not need."""
    script = """
    import sys
    from featcache.extractors.speechtokenizer import _model_class

    _model_class()
    print({"speechtokenizer", "tensorboard", "beartype", "accelerate", "matplotlib"} & set(sys.modules))
    """
    assert run_script(cli, script) == "set()\n"
