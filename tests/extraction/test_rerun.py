"""`featcache extract` once more: only what is missing or has changed is done, and nothing
is lost."""

import os

import pytest
import soundfile
from cache_contents import check, items, only_version, versions_in
from corpora import speech
from extractions import extracted
from processes import run_python

from featcache.config import load_config
from featcache.errors import DamagedError
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest.read import read_manifest


def test_again_does_nothing_and_says_so_and_rows_removed_are_surplus(cli, plain, cache):
    before = sorted(cache.rglob("*"))
    again = cli("extract", plain.manifest(), "-o", cache).with_code(0, err="")
    assert "nothing to do: 12 utterances are already there" in again.out
    assert sorted(cache.rglob("*")) == before
    fewer = plain.manifest(plain.rows[:-3], "fewer.csv")
    assert "nothing to do: 9 utterances are already there" in cli("extract", fewer, "-o", cache).out
    assert (
        "3 utterances are not in "
        "the manifest" in cli("verify", cache, "--manifest", fewer).with_code(0).out
    )


def test_torch_is_loaded_only_by_what_extracts(cli, plain, scratch):
    """A run that finds nothing to do loads none, nor if failures stand. A device that is
    not there is refused."""
    script = """
    import sys
    from featcache.cli import main
    for options in ([], ["--device", "cpu"], ["--dry-run"], ["--dry-run", "-c", "fbank80", "-c", "mfcc13"]):
        try:
            main([*sys.argv[1:], *options])
        except SystemExit as end:
            print("code", end.code, "torch" if "torch._C" in sys.modules else "no torch")
    """
    manifest = plain.manifest([*plain.rows[:2], {"id": "gone", "path": "gone.wav"}], "gone.csv")
    job = ("extract", manifest, "-o", scratch / "c")
    assert cli(*job, "--device", "meta").code == 2
    assert not (scratch / "c").exists()
    assert cli(*job).code == 3
    told = [line for line in run_python(script, *job).splitlines() if line.startswith("code ")]
    assert told == ["code 3 no torch", "code 3 no torch", "code 0 no torch", "code 0 torch"]
    assert cli(*job, "--retry-failed", "--device", "cpu").code == 3
    assert check(scratch / "c").problems == []


def test_another_config_is_another_version_and_says_what_differs(cli, plain, scratch, written):
    job = ("extract", plain.manifest(), "-o", scratch, "-c")
    assert cli(*job, written("name: mine\nextractor: fbank\n", "a.yaml")).err == ""
    other = written(
        "name: mine\nextractor: fbank\nparams: {low_freq: 0, num_mel_bins: 40}\n", "b.yaml"
    )
    (line,) = cli(*job, other).with_code(0).err.splitlines()
    assert "params.low_freq: 20.0 -> 0.0" in line
    assert "params.num_mel_bins: 80 -> 40" in line
    assert "params.high_freq" not in line
    assert len(versions_in(scratch)) == 2
    again = cli(*job, other)
    assert ("nothing to do" in again.out, again.err) == (True, "")


def test_rows_that_changed_are_extracted_again(cli, plain, cache, scratch):
    before = items(cache)
    changes = [
        {"path": "09.wav"},
        {"start": 0.1, "duration": 0.2},
        {"duration": 0.3},
        {"channel": 0},
        *[{}] * 8,
    ]
    changed = plain.manifest(
        [row | change for row, change in zip(plain.rows, changes, strict=True)], "changed.csv"
    )
    job = ("extract", changed, "--replace", "-o")
    verified = cli("verify", cache, "--manifest", changed).with_code(1)
    assert all(
        f"{id_}: its row is not the one that was extracted" in verified.out for id_ in plain.ids[:4]
    )
    assert "4 of 12 utterances to extract, 4 of them changed" in cli(*job, cache, "--dry-run").out
    assert extracted(cli(*job, cache, "--json")) == 4
    after = items(cache)
    # that channel is the only one
    assert {name for name in after if after[name] != before[name]} == {*plain.ids[:3]}
    assert (
        "4 older items of utterances extracted again: not read, but kept" in cli("info", cache).out
    )
    assert cli(*job, scratch / "fresh").code == 0
    assert after == items(scratch / "fresh")
    report = check(cache, manifest=read_manifest(changed))
    assert (report.problems, report.utterances, report.repeated, report.surplus) == ([], 12, 0, 0)


def test_a_changed_file_is_extracted_again_when_asked_and_one_that_is_gone_keeps_its_features(
    cli, plain, scratch
):
    corpus, cache = plain.copy(scratch / "corpus"), scratch / "c"
    cli("extract", corpus.manifest(), "-o", cache)
    before = items(cache)
    # same size, other mtime and sound
    soundfile.write(corpus.folder / "03.wav", speech(0.46, seed=99), 16000)
    os.utime(corpus.folder / "05.wav", ns=(1, 1))  # touched, and the same
    assert "nothing to do" in cli("extract", corpus.manifest(), "-o", cache).out
    assert (
        extracted(
            cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--json").with_code(0)
        )
        == 2
    )
    after = items(cache)
    assert {name for name in after if after[name] != before[name]} == {"utt-03"}
    assert "nothing to do" in cli("extract", corpus.manifest(), "-o", cache, "--check-sources").out
    assert check(cache, manifest=read_manifest(corpus.manifest())).problems == []
    # as audio is tidied away: what cannot be extracted again stays
    (corpus.folder / "03.wav").unlink()
    os.utime(corpus.folder / "05.wav", ns=(2, 2))
    assert (
        extracted(
            cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--json").with_code(0)
        )
        == 1
    )
    assert items(cache) == after


def test_only_shards_that_hold_the_rows_are_asked_for_their_files(cli, plain, scratch):
    assert cli("extract", plain.manifest(), "-o", scratch, "--shard-size", "0.02").code == 0
    version, part = only_version(scratch), read_manifest(plain.manifest(plain.rows[:3], "part.csv"))
    for name in version.shard_names():
        if not {*version.shard(name).table.ids} & {*part.ids}:
            (version.shard(name).folder / "items" / "c" / "0" / "0").unlink()
    extraction = plan_extraction(
        part, [load_config("fbank80")], scratch, Options("cpu", 1, check_sources=True)
    )
    assert extraction.versions[0].num_missing == 0
    whole = read_manifest(plain.manifest())
    with pytest.raises(DamagedError, match=r"items.*missing"):
        plan_extraction(
            whole, [load_config("fbank80")], scratch, Options("cpu", 1, check_sources=True)
        )


def test_recompute_finds_the_audio_of_every_run(cli, plain, corpus, scratch):
    rows = [row for row in corpus.rows if row["id"].startswith("plain")]
    for manifest in (plain.manifest(), corpus.manifest(rows, "plain.csv")):
        assert cli("extract", manifest, "-o", scratch).code == 0
    for options in ((), ("--manifest", plain.manifest())):
        verified = cli("verify", scratch, "--recompute", 100, *options).with_code(0)
        assert "extracted 24 again: 24 bit-identical" in verified.out
