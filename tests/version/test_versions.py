"""Versions are made once, found again, and told apart."""

import os
from dataclasses import replace

import pytest
import zarr
from damage import each_flip, flip
from forking import fork, join
from msgspec import structs, to_builtins
from small_shards import INFO, SIDED, SPEC, create

from featcache.errors import DamagedError, StoreError
from featcache.format.writing import seal_group
from featcache.storage.directory import Directory
from featcache.version.selection import select_version, select_versions, version_folders
from featcache.version.version import Version


@pytest.mark.parametrize("info", [INFO, SIDED], ids=["plain", "sided"])
def test_a_version_is_found_again(scratch, info):
    made = create(scratch, info)
    assert made.path == scratch / "mine-0123456789ab"
    assert create(scratch, info).info == made.info == info
    assert version_folders(scratch) == version_folders(made.path) == [made.path]
    assert select_version(scratch, "mine").path == made.path
    assert select_version(scratch, "mine-0123456789ab").path == made.path
    group = zarr.open_group(made.path, mode="r")
    assert list(group["shards"].group_keys()) == []
    assert group.attrs["featcache"]["format"] == 2


def test_several_versions_of_a_name_are_told_apart(scratch):
    create(scratch, structs.replace(INFO, config={"params": {"low_freq": 20.0, "bins": 80}}))
    create(
        scratch,
        structs.replace(
            INFO, fingerprint="f" * 64, config={"params": {"low_freq": 0.0, "bins": 80}}
        ),
    )
    with pytest.raises(StoreError, match=r"2 versions.*params.low_freq: 20.0 -> 0.0"):
        select_version(scratch, "mine")
    assert select_version(scratch, "mine-ffffffffffff").info.fingerprint == "f" * 64
    with pytest.raises(StoreError, match="no version called 'yours'; it holds mine-"):
        select_version(scratch, "yours")


@pytest.mark.parametrize(
    ("document", "error"),
    [(b"{}", DamagedError), (seal_group({"format": 3, "spec": {}}, ""), StoreError)],
)
def test_a_version_that_cannot_be_read_does_not_hide_another(scratch, document, error):
    """Because it is damaged, or of another format."""
    create(scratch)
    other = create(scratch, structs.replace(INFO, name="other"))
    (other.path / "zarr.json").write_bytes(document)
    assert select_version(scratch, "mine").info == INFO
    for name in (None, "other", other.path.name):
        with pytest.raises(error):
            select_versions(scratch, name)


def test_what_is_no_cache_is_said_to_be_none(scratch):
    (scratch / "file").write_text("")
    (scratch / "empty").mkdir()
    for path, words in (
        (scratch / "gone", "no such cache"),
        (scratch / "file", "file: is a file, not a cache folder"),
        (scratch / "empty", "empty: holds no version: `featcache extract` creates one"),
        (scratch / "empty" / "..", "holds no version"),
        (scratch, "no version"),
    ):
        with pytest.raises(StoreError, match=words):
            version_folders(path)


def test_a_path_may_name_a_version_by_its_config(scratch):
    """Where the cache holds one of that name, else it says which there are; its metadata
    may be damaged. A folder of that name comes first."""
    made = create(scratch)
    with pytest.raises(
        StoreError,
        match=rf"mien: there is no such cache folder \(did you mean mine\?\); {scratch} holds {made.path.name}$",
    ):
        version_folders(scratch / "mien")
    create(scratch, structs.replace(INFO, name="other"))
    assert version_folders(scratch / "mine") == [made.path]
    assert [version.path for version in select_versions(scratch / "mine")] == [made.path]
    assert select_version(scratch / "mine").path == made.path
    flip(made.path / "zarr.json", 100)
    assert version_folders(scratch / "mine") == [made.path]
    again = create(scratch, structs.replace(INFO, fingerprint="f" * 64))
    for ask in (version_folders, select_version):
        with pytest.raises(
            StoreError,
            match=f"{scratch}: holds 2 versions: {made.path.name}, {again.path.name}; name",
        ):
            ask(scratch / "mine")
    (scratch / "mine" / "mine").mkdir(parents=True)
    with pytest.raises(StoreError, match="mine: holds no version"):
        version_folders(scratch / "mine")


@pytest.mark.parametrize("dtype", ["float16", "uint16"])
def test_every_flipped_bit_of_a_versions_document_is_noticed(scratch, dtype):
    version = create(scratch, structs.replace(INFO, spec=replace(SPEC, dtype=dtype)))
    path = version.path / "zarr.json"
    for _ in each_flip(path):
        with pytest.raises(DamagedError, match=f"^{path}: damaged: .*featcache repair"):
            Version.open(version.path)
    sound = to_builtins(version.info)
    for name, value in {
        "item_shape": [1 << 22, 1 << 22],
        "codebook_sizes": [1 << 24, 1 << 24],
        "frame_rate": 0,
        "side": [{"name": "quantization", "item_shape": [], "dtype": "uint8", "units": ""}],
    }.items():
        path.write_bytes(seal_group({**sound, "spec": {**sound["spec"], name: value}}, ""))
        with pytest.raises(DamagedError, match=f"^{path}: damaged: "):
            Version.open(version.path)


def test_several_processes_create_one_version(scratch):
    """At the same instant, in a cache that is not there yet: all get it, and nothing else
    is left."""
    starting_signal = os.pipe()

    def create_it():
        os.close(starting_signal[1])
        os.read(starting_signal[0], 1)
        assert Version.create(scratch / "cache" / INFO.folder_name, INFO).info == INFO

    pids = [fork(create_it) for _ in range(3)]
    os.close(starting_signal[1])
    assert [join(pid) for pid in pids] == [0] * 3
    os.close(starting_signal[0])
    assert [path.name for path in (scratch / "cache").iterdir()] == ["mine-0123456789ab"]
    assert Version.open(scratch / "cache" / "mine-0123456789ab").info == INFO


def test_a_link_in_a_circle_is_not_blamed_for_a_cache_that_is_missing(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(StoreError, match=r"missing: there is no such cache folder$"):
        version_folders(tmp_path / "missing")
    with pytest.raises(StoreError, match="holds no version"):
        version_folders(tmp_path)


def test_a_file_of_a_similar_name_is_not_blamed(tmp_path):
    (tmp_path / "train.csv").touch()
    with pytest.raises(StoreError, match=r"trains.csv: there is no such cache folder$"):
        version_folders(tmp_path / "trains.csv")


def test_a_neighbour_that_cannot_be_read_is_not_blamed_unless_it_is_meant(tmp_path, monkeypatch):
    exists = Directory.exists

    def refuse(store, key):
        if store.location.name == "other-0123":
            raise StoreError(f"{store.location}: cannot be read: Permission denied")
        return exists(store, key)

    (tmp_path / "other-0123").mkdir()
    monkeypatch.setattr(Directory, "exists", refuse)
    with pytest.raises(StoreError, match=r"missing: there is no such cache folder$"):
        version_folders(tmp_path / "missing")
    with pytest.raises(StoreError, match="other-0123: cannot be read"):
        version_folders(tmp_path / "other")
    with pytest.raises(StoreError, match="other-0123: cannot be read"):
        version_folders(tmp_path)
