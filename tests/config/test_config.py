"""Configs: every fault at once, and a fingerprint of what decides the values and of
nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from parsed_configs import parse_config
from pydantic import BaseModel, model_validator

from featcache import extractors
from featcache.config import config_from, load_config
from featcache.config.config import find_differences, keys_of
from featcache.errors import ConfigError, differing_keys
from featcache.extractors import Extractor, Params, find
from featcache.extractors.kaldi import Fbank
from featcache.extractors.model import ModelParams

PLAIN = "name: mine\nextractor: fbank\n"


def fault(text: str, values: dict[str, object] | None = None) -> str:
    """What is said of a config that is refused, with values that are set in it."""
    with pytest.raises(ConfigError) as raised:
        parse_config(text, "mine.yaml", set=values)
    message = str(raised.value)
    assert message.startswith("config mine.yaml:")
    first, *listed = message.removeprefix("config mine.yaml:").splitlines()
    assert not listed or first == f" {len(listed)} errors"
    assert all(line.startswith("  ") for line in listed)
    return message


# Faults


@pytest.mark.parametrize(
    "key",
    [
        *["name", "extractor", "params.weights", "params.num_mel_bins", "audio.resample"],
        *["augment.noise.manifest", "augment.speed", "store.dtype", "steps"],
    ],
)
@pytest.mark.parametrize(
    "url",
    ["https://u:HUSH@h/x", "https:/u:HUSH@h/x", f"https://u:{'0' * 40}HUSH@h/", "s3://b?HUSH"],
)
def test_a_config_with_a_secret_is_refused_and_the_secret_is_not_shown(key, url):
    """A version stores its config."""
    message = fault(PLAIN, {key: url})
    assert f"{key} has a " in message
    assert "HUSH" not in message
    assert "000" not in message
    assert "HUSH" not in fault(PLAIN, {key: [url, url]})


def test_noise_at_a_url_is_refused_as_one():
    message = fault(PLAIN, {"augment": {"noise": {"manifest": "https://h/n.csv", "snr": [5]}}})
    assert "augment.noise.manifest: the file: https://h/n.csv is a URL: mount or copy" in message


def test_every_fault_is_told_at_once_by_its_dotted_path():
    """Nobody mends a config one error at a time."""
    message = fault(
        """
        name: my config
        extractor: fbank
        params: {num_mel_bins: 2, low_freq: .nan, bins: 80, window_type: triangle}
        audio: {sample_rate: fast, channel: left, rate: 8000, max_seconds: 0}
        store: {dtype: bf16, shards: 3}
        steps: 5
        """
    )
    for path in (
        *(
            "name: 'my config'",
            "params.num_mel_bins:",
            "params.low_freq:",
            "params.bins:",
            "params.window_type:",
        ),
        *(
            "audio.sample_rate:",
            "audio.channel:",
            "audio.rate:",
            "audio.max_seconds:",
            "store.dtype:",
            "store.shards:",
        ),
        "steps:",
    ):
        assert message.count(path) == 1, path
    for name in ("literal", "constrained", "is_instance", "function-", "int:", "str:"):
        assert name not in message


@pytest.mark.parametrize(
    "name", ["", ".hidden", "-c", "a/b", "..", "a b", "naïve", "a\n", 5, None, True]
)
def test_a_name_is_fit_for_a_folder(name):
    assert "name: " in fault(json.dumps({"name": name, "extractor": "fbank"}))


def test_an_unknown_extractor_lists_those_there_are():
    message = fault("name: a\nextractor: fbnak\n")
    assert all(
        name in message for name in ("'fbnak'", "fbank", "log_mel", "mfcc", "package.module:Class")
    )


@pytest.mark.parametrize(
    "path",
    [
        "os:path",
        "json:loads",
        "no.such:Class",
        "json:Nothing",
        ":Class",
        "json:",
        ".a:B",
        "odd_extractors:HOP",
    ],
)
def test_an_extractor_that_cannot_be_imported_is_a_fault(path):
    message = fault(f"name: a\nextractor: '{path}'\n")
    assert f"extractor: {path}" in message
    assert ("put the folder of your own module on PYTHONPATH" in message) == (
        path == "no.such:Class"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extractor: fbank\n", "name: field required"),
        ("name: a\n", "extractor: field required"),
        (
            PLAIN + "audio: {sampel_rate: 8000}",
            "audio.sampel_rate: there is no such key (did you mean sample_rate?)",
        ),
        (
            PLAIN + "augment: {noise: {snrs: [5]}}",
            "augment.noise.snrs: there is no such key (did you mean snr?)",
        ),
        (
            PLAIN + "store: {shards: 3}",
            "store.shards: there is no such key (there are dtype, pool)",
        ),
        (
            PLAIN + "params: {num_mel_bin: 40}",
            "num_mel_bin: there is no such key (did you mean num_mel_bins?)",
        ),
        (PLAIN + "param: {}", "param: there is no such key (did you mean params?)"),
        (
            "name: a\nextractor: odd_extractors:Slow\nparams: {second: 1}\n",
            "(did you mean seconds?)",
        ),
        ("name: [a\n", "line 2, column 1: not valid YAML"),
        ("\tname: a\n", "not valid YAML"),
        ("", "expected a mapping"),
        ("- a\n", "expected a mapping"),
        ("just words", "expected a mapping"),
        (PLAIN + "1: 2\n", "1: keys should be strings"),
        (PLAIN + "params: 5\n", "params: should be a mapping, not 5"),
        (
            PLAIN + "audio: {channel: -1}\n",
            "audio.channel: should be 'mix' or 'first', or greater than or equal to 0, not -1",
        ),
        (
            PLAIN + "audio: {channel: true}\n",
            "audio.channel: should be 'mix' or 'first', or a whole number, not true",
        ),
        (
            PLAIN + "audio: {sample_rate: 8 kHz}\n",
            'audio.sample_rate: should be a whole number, not "8 kHz"',
        ),
        (
            PLAIN + "audio: {sample_rate: [8000]}\n",
            "audio.sample_rate: should be a whole number, not a list",
        ),
        (PLAIN + "audio: {resample: null}\n", "or 'forbid', not null"),
        (PLAIN + "store: {dtype: 2024-01-01}\n", "or 'int64', not 2024-01-01"),
        (PLAIN + "augment: [1.1]\n", "augment: should be a mapping, not a list"),
        (PLAIN + "augment: {speed: 1.1}\n", "augment.speed: should be a list, not 1.1"),
        (PLAIN + "audio: {max_seconds: .inf}\n", "audio.max_seconds: should be a finite number"),
        (
            PLAIN + "params: {blackman_coeff: .nan}\n",
            "params.blackman_coeff: should be a finite number",
        ),
        (PLAIN + "params: {low_freq: yes}\n", "params.low_freq: should be a number, not true"),
        (
            PLAIN + "params: {num_mel_bins: off}\n",
            "params.num_mel_bins: should be a whole number, not false",
        ),
        (
            PLAIN + "audio: {sample_rate: true}\n",
            "audio.sample_rate: should be a whole number, not true",
        ),
        (PLAIN + "audio: {max_seconds: no}\n", "audio.max_seconds: should be a number, not false"),
        (PLAIN + "augment: {speed: [1.1, yes]}\n", "augment.speed.1: should be a number, not true"),
    ],
)
def test_what_is_no_config_is_refused_in_one_line(text, words):
    """YAML's surprises included. A misspelt key says which may be meant, or else which
    there are."""
    assert words in fault(text)


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(st.text() | DOCUMENTS.map(yaml.safe_dump))
def test_no_text_is_more_than_refused(text):
    with pytest.raises(ConfigError):
        parse_config(text, "mine.yaml")


def test_a_file_that_cannot_be_read_is_a_fault(tmp_path):
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\n")
    for path in (tmp_path / "gone.yaml", tmp_path, tmp_path / "bytes.yaml", "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_config(path)
    with pytest.raises(ConfigError, match="Is a directory; `featcache configs --from` prints"):
        load_config(tmp_path)  # perhaps a version's
    with pytest.raises(ConfigError, match=r"; did you mean the packaged config fbank80\?"):
        load_config("fbank81")
    with pytest.raises(ConfigError, match=r"; the packaged configs are .*fbank80, .*mfcc13"):
        load_config("my-features")


# What a config is


def test_what_does_not_build_says_of_which_config_it_is(tmp_path):
    """There may be several; where it was read from a file, by that."""
    config = parse_config("name: mine\nextractor: fbank\nparams: {low_freq: 9000}\n")
    with pytest.raises(ConfigError, match=r"^config mine: params"):
        config.build(torch.device("cpu"))
    (tmp_path / "mine.yaml").write_text("name: other\nextractor: fbank\nparams: {low_freq: 9000}\n")
    with pytest.raises(ConfigError, match=r"^config .*/mine\.yaml: params"):
        load_config(tmp_path / "mine.yaml").build(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"^config units.yaml: params\.weights"):
        parse_config(
            "name: mine\nextractor: units\nparams: {weights: gone.safetensors}\n", "units.yaml"
        )


def test_values_that_are_set_are_as_if_the_file_had_them():
    text = "name: mine\nextractor: fbank\nparams: {low_freq: 30}\naudio:\n"
    changed = parse_config(
        text, set={"params.num_mel_bins": 40, "audio.channel": "first", "store.dtype": "float16"}
    )
    same = (
        "params: {low_freq: 30, num_mel_bins: 40}\naudio: {channel: first}\nstore: {dtype: "
        "float16}\n"
    )
    assert changed == parse_config(PLAIN + same)
    whole = load_config(parse_config(text), {"params": {"num_mel_bins": 40}, "params.low_freq": 20})
    assert whole == parse_config(PLAIN + "params: {num_mel_bins: 40}\n")
    message = fault(text, {"params.low_freq.x": True, "param.low_freq": 1, "augment.speed": [1]})
    assert "params.low_freq: should be a number, not a mapping" in message
    assert "param: there is no such key (did you mean params?)" in message
    assert "augment: makes no copies" in message


class _Tree(BaseModel):
    depth: int = 0
    left: _Tree | None = None


def test_keys_of_a_model_that_contains_itself_end():
    assert [*keys_of(_Tree)] == ["depth", "left"]


def test_all_keys_of_a_config_are_known():
    keys = parse_config(PLAIN).keys
    assert {
        "name",
        "params.num_mel_bins",
        "audio.channel",
        "augment.noise.snr",
        "store.dtype",
    } <= set(keys)
    for key in set(keys) - {"name", "extractor", "params"}:
        message = fault(PLAIN, {key: object()})
        assert f"{key}: " in message
        assert "no such key" not in message


# The fingerprint


def fingerprint(text: str) -> str:
    return parse_config(text).fingerprint()


@pytest.mark.parametrize(
    "same",
    [
        "name: another\nextractor: fbank\n",
        "extractor: fbank\nname: mine\n",
        PLAIN + "params: {}\naudio: {}\nstore: {}\n",
        PLAIN + "params:\naudio:\naugment:\nstore:\n",
        PLAIN + "params: {num_mel_bins: 80}\n",
        PLAIN + "params: {low_freq: 20}\n",
        PLAIN + "params: {window_type: povey, num_mel_bins: 80, low_freq: 2.0e+1}\n",
        PLAIN + "audio: {channel: mix, sample_rate: 16000, resample: soxr_hq}\n",
        PLAIN + "audio: {max_seconds: 30}\n",
        PLAIN + "store: {dtype: float32}\n",
    ],
)
def test_what_decides_no_value_is_not_in_the_fingerprint(same):
    assert fingerprint(same) == fingerprint(PLAIN)


def different(default):
    """Another value of a parameter of fbank."""
    match default:
        case bool():
            return not default
        case str():
            return "hamming"
        case _:
            return type(default)(default / 2) or 1


def test_each_key_that_decides_values_is_in_the_fingerprint():
    """All parameters, the audio policy, the stored dtype, the extractor: each alone makes
    another version."""
    params = {name: different(field.default) for name, field in Fbank.Params.model_fields.items()}
    texts = [f"params: {{{name}: {json.dumps(value)}}}\n" for name, value in params.items()]
    policies = (
        "sample_rate: 8000",
        "channel: first",
        "channel: 1",
        "resample: soxr_vhq",
        "resample: forbid",
    )
    texts += [f"audio: {{{policy}}}\n" for policy in policies]
    texts += [f"store: {{dtype: {dtype}}}\n" for dtype in ("float16", "uint8")]
    found = [
        fingerprint(text)
        for text in (PLAIN, *(PLAIN + text for text in texts), PLAIN.replace("fbank", "mfcc"))
    ]
    assert len(set(found)) == len(texts) + 2
    assert all(re.fullmatch("[0-9a-f]{64}", one) for one in found)


def test_a_parameter_that_was_added_later_leaves_older_versions_as_they_are():
    plain, spelt_out = (
        parse_config(PLAIN),
        parse_config(PLAIN + "params: {waveform_scale: 32768}\n"),
    )
    other = parse_config(PLAIN + "params: {waveform_scale: 1}\n")
    older = plain.resolved()
    assert "waveform_scale" not in older["params"]
    assert older == spelt_out.resolved()
    assert config_from(older).params.waveform_scale == 32768
    assert config_from(older).fingerprint() == plain.fingerprint() == spelt_out.fingerprint()
    assert other.resolved()["params"]["waveform_scale"] == 1
    assert config_from(other.resolved()) == other
    assert other.fingerprint() != plain.fingerprint()
    assert differing_keys(older, spelt_out.resolved()) == []
    assert differing_keys(older, other.resolved()) == ["params.waveform_scale: not given -> 1.0"]


class Layered(Params):
    """Parameters with others inside, a choice of types, and a check of its own."""

    class Piece(Params):
        locations: ClassVar[frozenset[str]] = frozenset({"path"})
        seconds: float
        path: str = "here"

    locations: ClassVar[frozenset[str]] = frozenset({"path"})

    path: str = "here"
    piece: Piece | None = None
    pieces: tuple[Piece, ...] = ()
    named: dict[str, Piece] | None = None
    layers: int | list[int] | Literal["all"] = 0
    either: Piece | Params | None = None

    @model_validator(mode="after")
    def _checked(self) -> Layered:
        if self.layers == 13:
            raise ValueError("Layer 13 is unlucky")
        return self


@pytest.fixture
def layered(monkeypatch):
    """A config's text, of an extractor with those parameters."""
    monkeypatch.setattr(Fbank, "Params", Layered)
    return lambda params: PLAIN + f"params: {json.dumps(params)}\n"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"piece": {}}, "params.piece.seconds: field required"),
        ({"piece": {"seconds": "long"}}, 'params.piece.seconds: should be a number, not "long"'),
        (
            {"piece": {"seconds": 1, "second": 2}},
            "params.piece.second: there is no such key (did you mean seconds?)",
        ),
        (
            {"named": {"a": {"seconds": 1, "pth": ""}}},
            "params.named.a.pth: there is no such key (did you mean path?)",
        ),
        (
            {"pieces": [{"seconds": 1}, {"seconds": None}]},
            "params.pieces.1.seconds: should be a number, not null",
        ),
        ({"pieces": 5}, "params.pieces: should be a list, not 5"),
        ({"layers": [1, "two"]}, 'params.layers.1: should be a whole number, not "two"'),
        ({"layers": "some"}, "params.layers: should be "),
        ({"either": {"seconds": "long"}}, 'params.either.seconds: should be a number, not "long"'),
        (
            {"layers": True},
            "params.layers: should be a whole number, or a list, or 'all', not true",
        ),
        ({"piece": {"seconds": False}}, "params.piece.seconds: should be a number, not false"),
        ({"layers": 13}, "params: layer 13 is unlucky"),
    ],
)
def test_a_fault_inside_parameters_has_the_path_that_the_file_has(layered, params, words):
    message = fault(layered(params))
    assert words in message
    lines = message.removeprefix("config mine.yaml: ").splitlines()
    for line in lines[1:] or lines:
        assert re.match(
            r"\s*params(\.(piece|pieces|named|layers|either|seconds?|pth|[01a]))*:", line
        )


def test_where_something_is_is_not_in_the_fingerprint(layered):
    one = fingerprint(layered({"path": "here", "piece": {"seconds": 1, "path": "here"}}))
    assert fingerprint(layered({"path": "there", "piece": {"seconds": 1, "path": "there"}})) == one
    assert fingerprint(layered({"path": "here", "piece": {"seconds": 2, "path": "here"}})) != one
    assert parse_config(layered({"path": "there"})).resolved()["params"]["path"] == "there"


class Weighted(Extractor[ModelParams]):
    """An extractor whose weights are hashed, and that is never run."""

    Params = ModelParams
    revision = 1

    @classmethod
    def weights_digest(cls, params):
        return Path(params.weights).read_text()


def test_weights_are_relative_to_the_config_file(tmp_path, monkeypatch):
    text = f"name: a\nextractor: {__name__}:Weighted\nparams: {{weights: model/weights.pt}}\n"
    for name in ("a", "b"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "weights.pt").write_text("the same in both")
        (tmp_path / name / "mine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    relative = load_config("a/mine.yaml")
    monkeypatch.chdir("b")
    assert relative.params.weights == str(tmp_path / "a" / "model" / "weights.pt")
    assert load_config(tmp_path / "a" / "mine.yaml") == relative
    again = config_from(json.loads(json.dumps(relative.resolved())))
    assert (again, again.fingerprint()) == (relative, relative.fingerprint())
    assert load_config("mine.yaml").params != relative.params
    assert load_config("mine.yaml").fingerprint() == relative.fingerprint()
    (tmp_path / "a" / "model" / "weights.pt").write_text("something else")
    assert load_config("mine.yaml").fingerprint() != relative.fingerprint()


# What makes a config another version

FBANK = parse_config(PLAIN)


def differences(old, new, old_fingerprint=None):
    found = find_differences(
        old.resolved(), old_fingerprint or old.fingerprint(), new.resolved(), new.fingerprint()
    )
    return found.deciding, found.others


def test_keys_are_those_that_decide_values():
    other = parse_config(
        "name: yours\nextractor: fbank\nparams: {low_freq: 0}\naudio: {max_seconds: 5}\n"
    )
    assert differences(FBANK, other) == (
        ["params.low_freq: 20.0 -> 0.0"],
        ["audio.max_seconds: 21600.0 -> 5.0", 'name: "mine" -> "yours"'],
    )
    same = parse_config("name: yours\nextractor: fbank\n")
    assert differences(FBANK, same) == ([], ['name: "mine" -> "yours"'])
    assert differences(FBANK, FBANK) == ([], [])
    assert differences(FBANK, parse_config("name: a\nextractor: mfcc\n"))[0] == [
        'extractor: "fbank" -> "mfcc"'
    ]


def test_a_revision_is_told_by_itself_and_beside_keys(monkeypatch):
    before = FBANK.fingerprint()
    extractor = find("fbank")
    monkeypatch.setattr(extractor, "revision", extractor.revision + 1)
    said = f"the extractor's revision: {extractor.revision - 1} -> {extractor.revision}"
    assert differences(FBANK, FBANK, before) == ([said], [])
    other = replace(FBANK, dtype="float16")
    assert differences(FBANK, other, before) == (['store.dtype: "float32" -> "float16"', said], [])


def test_weights_are_told_by_their_content_and_not_by_their_place(monkeypatch):
    extractor = find("mimi")
    params = f"{{weights: here/old, revision: {'a' * 40}}}"
    old = parse_config(f"name: mine\nextractor: mimi\nparams: {params}\nstore: {{dtype: uint16}}\n")
    new = replace(old, params=old.params.model_copy(update={"weights": "here/new"}))
    monkeypatch.setattr(
        extractor, "weights_digest", classmethod(lambda cls, params: params.weights)
    )
    place = 'params.weights: "here/old" -> "here/new"'
    assert differences(old, new) == (["the content of the weights"], [place])
    monkeypatch.setattr(extractor, "weights_digest", classmethod(lambda cls, params: "the same"))
    assert differences(old, new) == ([], [place])


@pytest.mark.parametrize("params", [None, "text", {"low_freq": "x"}, {"no": "such"}])
def test_a_strangers_record_is_only_text(params):
    record = FBANK.resolved() | {"params": params}
    found = find_differences(record, "0" * 64, FBANK.resolved(), FBANK.fingerprint())
    assert any(line.startswith("params") for line in found.deciding)


# Extractors of one's own


def test_parameters_do_not_change():
    class Mine(Params):
        value: float = 1.0
        names: ClassVar[list[str]] = []

    assert issubclass(extractors.Params, Params)
    with pytest.raises(ValueError, match="frozen"):
        Mine().value = 2.0
    with pytest.raises(ValueError, match="finite"):
        Mine(value=float("nan"))
