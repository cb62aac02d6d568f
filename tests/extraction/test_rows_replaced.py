"""Rows that name other audio than what was extracted for their ids: extracted again, or refused where they are many."""

import os
import shutil

import pytest
import soundfile
from cache_contents import only_version
from changed_rows import dataset_of, is_quiet, make_corpus, refusal
from corpora import Corpus, speech
from extractions import extracted

import featcache
from featcache.config import load_config
from featcache.engines.local import run_locally
from featcache.errors import ManifestError
from featcache.extraction.extraction import run_extraction
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest import read_manifest
from featcache.stats import moments


@pytest.fixture
def corpus(scratch) -> Corpus:
    return make_corpus(scratch / "corpus")


def test_it_says_which_utterances_are_extracted_again_and_what_was_different(cli, corpus, scratch):
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    rows = [dict(row) for row in corpus.rows]
    rows[0]["path"] = "d.wav"
    for row in rows[1:8]:
        row |= {"start": 0.1, "duration": 0.2}
    (line,) = cli("extract", corpus.manifest(rows, "edited.csv"), "-o", cache, "--dry-run").err.splitlines()
    assert (
        "8 utterances are extracted again: u1: path a.wav → d.wav; u2: start (none) → 0.1, duration (none) → " in line
    )
    assert line.endswith(" … and 3 more")
    os.utime(corpus.folder / "a.wav", ns=(1, 1))
    shutil.copy2(corpus.folder / "junk.wav", corpus.folder / "b.wav")
    (line,) = cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--dry-run").err.splitlines()
    assert line.endswith(": u1: its file's mtime; u2: its file's size and mtime")


def test_replacing_many_utterances_by_other_files_takes_a_word(cli, corpus, scratch):
    """More than one, and more than a few per cent; by other files, not by other parts of them."""
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    before = sorted(cache.rglob("*"))
    dev = corpus.manifest([{**row, "path": "b.wav"} for row in corpus.rows[2:5]], "dev.csv")
    for options in ((), ("--dry-run",)):
        refused = cli("extract", dev, "-o", cache, *options)
        assert (refused.code, refused.out) == (2, "")
        (line,) = refused.err.splitlines()
        assert f"{dev}: names other files for 3 of the 42 utterances in {only_version(cache).path}" in line
        assert "for example d0: path d.wav → b.wav" in line
        assert "another corpus with the same ids" in line
        assert "own cache with -o" in line
        assert "--replace" in line
    assert sorted(cache.rglob("*")) == before
    fewer = corpus.manifest([{**row, "path": "b.wav"} for row in corpus.rows[2:4]], "fewer.csv")
    assert cli("extract", fewer, "-o", cache, "--dry-run").code == 0
    parts = corpus.manifest([{**row, "duration": 0.2} for row in corpus.rows], "parts.csv")
    assert cli("extract", parts, "-o", cache, "--dry-run").code == 0
    for name in "abd":
        os.utime(corpus.folder / f"{name}.wav", ns=(1, 1))
    assert cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--dry-run").code == 0
    made = cli("extract", dev, "-o", cache, "--replace", "--json")
    assert (made.code, extracted(made)) == (0, 3)
    assert is_quiet(cli, cache, dev)


def test_an_utterance_counts_once_however_many_copies_there_are_of_it(corpus, scratch):
    """A single one may get another file without a word, with its copies."""
    config = scratch / "fast.yaml"
    config.write_text("name: fast\nextractor: fbank\naugment: {speed: [0.9, 1.0, 1.1]}\n")
    rows, options = corpus.rows[:6], Options("cpu", 1)

    def extraction(some, options=options):
        manifest = read_manifest(corpus.manifest(some, "some.csv"))
        return plan_extraction(manifest, [load_config(config)], scratch / "c", options)

    run_extraction(extraction(rows), run_locally)
    one, two = ([*({**row, "path": "b.wav"} for row in rows[2 : 2 + n]), *rows[:2]] for n in (1, 2))
    assert extraction(one).versions[0].num_missing == 3
    with pytest.raises(ManifestError, match="names other files for 2 of the 6 utterances"):
        extraction(two)
    assert extraction(two, Options("cpu", 1, replace=True)).versions[0].num_missing == 6


# The same ids and paths under another root


def another_corpus(corpus: Corpus, folder) -> Corpus:
    """With files of the same names and sizes as in a corpus, and other speech."""
    other = corpus.copy(folder)
    for seed, name in enumerate("abd"):
        soundfile.write(folder / f"{name}.wav", speech(0.4, seed=10 + seed), 16000)
        os.utime(folder / f"{name}.wav", (10**9, 10**9))
    return other


def test_another_corpus_of_equal_paths_and_sizes_is_refused(cli, corpus, scratch):
    """By its bytes: paths that are relative to another folder say nothing, nor does the length of one-second clips."""
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    other = another_corpus(corpus, scratch / "other").manifest()
    refused = cli("extract", other, "-o", cache)
    assert refused.code == 2
    assert "of 42 files checked are not what" in refused.err
    assert "is not the file that was extracted" in refusal(cache, other)
    with pytest.raises(ManifestError, match="is not the file that was extracted"):
        moments(featcache.open(cache), other)
    assert len(dataset_of(cache, other, on_changed="use")) == len(corpus.rows)


def test_a_corpus_that_was_copied_or_moved_is_the_same(cli, corpus, scratch):
    """Other times, equal bytes; or no longer there at all; or no audio beside the manifest, as in training."""
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    copied = corpus.copy(scratch / "copied")
    for path in copied.folder.glob("*.wav"):
        os.utime(path, (10**9, 10**9))
    assert "nothing to do" in cli("extract", copied.manifest(), "-o", cache).out
    assert len(dataset_of(cache, copied.manifest())) == len(corpus.rows)
    shutil.rmtree(corpus.folder)
    assert "nothing to do" in cli("extract", copied.manifest(), "-o", cache).out
    for path in copied.folder.glob("*.wav"):
        path.unlink()
    assert len(dataset_of(cache, copied.manifest())) == len(corpus.rows)
