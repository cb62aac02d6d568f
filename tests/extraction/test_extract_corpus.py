"""A corpus by one call, in a folder or an object store: what the command makes, part by
part."""

import shutil
import uuid
from contextlib import contextmanager

import pytest
import soundfile
from cache_contents import items
from corpora import speech

import featcache
from featcache.care.copying import copy_version
from featcache.errors import ArgumentError, ManifestError
from featcache.extraction.options import Options
from featcache.storage.location import parse_location
from featcache.version.corpus import read_parts
from featcache.version.selection import select_version

ONE = Options("cpu", 1)


@pytest.fixture
def manifests(plain, scratch):
    made = plain.copy(scratch / "audio")
    return [
        made.manifest(made.rows[4 * number : 4 * number + 4], f"p{number}.csv")
        for number in range(3)
    ]


def test_a_corpus_in_a_store_has_what_one_in_a_folder_has(manifests, tmp_path):
    pytest.importorskip("obstore")
    url = f"memory://{uuid.uuid4()}/corpus"
    made = featcache.extract(
        str(manifests[0].parent / "p?.csv"), "fbank80", tmp_path / "corpus", ONE
    )
    first = featcache.extract(manifests[:2], "fbank80", url, ONE)
    assert (sorted(first.parts), first.unchanged, first.errors, first.left) == (
        ["p0", "p1"],
        {},
        {},
        [],
    )
    manifests.append(manifests[0].with_name("wrong.csv"))
    manifests[-1].write_text("id,path\n,\n")
    second = featcache.extract(manifests, "fbank80", url, ONE)
    assert (sorted(second.parts), sorted(second.unchanged), sorted(second.errors)) == (
        ["p2"],
        ["p0", "p1"],
        ["wrong"],
    )
    assert isinstance(second.errors["wrong"], ManifestError)
    assert [part.name for part in read_parts(parse_location("url", url))] == [
        "p0",
        "p1",
        "p2",
        "wrong",
    ]
    with pytest.warns(featcache.FeatcacheWarning, match="1 part has no fbank80"):
        opened = featcache.open(url)
    assert sorted(opened.ids) == sorted(featcache.open(tmp_path / "corpus").ids)
    for name in made.parts:
        copy_version(
            select_version(parse_location("url", f"{url}/{name}")), tmp_path / "copy" / name
        )
        assert items(tmp_path / "copy" / name) == items(tmp_path / "corpus" / name)

    # A part by itself, in a corpus that is there; in which a shard is lost.
    version = select_version(parse_location("url", f"{url}/p1"))
    version.store.remove(f"shards/{version.shard_names()[0]}")
    again = featcache.extract(manifests[1], "fbank80", url, ONE)
    assert [summary.versions[0].extracted for summary in again.parts.values()] == [4]


def test_manifests_of_one_name_in_two_folders_are_not_one_part(manifests, tmp_path):
    first, second = (tmp_path / folder / "p.csv" for folder in ("a", "b"))
    for path, manifest in ((first, manifests[0]), (second, manifests[1])):
        path.parent.mkdir()
        path.write_text(manifest.read_text())
    options = {
        "cache": tmp_path / "corpus",
        "options": ONE,
        "reading": {"root": manifests[0].parent},
    }
    assert list(featcache.extract([first], **options).parts) == ["p"]
    with pytest.raises(
        ArgumentError, match=r"part p is that of .*a/p\.csv, and .*b/p\.csv is another manifest"
    ):
        featcache.extract([second], **options)
    second.write_text(first.read_text())  # a copy
    assert list(featcache.extract([second], **options).unchanged) == ["p"]
    second.write_text(manifests[1].read_text())
    first.unlink()  # so the other one takes its place
    assert featcache.extract([second], **options).parts["p"].versions[0].extracted == 4


def test_a_part_is_not_unchanged_if_its_paths_lead_to_other_audio(plain, manifests, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    copies = [shutil.copy(manifest, other) for manifest in manifests]
    for row in plain.rows:
        soundfile.write(other / row["path"], speech(1.5), 16000)
    options = {"cache": tmp_path / "corpus", "options": ONE}
    assert len(featcache.extract(manifests, **options).parts) == 3
    assert len(featcache.extract(manifests, **options).unchanged) == 3
    for job in ({"reading": {"root": other}, "manifest": manifests}, {"manifest": copies}):
        errors = featcache.extract(**job, **options).errors
        assert len(errors) == 3
        assert "are not what" in str(errors["p0"])

    # A corpus that was moved is looked at once.
    moved = tmp_path / "moved"
    shutil.copytree(manifests[0].parent, moved)
    elsewhere = {"reading": {"root": moved}, **options}
    assert len(featcache.extract(manifests, **elsewhere).parts) == 3
    assert len(featcache.extract(manifests, **elsewhere).unchanged) == 3


def test_manifests_of_a_corpus_are_read_as_it_is_said_and_anew_if_it_is_said_otherwise(
    plain, manifests, tmp_path
):
    table = tmp_path / "sb.csv"
    table.write_text(
        "ID,duration,wav\n"
        + "".join(f"{row['id']},1,$top/{row['path']}\n" for row in plain.rows[:3])
    )
    options = {"cache": tmp_path / "corpus", "options": ONE}
    reading = {"values": {"top": str(plain.folder)}, "format": "speechbrain"}
    assert (
        featcache.extract([table], reading=reading, **options).parts["sb"].versions[0].extracted
        == 3
    )
    same = {**reading, "allow_commands": False}
    assert list(featcache.extract([table], reading=same, **options).unchanged) == ["sb"]
    values = [{"values": {**reading["values"], "of": what}} for what in ("nothing", "something")]
    for changed in ({"root": "/anywhere"}, {"format": None}, *values, {"allow_commands": True}, {}):
        other = {"reading": {**reading, **changed}, **options}
        assert featcache.extract([table], **other).parts["sb"].versions[0].extracted == 0
        assert list(featcache.extract([table], **other).unchanged) == ["sb"]
    with pytest.raises(
        ArgumentError,
        match=r"reading: there is no formt \(did you mean format\?\): give root, format, values, allow_commands",
    ):
        featcache.extract([table], reading={"formt": "kaldi"}, **options)


def test_an_observer_is_told_of_each_part_and_of_a_dry_run_what_it_would_do(manifests, tmp_path):
    told = []

    @contextmanager
    def running():
        told.append("running")
        yield
        told.append("ended")

    observer = featcache.Observer(
        read=lambda manifest, part: told.append((part, len(manifest))),
        running=running,
        planned=lambda plan: told.append(plan.versions[0].num_missing),
        progress=lambda progress: told.append("progress"),
        done=lambda summary: told.append(summary.versions[0].extracted),
    )
    folder = tmp_path / "corpus"
    planned = featcache.extract(
        manifests[:2], "fbank80", folder, Options("cpu", 1, dry_run=True), observer=observer
    )
    assert (told, folder.exists()) == ([("p0", 4), 4, ("p1", 4), 4], False)
    assert [part.versions[0].missing for part in planned.parts.values()] == [4, 4]
    told.clear()
    featcache.extract(manifests[0], cache=tmp_path / "cache", options=ONE, observer=observer)
    # the last is 4 again
    assert list(dict.fromkeys(told)) == [("", 4), "running", 4, "progress", "ended"]
    assert told[-1] == 4


def test_a_table_in_memory_is_a_manifest(plain, tmp_path):
    frame = pytest.importorskip("pandas").DataFrame(plain.rows[:4])
    for table in (frame, plain.rows[:4]):
        summary = featcache.extract(
            table, cache=tmp_path / "features", options=ONE, reading={"root": plain.folder}
        )
        assert (summary.utterances, summary.failed) == (4, 0)
    assert [*featcache.open(tmp_path / "features").ids] == [row["id"] for row in plain.rows[:4]]
    with pytest.raises(ManifestError, match="no path column"):
        featcache.extract([{"id": "a"}], cache=tmp_path / "features")
