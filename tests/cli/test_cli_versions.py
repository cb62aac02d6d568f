"""`featcache index`, `tag`, `rm` and `prune`: what they say, ask and refuse."""

import json
import os
import shutil

import pytest
from cache_contents import only_version
from make_cache import add_shard, make_features, make_version
from manifests import manifest_of
from processes import run_here as run

from featcache.version import version as version_module
from featcache.version.index import load_index
from featcache.version.records import write_probe


@pytest.fixture
def version(tmp_path):
    """Six utterances in two shards, of which two have been replaced."""
    features = list(make_features(6).items())
    version = make_version(tmp_path / "features")
    add_shard(version, dict(features[:4]), run="run 1")
    add_shard(version, dict(features[4:]), row=4, run="run 1")
    add_shard(
        version,
        {"utt-1": features[0][1], "utt-2": features[0][1]},
        row=9,
        generation=2,
        run="run 2",
    )
    return version


def test_a_version_is_tagged_listed_and_read_by_its_tag(version):
    cache = version.path.parent
    assert (
        run("tag", cache / "fbank80", "paper") == f"{version.path}@paper: 6 "
        "utterances in 3 shards\n"
    )
    assert "tag paper: 6 utterances" in run("info", cache)
    assert json.loads(run("ls", cache, "--json"))["versions"][0]["tags"][0]["name"] == "paper"
    add_shard(version, make_features(3, prefix="more"), row=20, run="run 3")
    for command in ("verify", "stats", "info"):
        assert "6 utterances" in run(command, cache / "fbank80@paper")
    for place in (f"{cache}@paper", cache / "fbank80@paper"):
        (listed,) = json.loads(run("ls", place, "--json"))["versions"]
        assert (listed["path"], listed["utterances"]) == (f"{version.path}@paper", 6)
    assert "has no tag draft: its tags are paper" in run("ls", f"{cache}@draft", code=1)
    assert "3 only in" in run("diff", cache / "fbank80@paper", cache / "fbank80")
    for options in (["--dry-run"], ["--yes"]):
        assert "holds the tags paper" in (said := run("rm", cache / "fbank80", *options, code=2))
        assert "--force" in said
    assert "9 utterances" in (said := run("rm", cache / "fbank80", "--dry-run", "--force"))
    assert "with the tags paper" in said
    assert "removes" in run("rm", f"{cache}@paper", "--yes")
    assert "has no tag paper" in run("rm", cache / "fbank80@paper", "--yes", code=1)


def test_info_opens_a_version_with_a_tag_once(version, monkeypatch):
    run("tag", version.path, "paper")
    opened = []
    read_info = version_module.read_info
    monkeypatch.setattr(
        version_module, "read_info", lambda *args: opened.append(args) or read_info(*args)
    )
    assert "6 utterances" in run("info", f"{version.path}@paper")
    assert len(opened) == 1


def test_hours_are_those_of_what_counts(version):
    """Of a shard in which all items count, nothing is read."""
    items = sum(version.shard(name).info.items for name in version.shard_names())
    seconds = sum(version.shard(name).info.seconds for name in version.shard_names())
    tables = [version.shard(name).table for name in version.shard_names()]
    samples = {}
    for table in sorted(tables, key=lambda table: int(table["generation"].max())):
        samples |= zip(table["id_hash"].tolist(), table["num_samples"].tolist(), strict=True)
    counted = sum(samples.values()) / version.info.spec.sample_rate
    assert (items, len(samples)) == (8, 6)
    assert counted < seconds
    for command in ("ls", "info"):
        (told,) = json.loads(run(command, version.path.parent, "--json"))["versions"]
        assert told["audio_seconds"] == round(counted, 3)


def test_info_names_the_shards_without_a_document(version):
    """The index has them, so they are read nowhere else."""
    cache = version.path.parent
    (whole,) = json.loads(run("info", cache, "--json"))["versions"]
    assert whole["damage"] is None
    lost = version.shard_names()[1]
    (version.path / "shards" / lost / "zarr.json").unlink()
    said = run("info", cache, code=1)
    assert "6 utterances" in said
    assert f"{version.path}: damaged: 1 shard without zarr.json: {lost}; `featcache repair" in said


def test_of_two_versions_of_a_name_the_tag_of_one_is_removed(tmp_path):
    old, new = (
        make_version(tmp_path, make_features(3), params={"low_freq": hertz})
        for hertz in (20.0, 0.0)
    )
    for version in (old, new):
        run("tag", version.path, "paper")
    assert "holds 2 versions with a tag paper" in run(
        "rm", tmp_path / "fbank80@paper", "--yes", code=1
    )
    run("rm", f"{new.path}@paper", "--yes")
    assert f"{old.path}@paper" in run("rm", tmp_path / "fbank80@paper", "--yes")


def test_nothing_is_removed_without_a_yes(version, monkeypatch):
    cache = version.path.parent
    for command in (("rm", cache / "fbank80"), ("prune", cache)):
        assert "add --yes, or --dry-run" in run(*command, code=2)
        before = sorted(version.path.rglob("*"))
        run(*command, "--dry-run")
        with monkeypatch.context() as patch:
            patch.setattr(
                "click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False
            )
            assert "[y/N]" in (said := run(*command, input="n\n"))
            assert "nothing has been removed" in said
            # to click, as Ctrl-C
            assert "featcache: interrupted\n" in run(*command, input="", code=130)
        assert sorted(version.path.rglob("*")) == before
    assert json.loads(run("rm", cache / "fbank80", "--yes", "--json"))["removed"] is True
    assert list(cache.iterdir()) == []


def test_what_a_killed_rm_has_left_goes(version):
    """With a prune of the cache, or with the same command again, which finds no version
    any more."""
    left = version.path.with_name(".removed-0123456789ab")
    for command, code, said in (
        ("prune", 0, "1 leftover of processes that are dead"),
        ("rm", 1, "no such cache"),
    ):
        (left / "shards").mkdir(parents=True)
        if command == "rm":
            shutil.rmtree(version.path)
        place = version.path if command == "rm" else version.path.parent
        run(command, place, "--dry-run", code=code)
        assert left.exists()
        assert said in run(command, place, "--yes", code=code)
        assert not left.exists()


def test_a_whole_cache_and_what_is_no_version_are_not_removed(version, tmp_path):
    cache = version.path.parent
    assert f"name the version to remove: {version.path.name}" in run("rm", cache, "--yes", code=2)
    (tmp_path / "mine" / "shards").mkdir(parents=True)
    run("rm", tmp_path / "mine", "--yes", code=1)
    assert (tmp_path / "mine" / "shards").exists()
    assert version.path.exists()


@pytest.mark.parametrize("place", ["", "shards/", "mine/"])
def test_a_file_of_the_users_in_a_version_stays_unless_forced(version, place):
    write_probe(version, {"device": "cpu"})
    run("info", version.path)  # which makes an index
    (version.path / "work" / "left-behind").touch()
    file = version.path / place / "notes.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("which run is for which table")
    said = run("rm", version.path, "--yes", code=2)
    assert f"holds files that are not featcache's: {place}notes.txt: move it away" in said
    assert file.exists()
    assert f"; with files that are not featcache's: {place}notes.txt" in run(
        "rm", version.path, "--yes", "--force"
    )
    assert not version.path.exists()


def rows_of(numbers):
    """The rows of utterances of made-up features."""
    return [(f"utt-{number}", f"audio/utt-{number}.wav") for number in numbers]


def test_prune_says_what_goes_and_what_stays(version, tmp_path):
    cache = version.path.parent
    wanted = manifest_of(tmp_path, rows_of([0, 1, 3]), ("id", "path"))
    said = run("prune", cache, "--manifest", wanted, "--force", "--dry-run")
    assert (
        "would remove 2 items of utterances that were extracted again, 3 utterances not in "
        f"{wanted}" in said
    )
    assert "2 shards are written again" in said
    run("tag", cache / "fbank80", "paper")
    said = run("prune", cache, "--manifest", wanted, "--force", "--yes")
    assert "nothing to remove" in said
    assert "stay: of shards that a tag names, or needs: paper" in said
    run("rm", cache / "fbank80@paper", "--yes")
    done = json.loads(run("prune", cache, "--manifest", wanted, "--force", "--yes", "--json"))[
        "versions"
    ][0]["pruned"]
    assert (done["removed"], done["rewritten"], done["damaged"]) == (3, 2, [])
    assert "3 utterances" in run("verify", cache)
    assert "nothing to remove" in run("prune", cache)


def test_a_manifest_of_other_files_and_one_that_lacks_much_prune_nothing_unless_forced(tmp_path):
    version = make_version(tmp_path / "features", make_features(40))
    before = version.shard_names()

    def prune(rows, *options, code=0):
        wanted = manifest_of(tmp_path, rows, ("id", "path"))
        return run("prune", version.path, "--manifest", wanted, "--yes", *options, code=code)

    rows = rows_of(range(40))
    others = [(id_, f"dev/{id_}.wav") for id_, _ in rows[:3]]
    for options in ((), ("--dry-run",)):
        said = prune([*others, *rows[3:]], *options, code=2)
        assert "names other files for 3 of the 40 utterances" in said
        assert "utt-0: path audio/utt-0.wav → dev/utt-0.wav" in said
        said = prune(rows[3:], *options, code=2)
        assert "lacks 3 of the 40 utterances" in said
        assert "--force" in said
    assert "has none of the 40 utterances of" in prune([("x", "x.wav")], "--force", code=2)
    assert version.shard_names() == before
    assert "nothing to remove" in prune([*others[:2], *rows[2:]])
    assert "2 utterances not in" in prune(rows[2:])
    assert "7 utterances not in" in prune([*others, *rows[10:]], "--force")


# The index


def test_index_is_built_once(cli, plain, scratch):
    for number in range(2):
        assert (
            cli("extract", plain.manifest(), "-o", scratch, "--partition", f"{number}/2").code == 0
        )
    version = only_version(scratch)
    assert load_index(version, version.shard_names()) is None
    assert "index built" in cli("index", scratch).out
    assert len(load_index(version, version.shard_names())) == 12
    ended = cli("index", scratch, "--json")
    assert json.loads(ended.out)["versions"][0]["built"] is False
    assert ended.err == ""


def test_index_says_what_is_missing_and_that_it_could_not_be_written(cli, plain, scratch):
    assert (
        cli(
            "extract", plain.manifest(), "-o", scratch, "--partition", "0/1", "--shard-size", "0.03"
        ).code
        == 0
    )
    assert (
        cli(
            "extract",
            plain.manifest(),
            "-o",
            scratch / "b",
            "--partition",
            "0/2",
            "--shard-size",
            "0.03",
        ).code
        == 0
    )
    assert "5 of the 12 utterances of" in cli("index", scratch / "b").with_code(0).err
    (version,) = scratch.glob("fbank80-*")
    os.symlink(scratch, version / "index")
    assert "index: is a symbolic link to" in cli.refused("index", version, code=1)


def test_a_copy_that_was_extracted_into_says_what_is_missing_and_a_run_ends_it(cli, plain, scratch):
    """Both have extracted a row anew, each from another file."""
    one, two = scratch / "one", scratch / "two"
    swapped = [{**plain.rows[0], "path": plain.rows[at]["path"]} for at in (1, 2)]
    theirs, ours = (
        plain.manifest([row, *plain.rows[1:]], f"{name}.csv")
        for row, name in zip(swapped, ("theirs", "ours"), strict=True)
    )
    cli("extract", plain.manifest(), "-o", one).with_code(0)
    cli("copy", one, two).with_code(0)
    cli("extract", theirs, "-o", one).with_code(0)
    cli("extract", ours, "-o", two).with_code(0)
    copied = cli("copy", one, two).with_code(0)
    told = "1 utterance is to be extracted again: nothing tells which features are newer"
    assert told in copied.out
    assert f"1 of the 12 utterances of {ours} are missing" in copied.err
    assert cli("verify", two).code == 1
    for manifest in (theirs, ours):
        cli("extract", manifest, "-o", two).with_code(0)
    cli("verify", two).with_code(0)
    cli("copy", two, one).with_code(0)
    assert "12 utterances" in cli("verify", one).with_code(0).out


@pytest.mark.parametrize("to", ["fbank80", "VERSION", "VERSION/new"])
def test_no_cache_is_made_in_a_version_or_under_its_name(version, to):
    cache = version.path.parent
    before = sorted(cache.rglob("*"))
    place = cache / to.replace("VERSION", version.path.name)
    told = run("extract", "no.csv", "-o", place, code=2)
    assert f"{place}: is the version {version.path}, or in it: give a cache, as {cache}" in told
    assert sorted(cache.rglob("*")) == before


def test_a_difference_of_rows_is_part_of_what_both_versions_have(cli, tmp_path):
    rows = {"utt-0": {"path": "elsewhere.wav"}}
    first = make_version(tmp_path / "a", make_features(2))
    second = make_version(tmp_path / "b", make_features(2), rows=rows)
    done = cli("diff", first.path, second.path).with_code(0)
    assert done.out.splitlines()[1:] == [
        "2 utterances are in both, 1 of them from other rows: utt-0"
    ]
