"""A folder is read as the files in it that a list of paths would name; the others are told."""

import pytest
from manifests import faults_of

from featcache.manifest.read import read_manifest

SOUND = [
    "a.wav",
    "a1.wave",
    "b.flac",
    "c.mp3",
    "d.mp2",
    "e.ogg",
    "f.oga",
    "g.opus",
    "h.m4a",
    "i.m4b",
    "j.mp4",
    "k.mov",
    "l.3gp",
    "m.mka",
    "n.mkv",
    "o.webm",
    "p.aiff",
    "q.aifc",
    "r.au",
    "s.snd",
    "t.voc",
    "u.nist",
    "v.sph",
    "w.caf",
    "x.w64",
    "y.amr",
    "z.wma",
    "A.AAC",
    "B.3g2",
    "C.rf64",
    "D.paf",
    "E.pvf",
    "F.ac3",
    "G.avi",
    "H.m4v",
    "I.sf",
    "J.adts",
]


def test_every_kind_of_sound_is_taken(tmp_path):
    for name in SOUND:
        (tmp_path / name).touch()
    manifest = read_manifest(tmp_path)
    assert list(manifest.paths) == sorted(SOUND)
    assert manifest.notes == (f"{tmp_path}: read as folder",)


def test_what_is_left_out_is_counted_and_tables_and_tars_are_named(tmp_path):
    (tmp_path / "inner").mkdir()
    others = ("a.txt", "inner/b.TXT", "README", ".hidden", "train.csv", "inner/t.tar", "x.jsonl.gz")
    for name in ("a.wav", *others):
        (tmp_path / name).touch()
    manifest = read_manifest(tmp_path)
    assert list(manifest.paths) == ["a.wav"]
    _, left_out, tables = manifest.notes
    kinds = "2 '*.txt', 1 '*', 1 '*.csv', 1 '*.tar', 1 '*.gz'"
    assert left_out.startswith(f"{tmp_path}: 6 files not named as audio left out: ")
    assert sorted(left_out.rpartition(": ")[2].split(", ")) == sorted(kinds.split(", "))
    assert tables.endswith(": 'inner/t.tar', 'train.csv', 'x.jsonl.gz'")


@pytest.mark.parametrize("name", ["wav.1.scp", "audio_0.tar"])
def test_a_folder_without_audio_says_what_it_has(tmp_path, name):
    (tmp_path / name).touch()
    (fault,) = faults_of(tmp_path)
    assert fault.startswith("there are no audio files below it; 1 file not named as audio left out")
    assert fault.endswith(repr(name))
