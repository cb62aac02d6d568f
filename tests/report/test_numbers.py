"""The numbers of a report, held to what is computed from each utterance one after the
other."""

import csv
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import soundfile
from corpora import speech
from described import make_described
from make_cache import add_shard, codes_cache, make_features, make_version

import featcache
from featcache.cli.info import describe_versions
from featcache.extractors.audio_stats import STATISTICS
from featcache.loader.cache import Cache
from featcache.manifest.read import read_manifest
from featcache.manifest.strings import Strings
from featcache.report import numbers
from featcache.report.charts import by_decades, by_steps
from featcache.report.numbers import characters_of, collect
from featcache.report.page import make_page
from featcache.spec import Clip
from featcache.version.version import Version


def numbers_of(path, manifest=None, **options):
    documents, _ = describe_versions(path)
    folders = [path.parent / path.name / d["path"].split("/")[-1] for d in documents]
    caches = [Cache(Version.open(folder)) for folder in folders]
    return collect(str(path), documents, caches, manifest, **options)


@pytest.fixture(scope="module")
def corpus(cli, tmp_path_factory):
    """Twelve clips: one is clipped, one silent at its start, one has DC, and one is there
    twice; and a file that is missing. With speakers and texts."""
    folder = tmp_path_factory.mktemp("corpus")
    rows = []
    for number in range(12):
        wave = 0.3 * speech(0.5 + 0.05 * number, seed=number).ravel()
        if number == 3:
            wave = np.sign(wave) * np.where(np.arange(len(wave)) % 2, 1, -1)
        if number == 5:
            wave = np.concatenate([np.zeros(4000, np.float32), wave])
        if number == 7:
            wave = wave + 0.5
        soundfile.write(folder / f"{number}.wav", wave, 16000)
        rows.append([f"utt-{number}", f"{number}.wav", f"spk-{number % 3}", "é" * (number + 1)])
    shutil.copy(folder / "2.wav", folder / "again.wav")
    rows.append(["again", "again.wav", "spk-2", "x" * 500])
    rows.append(["gone", "gone.wav", "spk-2", "-"])
    with (folder / "m.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "path", "speaker", "text"], *rows])
    configs = ("-c", "fbank80", "-c", "audio-stats")
    made = cli("extract", folder / "m.csv", *configs, "-o", folder / "c", "--device", "cpu")
    assert made.code == 3
    return folder


def test_the_numbers_of_a_cache_are_those_of_its_utterances(corpus):
    shards = []
    manifest = read_manifest(corpus / "m.csv")
    report = numbers_of(corpus / "c", manifest, report=lambda *done: shards.append(done))
    assert len(shards) == 2 * sum(one["shards"] for one in report.versions)
    utterances, seconds_done, damaged = map(sum, zip(*shards, strict=True))
    assert (utterances, damaged) == (26, 0)
    assert seconds_done == pytest.approx(sum(one["audio_seconds"] for one in report.versions))
    seconds = {
        path.stem: soundfile.info(path).duration for path in corpus.glob("*.wav") if path.is_file()
    }
    durations = report.durations
    assert durations.maximum == pytest.approx(max(seconds.values()), abs=1e-4)
    assert durations.median == pytest.approx(np.median([*seconds.values()]), abs=1e-4)
    assert sum(durations.counts) == 13
    counts, _ = np.histogram(np.float32([*seconds.values()]), durations.edges)
    assert durations.counts == counts.tolist()
    fbank = next(one for one in report.versions if one["name"] == "fbank80")
    frames = np.concatenate([*featcache.open(corpus / "c", "fbank80").values()]).astype(np.float64)
    np.testing.assert_allclose(fbank["mean"], frames.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(fbank["std"], frames.std(axis=0), rtol=1e-9)
    assert fbank["sampled_frames"] == fbank["frames"] == len(frames)
    assert (fbank["failed"], fbank["failed_by_reason"]) == (1, {"file_missing": 1})
    assert [failure["id"] for failure in fbank["failures"]] == ["gone"]


def test_columns_and_texts_of_the_manifest(corpus):
    manifest = numbers_of(corpus / "c", read_manifest(corpus / "m.csv")).manifest
    assert (manifest["utterances"], manifest["missing"]) == (14, 1)
    (speaker,) = manifest["columns"]
    groups = {group["value"]: group for group in speaker["groups"]}
    assert {name: group["utterances"] for name, group in groups.items()} == {
        "spk-0": 4,
        "spk-1": 4,
        "spk-2": 5,
    }
    expected = sum(soundfile.info(corpus / f"{n}.wav").duration for n in (0, 3, 6, 9))
    assert groups["spk-0"]["audio_seconds"] == pytest.approx(expected, abs=1e-3)
    marked = {id_: characters for id_, _, characters in manifest["text"]["lengths"].marked}
    assert marked["again"] == 500
    assert marked["utt-0"] == 1
    assert len(manifest["text"]["lengths"].points) + len(marked) == 13


def test_outliers_are_those_that_were_made(corpus):
    report = numbers_of(corpus / "c")
    (audio,) = report.statistics
    assert audio["units"] == STATISTICS
    worst = {one["why"]: one["id"] for one in report.shown}
    assert worst["most clipped"] == "utt-3"
    assert worst["largest DC"] == "utt-7"
    rules = {one["id"]: one["rules"] for one in report.outliers}
    assert "longest silent start" in rules["utt-5"]
    assert "utt-5" in worst.values()
    cache = featcache.open(corpus / "c", "audio-stats")
    for outlier in report.outliers:
        values = [*outlier["statistics"][0].values()]
        np.testing.assert_array_equal(np.float32(values), cache[outlier["id"]])
    for place, histogram in enumerate(audio["histograms"]):
        values = np.stack([*cache.values()])[:, place]
        assert sum(histogram.counts) + histogram.zeros == len(values)
        assert histogram.maximum == pytest.approx(
            max(np.abs(values)) if histogram.is_log else max(values)
        )
    assert {one[0] for one in report.levels.marked} == {one["id"] for one in report.outliers}


def statistics(report, name):
    return {one["name"]: one["histograms"] for one in report.statistics}[name]


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    return make_described(tmp_path_factory.mktemp("described"))


def test_pitch_speech_and_scores_are_those_of_each_utterance(described):
    folder, pitch, probability, _, scores = described
    report = numbers_of(folder / "c")
    medians = [
        np.median(values[values[:, 1] >= 0.5, 0])
        for values in pitch.values()
        if (values[:, 1] >= 0.5).any()
    ]
    of_pitch, voiced = statistics(report, "pitch")
    assert (of_pitch.name, of_pitch.unit) == ("pitch", "Hz")
    assert of_pitch.minimum == pytest.approx(min(medians))
    assert of_pitch.median == pytest.approx(np.median(medians))
    assert sum(of_pitch.counts) == len(medians) < 30
    shares = [(values[:, -1] >= 0.5).mean() for values in probability.values()]
    (speech,) = statistics(report, "vad")
    assert (speech.median, voiced.maximum) == (
        pytest.approx(np.median(shares)),
        pytest.approx(max((values[:, 1] >= 0.5).mean() for values in pitch.values())),
    )
    ovrl, _ = statistics(report, "scores")
    assert ovrl.minimum == min(values[0, 0] for values in scores.values())
    rules = {one["id"]: one["rules"] for one in report.outliers}
    by_score = sorted(scores, key=lambda id_: scores[id_][0, 0])
    assert {id_ for id_ in rules if "worst overall" in rules[id_]} == {*by_score[:8]}
    assert "least voiced" in rules["utt-3"]
    place = [one["name"] for one in report.statistics].index("pitch")
    (unvoiced,) = (one["statistics"] for one in report.outliers if one["id"] == "utt-3")
    assert np.isnan(unvoiced[place]["pitch"])
    assert unvoiced[place]["voiced"] == 0


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_number_a_frame_may_have_a_dimension_or_none(shape, tmp_path):
    values = {"a": [0.2, 0.5, 0.9], "b": [0.1]}
    make_version(tmp_path, {id_: np.float32(v).reshape(-1, *shape) for id_, v in values.items()})
    ((speech,),) = (one["histograms"] for one in numbers_of(tmp_path).statistics)
    assert (speech.minimum, speech.maximum) == (0, pytest.approx(2 / 3))


def test_numbers_beyond_0_and_1_are_no_probabilities(tmp_path):
    make_version(tmp_path, {"a": np.array([[0.5], [3.0]], np.float32)})
    report = numbers_of(tmp_path)
    assert report.statistics == []
    assert report.versions[0]["mean"] == [1.75]


def test_a_voice_is_compared_with_the_other_utterances_of_its_speaker(described):
    folder, _, _, voice, _ = described
    report = numbers_of(folder / "c", read_manifest(folder / "m.csv"))
    (margins,) = statistics(report, "voice")
    units = {id_: vector[0] / np.linalg.norm(vector[0]) for id_, vector in voice.items()}
    expected = {}
    for id_, unit in units.items():
        speaker = int(id_[4:]) % 3
        cosines = []
        for number in range(3):
            others = [
                other
                for name, other in units.items()
                if int(name[4:]) % 3 == number and name != id_
            ]
            total = np.sum(others, axis=0)
            cosines.append(float(unit @ total / np.linalg.norm(total)))
        own = cosines.pop(speaker)
        expected[id_] = own - max(cosines)
    assert margins.minimum == pytest.approx(expected["utt-29"], abs=1e-6)
    assert margins.median == pytest.approx(np.median([*expected.values()]), abs=1e-6)
    voices = report.voices
    assert [one["id"] for one in voices["confused"]] == ["utt-29"]
    (confused,) = voices["confused"]
    assert (confused["speaker"], confused["nearest"]) == ("spk-2", "spk-0")
    assert confused["own_cosine"] - confused["cosine"] == pytest.approx(expected["utt-29"])
    assert (voices["column"], voices["compared"], voices["nearer_to_another"]) == ("speaker", 30, 1)
    assert {one["speaker"]: one["utterances"] for one in voices["speakers"]} == {
        "spk-0": 10,
        "spk-1": 10,
        "spk-2": 10,
    }
    assert "nearer to another speaker" in {one["why"] for one in report.shown}
    nearest = {one["id"]: one["nearest"] for one in voices["neighbours"]}
    assert nearest["utt-29"] == "utt-0"
    for id_, like in nearest.items():
        cosines = {name: units[id_] @ other for name, other in units.items() if name != id_}
        assert like == max(cosines, key=cosines.__getitem__)


def test_without_speakers_voices_have_neighbours_alone(described, tmp_path):
    folder = described[0]
    assert set(numbers_of(folder / "c").voices) == {"path", "neighbours"}
    one = {"only": np.ones((1, 4), np.float32)}
    make_version(tmp_path, one, axis=Clip(), units="speaker vector")
    (tmp_path / "m.csv").write_text("id,path,speaker\nonly,audio/only.wav,me\n")
    report = numbers_of(tmp_path, read_manifest(tmp_path / "m.csv"))
    assert report.voices["neighbours"] == []
    assert "speakers" not in report.voices, "there is one alone"


def test_utterances_without_a_speaker_are_no_speaker(described, tmp_path):
    folder = described[0]
    lines = (folder / "m.csv").read_text().splitlines()
    unknown = [line.rsplit(",", 1)[0] + "," for line in lines[1:10]]
    (tmp_path / "m.csv").write_text("\n".join([lines[0], *unknown, *lines[10:]]))
    voices = numbers_of(folder / "c", read_manifest(tmp_path / "m.csv")).voices
    assert voices["compared"] == 21
    assert {one["speaker"] for one in voices["speakers"]} == {"spk-0", "spk-1", "spk-2"}


def test_a_speaker_of_one_utterance_is_compared_as_a_speaker_alone(tmp_path):
    vectors = {"a": [1, 0], "b": [1, 0.1], "c": [0, 1]}
    features = {id_: np.float32([vector]) for id_, vector in vectors.items()}
    make_version(tmp_path, features, axis=Clip(), units="speaker vector")
    lines = ["id,path,SPK", "a,audio/a.wav,x", "b,audio/b.wav,x", "c,audio/c.wav,y"]
    (tmp_path / "m.csv").write_text("\n".join(lines))
    voices = numbers_of(tmp_path, read_manifest(tmp_path / "m.csv")).voices
    assert (voices["compared"], voices["confused"]) == (2, [])
    owns = {one["speaker"]: (one["nearest"], one["own_cosine"]) for one in voices["speakers"]}
    assert owns["x"] == ("y", pytest.approx(1 / np.hypot(1, 0.1)))
    assert owns["y"][0] == "x"
    assert np.isnan(owns["y"][1])


def test_vectors_of_other_utterances_have_no_neighbours(tmp_path):
    make_version(tmp_path, make_features(5), name="mel")
    make_version(tmp_path, {"a": np.ones((1, 4), np.float32)}, axis=Clip(), name="voice")
    assert numbers_of(tmp_path).voices["neighbours"] == []


def test_of_many_named_values_the_first_have_histograms(tmp_path):
    names = ", ".join(f"v{number}" for number in range(40))
    features = {"a": np.ones((1, 40), np.float32)}
    make_version(tmp_path, features, axis=Clip(), units=names, name="many")
    (statistic,) = numbers_of(tmp_path).statistics
    assert len(statistic["units"]) == len(statistic["histograms"]) == 16


def test_without_a_voiced_frame_there_is_no_pitch(tmp_path):
    silence = {"a": np.float32([[200, 0.1]] * 3), "b": np.float32([[300, 0.2]])}
    for name in ("f0-swift", "f0-crepe"):
        make_version(tmp_path, silence, name=name, units="pitch (Hz), confidence")
    report = numbers_of(tmp_path)
    pitch, voiced = statistics(report, "f0-swift")
    assert pitch.counts == [0]
    assert np.isnan([pitch.minimum, pitch.median, pitch.maximum]).all()
    assert (voiced.counts, voiced.maximum) == ([2], 0)
    assert [one["rules"] for one in report.outliers] == [["least voiced"]] * 2, "named once"
    assert b"Median pitch</b><span>no utterance has a value<" in make_page(report)


def test_duplicates_are_equal_files_but_not_parts_of_one(cli, corpus, tmp_path):
    duplicates = numbers_of(corpus / "c").duplicates
    assert duplicates == {
        "compared": 13,
        "utterances": 2,
        "groups": 1,
        "examples": [["utt-2", "again"]],
    }
    rows = "id,path,start,duration\na,4.wav,0,0.2\nb,4.wav,0.2,0.2\nc,4.wav,0.2,0.2\n"
    (corpus / "parts.csv").write_text(rows)
    assert cli("extract", corpus / "parts.csv", "-o", tmp_path / "c").code == 0
    assert numbers_of(tmp_path / "c").duplicates["examples"] == [["b", "c"]]


def test_duplicates_are_outliers_by_name(corpus):
    rules = {one["id"]: one["rules"] for one in numbers_of(corpus / "c").outliers}
    assert "same audio as utt-2" in rules["again"]


def test_identical_channels_are_those_of_one_file(cli, tmp_path):
    left, right = (0.3 * speech(0.5, seed=seed).ravel() for seed in (0, 1))
    rows = ["id,path,channel"]
    for name, channels in {"same": (left, left), "two": (left, right)}.items():
        soundfile.write(tmp_path / f"{name}.wav", np.stack(channels, axis=1), 16000)
        rows += [f"{name}-{number},{name}.wav,{number}" for number in range(2)]
    rows += ["again,same.wav,0", "mixed,same.wav,"]
    (tmp_path / "m.csv").write_text("\n".join(rows))
    cli("extract", tmp_path / "m.csv", "-o", tmp_path / "c").with_code(0)
    report = numbers_of(tmp_path / "c")
    assert report.identical_channels["examples"] == [["same-0", "same-1"]]
    assert report.duplicates["examples"] == [["same-0", "again"]]


def test_what_is_shown_is_drawn_with_a_fixed_seed(corpus):
    first, second = (numbers_of(corpus / "c") for _ in range(2))
    assert asdict(first) == asdict(second)
    assert {"most clipped", "sample"} <= {one["why"] for one in first.shown}
    assert len({one["id"] for one in first.shown}) == len(first.shown)


def test_codebooks_are_those_of_stats(tmp_path):
    cache = codes_cache(tmp_path)
    (version,) = numbers_of(tmp_path).versions
    codes = np.concatenate([*cache.values()])
    for place, book in enumerate(version["codebooks"]):
        counts = np.bincount(codes[:, place])
        share = counts[counts > 0] / len(codes)
        assert book["used"] == len(share)
        assert book["perplexity"] == pytest.approx(2 ** -(share * np.log2(share)).sum())
    assert version["mean"] == []


def test_of_a_large_version_a_sample_of_shards_is_read(tmp_path, monkeypatch):
    features = [make_features(20, (4,), prefix=f"s{number}", seed=number) for number in range(6)]
    version = make_version(tmp_path, *features)
    total = featcache.open(tmp_path).lengths.sum()
    monkeypatch.setattr(numbers, "SAMPLE_BYTES", int(total * 8 * 0.3))
    (sampled,) = numbers_of(tmp_path).versions
    assert 0 < sampled["sampled_frames"] <= 0.3 * total
    assert sampled["frames"] == total
    monkeypatch.setattr(numbers, "SAMPLE_BYTES", 1)
    (sampled,) = numbers_of(tmp_path).versions
    assert sampled["sampled_frames"] > 0
    add_shard(version, {"nan": np.full((3, 4), np.nan, np.float16)}, row=500)
    monkeypatch.undo()
    (faulty,) = numbers_of(tmp_path).versions
    assert "NaN" in faulty["fault"]


@pytest.mark.parametrize(
    "values", [[], [0.0], [5.0] * 9, [1, 2, 3], [-80.0, -3], [1.0] * 999 + [4e4]]
)
def test_each_value_is_in_one_bin(values):
    found = by_steps("x", "s", np.array(values, np.float32))
    assert sum(found.counts) == len(values)
    assert len(found.counts) <= 34
    assert len(found.edges) == len(found.counts) + 1


@pytest.mark.parametrize("values", [[], [0.0], [1.0], [1e-12, 1, 0], [3e-5] * 4])
def test_zeros_are_counted_apart(values):
    found = by_decades("x", "s", np.array(values, np.float32))
    assert sum(found.counts) + found.zeros == len(values)
    assert found.zeros == values.count(0)


def test_characters_are_counted_not_bytes():
    texts = ["", "abc", "äöü", "日本語", "a" * 300]
    assert characters_of(Strings.of(texts)).tolist() == [*map(len, texts)]
