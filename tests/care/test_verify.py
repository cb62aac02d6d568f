"""`verify`: whether the audio is still what was extracted, and what is said."""

import json
import os
import re
import shutil
from typing import Any
from unittest.mock import Mock

import pytest
from cache_contents import only_version, provenance
from corpora import Corpus
from damage import CHUNKS, assert_repaired, flip, victim
from extractions import extracted
from hostile_caches import EDITS, columns_of, reseal, seal_files, shard_folder, version_folder
from make_cache import make_features, make_version
from xxhash import xxh3_64_intdigest

from featcache.audio import content_hash
from featcache.audio.content_hash import hash_of_content
from featcache.care.sources import SourceCheck
from featcache.care.verify import verify


@pytest.fixture
def moved(plain, scratch) -> Corpus:
    """A copy of the cache's audio with the same times, to spoil."""
    return plain.copy(scratch / "audio")


def verified(cli, cache, *options) -> tuple[int, dict[str, Any]]:
    """The exit code, and what is said of the one version."""
    found = cli("verify", cache, *options, "--json")
    (version,) = found.json()["versions"]
    return found.code, version


def told(cli, cache, *options) -> tuple[int, list[tuple[str | None, str]]]:
    """The exit code, and each problem with audio."""
    code, version = verified(cli, cache, *options)
    assert {(problem["kind"], problem["shard"]) for problem in version["problems"]} <= {
        ("source", None)
    }
    return code, [(problem["id"], problem["message"]) for problem in version["problems"]]


@pytest.mark.parametrize("how", ["stat", "content"])
def test_audio_that_is_what_it_was_is_no_problem(cli, cache, moved, how):
    """Where the run that extracted it has found it, or under --root."""
    assert told(cli, cache, f"--sources={how}") == (0, [])
    assert told(cli, cache, f"--sources={how}", "--root", moved.folder) == (0, [])
    assert told(cli, cache, "--root", moved.folder) == (0, [])


def test_files_that_are_gone_changed_or_no_files_are_named(cli, cache, moved):
    (moved.folder / "00.wav").unlink()
    (moved.folder / "01.wav").write_bytes(b"short")
    os.utime(moved.folder / "02.wav", ns=(1, 1))
    (moved.folder / "03.wav").unlink()
    (moved.folder / "03.wav").mkdir()
    folder, size = moved.folder, provenance(cache)["utt-01"].size
    code, found = told(cli, cache, "--sources", "--root", folder)
    assert code == 1
    assert dict(found) == {
        "utt-00": f"utt-00: {folder}/00.wav: there is no such file",
        "utt-01": f"utt-01: {folder}/01.wav: has changed since: {size:,} → 5 bytes",
        "utt-02": f"utt-02: {folder}/02.wav: has changed since: its mtime is another",
        "utt-03": f"utt-03: {folder}/03.wav: is not a file any more",
    }
    text = cli("verify", cache, "--sources", "--root", folder).with_code(1)
    assert "no damage found" in text.out
    assert text.err.startswith("4 audio files are not what was extracted: ")
    assert "repair" not in text.err


def test_what_has_the_same_content_is_the_same_whatever_its_time(cli, cache, moved):
    """And other content of the same size and time is not, which only the hash tells."""
    os.utime(moved.folder / "02.wav", ns=(1, 1))
    path = moved.folder / "05.wav"
    status = path.stat()
    flip(path, status.st_size - 1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    root = ("--root", moved.folder)
    assert [id_ for id_, _ in told(cli, cache, "--sources=stat", *root)[1]] == ["utt-02"]
    code, found = told(cli, cache, "--sources=content", *root)
    assert (code, found) == (
        1,
        [("utt-05", f"utt-05: {path}: has changed since: other bytes, of the same number")],
    )


def test_items_without_a_hash_are_counted_and_compared_by_time(cli, scratch):
    """Such as a member of a container, or what another writer has stored."""
    files = [scratch / f"utt-{number}.wav" for number in range(3)]
    for file in files:
        file.write_bytes(bytes(1000))
        os.utime(file, ns=(5, 5))
    version = make_version(
        scratch / "cache", make_features(3), rows={file.stem: {"path": file.name} for file in files}
    )
    command = ("verify", version.path, "--root", scratch)
    assert told(cli, version.path, "--sources=content", "--root", scratch) == (0, [])
    text = cli(*command, "--sources=content").out
    assert "3 utterances compared by size and mtime: no hash of their audio is known" in text
    os.utime(files[2], ns=(5, 6))
    code, found = told(cli, version.path, "--sources=content", "--root", scratch)
    assert (code, found) == (
        1,
        [("utt-2", f"utt-2: {files[2]}: has changed since: its mtime is another")],
    )
    assert "no hash" not in cli(*command, "--sources").out


def test_a_file_of_many_utterances_is_hashed_and_named_once(cli, corpus, monkeypatch, scratch):
    monkeypatch.setattr(
        content_hash, "hash_of_content", hashing := Mock(side_effect=hash_of_content)
    )
    cache = scratch / "cache"
    assert cli("extract", corpus.manifest(), "-o", cache, "--shard-size", "0.004").code == 0
    version = only_version(cache)
    assert len(version.shard_names()) > 5
    found = verify(version, sources=SourceCheck(by_content=True, root=corpus.folder), threads=2)
    assert found.problems == []
    assert hashing.call_count == len({row["path"] for row in corpus.rows}) < len(corpus.rows)
    empty = scratch / "empty"
    empty.mkdir()
    code, problems = told(cli, cache, "--sources", "--root", empty)
    assert (code, len(problems)) == (1, len({row["path"] for row in corpus.rows}))
    (message,) = (message for _, message in problems if "long.flac" in message)
    assert message.startswith("segment-0 and 5 others: ")


def test_a_file_that_was_changed_while_it_was_extracted_has_one_size_and_time_and_two_contents(
    cli, scratch
):
    file = scratch / "a.wav"
    file.write_bytes(b"\1" * 1000)
    os.utime(file, ns=(5, 5))
    contents = {"utt-0": xxh3_64_intdigest(file.read_bytes()), "utt-1": 1, "utt-2": 2}
    rows = {id_: {"path": "a.wav", "content_hash": content} for id_, content in contents.items()}
    version = make_version(scratch / "cache", make_features(3), rows=rows)
    for how, ids in (("stat", []), ("content", ["utt-1", "utt-2"])):
        _, said = verified(cli, version.path, f"--sources={how}", "--root", scratch)
        problems = [problem for problem in said["problems"] if problem["kind"] == "source"]
        assert len(problems) == bool(ids)
        assert all("utt-1 and 1 other" in problem["message"] for problem in problems)


def test_only_items_that_count_are_compared(cli, cache, moved):
    """A file that has changed and was extracted again is what its utterance was extracted
    from."""
    shutil.copy(moved.folder / "03.wav", moved.folder / "04.wav")
    manifest = moved.manifest(moved.rows)
    assert told(cli, cache, "--sources", "--root", moved.folder)[0] == 1
    assert (
        extracted(cli("extract", manifest, "-o", cache, "--check-sources", "--json").with_code(0))
        == 1
    )
    assert told(cli, cache, "--sources", "--root", moved.folder) == (0, [])


def test_audio_is_looked_at_in_sound_shards_only(cli, cache, moved):
    version = only_version(cache)
    shard = version.shard(version.shard_names()[0])
    inside = len(shard.table.ids)
    flip(shard.folder / CHUNKS["features"], 0)
    shutil.rmtree(moved.folder)
    moved.folder.mkdir()
    code, found = verified(cli, cache, "--sources", "--root", moved.folder)
    kinds = [problem["kind"] for problem in found["problems"]]
    assert (code, kinds.count("source")) == (1, len(moved.rows) - inside)
    assert "checksum" in kinds


def test_an_index_that_leads_out_of_a_shard_is_damage(cli, cache):
    EDITS["index: item beyond"](cache)
    assert re.fullmatch(
        r"featcache: .*/index: damaged: there is no item \d+: remove this folder\n",
        cli("verify", cache, "--sources").err,
    )


def test_extract_says_whose_audio_it_did_not_look_at(cli, plain, cache):
    again = cli("extract", plain.manifest(), "-o", cache)
    assert (
        "12 already there: their audio was not checked for changes (--check-sources)\n" in again.out
    )
    assert (
        cli("extract", plain.manifest(), "-o", cache, "--json").json()["versions"][0][
            "not_looked_at"
        ]
        == 12
    )
    looked = cli("extract", plain.manifest(), "-o", cache, "--check-sources")
    assert "checked for changes" not in looked.out
    assert (
        "checked for changes"
        not in cli("extract", plain.manifest(), "-o", cache.parent / "new").out
    )


def test_frames_of_replaced_utterances_are_not_counted(cli, plain, cache):
    rows = [{**row, "duration": 0.3} if row["id"] == "utt-00" else row for row in plain.rows]
    cli("extract", plain.manifest(rows, "shorter.csv"), "-o", cache).with_code(0)
    (verified,) = cli("verify", cache, "--json").json()["versions"]
    (held,) = cli("info", cache, "--json").json()["versions"]
    assert held["replaced"] == 1
    assert (verified["utterances"], verified["frames"]) == (12, held["frames"])


@pytest.mark.parametrize("claimed", [True, False])
def test_values_that_are_not_finite_are_found_and_repaired(cli, plain, sound, cache, claimed):
    """Under right seals; and although the shard says that they are finite, with --values."""
    EDITS["features: NaN"](cache)
    for document in cache.glob("*/shards/*/zarr.json"):
        reseal(document.parent, lambda it: it.update(finite=claimed))
    assert cli("verify", cache).code == (0 if claimed else 1)
    assert "features are NaN or infinite" in cli("verify", cache, "--values").with_code(1).out
    assert_repaired(cli, cache, sound, plain)


def test_a_table_that_another_digest_stands_for_is_found_and_repaired(cli, plain, sound, cache):
    """Under right seals, with --values; the shard has the name that the digest asks for."""
    folder = shard_folder(cache)
    columns_of(folder)["source_size"][0] += 1
    attributes = json.loads((folder / "zarr.json").read_bytes())["attributes"]
    seal_files(folder, lambda it: it.update(digest=attributes["featcache"]["digest"]))
    shutil.rmtree(version_folder(cache) / "index")
    cli("verify", cache).with_code(0)
    found = cli("verify", cache, "--values").with_code(1).out
    assert "its name does not follow from what is in it" in found
    assert_repaired(cli, cache, sound, plain)


# What is said of a version that is damaged, or lacks rows of a manifest: how much, and
# what to do


def test_utterances_of_a_damaged_shard_are_counted_apart(cli, plain, cache):
    """They are not lost: most of them are sound, and repair keeps those."""
    utterances = len(plain.rows)
    assert f": 3 shards, {utterances} utterances, " in cli("verify", cache).out
    assert verified(cli, cache)[1]["damaged_utterances"] == 0
    shard = victim(cache)
    inside = shard.info.items
    flip(shard.folder / CHUNKS["features"], 0)
    told = cli("verify", cache).with_code(1)
    assert (
        ": 3 shards, 1 of them damaged; the others hold "
        f"{utterances - inside} utterances, " in told.out
    )
    assert (
        f"  the damaged shard holds {inside} utterances: repair keeps the sound ones\n" in told.out
    )
    assert (
        told.err == f"1 shard is damaged: featcache repair {only_version(cache).path} --manifest "
        "MANIFEST\n"
    )
    ended = cli("verify", cache, "--json")
    (version,) = ended.json()["versions"]
    (problem,) = version["problems"]
    assert (ended.code, ended.json()["ok"]) == (1, False)
    assert (version["utterances"], version["damaged_utterances"]) == (utterances - inside, inside)
    assert (problem["shard"], problem["id"], problem["kind"]) == (
        shard.name,
        shard.table.ids[0],
        "checksum",
    )
    assert shard.table.ids[0] in problem["message"]


@pytest.mark.parametrize("file", [CHUNKS["features"], "zarr.json"])
@pytest.mark.parametrize("is_indexed", [True, False])
def test_what_is_missing_with_a_damaged_shard_is_one_line_and_one_remedy(
    cli, plain, cache, file, is_indexed
):
    """And it is no fault of the sound items, which repair keeps. Without an index, a shard
    without a document may have anything."""
    shard, manifest = victim(cache), plain.manifest()
    ids, folder = [*shard.table.ids], only_version(cache).path
    flip(shard.folder / file, 50)
    if not is_indexed:
        shutil.rmtree(folder / "index")
    told = cli("verify", cache, "--manifest", manifest).with_code(1)
    assert told.err == f"1 shard is damaged: featcache repair {folder} --manifest {manifest}\n"
    found = verified(cli, cache, "--manifest", manifest)[1]
    missing = {it["id"]: it["shard"] for it in found["problems"] if it["kind"] == "missing"}
    if is_indexed or file != "zarr.json":
        assert f" holds {len(ids)} utterances, {len(ids)} of the manifest: rep" in told.out
        assert "is in no" not in told.out
        assert missing == dict.fromkeys(ids, shard.name)
        assert found["damaged_utterances"] == len(ids)
    else:
        assert f"{ids[0]}: is in no undamaged shard\n" in told.out
        assert missing == dict.fromkeys(ids)
    done = cli("repair", cache, "--manifest", manifest, "--json").with_code(0).json()
    assert done["versions"][0]["kept"] == (len(ids) - 1 if file != "zarr.json" else 0)
    cli("verify", cache, "--manifest", manifest).with_code(0)


def test_an_older_item_of_what_a_damaged_shard_has_is_no_other_row(cli, plain, cache):
    rows = [{**plain.rows[0], "duration": 0.3}]
    manifest = plain.manifest([*rows, *plain.rows[1:]], "shorter.csv")
    cli("extract", manifest, "-o", cache).with_code(0)
    version = only_version(cache)
    names = version.shard_names()
    (name,) = (name for name in names if version.shard(name).table["generation"].max() > 1)
    flip(version.shard(name).folder / CHUNKS["features"], 10)
    (problem,) = (
        problem
        for problem in verified(cli, cache, "--manifest", manifest)[1]["problems"]
        if problem["kind"] != "checksum"
    )
    assert (problem["kind"], problem["shard"]) == ("missing", name)


def test_a_shard_that_does_not_say_how_many_it_holds_is_not_counted(cli, cache):
    (victim(cache).folder / "zarr.json").write_text("{}")
    shutil.rmtree(only_version(cache).path / "index")
    told = cli("verify", cache)
    assert "1 of them damaged" in told.out
    assert "the damaged shard holds" not in told.out
    assert verified(cli, cache)[1]["damaged_utterances"] is None


def test_where_every_shard_is_damaged_none_is_counted_as_sound(cli, cache):
    for chunk in cache.glob(f"*/shards/*/{CHUNKS['features']}"):
        flip(chunk, 10)
    assert ": 3 shards, all damaged; every byte read\n" in cli("verify", cache).out


def test_a_fault_is_said_once_and_the_hint_names_the_manifest(cli, plain, cache):
    flip(victim(cache).folder / CHUNKS["features"], 10)
    manifest = plain.manifest([*plain.rows, {"id": "new", "path": "new.wav"}], "longer.csv")
    told = cli("verify", cache, "--manifest", manifest)
    assert (
        f"1 shard is damaged: featcache repair {only_version(cache).path} --manifest "
        f"{manifest}\n" in told.err
    )
    faults = [line for line in told.out.splitlines()[2:] if line.startswith("  ")]
    assert any(line.startswith("  new: is in no shard") for line in faults)
    assert not any(line.startswith(("  checksum: ", "  missing: ")) for line in faults)


@pytest.mark.parametrize(("config", "given"), [("fbank80", ""), ("mfcc13", " -c CONFIG")])
def test_missing_rows_are_summed_up_with_what_extracts_them(cli, plain, scratch, config, given):
    """Not only the first of them listed; changed rows too, which the same command
    extracts."""
    cache = scratch / "my features"
    first = [row for number, row in enumerate(plain.rows) if number % 2]
    assert cli("extract", plain.manifest(first, "half.csv"), "-o", cache, "-c", config).code == 0
    rows = [*plain.rows, *({"id": f"more-{i}", "path": "00.wav"} for i in range(40))]
    rows[1] = {**rows[1], "start": 0.1, "duration": 0.2}
    manifest = plain.manifest(rows, "whole.csv")
    told = cli("verify", cache, "--manifest", manifest, "--root", plain.folder).with_code(1)
    command = f"featcache extract {manifest} --root {plain.folder}{given} -o '{cache}'"
    assert told.err == f"46 missing, 1 changed: {command}\n"
    assert "… and 27 more: --json has them all" in told.out
