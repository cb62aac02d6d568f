"""Noise in memory: the bits that decoding gives, within the limit, in every format, by every thread."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
from audio_files import KINDS, tone, write_audio
from augment_section import config_of, extract
from cache_contents import items
from corpora import speech
from hypothesis import given
from hypothesis import strategies as st
from real_speech import sentences

from featcache.audio import noise as noise_module
from featcache.audio import noise_memory
from featcache.audio.noise import Noise
from featcache.audio.noise_memory import LIMIT, NoiseMemory, shared_memory
from featcache.errors import AudioError, ConfigError, Reason

RATE = 16000
PIECE = 100


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    """So that short noises have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_memory, "_PIECE", PIECE)
        yield


class Source:
    """Noises as arrays, and what was decoded of them."""

    def __init__(self, noises):
        self.noises = noises
        self.decoded = []

    def cut(self, memory, number, first, stop):
        noise = self.noises[number]
        return memory.cut(number, len(noise), (first, stop), lambda spans: self.decode(number, spans))

    def decode(self, number, spans):
        self.decoded += [(number, *span) for span in spans]
        return [self.noises[number][first:stop].copy() for first, stop in spans]


def levels(num_samples, seed=0):
    """16-bit samples, with both extremes among them."""
    samples = np.random.default_rng(seed).integers(-32768, 32768, num_samples).astype(np.float32) / 32768
    samples[: min(2, num_samples)] = [-1, 32767 / 32768][:num_samples]
    return samples


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


@given(noises, st.integers(0, 3000), st.data())
def test_a_cut_is_what_decoding_gives_whatever_was_asked_for_before(noises, limit, data):
    source, memory = Source(noises), NoiseMemory(limit)
    for _ in range(12):
        number = data.draw(st.integers(0, len(noises) - 1))
        first = data.draw(st.integers(0, len(noises[number]) - 1))
        stop = data.draw(st.integers(first + 1, len(noises[number])))
        cut = source.cut(memory, number, first, stop)
        assert cut.dtype == np.float32
        assert cut.tobytes() == noises[number][first:stop].tobytes()
        cut[:] = 0  # it is the caller's own
        assert memory.num_bytes <= limit


def test_nothing_is_decoded_twice_while_there_is_room():
    source, memory = Source([levels(1050), levels(30)]), NoiseMemory(LIMIT)
    for first in range(0, 1000, 7):
        source.cut(memory, 0, first, first + 50)
        source.cut(memory, 1, first % 30, 30)
    assert sorted(source.decoded) == [*((0, at, min(at + PIECE, 1050)) for at in range(0, 1050, PIECE)), (1, 0, 30)]
    assert memory.num_bytes == 2 * 1080


@pytest.mark.parametrize(("odd", "size"), [(0.5, 2), (0.5**16, 4), (-0.0, 4), (1.0, 4)])
def test_samples_take_two_bytes_where_that_loses_nothing(odd, size):
    samples = levels(PIECE)
    samples[50] = odd
    source, memory = Source([samples]), NoiseMemory(LIMIT)
    source.cut(memory, 0, 0, 10)
    assert memory.num_bytes == size * PIECE


def test_where_it_is_full_cuts_alone_are_decoded_and_what_is_there_stays():
    source, memory = Source([levels(1000)]), NoiseMemory(limit=2 * 3 * PIECE)
    for at in range(0, 1000, PIECE):
        source.cut(memory, 0, at, at + 1)
    assert memory.num_bytes == 2 * 3 * PIECE
    source.decoded.clear()
    source.cut(memory, 0, 120, 290)
    assert source.decoded == []
    source.cut(memory, 0, 280, 320)
    assert source.decoded == [(0, 280, 320)]


def test_damage_fails_the_cuts_that_meet_it_and_no_others():
    samples = levels(500)

    def decode(spans):
        if any(first <= 250 < stop for first, stop in spans):
            raise AudioError(Reason.TRUNCATED, "decoding fails")
        return [samples[first:stop] for first, stop in spans]

    memory = NoiseMemory(LIMIT)
    for first, stop in ((0, 40), (180, 250), (251, 320), (400, 500)):
        assert memory.cut(0, 500, (first, stop), decode).tobytes() == samples[first:stop].tobytes()
    with pytest.raises(AudioError, match="decoding fails"):
        memory.cut(0, 500, (240, 260), decode)


def test_threads_get_the_same_bits():
    noises = [levels(3000, seed) for seed in range(3)]
    source, memory = Source(noises), NoiseMemory(limit=12_000)

    def work(seed):
        generator = np.random.default_rng(seed)
        for _ in range(300):
            number, first = int(generator.integers(3)), int(generator.integers(2900))
            assert source.cut(memory, number, first, first + 100).tobytes() == noises[number][first:][:100].tobytes()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert memory.num_bytes == sum(piece.nbytes for piece in memory._pieces.values()) <= 12_000


def test_those_who_name_the_same_noises_share_a_memory_which_goes_with_the_last():
    one, other = shared_memory(("a", "mix")), shared_memory(("a", "first"))
    assert shared_memory(("a", "mix")) is one is not other
    one.cut(0, 10, (0, 10), lambda spans: [levels(10)])
    del one
    gc.collect()
    assert shared_memory(("a", "mix")).num_bytes == 0


# Files


def noise_of(folder, rate=RATE):
    noise = {"manifest": "noises.csv", "snr": [5.0, 15.0], "seed": 0}
    config = config_of({"speed": [1.0], "noise": noise}, folder, audio={"sample_rate": rate})
    return Noise(config.augment.noise, config.audio)


def assert_as_decoded_alone(folder, monkeypatch, rate=RATE):
    """Cuts are the same without a memory, with one that fills, and with a full one, from which nothing is decoded."""
    cuts = [(1 + 97 * number, f"utt-{number}") for number in range(40)]
    with monkeypatch.context() as patch:
        patch.setattr(noise_memory, "LIMIT", 0)
        alone = noise_of(folder, rate)
        expected = [alone.cut(*one).tobytes() for one in cuts]
        assert alone._memory.num_bytes == 0
    del alone
    noise = noise_of(folder, rate)
    assert [noise.cut(*one).tobytes() for one in cuts] == expected
    monkeypatch.setattr(noise_module, "decode", None)
    assert [noise.cut(*one).tobytes() for one in cuts] == expected


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("caf-alac", "wav-gsm")])
def test_every_format_gives_the_bits_that_each_cut_alone_gives(kind, tmp_path, monkeypatch):
    write_audio(tmp_path / f"a.{KINDS[kind].suffix}", tone(0.4, channels=KINDS[kind].channels, seed=1), kind=kind)
    rows = "".join(f"{name},a.{KINDS[kind].suffix},{start},{duration}\n" for name, start, duration in (
        ("whole", "", ""), ("part", 0.125, 0.2), ("short", 0.3, 0.015)
    ))  # fmt: skip
    (tmp_path / "noises.csv").write_text(f"id,path,start,duration\n{rows}")
    assert_as_decoded_alone(tmp_path, monkeypatch)


def test_real_recordings_at_another_rate_too(tmp_path, monkeypatch):
    monkeypatch.setattr(noise_memory, "_PIECE", 1 << 14)
    rows = ["id,path"]
    for number, (samples, rate) in enumerate(sentences(3)):
        name = f"{number}.{'flac' if number else 'wav'}"
        soundfile.write(tmp_path / name, samples, rate)
        rows.append(f"{number},{name}")
    (tmp_path / "noises.csv").write_text("\n".join(rows) + "\n")
    assert_as_decoded_alone(tmp_path, monkeypatch, rate)
    monkeypatch.undo()
    assert_as_decoded_alone(tmp_path, monkeypatch)


def test_a_version_is_the_same_with_noise_in_memory_and_without(plain, tmp_path, scratch, monkeypatch):
    soundfile.write(tmp_path / "a.wav", speech(2.0, RATE), RATE)
    soundfile.write(tmp_path / "b.flac", speech(0.2, 22050, channels=2), 22050)
    (tmp_path / "noises.csv").write_text("id,path\na,a.wav\nb,b.flac\n")
    config = config_of({"noise": {"manifest": "noises.csv", "snr": [5.0, 15.0]}}, tmp_path)
    for limit in (0, 5000, 1 << 20):
        monkeypatch.setattr(noise_memory, "LIMIT", limit)
        extract(plain.manifest(), config, scratch / str(limit))
    assert items(scratch / "0") == items(scratch / "5000") == items(scratch / str(1 << 20))


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
