"""A corpus of real speech gives the same features, bit for bit, in whatever format its
manifest is."""

import csv

import numpy as np
import pytest
from foreign_manifests import RATE, WRITERS, Clip, dataset, shar
from real_speech import DATA

import featcache
from featcache.manifest.read import read_manifest

PACKED = ("datasets of arrow", "datasets of parquet", "shar")
"""Forms of tools in which the audio is inside of containers; of other containers:
`test_containers.py`."""

DIGITS = DATA / "fsdd"


@pytest.fixture(scope="module")
def clips():
    if not (DIGITS / "manifest.csv").exists():
        pytest.skip("the real data is not here")
    with (DIGITS / "manifest.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        Clip(
            f"wavs/{row['id']}.wav",
            round(float(row["duration"]) * RATE),
            f"digit {row['digit']}",
            row["speaker"],
        )
        for row in rows
    ]


@pytest.fixture(scope="module")
def expected(clips, tmp_path_factory):
    cache = tmp_path_factory.mktemp("expected")
    featcache.extract(DIGITS / "manifest.csv", "fbank80", cache)
    return featcache.open(cache)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WRITERS, *PACKED])
def test_features_are_the_same_in_every_format(clips, expected, tmp_path, name):
    (tmp_path / "wavs").mkdir()  # as every format has them
    for path in (DIGITS / "recordings").glob("*.wav"):
        (tmp_path / "wavs" / path.name).symlink_to(path)
    if name.startswith("datasets"):
        pytest.importorskip("pyarrow")
        written = dataset(tmp_path, clips, name.endswith("arrow"))
    elif name == "shar":
        pytest.importorskip("lhotse")
        written = shar(tmp_path, clips)
    else:
        written = WRITERS[name](tmp_path, clips)
    # `digit 3` may be a name as well as what is said
    is_said = name in ("piper", "styletts2", "vits")
    manifest = read_manifest(
        written.manifest, values=written.values, format=name if is_said else None
    )
    summary = featcache.extract(manifest, "fbank80", tmp_path / "cache")
    assert summary.failed == 0
    cache = featcache.open(tmp_path / "cache")
    assert len(cache) == len(clips)
    in_order = sorted(clips, key=lambda clip: clip.path) if name == "folder" else clips
    for id_, clip in zip(written.ids, in_order, strict=True):
        np.testing.assert_array_equal(cache[id_], expected[clip.stem])
