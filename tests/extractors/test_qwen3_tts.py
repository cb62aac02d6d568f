"""The codes of Qwen3-TTS's tokenizer at 12.5 Hz are the first 16 codebooks of its encoder,
a MimiModel, run on each clip alone."""

import json
import shutil

import codes
import pytest
import torch
from codec_checks import cut
from saved_models import edit_json
from transformers import MimiModel

from featcache.errors import ConfigError
from featcache.extractors.mimi import Mimi, MimiParams

MODEL, RATE, HOP = "qwen3_tts", 24000, 1920


def build(folder, codebooks=None):
    params = MimiParams(weights=str(folder), codebooks=codebooks)
    return Mimi(params, RATE, torch.device("cpu"))


@pytest.mark.parametrize("codebooks", [None, 16, 4])
def test_codes_are_those_of_the_mimi_within(saved, folder, codebooks):
    """`encode` of the original is that of its Mimi, cut to the codebooks in use. The last
    of the small model's codebooks are finer than rounding."""
    model = MimiModel.from_pretrained(saved("mimi")).eval()
    extractor = build(folder, codebooks)
    clips = cut([1, HOP - 1, HOP, HOP + 1, 3 * HOP, 3 * HOP + 1, 20000], RATE)
    for clip, found in zip(clips, codes.extract(extractor, clips), strict=True):
        with torch.inference_mode():
            expected = model.encode(clip[None, None]).audio_codes[0, : codebooks or 16].T
            latents = model.encoder(clip[None, None]).latents[0].T
        assert found.shape == expected.shape == (-(-len(clip) // HOP), codebooks or 16)
        assert torch.equal(found[:, :8].long(), expected[:, :8])
        assert torch.equal(extractor.quantize(latents[None])[0], expected)


def test_codebooks_without_use_are_refused(folder):
    with pytest.raises(ConfigError, match=r"params\.codebooks: 17, but .* has 16$"):
        build(folder, 17)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (None, "has no mapping encoder_config"),
        ({"codebook_size": 1000}, "config.json: Class validation error"),
        ({"num_filters": 6}, "is not a whole MimiModel: wrong shapes"),
        ({"num_hidden_layers": 3}, "is not a whole MimiModel: it lacks encoder."),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder, tmp_path, encoder, message):
    other = shutil.copytree(folder, tmp_path / "other")
    if encoder:
        encoder = json.loads((folder / "config.json").read_text())["encoder_config"] | encoder
    edit_json(other / "config.json", encoder_config=encoder)
    with pytest.raises(ConfigError, match=message):
        build(other)
