"""Several manifests make a corpus: each is a part, extracted once, and commands do every
part in turn."""

import os
import shutil

import pytest
from cache_contents import check, items, only_version, shard_folders
from damage import CHUNKS, flip

import featcache
from featcache.manifest.read import read_manifest
from featcache.version.corpus import Part, put_part, read_parts

UNCHANGED = dict.fromkeys(("p0", "p1", "p2"))
"""What was extracted where nothing had changed."""


@pytest.fixture
def audio(plain, scratch):
    """Twelve clips, and three manifests of four of them each: `p0.csv` to `p2.csv`."""
    made = plain.copy(scratch / "audio")
    for other in made.folder.glob("*.csv"):  # of other tests
        other.unlink()
    for number in range(3):
        made.manifest(made.rows[4 * number : 4 * number + 4], f"p{number}.csv")
    return made


@pytest.fixture
def corpus(scratch):
    """Where the corpus is to be."""
    return scratch / "corpus"


@pytest.fixture
def extract(cli, audio, corpus):
    """Runs `extract` with manifests of the audio, which a pattern names, into the corpus
    or into another place."""

    def run(*options, manifests="p*.csv", to=corpus):
        return cli("extract", audio.folder / manifests, "-o", to, "--threads", 1, *options)

    return run


def extracted(ended):
    """The parts that were looked at, with how many utterances were extracted of each;
    None for those that were not."""
    parts = ended.json()["parts"]
    return {
        part["part"]: None if part["unchanged"] else part["versions"][0]["extracted"]
        for part in parts
    }


def test_a_corpus_from_its_first_extraction_to_its_last(
    cli, plain, audio, corpus, extract, scratch
):
    first = extract().with_code(0)
    assert "part p1, 2 of 3" in first.err
    assert first.out.splitlines()[-1] == f"{corpus}: 3 parts: 3 extracted, 0 unchanged since"
    whole = scratch / "whole"
    assert cli("extract", plain.manifest(), "-o", whole, "--threads", 1).code == 0
    assert {
        id_: one for name in ("p0", "p1", "p2") for id_, one in items(corpus / name).items()
    } == items(whole)
    of_parts, of_one = (cli("stats", cache, "--json").json() for cache in (corpus, whole))
    assert {**of_parts, "path": ""} == {**of_one, "path": ""}  # bit for bit
    assert [(part.name, part.rows) for part in read_parts(corpus)] == [
        ("p0", 4),
        ("p1", 4),
        ("p2", 4),
    ]
    assert len(featcache.open(corpus, strict=True)) == 12

    # The same bytes, which may be read as other rows.
    assert extracted(
        extract("--json", "--set", "data_root=/elsewhere", manifests="p1.csv").with_code(0)
    ) == {"p1": 0}
    assert extracted(extract("--json", manifests="p1.csv")) == {"p1": 0}

    # Nothing has changed, and nothing is looked at: not even files that are gone.
    shutil.move(audio.folder / "00.wav", audio.folder / "away")
    assert extracted(extract("--json")) == UNCHANGED
    shutil.move(audio.folder / "away", audio.folder / "00.wav")
    os.utime(audio.folder / "p2.csv")
    assert extracted(extract("--json")) == UNCHANGED

    # A manifest has changed, one is gone, and one is new, which is extracted alone.
    audio.manifest([*audio.rows[4:8], {**audio.rows[0], "id": "more"}], "p1.csv")
    audio.manifest(audio.rows[:2], "p3.csv")
    (audio.folder / "p0.csv").unlink()
    again = extract("--json")
    assert (again.code, extracted(again)) == (0, {"p1": 1, "p2": None, "p3": 2})
    assert "part p1, 1 of 3; its manifest has changed since it was extracted" in again.err
    assert f"{corpus}: manifests of p0 are gone: their folders stay until removed" in again.err
    assert extracted(extract("--json", manifests="p3.csv")) == {"p3": None}
    assert len(featcache.open(corpus)) == 15
    shutil.rmtree(corpus / "p0")
    assert "p0: folder and manifest are gone" in extract().err
    assert [part.name for part in read_parts(corpus)] == ["p1", "p2", "p3"]

    # A shard is lost: the part is looked at.
    shutil.rmtree(shard_folders(corpus / "p2")[0])
    assert extracted(extract("--json")) == {"p1": None, "p2": 4, "p3": None}


def test_a_part_that_is_gone_or_was_renamed_is_said_to_be(cli, corpus, extract):
    assert extract().code == 0
    for folder, hint in (("q1", "; if it was renamed to q1, rename it back"), ("../away", "")):
        (corpus / "p1").rename(corpus / folder)
        said = f"{corpus}: the folder of its part p1 is not there{hint}"
        for command in ("verify", "info", "ls"):
            assert said in cli(command, corpus).with_code(1).err
        with pytest.warns(featcache.errors.FeatcacheWarning) as warned:
            assert len(featcache.open(corpus)) == 8
        assert [said in str(warning.message) for warning in warned] == [True]
        with pytest.raises(
            featcache.errors.StoreError, match="the folder of its part p1 is not there"
        ):
            featcache.open(corpus, strict=True)
        ended = extract("--dry-run")
        assert said in ended.err
        (corpus / folder).rename(corpus / "p1")
    assert extracted(extract("--json")) == UNCHANGED


def test_failures_and_faults_of_one_part(audio, extract):
    """The exit code is that of the worst part; an utterance that failed is tried again
    once its file has changed."""
    sound = (audio.folder / "01.wav").read_bytes()
    (audio.folder / "01.wav").write_bytes(b"no audio")
    (audio.folder / "p1.csv").write_text("id,path\n,\n")
    assert ["error" in part for part in extract("--json").with_code(2).json()["parts"]] == [
        False,
        True,
        False,
    ]
    (audio.folder / "p1.csv").unlink()
    assert extracted(extract("--json").with_code(3)) == {"p0": None, "p2": None}
    (audio.folder / "01.wav").write_bytes(sound)
    assert extracted(extract("--json")) == {"p0": 1, "p2": None}

    # A manifest that says itself where its files are.
    (audio.folder / "later").mkdir()
    (audio.folder / "q.tsv").write_text(f"{audio.folder / 'later'}\n04.wav\t100\n../05.wav\t100\n")
    assert extracted(extract("--json", manifests="q.tsv")) == {"q": 1}
    assert extracted(extract("--json", manifests="q.tsv")) == {"q": None}
    shutil.copy(audio.folder / "04.wav", audio.folder / "later")
    assert extracted(extract("--json", manifests="q.tsv")) == {"q": 1}


def test_a_job_of_several_takes_whole_parts(cli, audio, corpus, extract):
    """Of several manifests; of one, a job takes a range of rows, as ever."""
    planned = extract("--dry-run").out
    assert "p1/fbank80-2a8b3903b266: 4 of 4 utterances to extract" in planned
    assert planned.endswith("3 parts: 3 to extract, 0 unchanged since\n")
    assert not corpus.exists()
    assert extracted(extract("--json", "--partition", "1/2")) == {"p1": 4}
    with pytest.warns(
        featcache.FeatcacheWarning, match="2 parts have no fbank80-2a8b3903b266, not extracted yet"
    ):
        assert len(featcache.open(corpus)) == 4
    assert extracted(extract("--json", "--partition", "0/2")) == {"p0": 4, "p2": 4}
    extract("--partition", "3/4").with_code(0, err="--partition 3/4: none of the 3 parts\n")
    assert len(featcache.open(corpus, strict=True)) == 12

    audio.manifest(audio.rows[:6], "p9.csv")
    for number in (0, 1):
        extract("--partition", f"{number}/2", "--shard-size", "0.03", manifests="p9.csv").with_code(
            0
        )
    assert len(items(corpus / "p9")) == 6
    assert "fbank80-2a8b3903b266" not in read_parts(corpus)[-1].versions
    assert cli("index", corpus).code == 0
    assert read_parts(corpus)[-1].versions["fbank80-2a8b3903b266"].utterances == 6


def test_a_folder_is_the_manifest_of_a_part(audio, corpus, extract):
    """Which is always looked at: nothing tells at once whether it has changed."""
    for name, numbers in (("set.a", (0, 1)), ("set.b", (2,))):
        (audio.folder / name).mkdir()
        for number in numbers:
            shutil.copy(audio.folder / f"{number:02}.wav", audio.folder / name)
    assert extracted(extract("--json", manifests="set.*")) == {"set.a": 2, "set.b": 1}
    shutil.copy(audio.folder / "03.wav", audio.folder / "set.b")
    assert extracted(extract("--json", manifests="set.b")) == {"set.b": 1}
    assert len(featcache.open(corpus, strict=True)) == 4


def test_commands_do_each_part(cli, audio, corpus, extract, scratch):
    assert extract().code == 0
    manifests = audio.folder / "p?.csv"
    sound = cli("verify", corpus, "--manifest", manifests)
    assert (sound.code, sound.out.splitlines()[-1]) == (0, f"{corpus}: 3 parts: no errors")
    for command in ("info", "index"):
        parts = cli(command, f"{corpus}/fbank80", "--json").json()["parts"]
        assert {part["part"]: part["versions"][0]["utterances"] for part in parts} == {
            "p0": 4,
            "p1": 4,
            "p2": 4,
        }
    assert "p1/fbank80" in cli("show", corpus, "utt-05").out
    why = cli("why", corpus, manifests, "-c", "fbank80", "--id", "utt-05").out
    assert "4 utterances: 4 there, 0 to extract\n" in why
    assert "p1/fbank80" in why
    assert "p0/fbank80" not in why
    assert (
        cli("why", corpus, "-c", "fbank80", "--set", "params.low_freq=0").out.count(
            "low_freq: 20.0 -> 0.0"
        )
        == 3
    )
    why = cli("why", corpus, "-c", "fbank80", "--set", "mistyped=1")
    assert (
        why.code,
        why.err.count("featcache: --set mistyped: it is not a key of the config\n"),
    ) == (2, 3)
    missing = cli("show", corpus, "utt-99")
    assert (missing.code, "'utt-99': no such utterance" in missing.err) == (1, True)
    assert f"nor is it in the other parts of {corpus}" in missing.err
    said = cli.refused("stats", corpus, "--manifest", audio.folder / "p0.csv")
    assert "statistics of a corpus are of all its utterances" in said
    said = cli.refused("diff", f"{corpus}/fbank80", corpus / "p0")
    assert f"{corpus}: is a corpus: name one of its parts" in said

    assert (
        cli("copy", corpus, scratch / "copy").with_code(0).out.splitlines()[-1]
        == f"{corpus}: 3 parts: no errors"
    )
    assert len(featcache.open(scratch / "copy", strict=True)) == 12

    flip(shard_folders(corpus / "p1")[0] / CHUNKS["features"], 5)
    assert (
        cli("verify", corpus).with_code(1).out.splitlines()[-1] == f"{corpus}: 3 parts: 1 "
        "failed, or damaged: p1"
    )
    # p1 needs its own
    assert cli("repair", corpus, "--manifest", audio.folder / "p0.csv").code == 2
    assert cli("repair", corpus, "--manifest", manifests).code == 0
    assert check(corpus / "p1").problems == []
    assert len(featcache.open(corpus, strict=True)) == 12


@pytest.mark.parametrize(
    ("manifests", "message"),
    [
        (["none-*.csv"], "none-*.csv: there is no such file, and as a pattern, it fits none"),
        (["p0.csv", "none.csv"], "none.csv: there is no such file"),
        (["p0.csv", "-"], "-: standard input is one manifest"),
        (["p0.csv", "other/p0.csv"], "would both be the part p0"),
        (["p0.csv", "p1.csv", "--dry-run", "--trial"], "featcache: --trial is about one manifest"),
    ],
)
def test_what_is_refused(cli, audio, corpus, manifests, message):
    (audio.folder / "other").mkdir()
    audio.manifest(audio.rows[:1], "other/p0.csv")
    given = [name if name.startswith("-") else audio.folder / name for name in manifests]
    said = cli.refused("extract", *given, "-o", corpus)
    assert message in said
    assert said.count("\n") == 1
    assert not corpus.exists()


def test_a_corpus_is_no_cache_of_one_manifest(cli, audio, corpus, extract, scratch):
    assert extract(manifests="p0.csv", to=scratch / "cache").code == 0
    refused = extract(to=scratch / "cache")
    assert (refused.code, refused.out) == (2, "")
    assert (
        "is the cache of one manifest, with fbank80-2a8b3903b266: "
        "give another folder" in refused.err
    )
    assert only_version(scratch / "cache")
    assert extract().code == 0
    with pytest.raises(
        featcache.errors.ArgumentError, match="is a corpus, whose parts are named after files"
    ):
        featcache.extract(read_manifest(audio.folder / "p0.csv"), "fbank80", corpus)
    assert (
        f"{corpus}: is a corpus: "
        "name one of its parts" in cli("fit-kmeans", corpus, "-k", 2, "-o", "units").err
    )
    metadata = only_version(corpus / "p1").path / "zarr.json"
    whole = metadata.read_bytes()
    metadata.write_bytes(b"{}")
    damaged = extract()
    assert (damaged.code, f"{metadata}: damaged" in damaged.err) == (1, True)
    assert damaged.out == f"{corpus}: 3 parts: 0 extracted, 2 unchanged since, 1 not extracted\n"
    metadata.write_bytes(whole)
    (corpus / "parts" / "p1.json").unlink()
    assert extracted(extract("--json")) == {"p0": None, "p1": 0, "p2": None}


def test_a_part_that_was_not_begun_is_said_to_be(cli, audio, corpus, extract):
    """As after a kill in the first part: nothing is known of any part, and the others
    have no folder."""
    manifests = audio.folder / "p*.csv"
    extract().with_code(0)
    for part in read_parts(corpus):
        put_part(corpus, Part(part.name, part.manifest))
    shutil.rmtree(corpus / "p1")
    told = f"{corpus / 'p1'}: nothing of this part of the corpus is there: `featcache extract`"
    for command in (
        *(["info"], ["ls"], ["verify"], ["index"], ["prune", "--yes"]),
        *(["why", manifests], ["repair", "--manifest", manifests]),
    ):
        name, *options = command
        assert f"featcache: {told}" in cli(name, corpus, *options).with_code(1).err
    for path in (corpus / "p1", corpus / "p1" / "fbank80"):
        assert cli.refused("info", path, code=1).startswith(f"featcache: {told}")
    assert "is a corpus" not in cli("info", corpus / "p0" / "nothing").with_code(1).err


def test_a_corpus_is_not_removed_whether_the_name_in_it_is_there_or_not(cli, corpus, extract):
    """With the exit code of a cache that is not removed either, as it is no version."""
    extract().with_code(0)
    for place in (corpus, corpus / "gone"):
        assert f"{place}: is a corpus: rm is about one part" in cli.refused("rm", place, "--yes")
    assert "is a cache: name the version" in cli.refused("rm", corpus / "p0", "--yes")


def test_statistics_of_a_part_of_a_corpus_are_no_success(cli, corpus, extract):
    extract().with_code(0)
    whole = cli("stats", corpus, "--json").with_code(0).json()
    shutil.rmtree(corpus / "p1")
    some = cli("stats", corpus, "--json").with_code(1)
    assert (whole["utterances"], some.json()["utterances"]) == (12, 8)
    assert "the folder of its part p1 is not there" in some.err


@pytest.mark.parametrize("ending", [["prune", "--yes"], []])
def test_a_part_with_a_failure_is_unchanged_whatever_was_done_to_it(
    cli, audio, corpus, extract, ending
):
    """A prune records a run without a root; of what failed once and does not any more,
    nothing is asked."""
    sound = (audio.folder / "05.wav").read_bytes()
    for name in ("01.wav", "05.wav", "06.wav"):
        (audio.folder / name).write_bytes(b"no audio")
    extract("--json").with_code(3)
    (audio.folder / "05.wav").write_bytes(sound)
    assert extracted(extract("--json").with_code(3)) == {"p0": None, "p1": 1, "p2": None}
    if ending:
        name, *options = ending
        cli(name, corpus, *options).with_code(0)
    extract().with_code(3)
    assert extracted(extract("--json").with_code(3)) == UNCHANGED
