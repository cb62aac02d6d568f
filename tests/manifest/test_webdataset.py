"""A tar of audio is a manifest: the samples that WebDataset's own reader gives, with their
columns; what it cannot be is one line."""

import gzip
import io
import json
import subprocess
import tarfile

import numpy as np
import pytest
import soundfile
from containers import write_tar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_cache import make_features, make_version
from manifests import faults_of, refused

from featcache.audio.members import copy_of
from featcache.errors import ArgumentError
from featcache.manifest.numbered import expand_braces
from featcache.manifest.read import read_manifest
from featcache.version.corpus import manifests_of_parts
from featcache.version.selection import refuse_version


def wav(number):
    out = io.BytesIO()
    soundfile.write(out, np.full(800, number / 100), 8000, format="WAV")
    return out.getvalue()


def sample(number, **columns):
    return {"wav": wav(number), "json": json.dumps(columns).encode()}


SAMPLES = {
    "anna/1": sample(1, text="hello", speaker="anna", duration=9.5, id="a-1", tags=["x"]),
    "2.wide": {},
    "v1.0/3": {"left.wav": wav(3), "txt": b"good night\n", "npy": b"?"},
    "4": {"txt": b"other", **sample(4, text="kettle", n=7)},
}
"""By the prefix of members' names, the members."""


def members_of(samples):
    return {
        f"{key}.{extension}": data
        for key, members in samples.items()
        for extension, data in members.items()
    }


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a tar left open
def test_the_samples_are_those_of_webdataset_s_own_reader(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    path = write_tar(tmp_path / "audio_0.tar", members_of(SAMPLES))
    manifest = read_manifest(path)
    theirs = {
        sample["__key__"]: sample for sample in webdataset.WebDataset(str(path), shardshuffle=False)
    }
    assert list(manifest.ids) == list(theirs)
    for id_, audio in zip(manifest.ids, manifest.paths, strict=True):
        (name,) = (name for name in theirs[id_] if name.endswith("wav"))
        with copy_of(manifest.resolve(audio)).open() as copy:
            assert copy.read() == theirs[id_][name]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".tgz"])
def test_json_and_text_beside_audio_are_columns(tmp_path, suffix):
    path = write_tar(tmp_path / f"audio_0{suffix}", members_of(SAMPLES))
    if suffix != ".tar":
        path.write_bytes(gzip.compress(path.read_bytes()))
    manifest = read_manifest(path)
    assert manifest.format == "webdataset"
    assert list(manifest.ids) == ["anna/1", "v1.0/3", "4"]
    inside = ["anna/1.wav", "v1.0/3.left.wav", "4.wav"]
    assert list(manifest.paths) == [f"{path.name}/{name}" for name in inside]
    assert np.isnan(manifest.duration).all()  # a sample is the whole of its audio
    assert {name: list(values) for name, values in manifest.values.items()} == {
        "text": ["hello", "good night", "kettle"],
        "speaker": ["anna", None, None],
        "original_duration": [9.5, None, None],
        "original_id": ["a-1", None, None],
        "tags": [["x"], None, None],
        "n": [None, None, 7],
        "txt": [None, None, "other"],
    }
    assert any("1 member of the tar left out: 1 *.npy" in note for note in manifest.notes)


@pytest.mark.parametrize("format_name", ["csv", "paths", "jsonl"])
def test_another_format_is_no_reading_of_a_tar(tmp_path, format_name):
    path = write_tar(tmp_path / "a.tar", {"a.wav": wav(1)})
    assert f"--format {format_name} does not read" in refused(path, format=format_name)


def test_what_no_manifest_can_be_made_of_is_one_line(tmp_path):
    path = tmp_path / "a.tar"
    write_tar(path, {"a.json": b"{}", "b/c.txt": b"c", "README": b"r"})
    assert refused(path).startswith("is a tar of 1 *.json without audio, 1 *.txt without audio: ")
    write_tar(path, {})
    assert refused(path).startswith("is a tar of nothing")
    path.write_text("<html>404</html>")
    assert refused(path).startswith("is no tar, or ends after 16 bytes")
    whole = write_tar(path, {f"{number}.wav": wav(number) for number in range(9)}).read_bytes()
    path.write_bytes(whole[:9000])
    assert refused(path) == (
        "is no tar, or ends after 9,000 bytes without the mark of an end: fetch or pack it again"
    )
    path.write_bytes(whole[:4608] + b"\xff" + whole[4609:])
    assert "is damaged before byte 5,120" in refused(path)
    path.write_bytes(gzip.compress(whole))
    assert "name it .tar, or compressed .tar.gz" in refused(path)
    bare = tmp_path / "bare"
    bare.write_bytes(whole)
    assert "name it with .tar" in refused(bare)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE, tarfile.CHRTYPE])
def test_what_is_no_plain_file_is_counted(tmp_path, kind):
    path = write_tar(tmp_path / "a.tar", {"a.wav": wav(1)})
    with tarfile.open(path, "a") as tar:
        other = tarfile.TarInfo("b.wav")
        other.type, other.linkname = kind, "a.wav"
        tar.addfile(other)
    manifest = read_manifest(path)
    assert list(manifest.ids) == ["a"]
    assert any("left out: 1 *.wav that is no plain file" in note for note in manifest.notes)


def test_two_audio_members_of_one_key_and_bad_columns_are_named(tmp_path):
    members = {"a.x.wav": wav(1), "a.y.flac": wav(2), "b.wav": wav(1), "b.json": b"[1]"}
    members |= {"c.wav": wav(1), "c.json": b'{"x": ', "d.wav": wav(1), "d.txt": b"\xff"}
    one, array, broken, text = faults_of(write_tar(tmp_path / "a.tar", members))
    assert one.startswith("member 2: 'a.x.wav', 'a.y.flac' have one key, 'a', and are one sample")
    assert array == "member 4: 'b.json': not a JSON object: [1]"
    assert broken.startswith("member 6: 'c.json': not JSON: Expecting value")
    assert text.startswith("member 8: 'd.txt': 'utf-8' codec can't decode byte 0xff")


def test_a_key_that_comes_again_later_is_named(tmp_path):
    members = {"a.wav": wav(1), "b.wav": wav(2), "a.flac": wav(3)}
    assert faults_of(write_tar(tmp_path / "a.tar", members)) == [
        "member 3: id 'a' is already on member 1, for another path, start, duration or channel"
    ]


_PARTS = st.sampled_from(["{0..3}", "{08..11}", "{3..1}", "{a,b,}", "{a}", "{}", "x", "{00..2}"])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(_PARTS, min_size=1, max_size=3))
def test_braces_stand_for_what_bash_makes_of_them(parts):
    pattern = "-".join(["a", *parts])
    printed = subprocess.run(["bash", "-c", f"echo {pattern}"], capture_output=True, text=True)
    assert expand_braces(pattern) == printed.stdout.split()


def test_a_pattern_with_braces_names_parts_that_exist(tmp_path):
    for number in range(3):
        (tmp_path / f"{number:03d}.tar").touch()
    parts = manifests_of_parts([f"{tmp_path}/{{000..002}}.tar"])
    assert list(parts) == ["000", "001", "002"]
    assert list(manifests_of_parts([f"{tmp_path}/{{000..001}}.t*"])) == ["000", "001"]
    # `extract` names the missing one
    assert list(manifests_of_parts([f"{tmp_path}/{{000..003}}.tar"])) == [
        "000",
        "001",
        "002",
        "003",
    ]
    for pattern, message in (
        ("{5..7}.tar", "it fits none"),
        ("{1..99999999}", "more than 65,536"),
        ("{0..9999}/{0..9999}.tar", "more than 65,536"),  # refused before all are in memory
    ):
        with pytest.raises(ArgumentError, match=message):
            manifests_of_parts([f"{tmp_path}/{pattern}"])


def test_a_folder_of_tars_called_shards_makes_no_version_of_the_folder_around_it(tmp_path):
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards/000.tar", {"a.wav": wav(1)})
    refuse_version(tmp_path / "features")
    version = make_version(tmp_path / "c", make_features(2))
    for lost in ("zarr.json", "shards/zarr.json"):  # as damage may leave it
        (version.path / lost).rename(tmp_path / "aside")
        with pytest.raises(ArgumentError, match="is the version"):
            refuse_version(version.path / "features")
        (tmp_path / "aside").rename(version.path / lost)
