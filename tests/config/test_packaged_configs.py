"""The packaged configs: their fingerprints stay, and those of models hold together here,
where there are no weights."""

import re

import pytest
import torch
import yaml
from msgspec import structs
from parsed_configs import parse_config
from processes import run_here
from small_shards import INFO

from featcache.config import config_from, load_config, packaged_configs
from featcache.extractors.base import _BUILT_IN
from featcache.version.version import Version

DOCUMENTS = {name: yaml.safe_load(text) for name, text in packaged_configs().items()}
OF_HUB = {name for name, document in DOCUMENTS.items() if document["params"].get("revision")}

UNPINNED = {"neucodec", "pocket-tts", "vibevoice", "wavtokenizer"}
"""Configs for which you choose the commit of the weights."""

WITHOUT_HUB = {
    "audio_stats",
    "fbank",
    "imported",
    "labels",
    "log_mel",
    "mfcc",
    "torchaudio",
    "units",
}
"""Extractors without weights, with torchaudio's own, or with yours."""

IN_PACKAGES = {"crepe", "dnsmos", "ge2e", "onnx", "swift_f0"}
"""Extractors of packaged configs whose weights come inside packages of the registry."""

FINGERPRINTS = {
    "audio-stats": "61ed4807065e27b6f38721a00dd11f6b071cbfec83913ee030de6f5813f2787d",
    "dac16k": "1d04ff727f25cef46f7bb774bf3d7e149b4286789bc795080a417bb7f77916d6",
    "dac24k": "a1affd4abfc94be5f84792dc12b67cec47e17905cfd9ec7e5d0b7e468e4a51a2",
    "dac44k-latents": "e493bae122a5fd350ae3cceb67d889c00b65556912607b3e0b2aedd2bb964d67",
    "encodec24k-latents": "bce224d91abf194d13ffd661fce272f8c52abdc0b57a7035360bee81bf3bd33c",
    "mimi-latents": "c1384d08a555a2351b9e9914865b587145d9b6a3be7a84b697babba11d6d4c48",
    "pocket-tts": "2132a1a7452f1c5acbe7756a2ea3f8f629e2734056671cd8b372fb203e837bb5",
    "vibevoice": "a7ff88c19934483f0349150a4c5049faaf30c1b9908b12f87d624d2f4c8d54ff",
    "dac44k": "fe0db5227541c83f678eb1f8c7ce64fe8795fcaa5a390879a6ffda0b6c7fc9c9",
    "dnsmos": "6fc32b789d20faa5907af2c69f8491e625bd07fe94b6075d68ee66c6879acbf9",
    "encodec24k-6kbps": "e0995185b836d29aad0d3043d5cb72c655d810d3b7f705d62b922a44ce904f7e",
    "encodec48k-6kbps": "3d0100450102a5a61b39d4e7e99303e37ad03df1112c6de8c21ca53acd9d4bd1",
    "f0-crepe": "c454183e5b4e896f67832fb9a46be7be4f8520db4a780cdd2ba6bde0359a29bb",
    "f0-swift": "f1ccc1e0811b027e5f9a442006ff6fe388b56f705308dc1d106aa590437dbd42",
    "fbank80": "2a8b3903b2667ed138736649c8c46f81af719cfc36e0148853887a0ed7c80071",
    "fbank80-lhotse": "c7113388174080e48b113cfcc567309784a02c0614a6a9250468f4cd25ca8302",
    "fbank80-speed": "6241deab9d8259c06e9a5a6b8fefb6ef2619714ed3e331748a2243f2124f2730",
    "fbank80-uint8": "fef8c77494ca890a4296bff613349605f43faa6a6697df6a46da6c8fef1ea951",
    "hifigan-mel80": "06dc88440f69f3533995295b25632fbb5fa25c7435891b3bb3fcc08325556e6a",
    "higgs2": "891af20c74efe79139e8a09dbaa919757e9289b099e91de70dfee8b2ee0f6a9e",
    "hubert-base-l6": "418adb341b2b9b366bd8cbd8420422811ac8399f756d687362ed59eebc242086",
    "mfa-phones": "ec7dc308c1376bb401f9ef10ca227152773ca9ae6eef3f4bda5796bd9ba5cf56",
    "mfa-words": "d8968fd11d6e3b328aef17f8ed79e92177d415f59dbf18d244e12accaafca89f",
    "mfcc13": "9bc148a852d9fc807f9d18a6b27f09f5eb26d9591fc8650b02f378639a04e9e9",
    "mimi": "aff911855d16084ca9df4d03e1dc0677eab9a1edc772a3a901b0f182fe1667ae",
    "speaker-ge2e": "97cddddc96714ce0882f4aa0b0c99fe86432ab7422fe65bf3c1f720ca0a97b3b",
    "neucodec": "8ebfe9892619a4218ff66f7385a651f7783a9e095a306630890b7b4b9da8e6cb",
    "qwen3-tts-12hz": "71189e6bd4e2fe27f95d2ae5895a7513a7e2a4b061d9402b4d95758dd92bd6f8",
    "s3-v2": "7cde24cedaf73c57b70257aa42257044079f8adfe4ea07340d252bb96235b190",
    "snac": "b17005ac368c58ca42c7dd07dd59d4d6d69552034adff19b372705ac5ef45088",
    "speechtokenizer": "cd8b8a6baa83f95987b506911e0d470be888875b44afa011ec0804390197bb9f",
    "torchaudio-hubert-base": "a8a5ea6d82b7d6f774f7b1bf063179e6d3dc48a4e154e5b138229f525077f525",
    "vad-silero": "d23a1d9d3193b4fd99d9527137756e28cb16d932a3c915591e34e668bd7bfb54",
    "w2v-bert2-l17": "2e025374421d0a8d18dfbb57995ab4aa4ec7e4d1cf238ed5bab76a0fd40985c3",
    "wav2vec2-base-l7": "4580179d226580e3cfae5d54169b880c11d35b3e7b0f48bb6b66743c0ec6fb33",
    "wavlm-large-l6": "418adb341b2b9b366bd8cbd8420422811ac8399f756d687362ed59eebc242086",
    "wavtokenizer": "3c1a4dff82272e598a117ca2ea8c584919ef9d8c9ffaaf09929ea11daf629af3",
    "whisper-mel80": "ed9b99abd2d46b4b982c86dbfa0f86f14d90c494c97ecb26d922966519b2cf7f",
    "whisper-mel80-30s": "d39734744451eb839b109f2efe67cdfe5b6f4007747028ed1cad83422ff2ff1e",
    "whisper-small": "5e97f6db068c3ba63320f7140343fb41b236ed8f3578c8ab0ab58835e8d2c101",
    "xcodec": "19d9723b72198f12d17e0ef8f0f89ba79c760e52f9e055bdede2aa95bbea2ab7",
    "xcodec2": "cf732dc6cbf73fb1e3e2c10d197e9a98426cdb7c8e29bd8043597d5367badf2b",
}
"""Of every packaged config, with `of its weights` for the digest of the weights of those
that load any."""


def fingerprint(document, monkeypatch) -> str:
    """Of a config, whatever its weights are."""
    config = config_from(document)
    if "weights" in document["params"]:
        monkeypatch.setattr(
            config.extractor_class, "weights_digest", lambda params: "of its weights"
        )
    return config.fingerprint()


def test_fingerprints_are_what_they_were(monkeypatch):
    """A cache of years ago opens: no change to the code may move the fingerprint of a
    config that did not change."""
    assert {
        name: fingerprint(document, monkeypatch) for name, document in DOCUMENTS.items()
    } == FINGERPRINTS


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_each_holds_together_and_that_of_a_version_makes_the_version_again(
    name, scratch, monkeypatch
):
    """As `configs --from` prints it."""
    config = load_config(name)
    assert config.name == name
    assert {*DOCUMENTS[name]["params"]} == {*type(config.params).model_fields}
    if not config.params.locations:  # below are the others
        config.build(torch.device("cpu"))
    monkeypatch.setattr(config.extractor_class, "weights_digest", lambda params: "of its weights")
    made = structs.replace(
        INFO, name=name, fingerprint=config.fingerprint(), config=config.resolved()
    )
    version = Version.create(scratch, made)
    printed = run_here("configs", "--from", version.path)
    assert made.fingerprint in printed
    again = parse_config(printed)
    assert again == config
    assert again.fingerprint() == made.fingerprint
    assert again.resolved() == config.resolved()


def test_the_fingerprint_with_chunks_is_what_it_was(monkeypatch):
    """No packaged config has any: parameters within parameters are in the fingerprint too."""
    document = DOCUMENTS["hubert-base-l6"]
    chunked = {
        **document,
        "params": {**document["params"], "chunk": {"seconds": 20.0, "overlap": 4.0}},
    }
    assert (
        fingerprint(chunked, monkeypatch)
        == "6a1be50dcf2ce9c47fec19ee2dff1d0aae63ba3f7d77063005e56c1fe53ff33a"
    )


def test_there_is_one_for_each_extractor_of_models():
    found = {DOCUMENTS[name]["extractor"] for name in OF_HUB | UNPINNED}
    assert found == set(_BUILT_IN) - WITHOUT_HUB - IN_PACKAGES


def line_of(name, folder, key="weights") -> str:
    """What `featcache extract` says of the config, and nothing more, before it ends with
    2 and without a cache."""
    manifest, cache = folder / "manifest.csv", folder / "features"
    manifest.write_text("id,path\na,a.wav\n")
    (line,) = run_here(
        "extract", manifest, "-c", name, "-o", cache, "--device", "cpu", code=2
    ).splitlines()
    assert not cache.exists()
    assert line.startswith(f"featcache: config {name}: params.{key}: ")
    return line


@pytest.mark.parametrize("name", sorted(OF_HUB))
def test_without_its_weights_it_is_read_and_extraction_says_what_to_download(
    name, no_hub, tmp_path
):
    config = load_config(name)
    params = config.params
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", params.weights)
    assert re.fullmatch(r"[0-9a-f]{40}", params.revision)
    assert params.precision == "fp32"
    dtypes = {"codes": "uint16", "latents": "float32", None: "float16"}
    assert config.dtype == dtypes[getattr(params, "output", None)]
    assert f"hf download {params.weights} --revision {params.revision}" in line_of(name, tmp_path)


@pytest.mark.parametrize("name", sorted(UNPINNED))
def test_one_that_pins_no_commit_asks_for_it(name, no_hub, tmp_path):
    weights = load_config(name).params.weights
    line = line_of(name, tmp_path, "revision")
    assert line.endswith(f"the commit of {weights}, in 40 hex digits")


def test_one_whose_file_is_nowhere_to_download_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = line_of("s3-v2", tmp_path)
    assert line.endswith("there is no file speech_tokenizer_v2.onnx: name it by params.weights")


def test_extraction_without_torchaudios_weights_says_what_to_download(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    line = line_of("torchaudio-hubert-base", tmp_path)
    assert (
        "download "
        "https://download.pytorch.org/torchaudio/models/hubert_fairseq_base_ls960.pth to " in line
    )
    assert str(tmp_path / "torch") in line
