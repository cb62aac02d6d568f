"""Real speech for tests: in the folder FEATCACHE_TEST_DATA, or beside the checkout; a
test that asks for it is skipped where it is in neither."""

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

DATA = Path(os.environ.get("FEATCACHE_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data")


def sentences(count: int) -> list[tuple[np.ndarray, int]]:
    """Read sentences at 22.05 kHz: waveforms, and their rate."""
    return _read("ljspeech/wav", count)


def digits(count: int) -> list[tuple[np.ndarray, int]]:
    """Spoken digits at 8 kHz: waveforms, and their rate."""
    return _read("fsdd/recordings", count)


def _read(folder: str, count: int) -> list[tuple[np.ndarray, int]]:
    paths = sorted((DATA / folder).glob("*.wav"))
    if not paths:
        pytest.skip(f"no speech in {DATA / folder}")
    return [
        soundfile.read(path, dtype="float32")
        for path in paths[:: max(1, len(paths) // count)][:count]
    ]
