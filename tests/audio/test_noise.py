"""Noise: which, where, how loud; that it is in the fingerprint by what it holds; and what
is refused."""

import hashlib
import json
import math
import os
import shutil

import numpy as np
import pytest
import soundfile
from audio_files import KINDS, patch_file, tone, write_audio
from augment_section import config_of, refusal, section, write_config_of
from corpora import speech
from damage import flip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featcache.audio import decode as decode_module
from featcache.audio import noise as noise_module
from featcache.audio import recording
from featcache.audio.decode import Cut, decode
from featcache.audio.kept import Kept
from featcache.audio.noise import Noise
from featcache.audio.resample import to_waveform
from featcache.audio.waveform import WaveformMaker
from featcache.config import AudioPolicy, config_from, load_config, recorded_config
from featcache.errors import ConfigError

RATE = 16000


def noise_of(folder, audio=None, **changes):
    config = config_of(section(**changes), folder, audio=audio or {})
    return Noise(config.augment.noise, config.audio)


# What is added


@pytest.mark.parametrize("snr", [-5.0, 0.0, 5.0, 15.0, 30.0])
@pytest.mark.parametrize("number", range(8))
def test_the_mix_minus_the_clip_is_noise_at_that_ratio(noises, number, snr):
    clip = speech(0.7, RATE, seed=number)[:, 0].astype(np.float32)
    mixed = noise_of(noises).add_to(clip, f"utt-{number}", snr)
    added = mixed.astype(np.float64) - clip
    assert mixed.dtype == np.float32
    ratio = np.mean(clip.astype(np.float64) ** 2) / np.mean(added**2)
    assert 10 * math.log10(ratio) == pytest.approx(snr, abs=1e-3)


@settings(max_examples=40)
@given(st.text(max_size=8), st.integers(0, 2**40), st.integers(1, 40_000))
def test_the_seed_and_the_id_decide_which_noise_and_where(noises, id_, seed, num_samples):
    """As documented, done again from the whole waveforms of the noises."""
    digest = hashlib.sha256(f"{seed} {id_}".encode()).digest()
    draw, place = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
    whole_files = [
        (name, None, None) for name in ("long.wav", "short.flac", "slow.wav", "stereo.wav")
    ]
    name, channel, cut = [
        *whole_files,
        ("stereo.wav", 1, None),
        ("long.wav", None, (20_000, 24_000)),
    ][draw % 6]
    samples, rate = soundfile.read(noises / name, dtype="float32", always_2d=True)
    if cut:
        samples = samples[cut[0] : sum(cut)]
    needed = math.ceil(num_samples * rate / RATE)
    if needed <= len(samples):
        first = place % (len(samples) - needed + 1)
        expected = to_waveform(
            np.ascontiguousarray(samples[first : first + needed]), rate, AudioPolicy(), channel
        )
        expected = expected[:num_samples]
    else:
        whole = to_waveform(samples, rate, AudioPolicy(), channel)
        expected = whole[(place % len(whole) + np.arange(num_samples)) % len(whole)]
    found = noise_of(noises, seed=seed).cut(num_samples, id_)
    assert found.tobytes() == expected.tobytes()


def test_what_is_silent_stays_what_it_is(noises, tmp_path):
    silence = np.zeros(8000, np.float32)
    assert noise_of(noises).add_to(silence, "a", 5.0).tobytes() == silence.tobytes()
    write_noises(tmp_path, [silence])
    clip = speech(0.5, RATE)[:, 0].astype(np.float32)
    assert noise_of(tmp_path).add_to(clip, "a", 5.0).tobytes() == clip.tobytes()


def test_an_id_gets_the_noise_of_its_suffix(noises):
    config = config_of(section(), noises)
    waveform_maker = WaveformMaker.of(config.audio, config.augment)
    (result,) = decode(noises / "long.wav", [Cut(0.0, 0.5)])
    samples = result[0]

    def waveform_of(id_):
        builder = waveform_maker.builder(RATE, waveform_maker.speed(id_), None, len(samples))
        builder.add(samples)
        return waveform_maker.with_noise(builder.finish(), id_)

    clean, noisy = waveform_of("utt_sp0.9"), waveform_of("utt_sp0.9_snr5")
    assert len(noisy) == len(clean) == int(8000 / 0.9 + 0.5)
    assert noisy.tobytes() == noise_of(noises).add_to(clean, "utt_sp0.9_snr5", 5.0).tobytes()
    assert waveform_of("utt").tobytes() == samples[:, 0].tobytes()


# Noise in memory


def keep(patched, num_bytes):
    """An empty memory of so many bytes, for noises that are read from now on."""
    patched.setattr(noise_module, "_KEPT_BYTES", num_bytes)
    patched.setattr(noise_module, "_DECODED", Kept(num_bytes, lambda samples: samples.nbytes))


@pytest.fixture
def decoded(monkeypatch):
    """What is decoded from files: the name of the file, and the first sample and the one
    after the last."""
    spans = []

    def decode_and_tell(path, cuts, real=decode_module.decode, **options):
        spans.extend(
            (
                os.path.basename(path),
                round(cut.start * RATE),
                round((cut.start + cut.duration) * RATE),
            )
            for cut in cuts
        )
        return real(path, cuts, **options)

    monkeypatch.setattr(decode_module, "decode", decode_and_tell)
    return spans


def write_noises(folder, noises, subtype="PCM_16"):
    """Write arrays as noises; returns a function that cuts samples from one of them."""
    for number, samples in enumerate(noises):
        soundfile.write(folder / f"{number}.wav", samples, RATE, subtype=subtype)
    rows = "".join(f"{number},{number}.wav\n" for number in range(len(noises)))
    (folder / "noises.csv").write_text(f"id,path\n{rows}")
    noise = noise_of(folder)
    return lambda number, first, stop: noise._mono(noise._clips[number], first, stop)


def levels(num_samples, seed=0):
    """16-bit samples, with both extremes among them."""
    samples = (
        np.random.default_rng(seed).integers(-32768, 32768, num_samples).astype(np.float32) / 32768
    )
    samples[: min(2, num_samples)] = [-1, 32767 / 32768][:num_samples]
    return samples


LEVELS = st.builds(levels, st.integers(1, 400), st.integers(0, 9))
ODD = st.lists(st.sampled_from([-0.0, 1.0, 0.5**16, 1e-40, 7.25, 3e38]), max_size=2).map(np.float32)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(LEVELS, min_size=1, max_size=4).map(lambda noises: ("PCM_16", noises))
    | st.lists(st.builds(np.append, LEVELS, ODD), min_size=1, max_size=4).map(
        lambda noises: ("FLOAT", noises)
    ),
    st.integers(0, 3000),
    st.data(),
)
def test_a_cut_is_what_was_written_whatever_was_asked_for_before(tmp_path, written, limit, data):
    subtype, noises = written
    with pytest.MonkeyPatch.context() as patched:
        keep(patched, limit)
        patched.setattr(recording, "_BLOCK_VALUES", 99)
        cut_out = write_noises(tmp_path, noises, subtype)
        for _ in range(12):
            number = data.draw(st.integers(0, len(noises) - 1))
            first = data.draw(st.integers(0, len(noises[number]) - 1))
            stop = data.draw(st.integers(first + 1, len(noises[number])))
            cut = cut_out(number, first, stop)
            assert (cut.dtype, cut.tobytes()) == (np.float32, noises[number][first:stop].tobytes())
            assert noise_module._DECODED._total <= limit


def test_noises_are_decoded_once_and_those_without_room_cut_by_cut(tmp_path, monkeypatch, decoded):
    keep(monkeypatch, 2000)
    cut_out = write_noises(tmp_path, [levels(300), levels(250)])
    for _ in range(2):
        for number, at in ((0, 0), (1, 7), (0, 200)):
            cut_out(number, at, at + 9)
    assert decoded == [("0.wav", 0, 300), *[("1.wav", 7, 16)] * 2]


def test_of_many_channels_a_block_at_a_time_is_in_memory(tmp_path, monkeypatch, traced):
    keep(monkeypatch, 0)
    monkeypatch.setattr(recording, "_BLOCK_VALUES", 8000)
    cut_out = write_noises(tmp_path, [np.tile(levels(100_000)[:, None], 8)])
    assert traced(lambda: cut_out(0, 0, 100_000)).peak < 1.5 * 4 * 100_000


def test_those_who_name_the_same_noises_share_what_is_decoded(tmp_path, monkeypatch, decoded):
    """Unless they take another channel, or the noise has changed."""
    keep(monkeypatch, 1 << 30)
    cut_out = write_noises(tmp_path, [levels(100)])
    cut_out(0, 0, 100)
    for rate, channel, times in ((8000, "mix", 1), (RATE, "first", 2)):
        noise = noise_of(tmp_path, {"sample_rate": rate, "channel": channel})
        noise._mono(noise._clips[0], 0, 100)
        assert len(decoded) == times
    assert (
        write_noises(tmp_path, [levels(100, seed=1)])(0, 0, 100).tobytes()
        == levels(100, seed=1).tobytes()
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("caf-alac", "wav-gsm")])
def test_every_format_gives_the_bits_that_each_cut_alone_gives(kind, tmp_path, monkeypatch):
    """Without a memory, with one that fills, and with a full one, from which nothing is
    decoded."""
    name = f"a.{KINDS[kind].suffix}"
    write_audio(tmp_path / name, tone(0.4, channels=KINDS[kind].channels, seed=1), kind=kind)
    rows = f"whole,{name},,\npart,{name},0.125,0.2\nshort,{name},0.3,0.015\n"
    (tmp_path / "noises.csv").write_text(f"id,path,start,duration\n{rows}")
    cuts = [(1 + 97 * number, f"utt-{number}") for number in range(40)]
    keep(monkeypatch, 0)
    without = noise_of(tmp_path)
    expected = [without.cut(*arguments).tobytes() for arguments in cuts]
    keep(monkeypatch, 1 << 30)
    noise = noise_of(tmp_path)
    assert [noise.cut(*arguments).tobytes() for arguments in cuts] == expected
    monkeypatch.setattr(decode_module, "decode", None)
    assert [noise.cut(*arguments).tobytes() for arguments in cuts] == expected


def test_what_lies_outside_of_the_damage_is_used_and_the_rest_is_refused_by_name(tmp_path):
    samples = tone(1.0)
    samples[9000] = np.nan
    write_noises(tmp_path, [samples], "FLOAT")
    noise = noise_of(tmp_path)
    good = bad = 0
    for number in range(200):
        try:
            assert np.isfinite(noise.cut(4000, f"utt-{number}")).all()
            good += 1
        except ConfigError as error:
            assert f"{tmp_path / '0.wav'}: holds NaN" in str(error)  # noqa: PT017 - some are to pass
            bad += 1
    assert good > bad > 0


# The fingerprint


def fingerprint(folder, **changes):
    return config_of(section(**changes), folder).fingerprint()


def test_the_fingerprint_knows_what_the_noise_is_and_not_where(noises, tmp_path):
    shutil.copytree(noises, tmp_path / "moved")
    (tmp_path / "moved" / "noises.csv").rename(tmp_path / "moved" / "others.csv")
    before = fingerprint(noises)
    assert fingerprint(tmp_path / "moved", manifest="others.csv") == before
    assert fingerprint(noises, snr=[15.0, 5.0]) == before
    assert fingerprint(noises, seed=1) != before
    assert fingerprint(noises, snr=[5.0]) != before
    rows = (tmp_path / "moved" / "others.csv").read_text()
    (tmp_path / "moved" / "renamed.csv").write_text(rows.replace("long,", "another,"))
    assert fingerprint(tmp_path / "moved", manifest="renamed.csv") == before
    header, *lines = rows.splitlines()
    for name, changed in {
        "order": [header, *lines[::-1]],
        "fewer": [header, *lines[1:]],
        "segment": [header, *(line.replace("1.25", "1.5") for line in lines)],
        "channel": [
            header,
            *(line.replace(",1", ",0") if line.startswith("right") else line for line in lines),
        ],
    }.items():
        (tmp_path / "moved" / f"{name}.csv").write_text("\n".join(changed) + "\n")
        assert fingerprint(tmp_path / "moved", manifest=f"{name}.csv") != before, name
    flip(tmp_path / "moved" / "slow.wav", 9000)
    assert fingerprint(tmp_path / "moved", manifest="others.csv") != before


def test_a_resolved_config_holds_on_to_its_noise(noises, tmp_path):
    shutil.copytree(noises, tmp_path / "noise")
    config = config_of(section([0.9, 1.1]), tmp_path / "noise")
    resolved = json.loads(json.dumps(config.resolved()))
    again = config_from(resolved)
    assert again.resolved() == config.resolved()
    assert again.fingerprint() == config.fingerprint()
    (tmp_path / "noise" / "short.flac").write_bytes((tmp_path / "noise" / "long.wav").read_bytes())
    with pytest.raises(ConfigError, match=r"augment\.noise\.content: .* the noise has changed"):
        config_from(resolved)
    with pytest.raises(ConfigError, match="has changed since the config was read"):
        Noise(config.augment.noise, config.audio)


def test_another_manifest_may_be_set_in_a_config_that_has_noise(noises, tmp_path):
    """As in its file: the hash of the noise was filled in, and is then that of the other
    noise."""
    (tmp_path / "fewer.csv").write_text(f"id,path\nlong,{noises / 'long.wav'}\n")
    config, other = config_of(section(), noises), config_of(section(manifest="fewer.csv"), tmp_path)
    manifest = {"augment.noise.manifest": str(tmp_path / "fewer.csv")}
    assert load_config(config, manifest) == other != config
    assert (
        load_config(recorded_config(config.resolved()), manifest).fingerprint()
        == other.fingerprint()
    )
    with pytest.raises(ConfigError, match="the noise has changed"):
        load_config(config, {**manifest, "augment.noise.content": config.augment.noise.content})


# Faults


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"manifest": "none.csv"}, "augment.noise.manifest: "),
        ({"snr": []}, "augment.noise.snr: expected one number at least"),
        ({"snr": [5, 5]}, "augment.noise.snr: 5 is there 2 times"),
        (
            {"snr": [-300, 5]},
            "augment.noise.snr.0: should be greater than or equal to -50, not -300",
        ),
        ({"snr": [-30, 500]}, "augment.noise.snr.1: should be less than or equal to 100, not 500"),
        *(({"seed": seed}, "augment.noise.seed") for seed in (-1, 0.5)),
        ({"level": 3}, "augment.noise.level"),
    ],
)
def test_noise_that_makes_no_sense_is_refused(noises, changes, said):
    assert said in refusal(section(**changes), noises)


def test_every_noise_that_cannot_be_used_is_named_in_one_line(noises, tmp_path):
    shutil.copy(noises / "long.wav", tmp_path / "good.wav")
    (tmp_path / "text.wav").write_text("no audio")
    (tmp_path / "cut.wav").write_bytes((noises / "long.wav").read_bytes()[:10_000])
    (tmp_path / "noises.csv").write_text(
        "id,path,start,duration,channel\n"
        "good,good.wav,,,\ngone,gone.wav,,,\ntext,text.wav,,,\ncut,cut.wav,,,\n"
        "late,good.wav,9,1,\nlong,good.wav,4,2,\nleft,good.wav,,,1\nbefore,cut.wav,0.01,0.02,\n"
        "far,http://127.0.0.1:1/a.wav,,,\n"
    )
    message = refusal(section(), tmp_path)
    for id_ in ("gone", "text", "cut", "late", "long", "left"):
        assert f"{id_}: {'good' if id_ in ('late', 'long', 'left') else id_}.wav: " in message
    assert (
        "far: http://127.0.0.1:1/a.wav: is at a URL or in a container: copy the noise to "
        "this machine" in message
    )
    assert "good: good.wav" not in message
    assert "before: cut.wav" not in message


def test_a_manifest_of_noise_with_faults_is_told_in_one_line(tmp_path):
    (tmp_path / "noises.csv").write_text("id,path,duration\na,a.wav,long\na,,1\n")
    message = refusal(section(), tmp_path)
    assert "line 2: duration" in message
    assert "line 3: path is missing" in message


def test_noise_at_another_rate_needs_a_resampler(noises):
    said = refusal(section([1.0]), noises, audio={"resample": "forbid"})
    assert "holds noise at 8000 Hz, 22050 Hz, and audio.resample forbids" in said


def test_noise_that_breaks_off_while_it_is_used_ends_the_run_with_its_name(
    cli, plain, tmp_path, scratch
):
    """Its header is good, so that only decoding finds it out."""
    soundfile.write(tmp_path / "a.flac", speech(3.0, RATE), RATE)
    patch_file(tmp_path / "a.flac", (tmp_path / "a.flac").stat().st_size // 2, bytes(3000))
    (tmp_path / "noises.csv").write_text("id,path\na,a.flac\n")
    config = write_config_of(tmp_path / "copies.yaml", section([1.0]))
    done = cli("extract", plain.manifest(), "-c", config, "-o", scratch).with_code(2)
    assert "augment.noise.manifest: " in done.err
    assert "a.flac: decoding fails" in done.err
    assert len(done.err.splitlines()) == 1
