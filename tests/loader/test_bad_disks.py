"""Disks that fail while a cache is read: files truncated where they are, and sectors that cannot be read.

Each in a process of its own, which the kernel would end by SIGBUS if what it reads were mapped.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from make_cache import in_three_shards, make_features, make_version
from processes import TESTS, run_python, run_script

import featcache
from featcache.spec import SideSpec

PATH = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])

READERS = """
import json, os, sys, torch, featcache
from featcache.errors import FeatcacheError

def all_of(cache):
    return {
        "item": lambda: [cache.item(id_, check=True) for id_ in cache.ids],
        "span": lambda: [cache.item(id_, start=0, duration=0.02, check=True) for id_ in cache.ids],
        "batch": lambda: cache.batch(range(len(cache)), check=True),
        "parts": lambda: cache.batch(range(len(cache)), start=0, duration=0.02, check=True),
    }

def tried(function):
    try:
        function()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""


@pytest.fixture
def version(tmp_path):
    """Of three shards, whose features are long enough for a page of their own."""
    side = (SideSpec("scales", (), "float32", ""),)
    return make_version(tmp_path / "c", *in_three_shards(make_features(20, max_frames=400)), side=side)


@pytest.fixture
def quantized(tmp_path):
    return make_version(tmp_path / "q", *in_three_shards(make_features(20, max_frames=400)), quantized=True)


def features_of(version, number=2) -> Path:
    name = featcache.open(version.path).index.shards[number]
    return version.shard(name).folder / "features" / "c" / "0" / "0"


@pytest.mark.parametrize("kind", ["version", "quantized"])
def test_a_file_that_is_truncated_while_it_is_open_is_damage_with_check(cli, request, kind):
    version = request.getfixturevalue(kind)
    script = (
        READERS
        + """
cache = featcache.open(sys.argv[1], check=True)
loader = featcache.DataLoader(featcache.FeatureDataset(cache, sys.argv[3]), [range(0, 10), range(10, 20)])
cache.batch(range(len(cache)))  # all is open
os.truncate(sys.argv[2], 100)
found = {name: tried(read) for name, read in all_of(cache).items()} | {"loader": tried(lambda: [*loader])}
print(json.dumps(found))
"""
    )
    manifest = version.path / "ids.csv"
    manifest.write_text("\n".join(["id", *featcache.open(version.path).ids]) + "\n")
    found = json.loads(run_script(cli, script, version.path, features_of(version), manifest))
    assert len(found) == 5
    for message in found.values():
        assert message.startswith("DamagedError: ")
        assert "damaged: " in message
        assert f"`featcache repair {version.path}" in message


def test_a_copy_on_a_local_disk_that_is_truncated_is_to_be_removed(cli, version, tmp_path):
    script = (
        READERS
        + """
import pathlib, time
cache = featcache.open(sys.argv[1], check=True, copy_to=sys.argv[2])
copies = lambda: [path for path in pathlib.Path(sys.argv[2]).glob("featcache/*/????????????????") if not path.suffix]
while len(copies()) < 3 or cache._shards.copies.is_at_work:
    cache.batch(range(len(cache)))
    time.sleep(0.001)
cache.batch(range(len(cache)))
assert len(cache._shards._copied) == 3
for path in copies():
    os.truncate(path, 100)
print(json.dumps({name: tried(read) for name, read in all_of(cache).items()}))
"""
    )
    for message in json.loads(run_script(cli, script, version.path, tmp_path / "disk")).values():
        assert message.startswith("DamagedError: ")
        assert str(tmp_path / "disk") in message
        assert message.endswith("remove this copy")


def test_statistics_read_from_the_file(cli, version):
    """Whole shards, without `check`: what the disk refuses is an error here too."""
    script = (
        READERS
        + """
from featcache.stats import moments
cache = featcache.open(sys.argv[1])
list(cache.values())
read = cache._shards._file(2)
os.truncate(sys.argv[2], 100)
print(json.dumps([tried(lambda: moments(cache)), tried(lambda: cache.shard_frames(2, 0, 50))]))
"""
    )
    for message in json.loads(run_script(cli, script, version.path, features_of(version))):
        assert message.startswith("DamagedError: ")
        assert "it ends before byte" in message


# Bad sectors


@pytest.fixture(scope="module")
def bad_disk(tmp_path_factory):
    """A library that makes reading one file fail with EIO."""
    if shutil.which("gcc") is None:
        pytest.skip("a bad sector is made with gcc")
    library = tmp_path_factory.mktemp("eio") / "eio.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-o", library, TESTS / "eio.c"]
    subprocess.run(command, check=True)
    return library


FILES = ["zarr.json", "features/c/0/0", "items/c/0/0", "text/c/0", "side_scales/c/0", "../../zarr.json"]


def test_a_bad_sector_is_damage_wherever_it_is(version, bad_disk):
    """Reading with `check`, and the commands: one line that names the file, and never a bare OSError."""
    script = (
        READERS
        + """
import shutil
from click.testing import CliRunner
from featcache.cli import main
from featcache.version.version import Version
path, shard, files = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
found = {}
for name in files:
    shutil.rmtree(f"{path}/index", ignore_errors=True)
    os.environ["EIO_PATH"] = os.path.normpath(f"{shard}/{name}")
    os.environ["EIO_FROM"] = "2000" if name == "features/c/0/0" else "0"
    def read():
        cache = featcache.open(path, check=True)
        cache.batch(range(len(cache)))
        [cache.side("scales", id_) for id_ in cache.ids]
    found[name] = {"read": tried(read)}
    quick = ["verify", path, "--no-data"]
    for command in (["stats", path], ["show", path, "utt-12"], ["info", path], ["verify", path], quick):
        done = CliRunner().invoke(main, command)
        is_bare = done.exception is not None and not isinstance(done.exception, SystemExit)
        found[name][" ".join([command[0], *command[2:]])] = [done.exit_code, done.output, is_bare]
print(json.dumps(found))
"""
    )
    shard = features_of(version).parents[3]
    env = {**os.environ, "PYTHONPATH": PATH, "LD_PRELOAD": str(bad_disk)}
    found = json.loads(run_python(script, version.path, shard, json.dumps(FILES), env=env))
    assert {*found} == {*FILES}
    for name, by_reader in found.items():
        assert by_reader["read"].startswith("DamagedError: "), (name, by_reader["read"])
        commands = {reader: ended for reader, ended in by_reader.items() if reader != "read"}
        for reader, (code, output, is_bare) in commands.items():
            assert not is_bare, (name, reader, output)
            assert code in (0, 1)
            if code:
                assert "Input/output error" in output, (name, reader, output)
        assert by_reader["verify"][0] == 1, (name, by_reader["verify"][1])
    assert [name for name, by_reader in found.items() if by_reader["stats"][0] == 0] == ["side_scales/c/0"]
    assert found["features/c/0/0"]["show utt-12"][0] == 1


def test_repair_keeps_what_is_not_on_the_bad_sector(cache, plain, sound, bad_disk):
    """The damaged shard is read as far as it goes; what is lost is extracted again."""
    from cache_contents import items, only_version
    from damage import victim

    path = victim(cache).folder / "features" / "c" / "0" / "0"
    path_size = path.stat().st_size
    script = """
import json, sys
from pathlib import Path
from featcache.extraction.plan import Options
from featcache.care.repair import repair
from featcache.manifest import read_manifest
done = repair(Path(sys.argv[1]), read_manifest(sys.argv[2]), Options("cpu", 1))
print(json.dumps([len(done.removed), done.kept, done.extracted]))
"""
    env = {**os.environ, "PYTHONPATH": PATH, "LD_PRELOAD": str(bad_disk)}
    env |= {"EIO_PATH": str(path), "EIO_FROM": str(path_size // 2)}
    removed, kept, extracted = json.loads(run_python(script, only_version(cache).path, plain.manifest(), env=env))
    assert removed == 1
    assert kept > 0
    assert extracted > 0
    assert items(cache) == items(sound)
