"""The features of single files and waveforms are, bit for bit, those of a cache."""

import numpy as np
import pytest
import soundfile
import torch

import featcache
from featcache.config import config_from
from featcache.errors import ArgumentError, AudioError, ConfigError, Reason, StoreError

CONFIGS = {
    "dithered": {"extractor": "fbank", "params": {"dither": 1.0}},
    "quantised": {"extractor": "fbank", "store": {"dtype": "uint8"}},
    "copies": {"extractor": "fbank", "augment": {"speed": [0.9, 1.0]}},
    "rows": {"extractor": "row_extractors:Moments"},
    "quantised pieces": {
        "extractor": "row_extractors:Moments",
        "params": {"piece": 20},
        "store": {"dtype": "uint8"},
    },
}


def assert_same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.tobytes() == wanted.tobytes()


def test_files_give_what_the_cache_holds(corpus, reference):
    extractor, cache = featcache.extractor(reference, device="cpu"), featcache.open(reference)
    assert extractor.spec.item_shape == (80,)
    for row in corpus.rows:
        segment = {name: row[name] for name in ("start", "duration", "channel") if name in row}
        assert_same(extractor.file(corpus.folder / row["path"], **segment), cache[row["id"]])


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("source", CONFIGS.values(), ids=CONFIGS)
def test_waveforms_give_what_the_cache_holds(source, plain, scratch):
    config = config_from({"name": "some", **source})
    featcache.extract(plain.manifest(), config, scratch, featcache.Options("cpu"))
    cache = featcache.open(scratch)
    of_version, of_config = (
        featcache.extractor(cache, device="cpu"),
        featcache.extractor(config=config, device="cpu"),
    )
    path_of = {row["id"]: row["path"] for row in plain.rows}
    for id_ in cache.ids:
        waveform, rate = soundfile.read(plain.folder / path_of[id_.partition("_sp")[0]])
        assert_same(of_version(waveform, rate, id=id_), cache[id_])
        assert_same(of_config(torch.from_numpy(waveform), rate, id=id_), cache[id_])


def test_what_cannot_be_extracted_has_the_ledgers_reason(tmp_path):
    extractor = featcache.extractor(config="fbank80", device="cpu")
    for waveform, reason in (
        (np.zeros(10), Reason.TOO_SHORT),
        (np.full(16000, np.nan), Reason.NON_FINITE_AUDIO),
    ):
        with pytest.raises(AudioError) as caught:
            extractor(waveform, 16000)
        assert caught.value.reason == reason
    with pytest.raises(AudioError) as caught:
        extractor.file(tmp_path / "none.wav")
    assert caught.value.reason == Reason.FILE_MISSING
    (tmp_path / "text.wav").write_text("no sound")
    with pytest.raises(AudioError, match=r"text\.wav: .*format not recognised"):
        extractor.file(tmp_path / "text.wav")
    for waveform in (np.zeros(16000, np.int16), np.zeros((1, 16000))):
        with pytest.raises(ArgumentError, match=r"give \[num_samples\] floats in -1 to 1"):
            extractor(waveform, 16000)
    for rate in (0, -1, 16000.5):
        with pytest.raises(ArgumentError, match="sample_rate"):
            extractor(np.zeros(16000), rate)
    with pytest.raises(
        ArgumentError, match=r"waveform: Can't call numpy\(\) on Tensor that requires grad"
    ):
        extractor(torch.zeros(16000, requires_grad=True), 16000)
    with pytest.raises(ArgumentError, match="id is 3: give text"):
        extractor(np.zeros(16000), 16000, id=3)


def test_what_it_refuses_to_be_made_of(sound, scratch):
    with pytest.raises(ArgumentError, match="not both"):
        featcache.extractor()
    with pytest.raises(ArgumentError, match="not both"):
        featcache.extractor(sound, config="fbank80")
    with pytest.raises(ArgumentError, match="name= is for a version"):
        featcache.extractor(config="fbank80", name="fbank80")
    with pytest.raises(ArgumentError, match="set= is for config="):
        featcache.extractor(sound, set={"params.low_freq": 0})
    with pytest.raises(StoreError):
        featcache.extractor(scratch / "none")
    with pytest.raises(ConfigError, match="meta"):
        featcache.extractor(config="fbank80", device="meta")
