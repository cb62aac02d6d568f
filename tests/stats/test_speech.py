"""Segments of speech, held to silero-vad's own rule where that package is installed, and to
what the rule says."""

import csv
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_here

import featcache
from featcache.errors import ArgumentError
from featcache.manifest.read import read_manifest
from featcache.stats.speech import SpeechRule, speech_spans

RATE, HOP = 16_000, 512

probabilities = st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.36, 0.5, 0.9]), min_size=1, max_size=60)
runs = probabilities.map(lambda chosen: np.repeat(chosen, 4).tolist())
rules = st.builds(
    SpeechRule,
    threshold=st.sampled_from([0.12, 0.5, 0.7]),
    min_speech=st.sampled_from([0.0, 0.25, 0.5]),
    min_silence=st.sampled_from([0.0, 0.1, 0.3]),
    pad=st.sampled_from([0.0, 0.03, 0.2]),
    max_speech=st.sampled_from([0.5, 1.0, 2.0, math.inf]),
)


@given(runs, st.integers(0, HOP - 1), rules)
def test_segments_are_those_of_silero(frames, short_by, rule):
    silero = pytest.importorskip("silero_vad.utils_vad")
    num_samples = len(frames) * HOP - short_by
    expected = silero.get_speech_timestamps_from_probs(
        frames,
        threshold=rule.threshold,
        min_speech_duration_ms=rule.min_speech * 1000,
        min_silence_duration_ms=rule.min_silence * 1000,
        speech_pad_ms=rule.pad * 1000,
        max_speech_duration_s=rule.max_speech,
        audio_length_samples=num_samples,
    )
    spans = speech_spans(frames, num_samples, HOP, RATE, rule)
    assert spans == [(one["start"], one["end"]) for one in expected]


@given(runs, rules)
def test_segments_lie_in_the_clip_in_order_and_do_not_overlap(frames, rule):
    num_samples = len(frames) * HOP
    ends = [
        sample for span in speech_spans(frames, num_samples, HOP, RATE, rule) for sample in span
    ]
    assert ends == sorted(ends)
    assert all(0 <= sample <= num_samples for sample in ends)


def test_a_segment_begins_and_ends_with_its_frames():
    frames = [0.1] * 10 + [0.9] * 20 + [0.1] * 10
    rule = SpeechRule(pad=0)
    assert speech_spans(frames, 40 * HOP, HOP, RATE, rule) == [(10 * HOP, 30 * HOP)]
    assert speech_spans(frames, 40 * HOP, HOP, RATE, SpeechRule(pad=0.01)) == [
        (10 * HOP - 160, 30 * HOP + 160)
    ]
    assert speech_spans(frames, 40 * HOP, HOP, RATE, SpeechRule(min_speech=1)) == []
    assert speech_spans(frames[:25], 25 * HOP - 7, HOP, RATE, rule) == [(10 * HOP, 25 * HOP - 7)]


CONFIG = """name: louder
extractor: speech_by_level:SpeechByLevel
"""


@pytest.fixture
def version(tmp_path, monkeypatch):
    """A cache of two recordings: one with two sounds of a second each, in its second half;
    one that is silent."""
    soundfile = pytest.importorskip("soundfile")
    waveform = np.zeros(8 * RATE, np.float32)
    tone = 0.3 * np.sin(np.arange(RATE) / 9)
    waveform[4 * RATE : 5 * RATE] = waveform[6 * RATE : 7 * RATE] = tone
    soundfile.write(tmp_path / "a.wav", waveform, RATE)
    soundfile.write(tmp_path / "b.wav", waveform[: 2 * RATE], RATE)
    rows = "id,path,start,duration\na,a.wav,3,5\nb,b.wav,,\n"
    (tmp_path / "m.csv").write_text(rows)
    (tmp_path / "louder.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    run_here("extract", "m.csv", "-c", "louder.yaml", "-c", "fbank80", "-o", "c")
    return tmp_path / "c" / "louder"


def test_vad_writes_a_manifest_to_extract_from_next(version, tmp_path):
    printed = run_here("vad", version, "-o", "s.csv")
    assert "s.csv: 2 segments of 1 utterance, 2." in printed
    assert "1 utterance without speech" in printed
    with open("s.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["a-1", "a-2"]
    assert [float(row["start"]) for row in rows] == pytest.approx([4, 6], abs=0.064)
    assert [float(row["duration"]) for row in rows] == pytest.approx([1, 1], abs=0.128)
    assert {row["utterance"] for row in rows} == {"a"}
    assert len(read_manifest("s.csv")) == 2
    run_here("extract", "s.csv", "-o", "segments")
    assert [*featcache.open("segments").ids] == ["a-1", "a-2"]


def test_segments_of_manifests_in_two_folders_name_the_files_of_each(version, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    (tmp_path / "a.wav").rename(folder / "b.wav")
    (folder / "m.csv").write_text("id,path\nc,b.wav\n")
    run_here("extract", "other/m.csv", "-c", "louder.yaml", "-o", "c")
    assert "--root" not in run_here("vad", version, "-o", "s.csv")
    with open("s.csv", newline="") as file:
        paths = {row["utterance"]: row["path"] for row in csv.DictReader(file)}
    assert paths == {"a": str(tmp_path / "a.wav"), "c": str(folder / "b.wav")}


def test_vad_takes_any_whole_hop(version, tmp_path):
    config = CONFIG.replace("louder", "hops") + "params: {hop: 480}\n"
    (tmp_path / "hops.yaml").write_text(config)
    run_here("extract", "m.csv", "-c", "hops.yaml", "-o", "c")
    assert "2 segments of 1 utterance" in run_here("vad", version.parent / "hops", "-o", "s.csv")


@pytest.mark.parametrize("rule", [{"pad": math.nan}, {"min_silence": math.inf}, {"threshold": -1}])
def test_a_rule_has_numbers_of_seconds(rule):
    with pytest.raises(ArgumentError, match=f"{next(iter(rule))} is .*: give a number"):
        SpeechRule(**rule)


def test_vad_refuses_what_holds_no_probabilities_and_writes_nothing_without_speech(version):
    line = run_here("vad", version.parent / "fbank80", "-o", "s.csv", code=2)
    assert "holds [frames, 80], log mel energy" in line
    line = run_here("vad", version, "-o", "s.txt", code=2)
    assert "s.txt: its suffix names no format: end it in .csv, .jsonl or .parquet" in line
    line = run_here("vad", version, "-o", "s.csv", "--min-speech", "9", code=1)
    assert "no segment of speech in 2 utterances: nothing is written" in line
    assert not (version.parent.parent / "s.csv").exists()
