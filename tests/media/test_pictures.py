"""Pictures of utterances: what lies where, in files and in terminals."""

import io
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress
from itertools import pairwise
from unittest.mock import Mock
from xml.etree import ElementTree

import numpy as np
import pytest
from make_cache import made_cache

from featcache.cli import process
from featcache.errors import ArgumentError, FeatcacheError
from featcache.loader.events import Event
from featcache.media.pictures import PALETTE, SHADES, picture_of
from featcache.spec import MAIN, Clip, Events, FeatureSpec, Frames, Track

MELS = FeatureSpec.of(16000, Track("features", (40,), "float16", "log mel energy (e)", Frames(100)))
CODES = FeatureSpec.of(16000, Track("features", (4,), "uint16", "code", Frames(50), (1024,) * 4))
VECTOR = FeatureSpec.of(16000, Track("features", (6,), "float32", "an embedding", Clip()))
PITCH = FeatureSpec.of(
    16000, Track("features", (2,), "float32", "pitch (Hz), confidence (0 to 1)", Frames(62.5))
)
CURVE = FeatureSpec.of(16000, Track("features", (1,), "float32", "probability", Frames(31.25)))
EVENTS = FeatureSpec.of(16000, Track("features", (2,), "float64", "seconds", Events()))


def draw(spec, item, columns=120, rows=40):
    return picture_of("one", spec, item, columns, rows)


def falling():
    """Mels of a tone that falls from the last bin to the first within 2 s."""
    frames = np.zeros((200, 40), np.float16)
    frames[np.arange(200), 39 - np.arange(200) // 5] = 5
    return frames


def test_low_bins_are_below_and_time_goes_to_the_right():
    picture = draw(MELS, falling(), 200, 40)
    assert picture.shades.shape == (40, 200)
    brightest = picture.shades.argmax(axis=0)
    assert brightest[0] == 0, "the tone begins at the top"
    assert brightest[-1] == 39
    assert (np.diff(brightest.astype(int)) >= 0).all()
    assert (picture.across.high, picture.across.unit) == (2.0, "seconds")
    places = {label: place for place, label in picture.up.ticks(40, 0)}
    assert places["0"] == pytest.approx(39.5)
    assert places["20"] == pytest.approx(19.5)
    assert picture.span[1].endswith(" log mel energy")


def test_the_first_codebook_is_above():
    codes = np.tile(np.array([0, 300, 600, 1023], np.uint16), (10, 1))
    picture = draw(CODES, codes)
    assert picture.shades.shape == (4, 10)
    assert picture.span == ("0", "1,023 code")
    assert picture.shades[:, 0].tolist() == [0, 300 * 64 // 1024, 600 * 64 // 1024, 63]
    places = {label: place for place, label in picture.up.ticks(4, 0)}
    assert places["0"] == pytest.approx(0.5)
    assert places["3"] == pytest.approx(3.5)


def test_a_vector_has_bars_from_zero():
    picture = draw(VECTOR, np.array([1, -1, 0.5, 0, np.nan, 0.25], np.float32))
    heights = (picture.shades > 0).sum(axis=0)
    rows = len(picture.shades)
    assert heights[0] == pytest.approx(rows / 2, abs=1)
    assert heights[2] == pytest.approx(rows / 4, abs=1)
    assert heights[3] <= 1
    assert picture.shades[0, 0] > 0, "the largest reaches the top"
    assert picture.shades[-1, 1] > 0, "the least the bottom"


@pytest.mark.parametrize("rows", [40, 320])
def test_pitch_is_a_line_in_hz_as_bright_as_it_is_certain(rows):
    pitch = np.array([[100, 1], [200, 0.5], [400, 0.9], [300, 0], [2000, 0.1]], np.float32)
    picture = draw(PITCH, np.repeat(pitch, 10, axis=0), 50, rows)
    assert (picture.up.unit, picture.up.low, picture.up.high) == ("Hz", 0, pytest.approx(440))
    assert picture.span == ("0", "1 confidence")
    assert picture.across.high == pytest.approx(50 / 62.5)
    for column, (hertz, confidence) in zip((5, 15, 25), pitch[:3], strict=True):
        (lit,) = np.nonzero(picture.shades[:, column])
        assert lit[0] == pytest.approx(rows * (1 - hertz / 440), abs=1)
        assert lit[-1] - lit[0] < rows / 20
        assert {*picture.shades[lit, column]} == {int(confidence * (SHADES - 1))}
    assert not picture.shades[:, 35:].any(), "no confidence; beyond the highest certain pitch"
    crowded = draw(PITCH, np.repeat(pitch, 500, axis=0), 50, rows)
    np.testing.assert_array_equal(crowded.shades, picture.shades)


@pytest.mark.parametrize(
    ("values", "low", "high"), [([0, 0.25, 0.5], 0, 1), ([0, 3], 0, 3), ([-1, 0.5], -1, 0.5)]
)
def test_numbers_from_0_to_1_are_drawn_on_this_scale_and_others_on_their_own(values, low, high):
    picture = draw(CURVE, np.array(values, np.float32)[:, None])
    assert (picture.up.low, picture.up.high) == (low, high)
    share = (picture.shades > 0).mean(axis=0) * (high - low)
    np.testing.assert_allclose(share, np.abs(values), atol=0.03 * (high - low))


def test_named_values_have_bars_on_one_scale_or_are_a_table():
    scores = Track("features", (3,), "float32", "ovrl (of 5), sig (of 5), bak (of 5)", Clip())
    picture = draw(FeatureSpec.of(16000, scores), np.array([2, 4, 1], np.float32))
    assert [label.text for label in picture.labels] == ["ovrl 2 of 5", "sig 4 of 5", "bak 1 of 5"]
    assert (picture.shades > 0).sum(axis=1)[4::8].tolist() == [60, 120, 30]
    assert (picture.across.unit, picture.across.low, picture.across.high) == ("of 5", 0, 4)
    mixed = Track("features", (2,), "float32", "level (dB), bandwidth (Hz)", Clip())
    picture = draw(FeatureSpec.of(16000, mixed), np.array([-20.5, np.nan], np.float32))
    assert not picture.shades.any()
    assert [label.text for label in picture.labels] == [
        "level \N{MINUS SIGN}20.5 dB",
        "bandwidth nan Hz",
    ]
    assert picture.axes()[:2] == ([], [])
    for suffix in (".svg", ".png"):
        assert picture.encode(suffix)


def test_events_that_overlap_have_lanes_of_their_own():
    events = [Event(0, 1, "a"), Event(0.5, 2, "b"), Event(1, 1.5, None), Event(3, 4, "d")]
    picture = draw(EVENTS, events)
    assert len(picture.shades) == 16
    first, second = picture.shades[4], picture.shades[12]
    columns = picture.shades.shape[1]
    assert first[: columns // 4].all()
    assert not second[: columns // 8 - 1].any()
    assert second[columns // 8 + 1 : columns // 2].all()
    assert not first[columns // 2 : columns * 3 // 4 - 1].any()
    assert [label.text for label in picture.labels] == ["a", "b", "", "d"]
    assert picture.across.high == 4


@pytest.mark.parametrize(
    ("spec", "item"),
    [
        (MELS, np.zeros((0, 40), np.float16)),
        (MELS, np.full((3, 40), np.nan, np.float16)),
        (CODES, np.zeros((1, 4), np.uint16)),
        (VECTOR, np.zeros(6, np.float32)),
        (PITCH, np.zeros((0, 2), np.float32)),
        (PITCH, np.full((3, 2), np.nan, np.float32)),
        (CURVE, np.zeros((0, 1), np.float32)),
        (EVENTS, []),
    ],
)
def test_what_is_empty_or_flat_has_a_picture(spec, item):
    picture = draw(spec, item)
    assert picture.as_svg().startswith("<svg")
    assert picture.encode(".png").startswith(b"\x89PNG")
    for colours in (0, 256, 1 << 24):
        assert picture.as_lines(60, colours)


def test_a_png_and_an_svg_show_the_same_colours():
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(draw(MELS, falling()).encode(".png")))
    pixels = np.asarray(image)
    assert pixels.shape == (660, 2000, 3)
    inside = pixels[80:560, 150:1770].reshape(-1, 3)
    palette = {tuple(colour) for colour in PALETTE.astype(int).tolist()}
    assert {tuple(colour) for colour in np.unique(inside, axis=0).tolist()} <= palette
    svg = ElementTree.fromstring(draw(MELS, falling()).as_svg())
    names = [element.tag.rpartition("}")[2] for element in svg.iter()]
    assert names.count("image") == 2
    texts = [element.text for element in svg.iter() if element.tag.endswith("text")]
    assert {"one", "seconds", "dimension", "0", "20"} <= set(texts)


def test_markup_in_names_is_text():
    evil = "<script>&\"'"
    spec = FeatureSpec.of(16000, Track("features", (4,), "float32", evil, Frames(100)))
    svg = picture_of(evil, spec, np.zeros((3, 4), np.float32), 10, 10).as_svg()
    assert "<script" not in svg
    assert ElementTree.fromstring(svg) is not None


def test_texts_of_strangers_are_one_short_line():
    evil = "a\n\x1b[31m\x00\ud800" + "b" * 10_000
    picture = picture_of(evil, EVENTS, [Event(0, 1, evil)], 10, 10)
    for text in (picture.title, picture.labels[0].text):
        assert len(text) == 100
        assert text.isprintable()
        assert text.startswith("a\ufffd\ufffd[31m\ufffd\ufffdb")
    assert ElementTree.fromstring(picture.as_svg()) is not None
    assert picture.encode(".png")


def test_events_without_durations_are_all_drawn():
    events = [Event(1, 1, "a"), Event(1, 1, "b"), Event(4, 4, "c")]
    picture = draw(EVENTS, events)
    assert (picture.shades[4] > 0).nonzero()[0].tolist() == [30, 119]
    assert (picture.shades[12] > 0).nonzero()[0].tolist() == [30]
    for timeless in ([], [Event(0, 0, "a")]):
        assert draw(EVENTS, timeless).axes()[0] == [], "there is no scale"


def test_points_have_their_labels_next_to_them():
    """None is cut, leaves the picture, or begins before the end of another in its lane."""
    events = [Event(at, at, f"tone {at}") for at in (0.0, 0.1, 0.2, 5.0, 9.5, 9.9, 10.0)]
    events.append(Event(5.1, 6.0, "a word"))
    picture = draw(EVENTS, sorted(events))
    drawn = picture.texts()[1:]
    assert [text.text for text in drawn] == [event.label for event in sorted(events)]
    of_lanes = {}
    for text in drawn:
        begin, end = text.x, text.x + 8 * len(text.text)
        assert begin >= 70
        assert end <= 890
        of_lanes.setdefault(text.y, []).append((begin, end))
    for spans in of_lanes.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans)))


@pytest.mark.parametrize("vector", [np.zeros(6, np.float32), np.float32(0)])
def test_a_vector_of_zeros_has_a_scale_from_0_to_1(vector):
    picture = draw(VECTOR, vector)
    assert (picture.up.low, picture.up.high) == (0, 1)


def test_many_events_at_once_have_as_many_lanes_as_there_are():
    events = [Event(0, 1 + number, str(number)) for number in range(300)]
    assert len(draw(EVENTS, events).shades) == 32 * 8


def test_lines_of_a_terminal_fit_and_have_its_colours():
    picture = draw(MELS, falling(), 70, 40)
    plain = picture.as_lines(80)
    assert max(map(len, plain)) <= 80
    assert len(plain) == 21
    assert plain[0].strip().startswith("="), "the tone begins at the top left"
    assert plain[19].rstrip().endswith("=")
    for colours, form in ((256, r"5;\d{1,3}"), (1 << 24, r"2;\d{1,3};\d{1,3};\d{1,3}")):
        lines = picture.as_lines(80, colours)
        for line in lines[:20]:
            shown = re.sub(rf"\x1b\[38;{form};48;{form}m|\x1b\[0m", "", line)
            assert "\x1b" not in shown
            assert shown.count("▀") == 73
    assert SHADES == 64


@pytest.mark.parametrize("columns", [40, 79, 80])
def test_the_last_tick_of_a_terminal_is_not_cut(columns):
    below = draw(EVENTS, [Event(0, 0.2, None)]).as_lines(columns)[-1]
    assert below.split() == ["0", "0.05", "0.1", "0.15", "0.2"]
    assert len(below) <= columns


def test_a_cache_shows_an_utterance_in_a_notebook(tmp_path):
    cache = made_cache(tmp_path, {"utt<1>": np.ones((30, 40), np.float16)})
    shown = cache.show("utt<1>")
    html = shown._repr_html_()
    assert html.count("<svg") == 1
    assert "fbank80: utt&lt;1&gt;" in html
    assert "no sound: " in html, "nobody knows the extractor made_up"
    with pytest.raises(FeatcacheError):
        cache.show("nobody")


def test_vectors_and_events_are_not_heard(tmp_path):
    cache = made_cache(tmp_path, {"utt": np.ones(6, np.float32)}, axis=Clip())
    with pytest.raises(ArgumentError, match="one vector for each utterance cannot be turned into"):
        cache.show("utt").wav()


@pytest.fixture(scope="module")
def spoken(cli, plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spoken")
    configs = [word for name in ("fbank80", "mfcc13", "audio-stats") for word in ("-c", name)]
    cli("extract", plain.manifest(plain.rows[:2]), *configs, "-o", folder / "c").with_code(0)
    return folder


def test_show_writes_a_picture_and_a_sound(cli, spoken, tmp_path):
    import soundfile

    picture, sound = tmp_path / "a.svg", tmp_path / "a.wav"
    shown = cli("show", spoken / "c" / "fbank80", "utt-01", "--plot", picture, "--wav", sound)
    assert f"{picture}: " in shown.with_code(0).out
    assert "to the right: seconds; up: dimension" in shown.out
    assert "\x1b" not in shown.out, "a pipe has no colours"
    samples, rate = soundfile.read(sound)
    assert (rate, len(samples)) == (16000, 400 + 39 * 160), "the samples that frames see"
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    again = ("show", spoken / "c" / "fbank80", "utt-01", "--wav", sound)
    assert "already exists" in cli.refused(*again)
    cli(*again, "--force", "--json").with_code(0)


def test_named_values_are_named(cli, spoken):
    shown = cli("show", spoken / "c" / "audio-stats", "utt-01").with_code(0).out
    assert re.search(r"^level +-\d+\.?\d* dB of full scale$", shown, re.MULTILINE)
    assert re.search(r"^silent start +[\d.]+ s$", shown, re.MULTILINE)
    assert "dimension" not in shown, "dB, Hz and seconds in one picture say nothing"
    counted = cli("stats", spoken / "c" / "audio-stats").with_code(0).out
    assert re.search(
        r"^  peak: mean -[\d.]+, standard deviation [\d.]+ dB of", counted, re.MULTILINE
    )


@pytest.mark.parametrize(
    ("units", "named"),
    [
        ("level (dB, full scale), peak (s)", {"level": "dB, full scale", "peak": "s"}),
        ("ovrl, sig (MOS, 1 to 5)", {"ovrl": "MOS, 1 to 5", "sig": "MOS, 1 to 5"}),
        ("high, low", {"high": "", "low": ""}),
        ("mean over time of pitch (Hz), loudness (dB)", {}),
        ("level (dB)", {}),
    ],
)
def test_units_name_the_values_of_a_vector(units, named):
    spec = FeatureSpec.of(16000, Track(MAIN, (2,), "float32", units, Clip()))
    assert spec.named_units == named
    assert [*spec.named_units] == [*named]


@pytest.mark.parametrize(
    ("version", "options", "what"),
    [
        ("c/mfcc13", ("--wav", "x.wav"), "mfcc13: mel-frequency cepstrum.*: cannot be turned into"),
        ("c/audio-stats", ("--wav", "x.wav"), "one vector for each utterance cannot be turned"),
        ("c/fbank80", ("--wav", "x.mp3"), "--wav: .*x.mp3 does not end in .wav"),
        ("c/fbank80", ("--plot", "x.gif"), r"--plot: .*x.gif does not end in .png or .svg"),
        ("c", ("--plot", "x.png"), "holds audio-stats-.*: .*x.png shows one of them: name it"),
    ],
)
def test_what_cannot_be_shown_is_one_line(cli, spoken, tmp_path, version, options, what):
    name, file = options
    refused = cli.refused("show", spoken / version, "utt-01", name, tmp_path / file)
    assert re.search(what, refused)
    assert not (tmp_path / file).exists()


def test_a_terminal_gets_colours(spoken, monkeypatch):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "featcache", "show", spoken / "c" / "fbank80", "utt-00"]
    with open(theirs, "wb") as terminal:
        running = subprocess.Popen(command, stdout=terminal, env=environment)
    shown = b""
    with suppress(OSError):  # which ends it
        while block := os.read(ours, 1 << 16):
            shown += block
    os.close(ours)
    assert running.wait() == 0
    lines = shown.decode().splitlines()
    assert sum("\x1b[38;2;" in line for line in lines) == 20
    for line in lines:
        if "▀" in line:
            assert len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= 80


@pytest.mark.parametrize(
    ("variables", "colours"),
    [
        ({"TERM": "xterm-256color"}, 256),
        ({"TERM": "xterm", "COLORTERM": "24bit"}, 1 << 24),
        ({"TERM": "xterm"}, 0),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, 0),
        ({"COLORTERM": "truecolor", "TERM": "dumb"}, 0),
    ],
)
def test_a_terminal_says_its_colours(monkeypatch, variables, colours):
    for name in ("TERM", "COLORTERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process.os, "get_terminal_size", lambda _: os.terminal_size((99, 20)))
    monkeypatch.setattr(sys, "stdout", Mock())
    assert process.terminal_of_results() == (99, colours)


def test_a_terminal_that_does_not_know_its_size_gets_80_columns(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(process.os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    monkeypatch.setattr(sys, "stdout", Mock())
    assert process.terminal_of_results() == (80, 0)
