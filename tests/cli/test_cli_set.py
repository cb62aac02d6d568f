"""`--set`: keys of configs, and placeholders of manifests."""

import numpy as np
import pytest

import featcache
from featcache.errors import ArgumentError


@pytest.fixture
def table(written):
    """A table of SpeechBrain's, of two clips."""
    return written("ID,wav\na,$data_root/00.wav\nb,$data_root/01.wav\n", "two.csv")


def test_a_key_is_the_configs_and_another_name_the_manifests(cli, plain, table, scratch):
    """Each config has the key; and a note, which is no part of the document, says how
    this version differs from the one that is there."""
    placed = "--set", f"data_root={plain.folder}"
    extract = "extract", table, "-o", scratch / "c", *placed, "-c", "fbank80", "-c", "mfcc13"
    assert cli(*extract).code == 0
    changed = cli(
        *extract, "--set", "params.num_mel_bins=40", "--set", "audio.resample=soxr_vhq", "--json"
    )
    assert [version["extracted"] for version in changed.json()["versions"]] == [2, 2], changed.err
    for name, bins in (("fbank80", 80), ("mfcc13", 23)):
        assert f"is a new version next to {name}-" in changed.err
        assert (
            'audio.resample: "soxr_hq" -> "soxr_vhq", '
            f"params.num_mel_bins: {bins} -> 40" in changed.err
        )


def test_python_sets_the_same_keys(cli, plain, scratch):
    manifest, bins = plain.manifest(plain.rows[:1]), {"params.num_mel_bins": 40}
    options = featcache.Options("cpu", 1)
    summary = featcache.extract(manifest, "fbank80", scratch / "c", options, set=bins)
    assert (
        "nothing to do"
        in cli("extract", manifest, "-o", scratch / "c", "--set", "params.num_mel_bins=40").out
    )
    cached = featcache.open(summary.versions[0].path)
    extractor = featcache.extractor(config="fbank80", set=bins, device="cpu")
    assert np.array_equal(extractor.file(plain.folder / "00.wav", id="utt-00"), cached["utt-00"])
    with pytest.raises(ArgumentError, match="set= is for config="):
        featcache.extractor(cached, set=bins)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "num_mel_bins=40",
            "--set num_mel_bins: it is neither a key of the config (did you mean "
            "params.num_mel_bins?) nor a placeholder of {table}, which has data_root",
        ),
        (
            "data_rot=x",
            "--set data_rot: it is neither a key of the config nor a placeholder of "
            "{table}, which has ",
        ),
        ("params={a: [1", "--set: the value of params: line 1, column 7: not valid YAML"),
        ("params.=", "config fbank80: params.: there is no such key (there are "),
        ("data_root=/twice", "--set data_root: it is given twice"),
    ],
)
def test_what_nothing_takes_is_refused_in_a_line(cli, plain, table, scratch, setting, words):
    said = cli.refused(
        "extract",
        table,
        "-o",
        scratch / "c",
        "--set",
        f"data_root={plain.folder}",
        "--set",
        setting,
    )
    assert said.splitlines()[-1].startswith("featcache: " + words.format(table=table))


def test_commands_without_configs_know_placeholders_alone(cli, plain, scratch):
    manifest = plain.manifest()
    said = cli.refused(
        "manifest", manifest, "-o", scratch / "m.csv", "--set", "params.num_mel_bins=40"
    )
    assert said == f"featcache: --set params.num_mel_bins: it is not a placeholder of {manifest}\n"


def test_a_part_of_a_corpus_need_not_have_every_placeholder(cli, plain, table, scratch, written):
    """Another part may have it; what looks like a key of the config is refused all the
    same."""
    other = written(f"id,path\nc,{plain.folder}/02.wav\n", "other.csv")
    extract = "extract", other, table, "-o", scratch / "c", "--set", f"data_root={plain.folder}"
    assert cli(*extract).code == 0
    assert "did you mean params.low_freq?" in cli.refused(
        *extract, "-c", "mfcc13", "--set", "low_freq=40"
    )
