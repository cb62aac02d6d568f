"""What makes a config another version: keys, the revision, the weights; and what does not."""

from dataclasses import replace

import pytest

from featcache.config import parse_config
from featcache.config.config import find_differences
from featcache.extractors import find

FBANK = parse_config("name: mine\nextractor: fbank\n")


def differences(old, new, old_fingerprint=None):
    found = find_differences(old.resolved(), old_fingerprint or old.fingerprint(), new.resolved(), new.fingerprint())
    return found.deciding, found.others


def test_keys_are_those_that_decide_values():
    """Names and limits are told apart."""
    other = parse_config("name: yours\nextractor: fbank\nparams: {low_freq: 0}\naudio: {max_seconds: 5}\n")
    assert differences(FBANK, other) == (
        ["params.low_freq: 20.0 -> 0.0"],
        ["audio.max_seconds: 21600.0 -> 5.0", 'name: "mine" -> "yours"'],
    )
    same = parse_config("name: yours\nextractor: fbank\n")
    assert differences(FBANK, same) == ([], ['name: "mine" -> "yours"'])
    assert differences(FBANK, FBANK) == ([], [])
    assert differences(FBANK, parse_config("name: a\nextractor: mfcc\n"))[0] == ['extractor: "fbank" -> "mfcc"']


def test_a_revision_is_told_by_itself_and_beside_keys(monkeypatch):
    before = FBANK.fingerprint()
    extractor = find("fbank")
    monkeypatch.setattr(extractor, "revision", extractor.revision + 1)
    said = f"the extractor's revision: {extractor.revision - 1} -> {extractor.revision}"
    assert differences(FBANK, FBANK, before) == ([said], [])
    other = replace(FBANK, dtype="float16")
    assert differences(FBANK, other, before) == (['store.dtype: "float32" -> "float16"', said], [])


def test_weights_are_told_by_their_content_and_not_by_their_place(monkeypatch):
    """Beside a revision or keys, too."""
    extractor = find("mimi")
    params = f"{{weights: here/old, revision: {'a' * 40}}}"
    old = parse_config(f"name: mine\nextractor: mimi\nparams: {params}\nstore: {{dtype: uint16}}\n")
    new = replace(old, params=old.params.model_copy(update={"weights": "here/new"}))
    monkeypatch.setattr(extractor, "weights_digest", classmethod(lambda cls, params: params.weights))
    place = 'params.weights: "here/old" -> "here/new"'
    assert differences(old, new) == (["the content of the weights"], [place])
    monkeypatch.setattr(extractor, "weights_digest", classmethod(lambda cls, params: "the same"))
    assert differences(old, new) == ([], [place])


@pytest.mark.parametrize("params", [None, "text", {"low_freq": "x"}, {"no": "such"}])
def test_a_strangers_record_is_only_text(params):
    """Whatever it says."""
    record = FBANK.resolved() | {"params": params}
    found = find_differences(record, "0" * 64, FBANK.resolved(), FBANK.fingerprint())
    assert any(line.startswith("params") for line in found.deciding)
