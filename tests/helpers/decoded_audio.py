"""What `featcache.audio.decode` gives for one segment of a file, and what another decoder
gives."""

import numpy as np
import soundfile
from audio_files import RATE

from featcache.audio.decode import Cut, decode
from featcache.errors import AudioError

WHOLE = Cut()


def samples_of(path, segment=WHOLE, **options) -> np.ndarray:
    """Its samples, `[num_samples, channels]`; raises the AudioError if there is one."""
    (result,) = decode(path, [segment], **options)
    if isinstance(result, AudioError):
        raise result
    return result[0]


def fault_of(path, segment=WHOLE, **options) -> AudioError:
    """What is wrong with it."""
    (result,) = decode(path, [segment], **options)
    assert isinstance(result, AudioError)
    return result


def read_whole(path) -> np.ndarray:
    """All samples, in one read from the start."""
    with soundfile.SoundFile(path) as file:
        return file.read(file.frames, "float32", always_2d=True)


def in_seconds(first: int, stop: int, rate: int = RATE) -> Cut:
    return Cut(first / rate, (stop - first) / rate)
