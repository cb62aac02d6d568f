"""Mistakes in an extractor of one's own: one line each, which names the class and its
file, before anything is stored."""

import mistaken_extractors
import pytest
from cache_contents import only_version
from corpora import Corpus
from extractions import write_config

import featcache
from featcache.errors import ConfigError, ExtractorError
from featcache.extraction.options import Options
from featcache.version.ledger import read_failures

FILE = mistaken_extractors.__file__

OF_THE_CLASS = {
    "Withoutrevision": "lacks revision: ",
    "WithoutParams": "lacks Params: ",
    "DictParams": "Params does not inherit from featcache.extractors.Params",
}
OF_AN_INSTANCE = {
    "Withoutbatching": "lacks batching: ",
    "Withoutspec": "lacks spec: ",
    "Withoutextract": "lacks extract: ",
    "Withoutnum_frames": "lacks num_frames: ",
    "Withoutinit": "lacks __init__: ",
    "WithoutgranularityRowed": "lacks granularity: ",
    "OddBatching": "batching is 'batched': choose from frames, padded, equal_length, single",
    "FrameRowed": "batching is 'frames': choose from padded, equal_length, single",
    "DictSpec": "ValidationError: Object missing required field",
    "TorchDtype": "TypeError: Encoding objects of type torch.dtype",
    "InitRaises": "ValueError: no such model (helpers/mistaken_extractors.py:",
    "InitExits": "SystemExit: 0 (helpers/mistaken_extractors.py:",
    "InitTakesNothing": "TypeError: ",
    "OddStoredDtype": "TypeError: Cannot interpret 'torch.float16' as a data type",
    "DigestRaises": "FileNotFoundError: ",
    "DigestOfBytes": "TypeError: Object of type bytes is not JSON serializable",
}
OF_WHAT_IS_RETURNED = {
    "Numpy": "extract returned ndarray; ",
    "Nothing": "extract returned NoneType of 0, and no list of ",
    "OneTooFew": "extract returned list of ",
    "Narrow": "extract returned a tensor [40, 1]; ",
    "Transposed": "extract returned a tensor [2, 40]; ",
    "FloatFrames": "num_frames returned 40.0: no whole number",
    "Complex": "its features are torch.complex64, and float32 is stored",
    "NotCodes": "uint8 cannot hold its features, from 0.5 to 0.5",
    "LargeCodes": "uint8 cannot hold its features, from 300 to 300",
    "NarrowFramed": "compute returned a tensor [640, 1]; ",
    "ShortFramed": "frames returned a tensor [39, 160]; ",
    "NumpyFramed": "compute returned ndarray; ",
    "BareRowed": "encode returned Tensor, and not Rows",
    "NarrowRowed": "encode returned a tensor [",
    "FewRowed": "encode returned a tensor [",
    "SidelessRowed": "encode returned no side array counts",
}


def told(plain: Corpus, scratch, extractor: str, kind: type[Exception]) -> str:
    config = write_config(scratch, extractor, module="mistaken_extractors")
    with pytest.raises(kind) as caught:
        featcache.extract(plain.manifest(), config, scratch / "c", Options("cpu", 1))
    return str(caught.value)


@pytest.mark.parametrize(("extractor", "words"), OF_THE_CLASS.items())
def test_a_class_that_lacks_something_is_a_faulty_config(plain, scratch, extractor, words):
    line = told(plain, scratch, extractor, ConfigError)
    assert f"extractor: {extractor} ({FILE})" in line
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize(("extractor", "words"), OF_AN_INSTANCE.items())
def test_what_an_extractor_says_of_itself_is_checked(plain, scratch, extractor, words):
    line = told(plain, scratch, extractor, ExtractorError)
    assert line.startswith(f"{extractor} ({FILE})")
    assert words in line
    assert "\n" not in line


@pytest.mark.parametrize(("extractor", "words"), OF_WHAT_IS_RETURNED.items())
def test_what_its_methods_return_is_checked_and_leaves_no_version(plain, scratch, extractor, words):
    line = told(plain, scratch, extractor, ExtractorError)
    assert line.startswith(f"{extractor} ({FILE}): {words}")
    assert "\n" not in line
    assert [*(scratch / "c").iterdir()] == []


@pytest.mark.parametrize("extractor", ["Sound", "Framed", "Rowed"])
def test_extractors_without_a_mistake_extract(plain, scratch, extractor):
    config = write_config(scratch, extractor, module="mistaken_extractors")
    summary = featcache.extract(plain.manifest(), config, scratch / "c", Options("cpu", 1))
    assert summary.versions[0].extracted == len(plain.rows)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def mine(:", "SyntaxError: invalid syntax (own_module.py, line 1)"),
        ("x = 1 / 0", "ZeroDivisionError: division by zero ("),
        ("import sys\nsys.exit()", "SystemExit ("),
        ("import no_such_package", "No module named 'no_such_package' ("),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    plain, scratch, tmp_path, monkeypatch, code, words
):
    (tmp_path / "own_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = write_config(scratch, "Mine", module="own_module")
    with pytest.raises(ConfigError) as caught:
        featcache.extract(plain.manifest(), config, scratch / "c", Options("cpu", 1))
    assert "own_module:Mine cannot be imported: " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_first_run_that_fails_leaves_nothing_in_ls(cli, plain, scratch):
    """With other versions beside it, an empty one would be in the way of `open`."""
    cli("extract", plain.manifest(), "-o", scratch / "c", "-c", "fbank80").with_code(0)
    numpy = write_config(scratch, "Numpy", module="mistaken_extractors")
    failed = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", numpy).with_code(1)
    assert len(failed.err.splitlines()) == 1
    (version,) = cli("ls", scratch / "c", "--json").json()["versions"]
    assert version["name"] == "fbank80"
    assert len(featcache.open(scratch / "c")) == len(plain.rows)


def test_what_failed_in_a_first_run_stays_in_the_ledger(plain, scratch):
    config = write_config(scratch, "Broken")
    summary = featcache.extract(plain.manifest(), config, scratch / "c", Options("cpu", 1))
    assert summary.too_many_failures
    assert len(read_failures(only_version(scratch / "c"))) == summary.failed > 0
