"""A shard keeps what it was given, is named after it, is plain Zarr, and takes only what
its version holds."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from damage import CHUNKS, SPOIL, flip, swap_in_another
from hostile_caches import columns_of, rename_shard, reseal, write_chunk
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from scratch import scratch_folder
from small_shards import INFO, SIDE, SIDED, SPEC, create, item, problems, publish, write

from featcache.care.verify import examine_shard
from featcache.errors import DamagedError, ExtractorError, StoreError
from featcache.format.writing import ShardBuilder, seal_group
from featcache.spec import DTYPES, Track
from featcache.storage.base import MARK
from featcache.version.indexing import open_index
from featcache.version.version import Version

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ITEMS = st.lists(
    st.builds(
        item,
        TEXT,
        st.integers(1, 5),
        path=TEXT,
        start=st.none() | st.floats(0, 1e6),
        duration=st.none() | st.floats(1e-3, 1e6),
        channel=st.none() | st.integers(0, 2**31 - 1),
        size=st.integers(0, 2**63 - 1),
        mtime_ns=st.integers(-(2**63), 2**63 - 1),
        sample_rate=st.integers(1, 10**6),
        content_hash=st.integers(0, 2**64 - 1),
        decoder=st.integers(0, 2),
        generation=st.integers(1, 2**40),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda item: item.id,
)


@settings(max_examples=15)
@given(ITEMS, st.data())
def test_a_shard_keeps_what_its_items_are_and_their_side_arrays(items, data):
    """With as many entries as there are, or none; and stock Zarr reads them."""
    counts = data.draw(
        st.lists(st.integers(0, 4), min_size=len(items), max_size=len(items)), "entries"
    )
    expected = side_of(counts, 100 * len(counts))
    with scratch_folder() as folder:
        version = create(folder, SIDED)
        shard = write(version, items, side=expected)
        assert list(shard.items()) == items
        assert list(shard.items([len(items) - 1])) == items[-1:]
        assert [shard.features[first, 0] for first in shard.table.offsets("frame")[:-1]] == list(
            range(len(items))
        )
        assert math.isclose(shard.info.seconds, sum(item.num_samples for item in items) / 16000)
        assert problems(version, shard.name) == []
        group = zarr.open_group(shard.folder, mode="r")
        for spec in SIDE:
            side = shard.side(spec.name)
            for number, entries in enumerate(one[spec.name] for one in expected):
                assert (side.item(number).dtype, side.item(number).shape) == (
                    spec.dtype,
                    entries.shape,
                )
                assert (side.item(number) == entries).all()
                assert not (len(entries) and side.entries.flags.writeable)
            assert (
                group[f"side_{spec.name}"][...]
                == np.concatenate([one[spec.name] for one in expected])
            ).all()


@pytest.mark.parametrize("dtype", sorted({*DTYPES} - {"bfloat16"}))
def test_stock_zarr_reads_every_dtype_and_refuses_a_flipped_bit(scratch, dtype):
    spec = replace(SPEC, dtype=dtype, side=(Track("all", (2, 3), dtype, ""),))
    version = create(scratch, structs.replace(INFO, spec=spec))
    entries = np.arange(18).reshape(3, 2, 3).astype(dtype)
    for items, values in (
        ([item("a")], np.zeros((3, 2))),
        ([item("b")], np.arange(6).reshape(3, 2)),
    ):
        shard = write(version, items, values, side=[{"all": entries}])
        assert problems(version, shard.name) == []
        assert shard.features.dtype == dtype
        assert np.array_equal(shard.features, values.astype(dtype))
        group = zarr.open_group(shard.folder, mode="r")
        assert {*group.array_keys()} == {"features", "items", "text", "side_all"}
        assert group["features"].dtype == group["side_all"].dtype == dtype
        assert np.array_equal(group["features"][...], values.astype(dtype))
        assert np.array_equal(group["side_all"][...], entries)
        assert group["items"].shape == (len(shard.info.columns), 2)
        assert group["text"][...].tobytes() == f"{items[0].id}{items[0].path}".encode()
    for chunk in sorted(shard.folder.glob("*/c/**/0")):
        if chunk.is_file():
            for at in (0, chunk.stat().st_size // 2, chunk.stat().st_size - 1):
                flip(chunk, at, at % 8)
                with pytest.raises(ValueError, match="checksum"):
                    group[chunk.relative_to(shard.folder).parts[0]][...]
                flip(chunk, at, at % 8)


def test_xarray_opens_a_shard(scratch):
    """No dimension has the name of an array, and those of one name have one length."""
    xarray = pytest.importorskip("xarray")
    shard = write(create(scratch, SIDED), [item("a"), item("b")], side=side_of([2, 0]))
    opened = xarray.open_zarr(shard.folder, consolidated=False)
    assert opened.sizes["frame"] == 6
    assert opened.sizes["side_scales_entry"] == 2
    assert np.array_equal(opened["features"].values, shard.features)


def test_a_code_that_is_missing_is_none(scratch):
    """What Zarr libraries read where a chunk is missing cannot be taken for a code, nor
    for a feature."""
    for spec, fill in (
        (SPEC, np.nan),
        (replace(SPEC, dtype="uint16", units="codes", codebook_sizes=(1024, 300)), 65535),
        (replace(SPEC, dtype="uint8", units="codes", codebook_sizes=(256, 256)), 0),
    ):
        version = create(scratch / spec.dtype, structs.replace(INFO, spec=spec))
        shard = write(version, [item("a")])
        (shard.folder / "features/c/0/0").unlink()
        read = zarr.open_group(shard.folder, mode="r")["features"][...]
        assert np.array_equal(read, np.full((3, 2), fill, spec.dtype), equal_nan=True)
        with pytest.raises(DamagedError, match="features/c/0/0: damaged: the file is missing"):
            shard.features  # noqa: B018


@pytest.mark.parametrize("is_file", [True, False])
def test_a_file_for_a_folder_and_a_folder_for_a_file_name_the_remedy(scratch, is_file):
    version = create(scratch)
    shard = write(version, [item("a")])
    lost = shard.folder if is_file else shard.folder / MARK
    shutil.rmtree(shard.folder)
    lost.parent.mkdir(exist_ok=True)
    lost.write_text("") if is_file else lost.mkdir()
    with pytest.raises(DamagedError, match=r"damaged: .*; `featcache repair .*` repairs it"):
        version.shard(shard.name)


# Written


@pytest.mark.parametrize("dtype", sorted({*DTYPES} - {"bfloat16"}))
def test_documents_are_byte_for_byte_those_of_zarr_python(scratch, dtype):
    """So that a shard has the name that it had when zarr-python wrote it."""
    sides = (Track("all", (2, 3), dtype, ""), Track("empty", (), dtype, ""))
    spec = replace(SPEC, dtype=dtype, side=sides)
    side = [{"all": np.ones((3, 2, 3), dtype), "empty": np.ones(0, dtype)}]
    shard = write(create(scratch, structs.replace(INFO, spec=spec)), [item("a")], side=side)
    made: dict[str, zarr.core.buffer.Buffer] = {}
    store = zarr.storage.MemoryStore(made)
    group = zarr.open_group(shard.folder, mode="r")
    zarr.create_group(store, attributes=dict(group.attrs))
    for name, array in group.arrays():
        zarr.create_array(
            store,
            name=name,
            shape=array.shape,
            dtype=array.dtype,
            chunks=tuple(max(1, size) for size in array.shape),
            compressors=zarr.codecs.Crc32cCodec(),
            fill_value=array.fill_value,
            dimension_names=array.metadata.dimension_names,
        )
    assert len(made) == 6
    for path, document in made.items():
        assert document.to_bytes() == (shard.folder / path).read_bytes(), path


# Names


def test_names_are_content(version):
    """The same items have the same name, whoever made them, and whatever run; anything
    else has another."""
    items = [item("a"), item("b", start=0.5)]
    changes = {
        "duration": 0.25,
        "channel": 1,
        "num_samples": 481,
        "size": 2,
        "mtime_ns": 3,
        "sample_rate": 8000,
    }
    changes |= {"content_hash": 7, "decoder": 2, "generation": 2}
    first = write(version, items, run="run 1", row=3)
    inode = first.folder.stat().st_ino
    again = write(version, items, run="run 2", row=3)
    assert (again.name, again.folder.stat().st_ino, again.run) == (first.name, inode, "run 1")
    assert (
        write(create(version.path / "elsewhere"), items, run="run 3", row=7, manifest="1" * 16).name
        == first.name
    )
    others = [
        [item("a"), item("c", start=0.5)],
        [item("b", start=0.5), item("a")],
        [item("a"), item("b")],
        [item("a", path="elsewhere.wav"), items[1]],
        *(
            [item("a"), structs.replace(items[1], **{field: value})]
            for field, value in changes.items()
        ),
    ]
    names = {write(version, other).name for other in others}
    values = np.zeros((6, 2), np.float32)
    names |= {
        write(version, items, values).name,
        write(version, items, values + 1).name,
        first.name,
    }
    assert len(names) == len(others) + 3
    assert {*version.shard_names()} == names
    assert [*version.store.walk("work")] == []
    sided = create(version.path / "sided", SIDED)
    sides = [side_of([count], first) for count, first in ((2, 0), (2, 1), (3, 0))]
    assert len({write(sided, [item("a")], side=side).name for side in sides}) == 3


def test_a_shard_keeps_its_bytes(version):
    """Formats are kept: what a later featcache writes of the same items is the same, byte
    for byte."""
    shard = write(
        version, [item("a", content_hash=7), item("b", 2, start=0.5, channel=1)], run="20260101"
    )
    chunks = {path: tuple(written) for path, written in shard.info.files.items() if "/c/" in path}
    assert chunks == {
        "features/c/0/0": (44, 1024106899),
        "items/c/0/0": (388, 3284908568),
        "text/c/0": (16, 491774346),
    }


# What does not belong


def side_of(counts, first: int = 0) -> list[dict]:
    """Data of both side arrays: so many entries for each item, counted up from `first`;
    of marks one more."""
    more = [count + 1 for count in counts]
    scales = np.arange(first, first + sum(counts), dtype=np.float32)
    marks = np.arange(first, first + 2 * sum(more), dtype=np.uint16).reshape(-1, 2)
    arrays = np.split(scales, np.cumsum(counts)[:-1]), np.split(marks, np.cumsum(more)[:-1])
    return [
        dict(zip(("scales", "marks"), entries, strict=True))
        for entries in zip(*arrays, strict=True)
    ]


(ONE_ENTRY,) = side_of([1])
RIGHT = np.zeros((3, 2), np.float32)


@pytest.mark.parametrize(
    ("values", "side", "words"),
    [
        (
            np.zeros((3, 2)),
            ONE_ENTRY,
            r"features are float64 \[3, 2\]; this version's are float32 \[3, 2\]",
        ),
        (
            np.zeros((3, 3), np.float32),
            ONE_ENTRY,
            r"features are float32 \[3, 3\]; this version's are",
        ),
        (RIGHT, {}, "side arrays are none; this version's are marks, scales"),
        (
            RIGHT,
            {"scales": ONE_ENTRY["scales"]},
            "side arrays are scales; this version's are marks, scales",
        ),
        (
            RIGHT,
            ONE_ENTRY | {"scales": np.zeros(1)},
            r"scales is float64 \[1\]; .*'s is float32 \[1\]",
        ),
        (
            RIGHT,
            ONE_ENTRY | {"scales": np.float32(1)},
            r"scales is float32 \[\]; .*'s is float32 \[1\]",
        ),
        (
            RIGHT,
            ONE_ENTRY | {"marks": np.zeros((1, 3), np.uint16)},
            r"is uint16 \[1, 3\].*\[1, 2\]",
        ),
    ],
)
def test_a_shard_takes_only_what_its_version_holds(values, side, words):
    """Else it is told as the extractor's fault; and nothing of the call has been added."""
    builder = ShardBuilder(SIDED.spec)
    with pytest.raises(ExtractorError, match=words):
        builder.append(item("a"), values, side)
    assert len(builder) == 0
    with pytest.raises(ExtractorError, match="this version's are none"):
        ShardBuilder(SPEC).append(item("a"), RIGHT, ONE_ENTRY)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"x": float("nan")}, "Out of range float values are not JSON compliant.*"),
        ({"x": "\ud800"}, ".*surrogates not allowed"),
        (
            [Track("Scales", (), "float32", "")],
            r".*regex '\^\[a-z\]\[a-z0-9_\]\*.* - at `\$.spec.side\[0\].name`",
        ),
        (
            [Track("../x", (), "float32", "")],
            r".*regex '\^\[a-z\]\[a-z0-9_\]\*.* - at `\$.spec.side\[0\].name`",
        ),
        (
            [Track("x", (), "complex64", "")],
            r".*regex '\^\(float16\|float32\|.* - at `\$.spec.side\[0\].dtype`",
        ),
        (
            [Track("x", (2, 0), "float32", "")],
            r"Expected `int` >= 1 - at `\$.spec.side\[0\].item_shape\[1\]`",
        ),
        (
            [Track("x", (), "float32", ""), Track("x", (2,), "float32", "")],
            ".* x, x: two of them have .* name",
        ),
    ],
)
def test_a_version_is_not_made_of_a_config_or_side_arrays_that_cannot_be_stored(
    scratch, odd, words
):
    """What an extractor declares is held against the format before anything is written
    that nobody could read."""
    is_config = isinstance(odd, dict)
    info = structs.replace(
        INFO, **({"config": odd} if is_config else {"spec": replace(SPEC, side=tuple(odd))})
    )
    with pytest.raises(ExtractorError, match=f": features that cannot be stored: {words}$"):
        Version.create(scratch / "cache", info)
    assert list(scratch.iterdir()) == []


# Damage


@pytest.fixture
def sided(scratch) -> tuple[Version, Path]:
    """A version of two shards with side arrays, and the folder of one."""
    version = create(scratch, SIDED)
    write(version, [item("c"), item("d")], np.full((6, 2), 7), side=side_of([2, 3], 50))
    shard = write(version, [item("a"), item("b", start=1.5)], side=side_of([1, 3]))
    return version, shard.folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def noticed(version: Version, path: Path) -> bool:
    """Whether verify names the shard of a file, reading no features unless they are the
    file."""
    name = path.relative_to(version.path / "shards").parts[0]
    problems = examine_shard(version, name, data=f"{name}/features/c" in str(path)).problems
    return name in {problem.shard for problem in problems}


def test_every_file_that_is_not_what_was_written_is_noticed(sided):
    """Each file: gone, emptied, cut, longer, a folder, or that of another shard, which is
    sound in itself."""
    version, folder = sided
    assert len(files_of(folder)) == 11
    other = next(path for path in folder.parent.glob("*/") if path != folder)
    for path in files_of(folder):
        data = path.read_bytes()
        same = data == (other / path.relative_to(folder)).read_bytes()
        for spoil in SPOIL:
            spoil(path)
            assert noticed(version, path) or (same and spoil is swap_in_another), (path, spoil)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(data)
    assert problems(version, folder.name) == []


def test_a_flipped_bit_anywhere_in_a_shard_is_noticed(sided):
    """One bit of every byte of the shard's document and of its side arrays, and of every
    seventh byte else and of the last ones: in data, metadata and checksums."""
    version, folder = sided
    for path in files_of(folder):
        size, name = path.stat().st_size, str(path.relative_to(folder))
        for at in {
            *range(0, size, 1 if name == MARK or name.startswith("side_") else 7),
            *range(size - 4, size),
        }:
            flip(path, at, at % 8)
            assert noticed(version, path), (path, at)
            flip(path, at, at % 8)
    assert problems(version, folder.name) == []


@pytest.mark.parametrize(
    "columns",
    [
        *({"frame_offset": offsets} for offsets in ([0, 6, 6], [0, 3, 7], [0, 1 << 62, 6])),
        *({"id_offset": offsets} for offsets in ([0, 0, 2], [0, 1, 99])),
        {"path_offset": [2, 1, 12]},
        *({"side_scales_offset": offsets} for offsets in ([0, 5, 4], [1, 2, 4])),
        *({name: [1, 2]} for name in ("id_hash", "row_hash")),
        {"start": [0.5, 1.5]},
        {"channel": [5, -1]},
    ],
    ids=str,
)
def test_a_table_that_contradicts_itself_is_found(sided, columns):
    """Though all checksums are right; and no index is made of it. A hash of a row is computed
    again only if that is asked for, or the writer has not recorded that it checked values."""
    version, folder = sided
    for name, values in columns.items():
        columns_of(folder)[name][: len(values)] = values
    name = rename_shard(folder).name
    is_hashed = {*columns} <= {"id_hash", "row_hash", "start", "channel"}
    assert problems(version, name) == ([] if is_hashed else ["structure"])
    assert problems(version, name, values=True) == ["structure"]
    with pytest.raises(DamagedError, match=name):
        open_index(version)


@pytest.mark.parametrize("data", [True, False], ids=["data", "no-data"])
@pytest.mark.parametrize("chunk", [CHUNKS["features"], "side_scales/c/0", "side_marks/c/0/0"])
def test_an_array_that_does_not_have_what_the_table_says_is_found(sided, chunk, data):
    """It lacks an entry, or is not there at all; and its seal and the shard's name are
    those of what is there."""
    version, folder = sided
    values = np.frombuffer((folder / chunk).read_bytes()[:-4], np.uint8)
    write_chunk(folder / chunk, values[:-8])
    folder = rename_shard(folder)
    assert [problem.kind for problem in examine_shard(version, folder.name, data).problems] == [
        "structure"
    ]
    (folder / chunk).unlink()
    folder = rename_shard(folder)
    assert [problem.kind for problem in examine_shard(version, folder.name, data).problems] == [
        "structure"
    ]
    with pytest.raises(DamagedError, match=folder.name):
        open_index(version)


def test_values_that_make_no_sense_are_found(version):
    """NaN, frames that the audio does not give, and an id that is there twice: sound
    bytes, wrong content."""
    values = np.zeros((6, 2), np.float32)
    for number, value in enumerate((np.nan, -np.inf)):
        values[4, 1] = value
        shard = write(version, [item(f"a{number}"), item("b")], values)
        assert problems(version, shard.name) == ["non_finite"]
        reseal(shard.folder, lambda document: document.update(finite=True))
        assert problems(version, shard.name) == []  # as it says; see docs/reliability.md
        looked_at = examine_shard(version, shard.name, True, values=True).problems
        assert [(problem.kind, problem.id) for problem in looked_at] == [("non_finite", "b")]
    builder = ShardBuilder(SPEC)
    builder.append(item("e", num_samples=16000), np.zeros((3, 2), np.float32))
    assert problems(version, publish(version, builder).name) == ["frames"]
    assert problems(version, write(version, [item("f"), item("f", path="g.wav")]).name) == [
        "structure"
    ]


# What comes next


def test_what_is_not_known_yet_is_ignored(sided):
    """Columns, arrays and keys that a later featcache adds; also in the version's own
    document."""
    version, folder = sided
    for name in version.shard_names():
        if name != folder.name:
            shutil.rmtree(version.path / "shards" / name)
    table = version.shard(folder.name).table
    columns = [*table.columns[:2], ("news_offset", "uint64"), *table.columns[2:]]
    write_chunk(folder / CHUNKS["items"], np.insert(table.matrix, 2, table.matrix[0] + 9, axis=0))
    shutil.copytree(folder / "side_marks", folder / "side_news")
    newer = rename_shard(folder, lambda it: it.update(columns=columns, news={"a": [1]})).name
    reseal(version.path, lambda it: it["spec"].update(news=1) or it.update(news=1))
    again = Version.open(version.path)
    assert again.info == version.info
    assert problems(again, newer) == []
    assert [*again.shard(newer).items()] == [item("a"), item("b", start=1.5)]
    assert [*open_index(again).ids] == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"format": 1},
            "has format 1, which only development versions of featcache wrote: extract it again",
        ),
        ({"format": 3}, "has format 3; this featcache reads format 2: upgrade it"),
        (
            {"spec": {"kind": "vector"}},
            "holds features of the kind 'vector', which this featcache cannot read",
        ),
        (
            {"spec": {"dtype": "float8"}},
            "holds features of the dtype 'float8', which this featcache cannot read: upgrade it",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_clear_line(version, changes, words):
    (version.path / MARK).write_bytes(seal_group({"spec": {}, "format": 2, **changes}, ""))
    with pytest.raises(StoreError, match=f"^{version.path}: {words}") as raised:
        Version.open(version.path)
    assert not isinstance(raised.value, DamagedError)
    assert "\n" not in str(raised.value)
