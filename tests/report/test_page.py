"""The page of a report: it is complete, closed, escaped, and small."""

import base64
import io
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import soundfile
from corpora import speech
from described import make_described
from make_cache import codes_cache, make_features, make_version

from featcache.cli.info import describe_versions
from featcache.loader.cache import Cache
from featcache.media.look import encode_wav
from featcache.media.pictures import encode_png
from featcache.report import collect, make_page
from featcache.report.clips import RATE, Clip
from featcache.spec import Events
from featcache.version.version import Version

VOID = {"meta", "img", "input", "br"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Page(HTMLParser):
    """The elements of a page; fails where one is not closed in its order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def check(path):
    """A page is closed, loads nothing, has one script, and labels each chart."""
    data = path.read_bytes()
    assert len(data) <= 2_000_000
    page = Page(data.decode())
    for tag, attrs in page.elements:
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert attrs.get(name, "data:").startswith("data:"), (tag, attrs)
        assert not any(name.startswith("on") or name == "style" for name in attrs)
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert "http" not in re.sub(r"http-equiv", "", data.decode().partition("</head>")[0])
    for svg in page.all("svg"):
        assert svg["role"] == "img"
    for image in page.all("img"):
        assert image["alt"]
    names = [tag for tag, _ in page.elements]
    assert names.count("svg") == names.count("desc")
    return page


EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def hostile(cli, tmp_path_factory):
    """A page of a corpus whose ids, columns, texts and paths are markup."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "a'b\"<i>").mkdir()
    rows = [f'id,path,"<b>{EVIL}",text']
    for number in range(6):
        soundfile.write(
            folder / "a'b\"<i>" / f"{number}.wav", 0.3 * speech(0.4, seed=number), 16000
        )
        quoted = '"say ""hi"" & <img src=x onerror=alert(1)>"'
        rows.append(f'"{EVIL}-{number}","a\'b""<i>/{number}.wav","{EVIL}{number % 2}",{quoted}')
    rows.append(f'"{EVIL}-gone",\'"><svg onload=alert(1)>.wav,x,y')
    (folder / "<m>.csv").write_text("\n".join(rows))
    made = cli(
        "extract", folder / "<m>.csv", "-c", "fbank80", "-c", "audio-stats", "-o", folder / "<c>"
    )
    assert made.code == 3
    page = folder / "page.html"
    cli("report", folder / "<c>", "--manifest", folder / "<m>.csv", "-o", page).with_code(0)
    return page


def test_markup_of_a_manifest_is_text(hostile):
    page = check(hostile)
    text = hostile.read_text()
    assert EVIL not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;-0" in text
    assert any(f"{EVIL}-3" in data for data in page.text)
    assert not any("alert" in str(attrs.get("onload", "")) for _, attrs in page.elements)
    assert {attrs["alt"] for attrs in page.all("img") if EVIL in attrs["alt"]}
    assert "script-src 'sha256-" in text


def test_sounds_are_short_wav_at_16_khz(hostile):
    players = check(hostile).all("audio")
    assert len(players) == 6
    for player in players:
        data = base64.b64decode(player["src"].partition("base64,")[2])
        samples, rate = soundfile.read(io.BytesIO(data))
        assert (rate, samples.ndim) == (16000, 1)
        assert 0.3 < len(samples) / rate <= 0.5


def test_pictures_are_png(hostile):
    for image in check(hostile).all("img"):
        data = base64.b64decode(image["src"].partition("base64,")[2])
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert data.endswith(b"IEND\xaeB`\x82")


def test_a_png_holds_its_shades():
    shades = np.arange(12, dtype=np.uint8).reshape(3, 4)
    data = encode_png(shades)
    begin = data.index(b"IDAT") + 4
    lines = np.frombuffer(zlib.decompressobj().decompress(data[begin:]), np.uint8).reshape(3, 5)
    np.testing.assert_array_equal(lines[:, 1:], shades)
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(data))
    np.testing.assert_array_equal(np.asarray(image), shades)


def test_a_wav_holds_its_samples():
    wave = np.array([0, 0.5, -0.25, 1.5, -1.5], np.float32)
    samples, rate = soundfile.read(io.BytesIO(encode_wav(wave, RATE)))
    assert rate == RATE
    np.testing.assert_allclose(samples, wave.clip(-1, 1), atol=1e-4)


def test_a_page_of_20_000_utterances_is_below_2_mb(cli, tmp_path):
    features = make_features(20_000, (80,), max_frames=4)
    long = {
        f"long-{number}": np.random.default_rng(number)
        .standard_normal((900, 80))
        .astype(np.float16)
        for number in range(40)
    }
    make_version(tmp_path / "c", features, long)
    cli("report", tmp_path / "c", "-o", tmp_path / "r.html").with_code(0)
    assert len(check(tmp_path / "r.html").all("img")) == 14


def test_long_sounds_and_texts_leave_room(cli, tmp_path):
    noise = 0.3 * np.random.default_rng(0).standard_normal(16000 * 8).clip(-1, 1)
    rows = ["id,path,speaker"]
    for number in range(24):
        soundfile.write(tmp_path / f"{number}.wav", np.roll(noise, 100 * number), 16000)
        rows.append(f"{number}{'x' * 3000},{number}.wav,{'y' * 3000}{number % 4}")
    (tmp_path / "m.csv").write_text("\n".join(rows))
    configs = ("-c", "fbank80", "-c", "audio-stats")
    cli("extract", tmp_path / "m.csv", *configs, "-o", tmp_path / "c").with_code(0)
    cli(
        "report", tmp_path / "c", "--manifest", tmp_path / "m.csv", "-o", tmp_path / "r.html"
    ).with_code(0)
    page = check(tmp_path / "r.html")
    assert len(page.all("audio")) >= 10
    assert len(page.all("img")) >= 12


def test_what_has_no_room_is_left_out_from_the_end(cli, tmp_path):
    make_version(tmp_path / "c", make_features(30))
    documents, _ = describe_versions(tmp_path / "c")
    report = collect("c", documents, [Cache(Version.open(Path(documents[0]["path"])))])
    sound, picture = b"s" * 300_000, b"p" * 60_000
    clips = [Clip(shown, [("it", picture)], sound) for shown in report.shown]
    for large, sounds in (([("it", picture)], 2), ([("it", b"p" * 400_000)], 0)):
        page = tmp_path / "r.html"
        page.write_bytes(make_page(report, [replace(clip, pictures=large) for clip in clips]))
        shown = check(page)
        assert len(shown.all("audio")) == sounds
        assert len(shown.all("img")) == (len(clips) if sounds else 3)


def test_codes_have_maps_and_a_table(cli, tmp_path):
    codes_cache(tmp_path / "c")
    cli("report", tmp_path / "c", "-o", tmp_path / "r.html").with_code(0)
    page = check(tmp_path / "r.html")
    assert len(page.all("img")) > 10
    assert "codec: use of codebooks" in page.text


def test_wrong_input_is_one_line(cli, tmp_path, scratch):
    make_version(tmp_path / "c", make_features(3))
    place = tmp_path / "r.html"
    cli("report", tmp_path / "c", "-o", place).with_code(0)
    assert "already exists" in cli.refused("report", tmp_path / "c", "-o", place)
    nowhere = cli.refused("report", tmp_path / "nowhere", "-o", place, code=1)
    assert "nowhere: there is no such cache folder" in nowhere
    cli("report", tmp_path / "c", "-o", place, "--force").with_code(0)
    assert "leave out -o" in cli("report", tmp_path / "c", "-o", place, "--json").with_code(2).err
    assert "nowhere" in cli.refused("report", tmp_path / "nowhere", code=1)
    assert "gone.csv" in cli.refused(
        "report", tmp_path / "c", "--manifest", "gone.csv", "-o", tmp_path / "x.html"
    )
    assert not (tmp_path / "x.html").exists()


@pytest.fixture(scope="module")
def parts(cli, plain, tmp_path_factory):
    """A corpus of two parts, and the cache of one manifest with the same rows."""
    folder = tmp_path_factory.mktemp("parts")
    manifests = [plain.manifest(plain.rows[:5], "a.csv"), plain.manifest(plain.rows[5:], "b.csv")]
    configs = ("-c", "fbank80", "-c", "audio-stats")
    cli("extract", *manifests, *configs, "-o", folder / "corpus").with_code(0)
    cli("extract", plain.manifest(), *configs, "-o", folder / "cache").with_code(0)
    return folder


def test_a_corpus_has_the_numbers_of_one_cache_of_its_rows(cli, parts):
    of_corpus = cli("report", parts / "corpus", "--json").with_code(0).json()
    of_cache = cli("report", parts / "cache", "--json").with_code(0).json()
    for name in ("durations", "duplicates", "shown", "outliers", "levels"):
        assert of_corpus[name] == of_cache[name], name
    (audio,), (other,) = of_corpus["statistics"], of_cache["statistics"]
    assert audio["histograms"] == other["histograms"]
    for version, expected in zip(of_corpus["versions"], of_cache["versions"], strict=True):
        assert version["shards"] == 2 * expected["shards"]
        for name in ("utterances", "frames", "audio_seconds", "bytes", "failed", "unfinished"):
            assert version[name] == pytest.approx(expected[name])
        np.testing.assert_allclose(version["mean"], expected["mean"], rtol=1e-6)
    page = parts / "corpus.html"
    cli("report", parts / "corpus", "-o", page).with_code(0)
    assert len(check(page).all("img")) == 12
    cli("report", parts / "corpus" / "a", "-o", parts / "a.html").with_code(0)
    refused = cli.refused("report", parts / "corpus", "--manifest", "a.csv", "-o", parts / "x.html")
    assert "is a corpus: --manifest is about one part" in refused


@pytest.mark.parametrize("place", ["cache", "corpus"])
def test_a_report_of_a_version_has_the_statistics_next_to_it(cli, parts, place):
    document = cli("report", parts / place / "fbank80", "--json").with_code(0).json()
    assert [version["name"] for version in document["versions"]] == ["fbank80", "audio-stats"]
    assert [one["utterances"] for one in document["statistics"]] == [12]


def test_two_versions_stand_side_by_side(cli, plain, parts):
    other = parts / "other"
    cli("extract", plain.manifest(plain.rows[3:]), "--set", "params.low_freq=60", "-o", other)
    page = parts / "against.html"
    first = parts / "cache" / "fbank80"
    cli("report", first, "--against", other, "-o", page).with_code(0)
    text = check(page).text
    assert "config: params.low_freq: 20.0 -> 60.0" in text
    assert "9 utterances are in both" in text
    assert any(line.startswith("3 only in ") for line in text)
    pictures = [image["alt"] for image in check(page).all("img")]
    assert len(pictures) == 12 + 9
    assert page.read_text().count('class="line other"') == 1
    numbers = cli("report", first, "--against", other, "--json").with_code(0).json()
    assert numbers["compared"][:2] == [
        "config: params.low_freq: 20.0 -> 60.0",
        "9 utterances are in both",
    ]
    assert len(numbers["compared"]) == 3
    cached = cli("report", parts / "cache", "--against", other, "-o", parts / "no.html")
    assert "--against: " in cached.with_code(2).err
    assert "holds 2 versions: name one" in cached.err
    for pair in ((parts / "corpus", other), (first, parts / "corpus")):
        refused = cli("report", pair[0], "--against", pair[1], "-o", parts / "no.html")
        assert "is a corpus: --against is about one part" in refused.with_code(2).err
    itself = cli("report", first, "--against", first, "-o", parts / "no.html")
    assert "is the version itself" in itself.with_code(2).err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [320, 1400])
def test_a_browser_shows_two_versions_of_hostile_names(cli, hostile, tmp_path, width):
    """As below, of a page of two versions side by side."""
    cache = hostile.parent / "<c>"
    other = hostile.parent / f"<d>{width}"
    row = hostile.parent / "<m>.csv"
    cli("extract", row, "--set", "params.low_freq=60", "-o", other).with_code(3)
    page = tmp_path / "against.html"
    cli("report", cache / "fbank80", "--against", other, "-o", page).with_code(0)
    check(page)
    assert EVIL not in page.read_text()
    shown_by_chromium(page)
    (tmp_path / "frame.html").write_text(_frame(_asking(page, tmp_path), width))
    assert f"<title>{width},0,true," in shown_by_chromium(tmp_path / "frame.html")


@pytest.fixture(scope="module")
def described(cli, tmp_path_factory):
    """A page of pitch, speech, scores and voices, of speakers whose names are markup."""
    folder, *_ = make_described(tmp_path_factory.mktemp("described"), EVIL)
    make_version(folder / "c", make_features(30), name="mel")
    page = folder / "page.html"
    cli("report", folder / "c", "--manifest", folder / "m.csv", "-o", page).with_code(0)
    return page


def test_pitch_speech_scores_and_voices_have_charts_and_outliers(described):
    page = check(described)
    assert EVIL not in described.read_text()
    text = "\n".join(page.text)
    for title in ("Median pitch", "Frames with speech", "Quality overall", "Nearest speakers"):
        assert title in text
    for rule in ("lowest pitch", "least speech", "worst overall", "nearer to another speaker"):
        assert rule in text
    pictures = [image["alt"] for image in page.all("img")]
    assert sum(alt.startswith("mel of") for alt in pictures) >= 12
    assert sum(bool(re.search(r"^pitch of .*, from 0 to \d+ Hz$", alt)) for alt in pictures) >= 12
    assert any(alt.endswith("from 0 to 1 log mel energy") for alt in pictures)


def test_a_report_of_a_version_has_what_describes_utterances_next_to_it(cli, described):
    cache = described.parent / "c"
    document = cli("report", cache / "mel", "--json").with_code(0).json()
    names = [version["name"] for version in document["versions"]]
    assert names == ["mel", "pitch", "scores", "vad", "voice"]
    of_pitch = cli("report", cache / "pitch", "--json").with_code(0).json()
    assert [one["name"] for one in of_pitch["statistics"]] == ["pitch", "scores", "vad"]
    assert len(of_pitch["versions"]) == 4


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [320, 1400])
def test_a_browser_shows_pitch_speech_scores_and_voices(described, tmp_path, width):
    (tmp_path / "frame.html").write_text(_frame(_asking(described, tmp_path), width))
    assert f"<title>{width},0,true,true</title>" in shown_by_chromium(tmp_path / "frame.html")
    shown_by_chromium(described)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [320, 1400])
def test_a_browser_shows_it_without_an_error(hostile, tmp_path, width):
    """Nothing is refused or thrown, tables sort and filter, and nothing is wider than a frame
    of this width."""
    (tmp_path / "frame.html").write_text(_frame(_asking(hostile, tmp_path), width))
    assert f"<title>{width},0,true,true</title>" in shown_by_chromium(tmp_path / "frame.html")
    shown = shown_by_chromium(hostile)
    assert 'th scope="col" class="n"' in shown, "its script has run, which its hash allows"


def _frame(page, width):
    return f"""
<script>addEventListener("message", (event) => (document.title = event.data))</script>
<iframe src="{page.name}" width="{width}" height="800" frameborder="0"></iframe>
"""


def _asking(page, folder):
    """A copy of a page whose policy allows a script more, which asks how the page is."""
    asking = """
addEventListener("load", () => {
  document.querySelectorAll("th button").forEach((button) => button.click());
  const filter = document.querySelector("input"), root = document.documentElement;
  filter.value = "nobody";
  filter.dispatchEvent(new Event("input"));
  const count = (what) => document.querySelectorAll(what).length > 0;
  const wider = root.scrollWidth - root.clientWidth;
  parent.postMessage([innerWidth, wider, count("[aria-sort]"), count("tr[hidden]")].join(), "*");
});
"""
    copy = re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", page.read_text())
    place = folder / "asking.html"
    place.write_text(copy.replace("</body>", f"<script>{asking}</script></body>"))
    return place


def shown_by_chromium(page):
    """What a browser makes of a page, which has nothing to complain of."""
    options = "--headless=new --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [CHROMIUM, *options.split(), "--virtual-time-budget=3000", profile, f"file://{page}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["pitch", "vad", "voice", "scores"])
@pytest.mark.parametrize("lost", ["features", "zarr.json"])
def test_what_is_damaged_is_named_and_the_rest_is_shown(cli, described, tmp_path, name, lost):
    shutil.copytree(described.parent / "c", tmp_path / "c")
    for place in tmp_path.glob(f"c/{name}-*/shards/*/{lost}"):
        place.rename(place.parent / "lost")
    reported = cli("report", tmp_path / "c" / "mel", "-o", tmp_path / "r.html").with_code(1)
    (line,) = reported.err.splitlines()
    assert re.search(rf"/{name}-.*: damaged: the file is missing", line)
    assert "Look and listen" in check(tmp_path / "r.html").text


def test_a_version_of_events_is_shown_and_is_no_damage(cli, tmp_path):
    """The mean of times would say nothing, and events are no fault of the cache."""
    times = {"utt-0": np.array([[0.0, 0.5], [0.5, 1.0]])}
    make_version(tmp_path / "c", times, name="words", axis=Events())
    reported = cli("report", tmp_path / "c", "-o", tmp_path / "r.html").with_code(0)
    assert reported.err == ""
    (version,) = cli("report", tmp_path / "c", "--json").with_code(0).json()["versions"]
    assert (version["utterances"], version["fault"], version["mean"]) == (1, None, [])
