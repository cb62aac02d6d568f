"""Copies at other speeds: what they hold, how long they are, and that all else takes them as any utterance."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import soundfile
import torch
from augment_section import SPEEDS, config_of, extract, write_config_of
from cache_contents import check, items, only_version
from corpora import speech
from hypothesis import given
from hypothesis import strategies as st

from featcache.audio.resample import to_waveform
from featcache.config import AudioPolicy, load_config, packaged_configs
from featcache.errors import AudioError, ConfigError, ManifestError, Reason
from featcache.extraction import from_audio

RATE = 16000


def at_speed(samples, speed, source_rate=RATE, **policy):
    return to_waveform(samples[:, None].astype(np.float32), source_rate, AudioPolicy(**policy), speed=speed)


# The waveform


@pytest.mark.parametrize("speed", [0.5, 0.8, 0.9, 1.1, 1.25, 2.0])
@pytest.mark.parametrize("source_rate", [8000, 16000, 22050, 48000])
def test_it_is_the_recording_read_at_another_rate(source_rate, speed):
    """Tones below the band's end, in closed form: sample k is what the recording is at k * speed / rate seconds."""
    top = 0.7 * min(source_rate, RATE / speed) / 2
    frequencies = np.linspace(100, top, 7)

    def tones(seconds):
        return 0.1 * np.sin(2 * np.pi * frequencies[:, None] * seconds + np.arange(7)[:, None]).sum(0)

    made = at_speed(tones(np.arange(source_rate) / source_rate), speed, source_rate)
    expected = tones(np.arange(len(made)) * speed / RATE)
    inside = slice(RATE // 20, -RATE // 20)
    np.testing.assert_allclose(made[inside], expected[inside], atol=3e-4)


def test_it_is_what_torchaudio_gives():
    from torchaudio.functional import resample

    samples = speech(1.0, RATE)[:, 0]
    samples = np.convolve(samples, np.hanning(9) / np.hanning(9).sum(), "same")  # little near the band's end
    for speed, (source, target) in {0.9: (9, 10), 1.1: (11, 10)}.items():
        sinc = {"lowpass_filter_width": 128, "resampling_method": "sinc_interp_kaiser", "beta": 14.0}
        theirs = resample(torch.from_numpy(samples), source, target, rolloff=0.95, **sinc).numpy()
        ours = at_speed(samples, speed)
        assert abs(len(ours) - len(theirs)) <= 1
        inside = slice(1000, min(len(ours), len(theirs)) - 1000)
        difference = np.sqrt(np.mean((ours[inside] - theirs[inside]) ** 2) / np.mean(theirs[inside] ** 2))
        assert difference < 1e-3


@given(
    st.integers(1, 5000),
    st.sampled_from([0.5, 0.85, 0.9, 0.95, 1.05, 1.1, 1.15, 2.0]),
    st.sampled_from([8000, 11025, 16000, 22050, 44100, 48000]),
)
def test_its_length_is_the_recordings_by_the_speed(num_samples, speed, source_rate):
    made = at_speed(np.zeros(num_samples), speed, source_rate)
    assert len(made) == int(num_samples * RATE / (source_rate * speed) + 0.5 + 1e-9)


def test_rate_and_speed_are_one_step(monkeypatch):
    import soxr

    asked = []
    real = soxr.resample
    monkeypatch.setattr(soxr, "resample", lambda *args: asked.append(args[1:]) or real(*args))
    at_speed(speech(0.2, 8000)[:, 0], 0.9, 8000)
    assert asked == [(9, 20, "HQ")]


def test_where_speed_and_rate_cancel_out_samples_stay_what_they_are():
    samples = speech(0.3, 12800)[:, 0].astype(np.float32)
    assert at_speed(samples, 1.25, 12800).tobytes() == samples.tobytes()


def test_a_limit_is_on_how_long_the_copy_lasts():
    samples = np.zeros(RATE)
    assert len(at_speed(samples, 1.0, max_seconds=1.0)) == RATE
    assert len(at_speed(samples, 1.1, max_seconds=0.95)) < RATE
    with pytest.raises(AudioError) as caught:
        at_speed(samples, 0.9, max_seconds=1.05)
    assert caught.value.reason == Reason.TOO_LONG


# Configs


@pytest.mark.parametrize(
    ("speed", "said"),
    [
        ([0.0, 1.0], "augment.speed: 0 is outside 0.5 to 2 times"),
        ([-1.0], "augment.speed: -1 is outside 0.5 to 2 times"),
        ([0.1, 3], "augment.speed: 0.1 is outside 0.5 to 2 times, 3 is outside 0.5 to 2 times"),
        ([0.9, 0.9], "augment.speed: 0.9 is there 2 times"),
        ([0.9123456789], "augment.speed: 0.9123456789 has more than six digits"),
        ([], "augment.speed: expected one number at least"),
        ([1.0], "augment: makes no copies"),
        (["fast"], "augment.speed"),
        ([float("nan")], "augment.speed"),
    ],
)
def test_speeds_that_make_no_sense_are_refused(speed, said):
    with pytest.raises(ConfigError) as caught:
        config_of({"speed": speed})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        config_of({"speed": [7], "pitch": 2}, audio={"sample_rate": 1})
    message = str(caught.value)
    assert all(path in message for path in ("augment.speed: 7", "augment.pitch", "audio.sample_rate"))


def test_speeds_need_a_resampler():
    with pytest.raises(
        ConfigError, match=r"augment\.speed: to change it is to resample, which audio\.resample forbids"
    ):
        config_of({"speed": [0.9]}, audio={"resample": "forbid"})


def test_the_fingerprint_knows_the_speeds_and_not_their_order():
    plain, some = config_of(None), config_of({"speed": SPEEDS})
    assert "augment" not in plain.resolved()
    assert config_of({"speed": SPEEDS[::-1]}).fingerprint() == some.fingerprint()
    assert len({one.fingerprint() for one in (plain, some, config_of({"speed": [0.9, 1.0]}))}) == 3


def test_packaged_configs_without_copies_have_no_trace_of_the_section():
    for name in ("fbank80", "mfcc13", "whisper-mel80"):
        assert "augment" not in load_config(name).resolved()
    assert load_config("fbank80-speed").resolved()["augment"] == {"speed": SPEEDS, "noise": None}
    assert "fbank80-speed" in packaged_configs()


# Versions


def test_every_utterance_is_there_at_every_speed(plain, scratch):
    extract(plain.manifest(), config_of({"speed": SPEEDS}), scratch / "copies")
    extract(plain.manifest(), config_of(None), scratch / "plain")
    copies, alone = items(scratch / "copies"), items(scratch / "plain")
    assert set(copies) == {f"{id_}{suffix}" for id_ in plain.ids for suffix in ("_sp0.9", "", "_sp1.1")}
    for row in plain.rows:
        assert copies[row["id"]] == alone[row["id"]]
        for speed in (0.9, 1.1):
            num_samples = int(row["duration"] * RATE / speed + 0.5)
            assert copies[f"{row['id']}_sp{speed:g}"][1][0] == 1 + (num_samples - 400) // 160
    assert check(scratch / "copies").problems == []


def test_without_speed_1_there_is_no_plain_copy(plain, scratch):
    summary = extract(plain.manifest(), config_of({"speed": [0.9]}), scratch)
    assert set(items(scratch)) == {f"{id_}_sp0.9" for id_ in plain.ids}
    assert (summary.utterances, summary.versions[0].utterances) == (12, 12)


def test_a_recording_is_decoded_once_for_its_copies(plain, scratch, monkeypatch):
    cut = []
    real = from_audio.decode
    monkeypatch.setattr(
        from_audio, "decode", lambda path, segments, **how: cut.extend(segments) or real(path, segments, **how)
    )
    extract(plain.manifest(), config_of({"speed": SPEEDS}), scratch, threads=1)
    assert len(cut) == len(plain.rows)


def test_versions_with_other_copies_are_filled_in_one_run(cli, plain, scratch):
    one = write_config_of(scratch / "one.yaml", {"speed": [0.9, 1.0]})
    done = cli("extract", plain.manifest(), "-c", one, "-c", "fbank80", "-o", scratch / "features", "--json")
    assert done.code == 0
    assert [version["utterances"] for version in done.json()["versions"]] == [24, 12]
    assert [version["extracted"] for version in done.json()["versions"]] == [24, 12]


def test_limits_are_on_the_copies(plain, scratch):
    """0.40 to 0.62 s: at 0.9 the longest last 0.69 s; a limit between them fails some copies, and them alone."""
    config = config_of({"speed": [0.9, 1.0]}, audio={"max_seconds": 0.63})
    summary = extract(plain.manifest(), config, scratch)
    lasting = {f"{row['id']}_sp0.9" for row in plain.rows if row["duration"] / 0.9 > 0.63}
    assert 0 < len(lasting) < 12
    assert set(items(scratch)) == {*plain.ids, *(f"{id_}_sp0.9" for id_ in plain.ids)} - lasting
    assert summary.failed_by_reason == {"too_long": len(lasting)}
    again = extract(plain.manifest(), config, scratch)
    assert (again.versions[0].extracted, again.versions[0].failed) == (0, len(lasting))


def test_a_clip_may_be_too_short_at_a_high_speed_alone(tmp_path, scratch):
    soundfile.write(tmp_path / "a.wav", speech(0.026), RATE)
    (tmp_path / "m.csv").write_text("id,path\na,a.wav\n")
    summary = extract(tmp_path / "m.csv", config_of({"speed": SPEEDS}), scratch)
    assert set(items(scratch)) == {"a", "a_sp0.9"}
    assert summary.failed_by_reason == {"too_short": 1}


def test_a_manifest_with_ids_of_copies_is_refused(cli, plain, scratch):
    rows = [{**plain.rows[0], "id": "utt-00_sp0.9"}, *plain.rows]
    with pytest.raises(ManifestError, match=r"1 of 13 ids end in .*: utt-00_sp0\.9: rename them"):
        extract(plain.manifest(rows, "marked.csv"), config_of({"speed": SPEEDS}), scratch)
    config = write_config_of(scratch / "copies.yaml", {"speed": SPEEDS})
    done = cli("extract", plain.manifest(rows, "marked.csv"), "-c", config, "-o", scratch / "features")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1


# Commands


@pytest.fixture(scope="module")
def made(cli, plain, tmp_path_factory):
    """A cache with a version of copies, and its config."""
    folder = tmp_path_factory.mktemp("copies")
    config = write_config_of(folder / "copies.yaml", {"speed": SPEEDS})
    done = cli("extract", plain.manifest(), "-c", config, "-o", folder / "features", "--shard-size", "0.05")
    assert done.code == 0
    assert "36 utterances: 36 extracted" in done.out
    return folder


def test_a_dry_run_counts_copies_and_how_long_they_last(cli, plain, scratch):
    config = write_config_of(scratch / "copies.yaml", {"speed": [0.5, 1.0]})
    (version,) = cli("extract", plain.manifest(), "-c", config, "--dry-run", "--json", cwd=scratch).json()["versions"]
    seconds = sum(row["duration"] for row in plain.rows)
    assert (version["utterances"], version["missing"]) == (24, 24)
    assert version["audio_seconds"] == pytest.approx(3 * seconds, rel=0.01)


def test_nothing_is_left_to_do(cli, plain, made):
    done = cli("extract", plain.manifest(), "-c", made / "copies.yaml", "-o", made / "features")
    assert "all 36 utterances are already there" in done.out


def test_verify_knows_the_copies(cli, plain, made):
    done = cli("verify", made / "features", "--manifest", plain.manifest(), "--recompute", 36, "--json")
    assert done.code == 0, done.out
    (version,) = done.json()["versions"]
    assert (version["utterances"], version["surplus"], version["recomputed"]["identical"]) == (36, 0, 36)
    more = [*plain.rows, {**plain.rows[0], "id": "another"}]
    (version,) = cli("verify", made / "features", "--manifest", plain.manifest(more, "more.csv"), "--json").json()[
        "versions"
    ]
    assert {problem["id"] for problem in version["problems"]} == {"another", "another_sp0.9", "another_sp1.1"}


def test_repair_extracts_copies_again(cli, plain, made, scratch):
    shutil.copytree(made / "features", scratch / "features")
    before = items(scratch / "features")
    version = only_version(scratch / "features")
    chunk = version.shard(version.shard_names()[0]).folder / "features" / "c" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    assert cli("verify", scratch / "features").code == 1
    assert cli("repair", scratch / "features", "--manifest", plain.manifest()).code == 0
    assert items(scratch / "features") == before


def test_show_passes_by_versions_that_have_not_the_copy(cli, plain, made, scratch):
    """Unless none has it."""
    shutil.copytree(made / "features", scratch / "features")
    assert cli("extract", plain.manifest(), "-c", "mfcc13", "-o", scratch / "features").code == 0
    assert len(cli("show", scratch / "features", "utt-03", "--json").json()["versions"]) == 2
    (version,) = cli("show", scratch / "features", "utt-03_sp0.9", "--json").json()["versions"]
    assert "mfcc13" not in version["version"]
    refused = cli("show", scratch / "features", "utt-03_sp0.7")
    assert (refused.code, len(refused.err.splitlines())) == (1, 1)
    assert "'utt-03_sp0.7': no such utterance in " in refused.err


def test_show_and_info_and_probe_take_copies(cli, plain, made):
    shown = cli("show", made / "features", "utt-03_sp0.9", "--json")
    (version,) = shown.json()["versions"]
    assert version["num_samples"] == int(plain.rows[3]["duration"] * RATE / 0.9 + 0.5)
    assert "copies at speed 0.9, 1, 1.1" in cli("info", made / "features").out
    assert cli("probe", made / "copies.yaml", plain.manifest(), "--utterances", 4).code == 0


def test_units_of_copies_are_the_same_from_features_and_from_audio(cli, plain, made, scratch):
    assert cli("fit-kmeans", made / "features", "-k", 8, "-o", scratch / "units.safetensors").code == 0
    params = {"weights": "units.safetensors"}
    units = write_config_of(scratch / "units.yaml", {"speed": SPEEDS}, extractor="units", params=params)
    for cache, source in (("a", ()), ("b", ("--from", made / "features"))):
        assert cli("extract", plain.manifest(), "-c", units, "-o", scratch / cache, *source).code == 0
    assert items(scratch / "a") == items(scratch / "b")
    assert len(items(scratch / "a")) == 36
    some = write_config_of(scratch / "some.yaml", {"speed": [0.8, 0.9]}, extractor="units", params=params)
    done = cli("extract", plain.manifest(), "-c", some, "-o", scratch / "c", "--from", made / "features")
    assert done.code == 2
    assert "lacks: _sp0.8" in done.err
