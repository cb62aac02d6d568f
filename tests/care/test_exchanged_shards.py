"""A shard knows its version: one of another version is never read as this one's, and never thrown away as damaged."""

import shutil
from pathlib import Path

import pytest
from damage import mend

import featcache
from featcache.care.verify import verify
from featcache.errors import DamagedError
from featcache.version.version import Version


@pytest.fixture(scope="module")
def two(cli, plain, tmp_path_factory) -> Path:
    """A cache of two versions, at a frame shift of 10 and of 12.5 ms, each in some shards."""
    folder = tmp_path_factory.mktemp("two")
    for name, shift in (("a", 10.0), ("b", 12.5)):
        (folder / f"{name}.yaml").write_text(f"name: {name}\nextractor: fbank\nparams: {{frame_shift: {shift}}}\n")
    configs = ("-c", folder / "a.yaml", "-c", folder / "b.yaml")
    assert cli("extract", plain.manifest(), *configs, "-o", folder / "cache", "--shard-size", "0.04").code == 0
    return folder / "cache"


@pytest.fixture
def pair(two, scratch) -> tuple[Version, Version]:
    """A copy of both versions, to spoil."""
    return versions(Path(shutil.copytree(two, scratch / "cache")))


def versions(cache: Path) -> tuple[Version, Version]:
    a, b = (Version.open(path) for path in sorted(cache.glob("[ab]-*")))
    return a, b


def values(version: Version) -> dict[str, bytes]:
    cache = featcache.open(version.path, check=True, strict=True)
    return {id_: cache[id_].tobytes() for id_ in cache.ids}


def test_a_foreign_shard_is_noticed_by_every_command(cli, pair):
    a, b = pair
    shutil.copytree(b.path / "shards", a.path / "shards", dirs_exist_ok=True)
    what = f"belongs to another version ({b.info.fingerprint[:12]})"
    with pytest.raises(DamagedError, match=r"belongs to another version .*featcache repair"):
        featcache.open(a.path)
    for command in ("verify", "stats", "info"):
        finished = cli(command, a.path)
        assert finished.code == 1
        assert what in finished.out + finished.err


def test_shards_copied_beside_anothers_are_taken_away(plain, two, pair):
    """Nothing was lost, and nothing is extracted again."""
    a, b = pair
    shutil.copytree(b.path / "shards", a.path / "shards", dirs_exist_ok=True)
    done = mend(a.path, plain.manifest())
    assert (done.extracted, done.aside, {*done.removed}) == (0, {}, {*b.shard_names()})
    for mended, before in zip(pair, versions(two), strict=True):
        assert mended.shard_names() == before.shard_names()
        assert values(mended) == values(before)
        assert verify(mended).problems == []


def test_a_shard_that_was_moved_goes_back_to_its_version_or_aside(plain, two, pair):
    """Aside, where its version is not in the cache; and can be moved back."""
    a, b = pair
    sound = values(versions(two)[0])
    first, second = a.shard_names()[:2]
    (a.path / "shards" / first).rename(b.path / "shards" / first)
    assert mend(b.path, plain.manifest()).aside == {}
    assert values(a) == sound
    (a.path / "shards" / second).rename(b.path / "shards" / second)
    elsewhere = a.path.rename(a.path.parent.parent / f"elsewhere-{a.path.parent.name}")
    try:
        ((place, fingerprint),) = mend(b.path, plain.manifest()).aside.items()
        assert fingerprint == a.info.fingerprint
        assert values(b) == values(versions(two)[1])
        Path(place).rename(elsewhere / "shards" / second)
        assert values(Version.open(elsewhere)) == sound
    finally:
        shutil.rmtree(elsewhere)
