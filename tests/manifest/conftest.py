"""What tests of manifests share."""

import pytest
from foreign_manifests import CLIPS


@pytest.fixture
def top(tmp_path):
    (tmp_path / "wavs").mkdir()
    for clip in CLIPS:
        (tmp_path / clip.path).write_text(clip.stem)
    return tmp_path
