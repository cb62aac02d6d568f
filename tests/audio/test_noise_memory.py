"""Noise in memory: the bits that decoding gives, within the limit, in every format, by every thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import pytest
import soundfile
from audio_files import KINDS, tone, write_audio
from augment_section import config_of, extract
from cache_contents import items
from corpora import speech
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_speech import sentences

from featcache.audio import decode as decode_module
from featcache.audio import noise as noise_module
from featcache.audio.decode import Cut
from featcache.audio.noise import Noise, read_noise
from featcache.errors import AudioError, ConfigError, Reason

RATE = 16000
PIECE = 100  # samples of 16 bits
LIMIT = noise_module._MOST_PIECES * noise_module._PIECE_BYTES


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces so small that short noises have several, in a memory of the test's own."""
    monkeypatch.setattr(noise_module, "_PIECE_BYTES", 2 * PIECE)
    limit_memory(monkeypatch, 1000)


def limit_memory(monkeypatch, pieces):
    """An empty memory for so many pieces, for noises that are read from now on."""
    monkeypatch.setattr(noise_module, "_MOST_PIECES", pieces)
    decode_piece = lru_cache(pieces)(noise_module._decoded_piece.__wrapped__)
    monkeypatch.setattr(noise_module, "_decoded_piece", decode_piece)
    return decode_piece


@pytest.fixture
def decoded(monkeypatch):
    """What is decoded from files: the name of the file, and the first sample and the one after the last."""
    found = []
    original = decode_module.decode

    def decode(path, cuts):
        found.extend((path.name, round(cut.start * RATE), round((cut.start + cut.duration) * RATE)) for cut in cuts)
        return original(path, cuts)

    monkeypatch.setattr(decode_module, "decode", decode)
    return found


def levels(num_samples, seed=0):
    """16-bit samples, with both extremes among them."""
    samples = np.random.default_rng(seed).integers(-32768, 32768, num_samples).astype(np.float32) / 32768
    samples[: min(2, num_samples)] = [-1, 32767 / 32768][:num_samples]
    return samples


def noise_of(folder, rate=RATE, **audio):
    noise = {"manifest": "noises.csv", "snr": [5.0, 15.0], "seed": 0}
    config = config_of({"speed": [1.0], "noise": noise}, folder, audio={"sample_rate": rate, **audio})
    return Noise(config.augment.noise, config.audio)


def write_noises(folder, noises, subtype="PCM_16"):
    """Write arrays as noises; returns a function that cuts samples from one of them."""
    for number, samples in enumerate(noises):
        soundfile.write(folder / f"{number}.wav", samples, RATE, subtype=subtype)
    rows = "".join(f"{number},{number}.wav\n" for number in range(len(noises)))
    (folder / "noises.csv").write_text(f"id,path\n{rows}")
    noise, clips = noise_of(folder), read_noise(folder / "noises.csv")
    return lambda number, first, stop: noise._mono(clips[number], first, stop)


noises = st.lists(
    st.builds(
        lambda num_samples, seed, odd: np.concatenate([levels(num_samples, seed), np.float32(odd)]),
        st.integers(1, 4 * PIECE),
        st.integers(0, 9),
        st.lists(st.sampled_from([-0.0, 1.0, 0.5**16, 1e-40, 7.25, 3e38]), max_size=2),
    ),
    min_size=1,
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(noises, st.integers(0, 15), st.data())
def test_a_cut_is_what_decoding_gives_whatever_was_asked_for_before(tmp_path, monkeypatch, noises, limit, data):
    memory = limit_memory(monkeypatch, limit)
    cut_out = write_noises(tmp_path, noises, "FLOAT")
    for _ in range(12):
        number = data.draw(st.integers(0, len(noises) - 1))
        first = data.draw(st.integers(0, len(noises[number]) - 1))
        stop = data.draw(st.integers(first + 1, len(noises[number])))
        cut = cut_out(number, first, stop)
        assert cut.dtype == np.float32
        assert cut.tobytes() == noises[number][first:stop].tobytes()
        cut[:] = 0  # it is the caller's own
        assert memory.cache_info().currsize <= limit


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(st.integers(1, 4 * PIECE), st.integers(0, 9), st.data())
def test_cuts_of_16_bit_samples_are_what_was_written(tmp_path, monkeypatch, num_samples, seed, data):
    limit_memory(monkeypatch, 3)
    samples = levels(num_samples, seed)
    cut_out = write_noises(tmp_path, [samples])
    for _ in range(12):
        first = data.draw(st.integers(0, num_samples - 1))
        stop = data.draw(st.integers(first + 1, num_samples))
        assert cut_out(0, first, stop).tobytes() == samples[first:stop].tobytes()


def test_nothing_is_decoded_twice_while_there_is_room(tmp_path, decoded):
    cut_out = write_noises(tmp_path, [levels(1050), levels(30)])
    for first in range(0, 1000, 7):
        cut_out(0, first, first + 50)
        cut_out(1, first % 30, 30)
    pieces = [("0.wav", at, min(at + PIECE, 1050)) for at in range(0, 1050, PIECE)]
    assert sorted(decoded) == [*pieces, ("1.wav", 0, 30)]


def test_the_limit_holds_in_bytes_and_samples_take_two_where_that_loses_nothing(tmp_path):
    """Every piece takes as many bytes: pieces of other samples than those of 16 bits are half as long."""
    cases = [("PCM_16", 1, None, np.int16), ("PCM_16", 2, 1, np.int16), ("PCM_16", 2, None, np.float32)]
    cases += [("PCM_24", 1, None, np.float32), ("FLOAT", 1, None, np.float32)]
    for number, (subtype, channels, channel, dtype) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        soundfile.write(folder / "a.wav", np.tile(levels(1000)[:, None], channels), RATE, subtype=subtype)
        (folder / "noises.csv").write_text(f"id,path,channel\na,a.wav,{'' if channel is None else channel}\n")
        pieces = []
        with pytest.MonkeyPatch.context() as patch:
            keep = noise_module._decoded_piece
            patch.setattr(noise_module, "_decoded_piece", lambda *key: pieces.append(keep(*key)) or pieces[-1])  # noqa: B023
            cut = noise_of(folder)._mono(read_noise(folder / "noises.csv")[0], 0, 1000)
        assert cut.tobytes() == levels(1000).tobytes()
        assert {piece.dtype for piece in pieces} == {np.dtype(dtype)}
        assert {piece.nbytes for piece in pieces} == {2 * PIECE}


def test_of_noises_without_room_the_cuts_alone_are_decoded_and_the_others_stay(tmp_path, monkeypatch, decoded):
    memory = limit_memory(monkeypatch, 5)
    noises = [levels(300), levels(250, seed=1)]
    cut_out = write_noises(tmp_path, noises)
    for _ in range(2):
        for at in range(0, 250, PIECE):
            for number in (0, 1):
                assert cut_out(number, at, at + 1).tobytes() == noises[number][at : at + 1].tobytes()
    assert memory.cache_info().currsize == 3
    assert sorted(decoded) == [
        *(("0.wav", at, at + PIECE) for at in (0, 100, 200)),
        *(("1.wav", at, at + 1) for at in (0, 0, 100, 100, 200, 200)),
    ]


def test_the_limit_is_a_gibibyte():
    assert LIMIT == 1 << 30


def test_damage_fails_the_cuts_that_meet_it_and_no_others(tmp_path, monkeypatch):
    samples = levels(500)
    cut_out = write_noises(tmp_path, [samples])
    original = decode_module.decode

    def decode(path, cuts):
        (cut,) = cuts
        if round(cut.start * RATE) <= 250 < round((cut.start + cut.duration) * RATE):
            return iter([AudioError(Reason.TRUNCATED, "decoding fails")])
        return original(path, cuts)

    monkeypatch.setattr(decode_module, "decode", decode)
    for first, stop in ((0, 40), (180, 250), (251, 320), (400, 500)):
        assert cut_out(0, first, stop).tobytes() == samples[first:stop].tobytes()
    with pytest.raises(AudioError, match="decoding fails"):
        cut_out(0, 240, 260)


def test_threads_get_the_same_bits(tmp_path, monkeypatch):
    memory = limit_memory(monkeypatch, 60)
    monkeypatch.setattr(noise_module, "_MOST_PIECES", 90)  # so that pieces are dropped, too
    noises = [levels(3000, seed) for seed in range(3)]
    cut_out = write_noises(tmp_path, noises)

    def work(seed):
        generator = np.random.default_rng(seed)
        for _ in range(300):
            number, first = int(generator.integers(3)), int(generator.integers(2900))
            assert cut_out(number, first, first + 100).tobytes() == noises[number][first:][:100].tobytes()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert memory.cache_info().currsize == 60


def test_those_who_name_the_same_noises_share_what_is_decoded(tmp_path, decoded):
    """Unless they take another channel, or the noise has changed."""
    cut_out = write_noises(tmp_path, [levels(PIECE)])
    cut_out(0, 0, PIECE)
    (clip,) = read_noise(tmp_path / "noises.csv")
    noise_of(tmp_path, rate=8000)._mono(clip, 0, PIECE)
    assert len(decoded) == 1
    noise_of(tmp_path, channel="first")._mono(clip, 0, PIECE)
    assert len(decoded) == 2
    soundfile.write(tmp_path / "0.wav", levels(PIECE, seed=1), RATE)
    assert noise_of(tmp_path)._mono(clip, 0, PIECE).tobytes() == levels(PIECE, seed=1).tobytes()


# Files


def assert_as_decoded_alone(folder, monkeypatch, rate=RATE):
    """Cuts are the same without a memory, with one that fills, and with a full one, from which nothing is decoded."""
    cuts = [(1 + 97 * number, f"utt-{number}") for number in range(40)]
    noise = noise_of(folder, rate)
    with monkeypatch.context() as patch:
        patch.setattr(noise, "_mono", lambda clip, *span: alone(noise, clip, span))
        expected = [noise.cut(*arguments).tobytes() for arguments in cuts]
    assert [noise.cut(*arguments).tobytes() for arguments in cuts] == expected
    with monkeypatch.context() as patch:
        patch.setattr(decode_module, "decode", None)
        assert [noise.cut(*arguments).tobytes() for arguments in cuts] == expected


def alone(noise, clip, span):
    """Samples of a noise, decoded by themselves."""
    first, stop = (clip.first + at for at in span)
    cut = Cut(first / clip.sample_rate, (stop - first) / clip.sample_rate)
    ((samples, _),) = decode_module.decode(clip.path, [cut])
    policy = noise._audio.model_copy(update={"sample_rate": clip.sample_rate})
    return noise_module.to_waveform(samples, clip.sample_rate, policy, clip.channel)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("caf-alac", "wav-gsm")])
def test_every_format_gives_the_bits_that_each_cut_alone_gives(kind, tmp_path, monkeypatch):
    write_audio(tmp_path / f"a.{KINDS[kind].suffix}", tone(0.4, channels=KINDS[kind].channels, seed=1), kind=kind)
    rows = "".join(f"{name},a.{KINDS[kind].suffix},{start},{duration}\n" for name, start, duration in (
        ("whole", "", ""), ("part", 0.125, 0.2), ("short", 0.3, 0.015)
    ))  # fmt: skip
    (tmp_path / "noises.csv").write_text(f"id,path,start,duration\n{rows}")
    assert_as_decoded_alone(tmp_path, monkeypatch)


def test_real_recordings_at_another_rate_too(tmp_path, monkeypatch):
    monkeypatch.setattr(noise_module, "_PIECE_BYTES", 1 << 15)
    rows = ["id,path"]
    for number, (samples, rate) in enumerate(sentences(3)):
        name = f"{number}.{'flac' if number else 'wav'}"
        soundfile.write(tmp_path / name, samples, rate)
        rows.append(f"{number},{name}")
    (tmp_path / "noises.csv").write_text("\n".join(rows) + "\n")
    assert_as_decoded_alone(tmp_path, monkeypatch, rate)
    limit_memory(monkeypatch, 1000)
    assert_as_decoded_alone(tmp_path, monkeypatch)


def test_a_version_is_the_same_with_noise_in_memory_and_without(plain, tmp_path, scratch, monkeypatch):
    soundfile.write(tmp_path / "a.wav", speech(2.0, RATE), RATE)
    soundfile.write(tmp_path / "b.flac", speech(0.2, 22050, channels=2), 22050)
    (tmp_path / "noises.csv").write_text("id,path\na,a.wav\nb,b.flac\n")
    config = config_of({"noise": {"manifest": "noises.csv", "snr": [5.0, 15.0]}}, tmp_path)
    for pieces in (0, 25, 1000):
        limit_memory(monkeypatch, pieces)
        extract(plain.manifest(), config, scratch / str(pieces))
    assert items(scratch / "0") == items(scratch / "25") == items(scratch / "1000")


def test_what_lies_outside_of_the_damage_is_used_and_the_rest_is_refused_by_name(tmp_path):
    samples = tone(1.0)
    samples[9000] = np.nan
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    (tmp_path / "noises.csv").write_text("id,path\na,a.wav\n")
    noise = noise_of(tmp_path)
    good = bad = 0
    for number in range(200):
        try:
            assert np.isfinite(noise.cut(4000, f"utt-{number}")).all()
            good += 1
        except ConfigError as error:
            assert f"{tmp_path / 'a.wav'}: holds NaN" in str(error)  # noqa: PT017 - some are to pass
            bad += 1
    assert good > bad > 0
