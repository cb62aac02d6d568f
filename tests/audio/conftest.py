"""Noises, for tests of them and of copies."""

import numpy as np
import pytest
import soundfile
from audio_files import RATE


@pytest.fixture(scope="session")
def noises(tmp_path_factory):
    """Noises long and short, at other rates, of several channels, and a segment of one."""
    folder = tmp_path_factory.mktemp("noise")
    generator = np.random.default_rng(1)

    def write(name, seconds, rate, channels=1):
        soundfile.write(
            folder / name, 0.1 * generator.normal(size=(int(seconds * rate), channels)), rate
        )

    write("long.wav", 5.0, RATE)
    write("short.flac", 0.11, RATE)
    write("slow.wav", 2.0, 8000)
    write("stereo.wav", 1.5, 22050, 2)
    (folder / "noises.csv").write_text(
        "id,path,start,duration,channel\nlong,long.wav,,,\nshort,short.flac,,,\nslow,slow.wav,,,\n"
        "mix,stereo.wav,,,\nright,stereo.wav,,,1\npart,long.wav,1.25,1.5,\n"
    )
    return folder
