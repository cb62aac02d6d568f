"""One file that is several configs: a parameter that only takes from a model's pass may
list its values."""

import json

import jsonschema
import pytest

from featcache.config import load_config, load_configs
from featcache.config.config import listable_params
from featcache.config.schema import config_schema
from featcache.errors import ConfigError
from featcache.extractors.base import find


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "several.yaml"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"codebook_size": 2048}')

    def write(extractor, **params):
        document = {"name": "several", "extractor": extractor}
        document["params"] = {"weights": str(tmp_path / "model"), **params}
        path.write_text(json.dumps(document))
        return path

    return write


def test_each_value_is_a_config(path):
    configs = load_configs(path("ssl", layer=[6, 12, 24]))
    assert [config.name for config in configs] == [
        "several-layer6",
        "several-layer12",
        "several-layer24",
    ]
    assert [config.params.layer for config in configs] == [6, 12, 24]


def test_each_combination_is_a_config(path):
    configs = load_configs(path("mimi", output=["codes", "latents"], codebooks=[8, 16]))
    assert [config.name for config in configs] == [
        "several-codes-codebooks8",
        "several-codes-codebooks16",
        "several-latents-codebooks8",
        "several-latents-codebooks16",
    ]
    assert [config.params.codebooks for config in configs] == [8, 16, None, None]
    assert configs[0].dtype == "uint16"
    assert configs[2].dtype == "float32"


def test_a_key_that_is_set_may_list_values_too(path):
    source = path("ssl", layer=6)
    assert load_configs(source)[0].name == "several"
    configs = load_configs(source, {"params.layer": [1, 2], "name": "other"})
    assert [config.name for config in configs] == ["other-layer1", "other-layer2"]
    (config,) = load_configs(path("ssl", layer=[6, 12]), {"params.layer": 6})
    assert (config.name, config.params.layer) == ("several", 6)


def test_null_is_a_value_and_a_name_is_needed(path):
    configs = load_configs(path("ssl", layer=[None, 6]))
    assert [config.name for config in configs] == ["several-layernull", "several-layer6"]
    source = path("ssl", layer=[6, 12])
    source.write_text(source.read_text().replace('"name": "several", ', ""))
    with pytest.raises(ConfigError, match=r"several\.yaml: name: "):
        load_configs(source)


def test_layers_that_are_stacked_are_one_config(path):
    (config,) = load_configs(path("ssl", layers=[6, 12]))
    assert config.params.layers == (6, 12)


def test_where_one_config_is_wanted_several_are_refused(path):
    with pytest.raises(ConfigError, match="is 2 configs, several-layer6, several-layer12: set"):
        load_config(path("ssl", layer=[6, 12]))


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        ({"layer": []}, r"params\.layer: should be a whole number"),
        ({"layer": [6, "x"]}, r"params\.layer: should be a whole number"),
        ({"precision": ["fp32", "bf16"]}, r"params\.precision: should be"),
        ({"lair": [6]}, r"params\.lair: there is no such key"),
    ],
)
def test_other_lists_are_refused(path, params, fault):
    with pytest.raises(ConfigError, match=fault):
        load_configs(path("ssl", **params))


def test_the_schema_has_what_may_be_listed(path):
    assert listable_params(find("ssl").Params) == {"layer"}
    assert listable_params(find("encodec").Params) == {"output", "codebooks", "bandwidth"}
    assert listable_params(find("fbank").Params) == set()
    schema = config_schema()
    for listed in ({"layer": [6, 12]}, {"layer": 6}, {"layer": None}):
        document = {"name": "a", "extractor": "ssl", "params": {"weights": "x", **listed}}
        jsonschema.validate(document, schema)
    document["params"]["layer"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)
