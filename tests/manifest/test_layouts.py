"""Tables as R and Excel write them, with comments, or of tools whose files are no
manifests."""

import numpy as np
import pytest
from manifests import faults_of, refused, rows_of

from featcache.manifest.read import read_manifest
from featcache.manifest.segments import Utterance

UTTERANCES = [Utterance(id="u1", path="a b.wav", start=0.5), Utterance(id="u2", path="c.wav")]
TEXTS = ['say "hi", you', "x; y"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        # write.table(x), and with a separator
        (
            "t.txt",
            '"id" "path" "start" "text"\n"1" "u1" "a b.wav" 0.5 "say \\"hi\\", you"\n'
            '"2" "u2" "c.wav" NA "x; y"\n',
        ),
        (
            "t.tsv",
            '"id"\t"path"\t"start"\t"text"\n"r1"\t"u1"\t"a b.wav"\t0.5\t"say \\"hi\\", you"\n'
            '"r2"\t"u2"\t"c.wav"\tNA\t"x; y"\n',
        ),
        # write.table(x, sep = "\t", quote = FALSE)
        (
            "t.tsv",
            'id\tpath\tstart\ttext\n1\tu1\ta b.wav\t0.5\tsay "hi", you\n2\tu2\tc.wav\tNA\tx; y\n',
        ),
        # write.csv(x), write.csv2(x)
        (
            "t.csv",
            '"","id","path","start","text"\n"1","u1","a b.wav",0.5,"say ""hi"", you"\n'
            '"2","u2","c.wav",NA,"x; y"\n',
        ),
        (
            "t.csv",
            '"";"id";"path";"start";"text"\n"1";"u1";"a b.wav";0,5;"say ""hi"", you"\n'
            '"2";"u2";"c.wav";NA;"x; y"\n',
        ),
        # Excel, where commas are decimal
        (
            "t.csv",
            '\ufeffsep=;\r\nid;path;start;text\r\nu1;a b.wav;0,5;"say ""hi"", you"\r\n'
            'u2;c.wav;;"x; y"\r\n',
        ),
        (
            "t.csv",
            "SEP=\t\nid\tpath\tstart\ttext\nu1\ta b.wav\t0.5\t"
            '"say ""hi"", you"\nu2\tc.wav\t\tx; y\n',
        ),
        # comments
        (
            "t.csv",
            '# by anna, bob\n\n# "on monday\nid,path,start,text\nu1,a b.wav,0.5,'
            '"say ""hi"", you"\nu2,c.wav,,x; y\n',
        ),
        ("t.txt", '#id\tpath\tstart\ttext\nu1\ta b.wav\t0.5\tsay "hi", you\nu2\tc.wav\t\tx; y\n'),
        (
            "t.csv",
            '# made on Sunday, with care\n# id, path, start, text\nu1, a b.wav, 0.5, "say ""hi"", '
            'you"\nu2, c.wav, , x; y\n',
        ),
    ],
)
def test_is_read(written, name, content):
    manifest = read_manifest(written(content, name))
    assert rows_of(manifest) == UTTERANCES
    assert list(manifest.columns["text"]) == TEXTS
    assert {*manifest.columns} <= {"", "text"}


def test_times_have_decimal_commas_between_semicolons(written):
    manifest = read_manifest(written("sep=;\npath;start_ms;end_ms;channel\na.wav;0,5;1000,5;1\n"))
    assert (manifest.start[0], manifest.duration[0]) == (0.0005, 1.0)
    assert list(manifest.columns["end_ms"]) == ["1000.5"]
    (fault,) = faults_of(written("id;path;start\na;x.wav;1.234,5\n"))
    assert fault == "line 2: start is not a number: '1.234.5'"


def test_lines_are_counted_from_the_first(written):
    comments = '# one\n\n# "two\n'
    assert faults_of(written(f"{comments}id,path\na,x.wav\nb,\n")) == ["line 6: path is missing"]
    assert faults_of(written(f"{comments}id\tpath\na\n", "t.tsv")) == [
        "line 5: 1 field, but the header has 2"
    ]


@pytest.mark.parametrize(
    "content",
    [
        "id,path,text\n1,a.wav,Hello, you\n2,b.wav,Hi, you\n",
        '"id","path","text"\n"1","a.wav","Hello, you",\n',
        "id,path,text\nu1,a.wav,Hello, you\n",
    ],
)
def test_a_comma_in_a_text_is_no_name_of_a_row(written, content):
    assert all("4 fields, but the header has 3" in fault for fault in faults_of(written(content)))


def test_audiosets_lists_lack_paths_alone(written):
    """The header is the last of its comments."""
    content = (
        "# Segments csv created Sun Mar  5 10:54:31 2017\n# num_ytids=20371, num_segs=20371\n"
        "# YTID, start_seconds, end_seconds, positive_labels{}\n"
        '--PJHxphWEs, 30.000, 40.000, "/m/09x0r,/t/dd00088"{}\n'
    )
    (fault,) = faults_of(written(content.format("", "")))
    assert "no path column among 'YTID', 'start_seconds'" in fault
    manifest = read_manifest(written(content.format(", path", ", a.wav")))
    assert manifest[0] == Utterance(
        id="a.wav-003000-001000", path="a.wav", start=30.0, duration=10.0
    )
    assert list(manifest.columns["positive_labels"]) == ["/m/09x0r,/t/dd00088"]


def test_channels_in_several_files_are_utterances_of_their_own(tmp_path):
    """As ESPnet has them; a path may have spaces all the same."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "wav.scp").write_text("u1 a_1.wav a_2.flac\nu2 my dir/b.wav\n")
    (folder / "text").write_text("u1 hello\nu2 there\n")
    manifest = read_manifest(folder)
    assert list(manifest.ids) == ["u1-c0", "u1-c1", "u2"]
    assert list(manifest.paths) == ["a_1.wav", "a_2.flac", "my dir/b.wav"]
    assert list(manifest.columns["text"]) == ["hello", "hello", "there"]
    assert "read as ID-c0, ID-c1" in manifest.notes[-1]
    assert list(read_manifest(folder / "wav.scp").ids) == ["u1-c0", "u1-c1", "u2"]
    (folder / "segments").write_text("s1 u1 0.5 1.5\ns2 u2 1 2\n")
    cut = read_manifest(folder)
    assert list(cut.ids) == ["s1-c0", "s1-c1", "s2"]
    np.testing.assert_array_equal(cut.start, [0.5, 0.5, 1.0])


GIGASPEECH = '{{\n "dataset": "{}",\n "audios": [\n  {{"aid": "x", "path": "x.opus"}}]}}'


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.rttm", "SPEAKER rec 1 0.00 1.23 <NA> <NA> ann <NA> <NA>\n", "is RTTM: "),
        ("a.txt", ";; by x\nSPEAKER rec 1 0.0 1.2 <NA> <NA> ann <NA>\n", "is RTTM: "),
        ("a.ctm", "rec 1 0.00 0.45 hello 0.98\nrec 1 0.5 0.45 you\n", "is CTM or STM: "),
        ("a.stm", "rec A ann 0.00 2.45 <o,f0,male> hello there\n", "is CTM or STM: "),
        ("a.TextGrid", 'File type = "ooTextFile"\nObject class = "TextGrid"\n', "is a TextGrid "),
        ("GigaSpeech.json", GIGASPEECH.format("GigaSpeech"), "is JSON of GigaSpeech"),
        ("w.json", '{"audios": [{"aid": "x", "segments": []}]}', "is JSON of GigaSpeech"),
        ("r.json", '[\n {\n  "id": "r", "sources": [{"type": "file"}]}]', "is a JSON array of L"),
        ("s.json", '[{"id": "s", "recording_id": "r", "start": 0}]', "is a JSON array of Lhotse"),
        ("c.json", '[{"id": "c", "supervisions": []}]', "is a JSON array of Lhotse's: jq"),
    ],
)
def test_what_is_no_manifest_is_named_with_what_to_do(written, name, content, what):
    assert refused(written(content, name)).startswith(what)


@pytest.mark.parametrize(
    "content", ['{"path": "a.wav", "audios": ["b.wav"]}', '{"path": "a.wav", "sources": [{}]}']
)
def test_keys_of_other_tools_are_no_harm(written, content):
    assert list(read_manifest(written(content, "train.jsonl")).paths) == ["a.wav"]
