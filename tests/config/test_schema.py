"""The JSON Schema of configs says what the validation says, as far as a schema can."""

import json
import subprocess
import sys

import jsonschema
import pytest
import yaml
from processes import run_here

from featcache.config import config_from, packaged_configs
from featcache.errors import ConfigError
from featcache.extractors import find, registered


@pytest.fixture(
    scope="module", params=[jsonschema.Draft202012Validator, jsonschema.Draft7Validator]
)
def schema(request):
    """As `featcache configs --schema` prints it, and as editors read it that know no
    draft after the seventh."""
    printed = json.loads(run_here("configs", "--schema"))
    request.param.check_schema(printed)
    return request.param(printed)


def test_packaged_configs_fit(schema):
    for name, text in packaged_configs().items():
        assert not [*schema.iter_errors(yaml.safe_load(text))], name


@pytest.mark.parametrize(
    "good",
    [
        "{}",
        "{params: , audio: , augment: , store: }",
        "{params: {num_mel_bins: 40}, audio: {channel: 1, max_seconds: null}, augment: "
        "{speed: [0.9, 1]}}",
        "{extractor: 'odd_extractors:Slow', params: {seconds: 1}}",
        "{extractor: ssl, params: {weights: facebook/hubert-base-ls960, layer: 6, "
        "chunk: {seconds: 20, overlap: 2}}}",
    ],
)
def test_what_is_valid_fits(schema, good):
    document = {"name": "mine", "extractor": "fbank"} | yaml.safe_load(good)
    assert config_from(document).name == "mine"
    assert not [*schema.iter_errors(document)]


@pytest.mark.parametrize(
    "bad",
    [
        "{name: a b}",
        "{name: }",
        "{extractor: fbnak}",
        "{extractor: 5}",
        "{sections: {}}",
        "{params: {low_freq: yes}}",
        "{params: {num_mel_bins: 2.5}}",
        "{params: {num_mel_bins: 0}}",
        "{params: {window_type: triangle}}",
        "{params: {num_mel_bin: 40}}",
        "{params: [1]}",
        "{extractor: mfcc, params: {use_power: true}}",
        "{extractor: encodec}",
        "{extractor: ssl, params: {weights: here, layer: last}}",
        "{extractor: ssl, params: {weights: here, layer: 6, chunk: {seconds: -1}}}",
        "{audio: {sample_rate: 0}}",
        "{audio: {channel: left}}",
        "{audio: {resample: sinc}}",
        "{augment: {noise: {snr: [5]}}}",
        "{store: {dtype: bf16}}",
    ],
)
def test_what_is_refused_does_not_fit(schema, bad):
    document = {"name": "mine", "extractor": "fbank"} | yaml.safe_load(bad)
    with pytest.raises(ConfigError):
        config_from(document)
    assert not schema.is_valid(document)


def test_every_key_says_what_it_means(schema):
    for name in registered():
        params = find(name).Params
        described = schema.schema["$defs"][params.__name__]["properties"]
        assert set(described) == set(params.model_fields)
        for key, field in params.model_fields.items():
            assert described[key]["description"] == " ".join(field.description.split())


def test_reading_a_config_does_not_import_torch():
    code = """
import gc, sys
from featcache.cli.extract import import_torch_when_used
import_torch_when_used()
from featcache.config import load_config
load_config("fbank80")
assert "torch.nn" not in sys.modules
import torch
assert torch.zeros(2).tolist() == [0, 0] and "torch.nn" in sys.modules
assert gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
