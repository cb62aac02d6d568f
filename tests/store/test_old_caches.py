"""Caches that earlier code has made open, verify, are repaired and extended.

Each archive in data/ holds the folder in which `featcache extract manifest.csv` was run: the audio, the manifest, the
configs, the cache, and what that code read of it (`golden.npz`). A version has four rows, of which one fails, in two
shards. `cache-0.1.0` was made at commit 74b3262, and `cache-7fc06bc` at the last one whose shards do not record their
version.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from damage import flip

import featcache
from featcache.store.selection import version_folders

DATA = Path(__file__).parent / "data"
VERSIONS = {"cache-0.1.0": ["fbank8"], "cache-7fc06bc": ["fbank8", "fbank8-uint8"]}
IDS = ["a", "b", "b-end"]
EXTRACTED_HERE = 0.06
"""What another machine's rounding may change: a level of uint8, at most."""
UNKNOWN_VERSION = "written by an earlier featcache, without their version's fingerprint: "


@pytest.fixture(params=VERSIONS)
def old(request, tmp_path) -> Path:
    """The folder of an old cache, unpacked."""
    shutil.unpack_archive(DATA / f"{request.param}.tar.gz", tmp_path, filter="data")
    (tmp_path / "names").write_text("\n".join(VERSIONS[request.param]))
    return tmp_path


def names_of(old: Path) -> list[str]:
    return (old / "names").read_text().split()


def assert_as_written(old: Path, atol: float = 0) -> None:
    """Every version has the values that the code that made it has read."""
    with np.load(old / "golden.npz") as file:
        golden = dict(file)
    assert len(golden) == len(IDS) * len(names_of(old))
    for name in names_of(old):
        cache = featcache.open(old / "features" / name, check=True)
        for id_ in IDS:
            ((features,), _) = cache.batch([id_])
            np.testing.assert_allclose(features.numpy(), golden[f"{name}/{id_}"], rtol=0, atol=atol)


def test_it_opens(old):
    """With its values, columns and failure; nothing of it is extracted again."""
    assert_as_written(old)
    for name in names_of(old):
        cache = featcache.open(old / "features" / name)
        assert list(featcache.FeatureDataset(cache, _without_failed(old)).ids) == IDS
        with pytest.raises(featcache.errors.MissingItemError, match="not_audio"):
            cache["junk"]


def test_it_verifies(cli, old):
    """No damage; a note says what cannot be known of shards that do not record their version."""
    found = cli("verify", old / "features", "--manifest", old / "manifest.csv", "--root", old, "--recompute", 3)
    assert found.code == 3, found.err  # the failure that it has
    count = len(names_of(old))
    assert found.out.count("no damage found") == found.out.count("1 utterance is in the failure ledger") == count
    assert found.out.count(f"{UNKNOWN_VERSION}2 of 2 shards") == count
    assert found.out.count("extracted 3 again: ") == count


def test_it_is_repaired(cli, old):
    """A damaged utterance is extracted again, into a shard that records its version; the others stay."""
    for folder in version_folders(old / "features"):
        flip(max(folder.glob("shards/*/features/c/0/0"), key=lambda path: path.stat().st_size), 9)  # of a and b
    assert cli("verify", old / "features").code == 1
    repaired = cli("repair", old / "features", "--manifest", old / "manifest.csv", "--root", old)
    assert repaired.code == 0, repaired.err
    found = cli("verify", old / "features", "--manifest", old / "manifest.csv")
    assert (found.code, found.out.count("no damage found")) == (3, len(names_of(old))), found.out
    assert repaired.out.count("1 utterance kept, 1 extracted again") == len(names_of(old))
    assert_as_written(old, EXTRACTED_HERE)


def test_it_is_extended(cli, old):
    """`extract` adds what is new to the versions that are there, and extracts nothing again."""
    shutil.copy(old / "audio" / "a.flac", old / "audio" / "new.flac")
    with (old / "manifest.csv").open("a") as manifest:
        manifest.write("new,audio/new.flac,,\n")
    configs = [word for name in names_of(old) for word in ("-c", old / f"{name}.yaml")]
    made = cli("extract", old / "manifest.csv", "-o", old / "features", *configs)
    assert made.code == 3, made.err
    assert made.out.count("5 utterances: 1 extracted") == made.out.count("3 already there, 1 failed")
    assert len(version_folders(old / "features")) == made.out.count("1 extracted") == len(names_of(old))
    assert_as_written(old)
    for name in names_of(old):
        cache = featcache.open(old / "features" / name)
        np.testing.assert_allclose(cache["new"], cache["a"], rtol=0, atol=EXTRACTED_HERE)
    found = cli("verify", old / "features", "--manifest", old / "manifest.csv")
    assert found.out.count(f"{UNKNOWN_VERSION}2 of 3 shards") == len(names_of(old))


def _without_failed(old: Path) -> Path:
    """The manifest without the row that fails."""
    path = old / "sound.csv"
    rows = (old / "manifest.csv").read_text().splitlines(keepends=True)
    path.write_text("".join(row for row in rows if not row.startswith("junk")))
    return path
