"""A shard knows its version: one of another version is never read as this one's, and never thrown away as damaged."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import Corpus
from damage import CHUNKS, flip
from small_shards import INFO, SIDE, SIDED, item, write

import featcache
from featcache.errors import DamagedError
from featcache.extraction.plan import Options
from featcache.health.repair import Repaired, repair
from featcache.health.verify import verify
from featcache.manifest import read_manifest
from featcache.store import zarr3
from featcache.store.shard import Shard
from featcache.store.version import Version

FEATURES = CHUNKS["features"]


@pytest.fixture(scope="module")
def two(cli, plain, tmp_path_factory) -> Path:
    """A cache of two versions, at a frame shift of 10 and of 12.5 ms, each in three shards of the same names."""
    folder = tmp_path_factory.mktemp("two")
    for name, shift in (("a", 10.0), ("b", 12.5)):
        (folder / f"{name}.yaml").write_text(f"name: {name}\nextractor: fbank\nparams: {{frame_shift: {shift}}}\n")
    configs = ("-c", folder / "a.yaml", "-c", folder / "b.yaml")
    assert cli("extract", plain.manifest(), *configs, "-o", folder / "cache", "--shard-size", "0.04").code == 0
    a, b = versions(folder / "cache")
    assert a.shard_names() == b.shard_names()
    assert len(a.shard_names()) >= 3
    return folder / "cache"


@pytest.fixture
def pair(two, scratch) -> tuple[Version, Version]:
    """A copy of both versions, to spoil."""
    return versions(Path(shutil.copytree(two, scratch / "cache")))


def versions(cache: Path) -> tuple[Version, Version]:
    a, b = (Version.open(path) for path in sorted(cache.glob("[ab]-*")))
    return a, b


def values(version: Version) -> dict[str, bytes]:
    cache = featcache.open(version.path, check=True)
    return {id_: cache[id_].tobytes() for id_ in cache.ids}


def mend(version: Version, plain: Corpus) -> Repaired:
    return repair(version.path, read_manifest(plain.manifest()), Options("cpu", 1))


def exchange(shard: Path, other: Path) -> None:
    shard.rename(shard.with_name("aside"))
    other.rename(shard)
    shard.with_name("aside").rename(other)


def test_an_exchanged_shard_is_noticed_by_all_that_read_it(cli, plain, two, pair):
    """Opened with and without a check; and by every command, though both versions are sound in themselves."""
    a, b = pair
    name = a.shard_names()[1]
    inside = set(a.shard(name).ids)
    exchange(a.shard(name).folder, b.shard(name).folder)
    sound = values(versions(two)[0])
    what = (
        f"{name}: belongs to another version ({b.info.fingerprint[:12]}), not to this one ({a.info.fingerprint[:12]})"
    )
    for check in (False, True):
        cache = featcache.open(a.path, check=check)
        for id_ in cache.ids:
            if id_ in inside:
                with pytest.raises(DamagedError) as raised:
                    cache[id_]
                assert what in str(raised.value)
                assert f"featcache repair {a.path}" in str(raised.value)
            else:
                assert cache[id_].tobytes() == sound[id_]
        with pytest.raises(DamagedError):
            cache.batch(list(inside))
    manifest = plain.manifest()
    for command in (
        ("verify", a.path, "--manifest", manifest),
        ("verify", a.path, "--no-data"),
        ("stats", a.path),
        ("info", a.path),
        ("show", a.path, min(inside)),
        ("fit-kmeans", a.path, "-k", "2", "-o", pair[0].path.parent / "centroids.safetensors"),
    ):
        told = cli(*command)
        assert told.code == 1
        assert what in told.out + told.err
    shutil.rmtree(a.path / "index")
    with pytest.raises(DamagedError, match="belongs to another version"):
        featcache.open(a.path)


def test_repair_undoes_an_exchange(cli, plain, two, pair):
    """Both versions are what they were; of the shard that was nowhere else, nothing is lost."""
    a, b = pair
    expected = [values(version) for version in versions(two)]
    name = a.shard_names()[1]
    theirs = (b.shard(name).folder / FEATURES).read_bytes()
    inside = set(a.shard(name).ids)
    exchange(a.shard(name).folder, b.shard(name).folder)
    repaired = cli("repair", a.path.parent, "--manifest", plain.manifest())
    assert repaired.code == 0, repaired.err
    assert repaired.out.count(f"1 damaged shard: 0 utterances kept, {len(inside)} extracted again") == 2
    (aside,) = (a.path / "aside").iterdir()
    assert f"set aside {aside}: this shard belongs to the version {b.info.fingerprint[:12]}" in repaired.out
    assert (aside / FEATURES).read_bytes() == theirs
    assert not (b.path / "aside").exists()  # by then `a` has its own again
    assert [values(version) for version in pair] == expected
    assert cli("verify", a.path.parent, "--manifest", plain.manifest()).code == 0


@pytest.mark.parametrize("has_index", [True, False])
def test_shards_copied_over_anothers_are_taken_away(plain, two, pair, has_index):
    """`cp -r a/shards/* b/shards/`: nothing of them is kept, for `a` has them; and `b` is extracted again."""
    a, b = pair
    expected = values(versions(two)[1])
    shutil.copytree(a.path / "shards", b.path / "shards", dirs_exist_ok=True)
    assert {problem.shard for problem in verify(b).problems} == set(b.shard_names())
    if not has_index:
        shutil.rmtree(b.path / "index")
    done = mend(b, plain)
    assert (done.kept, done.extracted, done.aside) == (0, 12, {})
    assert values(b) == expected
    assert values(a) == values(versions(two)[0])
    assert (verify(b).problems, verify(b).notes) == ([], [])


def test_shards_copied_beside_anothers_are_taken_away(cli, plain, two, scratch):
    """Other utterances in each shard, so other names: nothing was lost, and nothing is extracted again."""
    cache = Path(shutil.copytree(two, scratch / "cache"))
    a, b = versions(cache)
    shutil.rmtree(b.path)
    config = two.parent / "b.yaml"
    assert cli("extract", plain.manifest(), "-c", config, "-o", cache, "--shard-size", "1").code == 0
    (own,) = b.shard_names()
    expected = values(b)
    shutil.copytree(a.path / "shards", b.path / "shards", dirs_exist_ok=True)
    with pytest.raises(DamagedError, match="belongs to another version"):
        featcache.open(b.path)
    done = mend(b, plain)
    assert (done.kept, done.extracted, done.aside) == (0, 0, {})
    assert b.shard_names() == [own]
    assert values(b) == expected
    # Nor are they needed in the manifest: nothing says that this version has held them.
    shutil.copytree(a.path / "shards", b.path / "shards", dirs_exist_ok=True)
    few = plain.manifest(plain.rows[:2], "few.csv")
    assert repair(b.path, read_manifest(few), Options("cpu", 1)).aside == {}
    assert values(b) == expected


def test_a_shard_that_its_own_version_lacks_is_set_aside(cli, plain, two, pair):
    """Moved and not copied: it can be moved back."""
    a, b = pair
    name = a.shard_names()[0]
    shutil.rmtree(b.shard(name).folder)
    a.shard(name).folder.rename(b.shard(name).folder)
    done = mend(b, plain)
    ((place, fingerprint),) = done.aside.items()
    assert fingerprint == a.info.fingerprint
    assert values(b) == values(versions(two)[1])
    Path(place).rename(a.shard(name).folder)
    assert verify(a).problems == []
    assert values(a) == values(versions(two)[0])


def test_a_foreign_shard_is_not_copied_to_a_local_disk(pair, scratch):
    """Nor read from there."""
    a, b = pair
    name = a.shard_names()[0]
    exchange(a.shard(name).folder, b.shard(name).folder)
    cache = featcache.open(a.path, copy_to=scratch / "disk")
    for id_ in Shard(a.shard(name).folder, None).ids:
        with pytest.raises(DamagedError, match="belongs to another version"):
            cache[id_]
    assert not list((scratch / "disk").rglob(f"{name}-*"))


def forget(shard: Shard) -> None:
    """Make a shard what an earlier featcache wrote: without the fingerprint, and sealed."""
    attributes = zarr3.read_group(shard.folder)
    del attributes["made_by"]["fingerprint"]
    (shard.folder / "zarr.json").write_bytes(zarr3.group_metadata(attributes))


def test_a_shard_that_says_nothing_is_read_verified_and_repaired(cli, plain, two, pair):
    """As earlier featcaches wrote them: verify says what it cannot know, and what repair keeps says no more."""
    a, _ = pair
    expected = values(versions(two)[0])
    for name in a.shard_names()[:2]:
        forget(a.shard(name))
    assert values(a) == expected
    verified = cli("verify", a.path, "--manifest", plain.manifest())
    assert verified.code == 0
    assert f"without their version's fingerprint: 2 of {len(a.shard_names())} shards" in verified.out
    assert "no damage found" in verified.out
    spoilt = max(map(a.shard, a.shard_names()[:2]), key=lambda shard: shard.info.items)
    flip(spoilt.folder / FEATURES, 10)
    before = set(a.shard_names())
    done = mend(a, plain)
    assert (done.kept > 0, done.extracted) == (True, 1)
    assert values(a) == expected
    stated = {name: a.shard(name).stated_version for name in {*a.shard_names()} - before}
    assert sorted(stated.values(), key=str) == sorted([None, a.info.fingerprint], key=str)


def test_earlier_featcaches_read_what_is_written_now(two):
    """They know no other keys of a shard than these, and take any in `made_by`."""
    a, _ = versions(two)
    for name in a.shard_names():
        document = json.loads((a.shard(name).folder / "zarr.json").read_text())["attributes"]["featcache"]
        known = {"items", "frames", "seconds", "digest", "row", "supersedes", "metadata", "made_by", "checksum"}
        assert set(document) == known
        assert document["made_by"]["fingerprint"] == a.info.fingerprint


def test_nothing_of_a_foreign_shard_is_given(scratch):
    """Whatever is asked of it; and no shard is committed in its place."""
    own, other = Version.create(scratch, SIDED), Version.create(scratch, replace(SIDED, fingerprint="f" * 64))
    side = {SIDE[0].name: (np.ones(1, np.float32), [1]), SIDE[1].name: (np.ones((1, 2), np.uint16), [1])}
    theirs = write(other, [item("a")], side=side)
    shutil.copytree(theirs.folder, own.path / "shards" / theirs.name)
    for ask in (
        lambda shard: shard.info,
        lambda shard: shard.features,
        lambda shard: shard.offsets,
        lambda shard: shard.ids,
        lambda shard: shard.paths,
        lambda shard: shard.column("crc32c"),
        lambda shard: shard.side("scales"),
        lambda shard: shard.side("marks", check=True),
        lambda shard: list(shard.items()),
        lambda shard: shard.num_bytes(own.info.spec),
    ):
        with pytest.raises(DamagedError, match="belongs to another version"):
            ask(own.shard(theirs.name))
    with pytest.raises(DamagedError, match="belongs to another version"):
        write(own, [item("a")], side=side)
    assert own.shard(theirs.name).stated_version == other.info.fingerprint


def test_what_superseded_items_is_extracted_again_with_them(scratch):
    """Where the index is lost: what the shard that was replaced had taken the place of does not come back."""
    from featcache.store.damaged import plan_repairs

    own, other = Version.create(scratch, INFO), Version.create(scratch, replace(INFO, fingerprint="f" * 64))
    for version in (own, other):
        first = write(version, [item("a"), item("b")], run="1")
        second = write(version, [item("b", start=1.0)], supersedes={first.name: [1]}, run="2")
    shutil.rmtree(own.shard(second.name).folder)
    shutil.copytree(other.shard(second.name).folder, own.path / "shards" / second.name)
    (found,) = plan_repairs(own, [second.name])
    assert ([*found.again], found.kept, found.was_held) == (["b"], [], False)
