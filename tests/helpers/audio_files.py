"""Audio files of every kind, good and bad, made by the tests that need them."""

import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
from numpy.typing import NDArray

from featcache.errors import Reason

RATE = 16000


class Kind(NamedTuple):
    """A format that libsndfile writes."""

    suffix: str
    format: str
    """libsndfile's name of the container."""
    subtype: str
    """libsndfile's name of the encoding."""
    channels: int = 2
    """The number of channels of the files to make."""
    options: dict = {}  # noqa: RUF012 - never changed
    """Options for `soundfile.SoundFile`."""
    tells_truncation: bool = True
    """Whether a file that is cut anywhere is noticed."""


KINDS = {
    "wav-u8": Kind("wav", "WAV", "PCM_U8"),
    "wav-16": Kind("wav", "WAV", "PCM_16"),
    "wav-24": Kind("wav", "WAV", "PCM_24"),
    "wav-32": Kind("wav", "WAV", "PCM_32"),
    "wav-float": Kind("wav", "WAV", "FLOAT"),
    "wav-double": Kind("wav", "WAV", "DOUBLE"),
    "wav-mulaw": Kind("wav", "WAV", "ULAW"),
    "wav-alaw": Kind("wav", "WAV", "ALAW"),
    "wav-adpcm": Kind("wav", "WAV", "IMA_ADPCM"),
    "wav-gsm": Kind("wav", "WAV", "GSM610", channels=1),
    "wavex": Kind("wav", "WAVEX", "PCM_24", channels=4),
    "rf64": Kind("wav", "RF64", "PCM_16"),
    "w64": Kind("w64", "W64", "PCM_16"),
    "aiff": Kind("aiff", "AIFF", "PCM_16"),
    "au": Kind("au", "AU", "PCM_16"),
    "sphere": Kind("sph", "NIST", "PCM_16"),
    "caf": Kind("caf", "CAF", "PCM_16", tells_truncation=False),
    "caf-alac": Kind("caf", "CAF", "ALAC_16", tells_truncation=False),
    "flac-16": Kind("flac", "FLAC", "PCM_16"),
    "flac-24": Kind("flac", "FLAC", "PCM_24", channels=1),
    "vorbis": Kind("ogg", "OGG", "VORBIS"),
    "opus": Kind("opus", "OGG", "OPUS", channels=1),
    "mp3-constant": Kind("mp3", "MP3", "MPEG_LAYER_III", options={"bitrate_mode": "CONSTANT"}),
    "mp3-variable": Kind(
        "mp3", "MP3", "MPEG_LAYER_III", channels=1, options={"bitrate_mode": "VARIABLE"}
    ),
}


def tone(
    seconds: float,
    rate: int = RATE,
    *,
    channels: int = 1,
    hertz: float = 440.0,
    seed: int | None = None,
):
    """A tone, float32 `[num_samples, channels]`; channel c is at (c + 1) * hertz.

    With a seed it waxes and wanes, and has noise: such a signal compresses to frames of
    different sizes."""
    at = np.arange(round(seconds * rate)) / rate
    samples = 0.4 * np.sin(2 * np.pi * hertz * np.outer(at, np.arange(1, channels + 1)))
    if seed is not None:
        noise = np.random.default_rng(seed).normal(scale=0.2, size=samples.shape)
        samples = (samples + noise) * np.abs(np.sin(2 * np.pi * 0.7 * at))[:, None] * 0.8
    return samples.astype(np.float32)


def write_audio(
    path: Path, samples: NDArray[np.float32], rate: int = RATE, kind: str = "wav-16"
) -> Path:
    """Write samples `[num_samples, channels]`, a second at a time: a large write crashes
    libsndfile's Vorbis."""
    _, container, subtype, _, options, _ = KINDS[kind]
    channels = samples.shape[1]
    with soundfile.SoundFile(
        path, "w", rate, channels, subtype, format=container, **options
    ) as file:
        for first in range(0, len(samples), rate):
            file.write(samples[first : first + rate])
    return path


def write_tone(
    path: Path, seconds: float = 1.0, rate: int = RATE, kind: str = "wav-16", **options
) -> Path:
    """Write a `tone`; the options are its."""
    return write_audio(path, tone(seconds, rate, **options), rate, kind)


def write_kind(folder: Path, kind: str, seconds: float = 3.0) -> Path:
    """Write a noisy tone of a kind to `folder/kind.suffix`."""
    path = folder / f"{kind}.{KINDS[kind].suffix}"
    return write_tone(path, seconds, kind=kind, channels=KINDS[kind].channels, seed=len(kind))


def patch_file(path: Path, at: int, new: bytes) -> Path:
    """Overwrite bytes of a file, in place."""
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(data)
    return path


def forget_flac_length(path: Path) -> Path:
    """Make a FLAC what an encoder writes into a pipe: STREAMINFO with 0 samples, for
    unknown."""
    return patch_file(path, 21, bytes([path.read_bytes()[21] & 0xF0, 0, 0, 0, 0]))


def forget_mp3_length(path: Path) -> Path:
    """Take away the first frame of an MP3, which holds no sound but says how much follows."""
    data = path.read_bytes()
    path.write_bytes(data[data.index(data[:2], 2) :])
    return path


def with_metadata(wav: bytes, num_entries: int) -> bytes:
    """A WAV of 44 bytes of header with a LIST chunk of that many comments before its
    samples."""
    entries = b"".join(
        b"I%03d" % (i % 1000) + struct.pack("<I", 4) + b"text" for i in range(num_entries)
    )
    body = wav[12:36] + b"LIST" + struct.pack("<I", 4 + len(entries)) + b"INFO" + entries + wav[36:]
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def bad_files(folder: Path) -> dict[str, tuple[Path, Reason]]:
    """Files that cannot be extracted whole, with why: by name, the path and the reason."""
    good = write_tone(folder / "good.wav", seed=1)
    bad: dict[str, tuple[Path, Reason]] = {
        "missing": (folder / "missing.wav", Reason.FILE_MISSING),
        "below a file": (good / "missing.wav", Reason.FILE_MISSING),
        "zero byte in the path": (Path(f"{folder}/zero\0byte.wav"), Reason.FILE_MISSING),
        "name too long": (folder / ("long" * 100), Reason.FILE_UNREADABLE),
        "folder": (folder / "folder.wav", Reason.FILE_MISSING),
        "pipe": (folder / "pipe.wav", Reason.FILE_MISSING),
    }
    (folder / "folder.wav").mkdir()
    os.mkfifo(folder / "pipe.wav")

    def add(name: str, reason: Reason, data: bytes) -> None:
        path = folder / name
        path.write_bytes(data)
        bad[name] = (path, reason)

    wav = good.read_bytes()
    add("empty.wav", Reason.EMPTY, b"")
    add("no-samples.wav", Reason.EMPTY, wav[:4] + struct.pack("<I", 36) + wav[8:40] + bytes(4))
    add("size-never-filled-in.wav", Reason.EMPTY, wav[:40] + bytes(4) + wav[44:])
    add(
        "text.wav",
        Reason.NOT_AUDIO,
        b"Printing, in the only sense with which we are at present concerned\n" * 50,
    )
    add("one-byte.wav", Reason.NOT_AUDIO, b"R")
    add("zeros.mp3", Reason.NOT_AUDIO, bytes(10000))
    noise = np.random.default_rng(2).bytes(5000)
    add("noise.wav", Reason.NOT_AUDIO, noise)
    add("noise.flac", Reason.NOT_AUDIO, b"fLaC" + noise)
    add("noise.ogg", Reason.NOT_AUDIO, b"OggS" + noise)
    add("noise.mp3", Reason.NOT_AUDIO, b"\xff\xfb" + noise)
    add("noise.raw", Reason.NOT_AUDIO, noise)
    add("no-data.wav", Reason.TRUNCATED, wav[:30])
    add("only-a-header.wav", Reason.TRUNCATED, wav[:44])
    add("metadata.wav", Reason.TRUNCATED, with_metadata(wav, 300)[:-1000])
    for name, kind in KINDS.items():
        if kind.tells_truncation:
            whole = write_kind(folder, name).read_bytes()
            add(f"truncated-{name}.{kind.suffix}", Reason.TRUNCATED, whole[: len(whole) * 2 // 3])
    for number, value in enumerate((np.nan, np.inf, -np.inf)):
        samples = tone(1.0, channels=2)
        samples[RATE // 2, 1] = value
        path = write_audio(folder / f"not-finite-{number}.wav", samples, kind="wav-float")
        bad[path.name] = (path, Reason.NON_FINITE_AUDIO)
    path = write_audio(folder / "not-finite.aiff", samples, kind="wav-double")
    bad[path.name] = (path, Reason.NON_FINITE_AUDIO)
    return bad
