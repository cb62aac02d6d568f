"""The corpora of tests about probes, and about extracting again."""

import numpy as np
import pytest
from corpora import Corpus
from small_models import speech_like


@pytest.fixture(scope="session")
def speech(tmp_path_factory) -> Corpus:
    """Eight clips of 0.2 to 1.6 s, no two of one length, the durations not in the
    manifest."""
    made = Corpus(tmp_path_factory.mktemp("speech"))
    for i in range(8):
        made.record(f"utt-{i}", f"{i}.wav", speech_like(0.213 + 0.201 * i, 16000, seed=i).numpy())
    return made


@pytest.fixture(scope="session")
def quarters(tmp_path_factory) -> Corpus:
    """Clips that are 0.25 all over, which is a tie between the two codewords of `Halves`."""
    made = Corpus(tmp_path_factory.mktemp("quarters"))
    for i in range(4):
        made.record(
            f"utt-{i}", f"{i}.wav", np.full(3217 + 1111 * i, 0.25, np.float32), subtype="FLOAT"
        )
    return made
