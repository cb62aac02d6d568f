"""A list of edits that make a cache hostile: sealed, so that every checksum holds, and
odd all the same."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
from cache_contents import only_version
from crc32c import crc32c
from damage import CHUNKS

from featcache.format.documents import UNSEALED, seal
from featcache.format.group import checksum_of
from featcache.version.index import index_name
from featcache.version.version import Version
from featcache.version.wanted import Wanted, name_of, read_all_wanted

Edit = Callable[[Path], None]
Change = Callable[[dict[str, Any]], object]

EDITS: dict[str, Edit] = {}
"""The edits of a cache, by name."""

QUANTISED: dict[str, Edit] = {}
"""The edits of a cache of quantised features, by name."""

TEXT = "\x1b[2J\x1b]0;title\x07\u202e\r\n\x00\x9b31m"
"""What would clear a terminal, name its window, turn text around, and begin a line of its
own."""


# What is edited


def version_folder(cache: Path) -> Path:
    (folder,) = [path for path in cache.iterdir() if (path / "shards").is_dir()]
    return folder


def shard_folder(cache: Path) -> Path:
    return min(path for path in (version_folder(cache) / "shards").iterdir() if path.is_dir())


def index_folder(version: Version) -> Path:
    return version.path / "index" / index_name(version, version.shard_names())


def file_in(folder: str) -> Callable[[Path], Path]:
    return lambda cache: min((version_folder(cache) / folder).iterdir())


def sealed(document: dict[str, Any]) -> bytes:
    """JSON with its seal; with NaN and infinity, as some writers have them."""
    return seal(json.dumps({**document, "checksum": UNSEALED}).encode())


def reseal(folder: Path, change: Change) -> None:
    """Change the attributes of a group, and seal them again."""
    document = json.loads((folder / "zarr.json").read_bytes())
    change(document["attributes"]["featcache"])
    document["attributes"]["featcache"]["checksum"] = UNSEALED
    (folder / "zarr.json").write_bytes(seal(json.dumps(document).encode()))


def columns_of(group: Path) -> dict[str, np.ndarray]:
    """The columns of the table of a shard or an index, mapped to be written to; each has
    one value more than there are items. What is written is sealed by `seal_files`, or
    `rename_shard`."""
    columns = json.loads((group / "zarr.json").read_bytes())["attributes"]["featcache"]["columns"]
    size = (group / CHUNKS["items"]).stat().st_size // 8
    matrix = np.memmap(
        group / CHUNKS["items"], np.uint64, "r+", shape=(len(columns), size // len(columns))
    )
    return {name: matrix[number].view(dtype) for number, (name, dtype) in enumerate(columns)}


def seal_files(
    group: Path, change: Change = lambda it: None, sizes: Mapping[str, list[int]] | None = None
) -> str:
    """Give a group whose files were changed the document and the seal that would have
    been written, but for a change of the document, and sizes and checksums that are not
    those of what is there; the name that it would have got."""
    items = (group / CHUNKS["items"]).read_bytes()[:-4]
    write_chunk(group / CHUNKS["items"], np.frombuffer(items, np.uint8))
    files = {
        str(path.relative_to(group)): path.read_bytes()
        for path in group.rglob("*/*")
        if path.is_file()
    }
    written = {
        path: [len(data), checksum_of(path, data)] for path, data in sorted(files.items())
    } | (sizes or {})
    digest = hashlib.sha256(json.dumps(written, separators=(",", ":")).encode())
    digest.update(items + files[CHUNKS["text"]][:-4])
    reseal(group, lambda it: it.update(files=written, digest=digest.hexdigest()))
    reseal(group, change)
    return digest.hexdigest()[:16]


def rename_shard(
    shard: Path, change: Change = lambda it: None, sizes: Mapping[str, list[int]] | None = None
) -> Path:
    """Do so with a shard, which gets that name; see `seal_files`."""
    return shard.rename(shard.with_name(seal_files(shard, change, sizes)))


def put(path: Path, kind: str) -> None:
    """Put something else in the place of a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = {
        "deep": b"[" * 200_000,
        "deep object": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "long number": b'{"attributes": {"featcache": ' + b"9" * 10_000 + b"}}",
        "list": b"[1, 2, 3]",
        "not text": b'{"a": "\xff\xfe"}',
        "empty": b"",
    }
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("device", "loop", "outside"):
        path.symlink_to(
            {"device": "/dev/zero", "loop": path.name, "outside": path.parents[3] / "outside"}[kind]
        )
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(7 << 40)
    else:
        path.write_bytes(contents[kind])


# How the edits are declared


def edit(name: str, function: Edit) -> None:
    edits = QUANTISED if name.startswith("side") else EDITS
    assert name not in edits, name
    edits[name] = function


def instead_of(what: str, find: Callable[[Path], Path], *kinds: str) -> None:
    for kind in kinds:
        edit(f"{what}: {kind}", lambda cache, kind=kind: put(find(cache), kind))


def in_document(
    what: str, write: Callable[[Path, dict[str, Any]], object], key: str, *values: Any
) -> None:
    """Write a document of a cache with another value of a key: an edit for each value."""
    for value in values:
        edit(
            f"{what}: {key} {str(value)[:60]!r}",
            lambda cache, value=value: write(cache, {key: value}),
        )


def in_column(name: str, what: str, make: Callable[[np.ndarray], Any]) -> None:
    """Write a column of a shard's table otherwise."""

    def apply(cache: Path) -> None:
        column = columns_of(shard_folder(cache))[name]
        with np.errstate(all="ignore"):
            column[:] = make(column.copy())
        rename_shard(shard_folder(cache))

    edit(f"{name}: {what}", apply)


def write_chunk(path: Path, array: np.ndarray) -> None:
    data = np.ascontiguousarray(array).tobytes()
    path.write_bytes(data + crc32c(data).to_bytes(4, "little"))


def in_chunk(
    name: str, what: str, make: Callable[[np.ndarray], np.ndarray], change: Change = lambda it: None
) -> None:
    """Write the chunk of an array of a shard otherwise, as bytes or as the float32 that
    it holds."""

    def apply(cache: Path) -> None:
        shard = shard_folder(cache)
        path = next(path for path in (shard / name / "c").rglob("*") if path.is_file())
        dtype = np.uint8 if name == "text" else np.float32
        write_chunk(path, make(np.frombuffer(path.read_bytes()[:-4], dtype)))
        rename_shard(shard, change)

    edit(f"{name}: {what}", apply)


def in_metadata(name: str, what: str, change: Change) -> None:
    """Change what the `zarr.json` of a shard's array says."""

    def apply(cache: Path) -> None:
        shard = shard_folder(cache)
        document = json.loads((shard / name / "zarr.json").read_bytes())
        change(document)
        (shard / name / "zarr.json").write_text(json.dumps(document))
        rename_shard(shard)

    edit(f"{name}'s zarr.json: {what}", apply)


def in_index(name: str, what: str, make: Callable[[np.ndarray], Any]) -> None:
    """Write a column of the index otherwise, or its `shards` or `makers`."""

    def apply(cache: Path) -> None:
        index = index_folder(only_version(cache))
        if name in ("shards", "makers"):
            reseal(index, lambda it: it.update({name: make(it[name])}))
        else:
            column = columns_of(index)[name][:-1]
            column[:] = make(column.copy())
            seal_files(index)

    edit(f"index: {name} {what}", apply)


def _with_failure(cache: Path, values: dict[str, Any]) -> None:
    record = {
        "id": "gone",
        "path": "gone.wav",
        "reason": "file_missing",
        "message": "no such file",
        **values,
    }
    (version_folder(cache) / "failures/9").write_bytes(sealed(record) + b"\n")


def _with_tag(cache: Path, values: dict[str, Any], name: str = "paper") -> None:
    (version_folder(cache) / "tags").mkdir()
    tag = {
        "name": name,
        "made": "",
        "items": 1,
        "shards": only_version(cache).shard_names(),
        **values,
    }
    (version_folder(cache) / "tags" / name).write_bytes(sealed(tag) + b"\n")


def _attributes(find: Callable[[Path], Path], *keys: str) -> Callable[[Path, dict[str, Any]], None]:
    """Writes values into the attributes of a group, or into what these keys lead to there."""
    return lambda cache, values: reseal(
        find(cache), lambda it: reduce(getitem, keys, it).update(values)
    )


in_version = partial(in_document, "version", _attributes(version_folder))
in_config = partial(in_document, "config", _attributes(version_folder, "config"))
in_params = partial(in_document, "params", _attributes(version_folder, "config", "params"))
in_spec = partial(in_document, "spec", _attributes(version_folder, "spec"))
in_shard = partial(in_document, "shard", _attributes(shard_folder))
in_ledger = partial(in_document, "ledger", _with_failure)
in_tag = partial(in_document, "tag", _with_tag)


def in_run(what: str, change: Change) -> None:
    def apply(cache: Path) -> None:
        path = file_in("runs")(cache)
        document = json.loads(path.read_bytes())
        change(document)
        path.write_bytes(sealed(document) + b"\n")

    edit(f"run: {what}", apply)


def as_probe(what: str, document: Any) -> None:
    def apply(cache: Path) -> None:
        (version_folder(cache) / "probes").mkdir(exist_ok=True)
        (version_folder(cache) / "probes" / "0.json").write_bytes(
            sealed({"probe": document}) + b"\n"
        )

    edit(f"probe: {what}", apply)


def as_wanted(
    what: str, header: dict[str, Any], rows: Callable[[np.ndarray], np.ndarray] = lambda old: old
) -> None:
    """Write what a manifest wants otherwise."""

    def apply(cache: Path) -> None:
        version = only_version(cache)
        (old,) = read_all_wanted(version)
        Wanted(old.manifest, rows(old.rows.copy())).save(version)
        path = version.path / "wanted" / old.name
        line, _, payload = path.read_bytes().partition(b"\n")
        path.write_bytes(sealed(json.loads(line) | header) + b"\n" + payload)
        if "manifest" in header:
            path.rename(path.with_name(name_of(str(header["manifest"]))))

    edit(f"wanted: {what}", apply)


# The edits


def side(**values: Any) -> dict[str, Any]:
    return {"name": "x", "item_shape": [], "dtype": "float32", "units": "", **values}


def speeds(speed: Any, noise: Any = None) -> dict[str, Any]:
    return {"speed": speed, "noise": noise}


FILES = ("pipe", "folder", "device", "loop", "sparse", "deep")
FILES += ("deep object", "long number", "list", "not text", "empty")
ODD = ("pipe", "folder", "device", "deep")
FOLDERS = ("pipe", "loop", "list", "outside")

instead_of("version's zarr.json", lambda cache: version_folder(cache) / "zarr.json", *FILES)
instead_of("shards/zarr.json", lambda cache: version_folder(cache) / "shards" / "zarr.json", *ODD)
instead_of("shard's zarr.json", lambda cache: shard_folder(cache) / "zarr.json", *FILES)
instead_of("features' zarr.json", lambda cache: shard_folder(cache) / "features/zarr.json", *FILES)
for array, chunk in CHUNKS.items():
    instead_of(
        f"{array}'s chunk",
        lambda cache, chunk=chunk: shard_folder(cache) / chunk,
        *ODD,
        "sparse",
        "empty",
    )
instead_of("shard", shard_folder, *FOLDERS, "folder")
instead_of("run", file_in("runs"), *FILES)
instead_of("failures", file_in("failures"), *FILES)
instead_of("wanted", file_in("wanted"), *FILES)
instead_of("index", lambda cache: index_folder(only_version(cache)), *FOLDERS, "folder")
instead_of(
    "index's zarr.json", lambda cache: index_folder(only_version(cache)) / "zarr.json", *FILES
)
instead_of(
    "index's items",
    lambda cache: index_folder(only_version(cache)) / CHUNKS["items"],
    *ODD,
    "sparse",
)
instead_of("probe", lambda cache: version_folder(cache) / "probes/0.json", *ODD)
instead_of("tag", lambda cache: version_folder(cache) / "tags/paper", *ODD, "sparse")
instead_of(
    "lock",
    lambda cache: version_folder(cache) / "lock",
    "pipe",
    "folder",
    "device",
    "loop",
    "outside",
)
instead_of(
    "mark",
    lambda cache: version_folder(cache) / "work/desk/20260101T000000.000000Z-0000/in_flight.0",
    *ODD,
)
for folder in (
    "runs",
    "failures",
    "wanted",
    "tags",
    "index",
    "probes",
    "aside",
    "work",
    "work/desk",
):
    instead_of(
        f"folder {folder}", lambda cache, folder=folder: version_folder(cache) / folder, *FOLDERS
    )

in_spec(
    "item_shape",
    [10**12],
    [-80],
    [0],
    [80.0],
    [2**40, 2**40],
    [],
    "80",
    None,
    [1] * 40,
    [True],
    [[80]],
)
in_spec(
    "dtype",
    "O",
    "object",
    "float32,float32",
    "V8",
    "float64",
    "<U10",
    "complex64",
    5,
    "datetime64[s]",
    ">f4",
)
in_spec("frame_rate", 0, -100, float("nan"), float("inf"), "100", 1e300, 10**400, None, 1e-300)
in_spec("sample_rate", 0, -1, 1.5, "16000", 10**400)
in_spec("frame_length", -1, 10**400, "x")
in_spec("padded_to", -1, 10**400, 0.5)
in_spec("codebook_sizes", [10**12], [1024] * 80, [-1], "x", [2**24] * 100, 5)
in_spec("units", TEXT, "\ud800", 5, "x" * 10**6)
in_spec("kind", "pictures", 5, TEXT)
in_spec(
    "side", "x", [{}], [side(name="../x")], [side(item_shape=[10**12])], [side(dtype="O")], [side()]
)
in_spec(
    "side",
    [side(name="quantization", item_shape=[2, 80])],
    [side(name="quantization", item_shape=[3])],
)
edit("version: no spec", lambda cache: reseal(version_folder(cache), lambda it: it.pop("spec")))
in_version("spec", [1])
in_version("config", [1], {})
in_version("name", "../../outside", TEXT, "x" * 5000)
in_version("fingerprint", "../" * 20)
in_version("made_by", {"a": {"b": 1}}, {TEXT: TEXT})
in_version("format", 1, 3, 10**400, "2")
in_version("surprise", 1)
in_config("augment", speeds("x"), speeds([1.5] * 10**5), speeds([0.0]), speeds([1.0, 1.1], True))
in_config("augment", speeds([1.0], {"manifest": "/dev/zero", "snr": [10.0], "seed": 0}))
in_config("params", "x")
in_config("extractor", "os:system")
in_params("num_mel_bins", 10**6)
edit("version: of an escape", lambda cache: version_folder(cache).rename(cache / "\x1b[31mred"))

in_shard("items", 10**12, 0, -1, 1.5, "4", True, 10**400, 3)
in_shard("text", 10**12, 0, -1, 10**400)
in_shard("frames", 10**15, 0, -1, 10**400, "x", 1 << 47)
in_shard("seconds", float("nan"), float("inf"), -1, "x", 10**400, 1e300)
in_shard("row", 10**400, -1, None, "x", 2**47)
in_shard("manifest", "0" * 16, "../" * 5, 5)
in_shard("fingerprint", "0" * 64, "../" * 20)
in_shard(
    "files",
    [1],
    {"features": 5},
    {},
    {"../../outside/precious": [8, 0]},
    {"features/c/0/0": [10**12, 0]},
)
in_shard(
    "made_by",
    [1],
    {"run": 5},
    {"run": TEXT},
    {"run": {}},
    {"mismatch": "x", "batching": "y"},
    {"device": None},
)
in_shard("digest", "x", 5, "0" * 64, "../" * 20)
in_shard("columns", [], "x", [["id_hash", "object"]], [["x", "uint64"]] * 200, [["../x", "uint64"]])

for offset in ("frame_offset", "id_offset", "path_offset"):
    in_column(offset, "beyond int64", lambda old: [*old[:-1], 2**63 + 5])
    in_column(offset, "falling", lambda old: old[::-1])
    in_column(offset, "far beyond", lambda old: old * np.uint64(10**12))
    in_column(offset, "zero", lambda old: 0)
in_column("id_offset", "within a character", lambda old: old // np.uint64(2))
for column in ("id_hash", "row_hash", "generation", "item_crc32c"):
    in_column(column, "zero", lambda old: 0)
for column in ("generation", "num_samples", "sample_rate", "source_size", "decoder"):
    in_column(column, "2^64 - 1", lambda old: 2**64 - 1)
in_column("start", "infinite", lambda old: np.inf)
in_column("duration", "far away", lambda old: -1e300)
in_column("channel", "large", lambda old: 2**63 - 1)
in_column("num_samples", "none", lambda old: 0)
in_column("source_mtime_ns", "small", lambda old: -(2**63))
in_chunk("text", "not UTF-8", lambda old: np.full(len(old), 0xFF, np.uint8))
in_chunk("text", "escapes", lambda old: np.full(len(old), 0x1B, np.uint8))
in_chunk("text", "NUL", np.zeros_like)
in_chunk(
    "text", "up the tree", lambda old: np.frombuffer((b"../" * len(old))[: len(old)], np.uint8)
)
in_chunk("text", "shorter", lambda old: old[:-1], lambda it: it.update(text=it["text"] - 1))
in_chunk("features", "NaN", lambda old: np.full_like(old, np.nan))
in_chunk("features", "fewer", lambda old: old[:-80])
in_chunk(
    "features", "fewer frames", lambda old: old[:-80], lambda it: it.update(frames=it["frames"] - 1)
)
in_chunk("items", "fewer columns", lambda old: old[: len(old) // 2])
for column in ("features", "text", "items"):
    in_metadata(column, "10^12 long", lambda it: it.update(shape=[10**12, *it["shape"][1:]]))
    in_metadata(column, "negative", lambda it: it.update(shape=[-1, *it["shape"][1:]]))
    in_metadata(column, "shape of floats", lambda it: it.update(shape=[1.5]))
    in_metadata(column, "shape is a number", lambda it: it.update(shape=5))
    in_metadata(column, "shape of 100 dimensions", lambda it: it.update(shape=[1] * 100))
    in_metadata(column, "objects", lambda it: it.update(data_type="object"))
    in_metadata(
        column,
        "structured",
        lambda it: it.update(data_type={"name": "structured", "configuration": {}}),
    )
    in_metadata(
        column,
        "other codecs",
        lambda it: it.update(codecs=[{"name": "gzip", "configuration": {"level": 10**9}}]),
    )
    in_metadata(column, "codecs are text", lambda it: it.update(codecs="x"))
    in_metadata(column, "fill value is an object", lambda it: it.update(fill_value={"a": 1}))
    in_metadata(column, "no grid", lambda it: it.pop("chunk_grid"))
    in_metadata(
        column,
        "chunks of none",
        lambda it: it["chunk_grid"]["configuration"].update(chunk_shape=[0]),
    )
    in_metadata(column, "version 2", lambda it: it.update(zarr_format=2))

in_chunk("side_quantization", "NaN", lambda old: np.full_like(old, np.nan))
in_chunk("side_quantization", "too few", lambda old: old[: len(old) // 2])
in_column("side_quantization_offset", "falling", lambda old: old[::-1])
in_column("side_quantization_offset", "none for each", lambda old: 0)
in_column("side_quantization_offset", "beyond", lambda old: old * np.uint64(2**40))
in_metadata(
    "side_quantization", "10^12 long", lambda it: it.update(shape=[10**12, *it["shape"][1:]])
)

in_index("id_offset", "falling", lambda old: old[::-1])
in_index("id_offset", "beyond", lambda old: old * np.uint64(1000))
in_index("shard", "beyond", lambda old: old + np.uint64(1000))
in_index("shard", "all the same", lambda old: 0)
in_index("item", "beyond", lambda old: old + np.uint64(10**9))
in_index("first_frame", "beyond", lambda old: old + np.uint64(2**47))
for column in ("shard", "item", "first_frame", "generation"):
    in_index(column, "2^64 - 1", lambda old: 2**64 - 1)
in_index("num_frames", "10^12", lambda old: 10**12)
in_index("num_frames", "none", lambda old: 0)
in_index("num_frames", "nearly all of int64", lambda old: 2**63 - 1)
in_index("by_id_hash", "beyond", lambda old: old + np.uint64(1000))
in_index("by_id_hash", "of one", lambda old: 0)
in_index("sorted_id_hash", "falling", lambda old: old[::-1])
in_index("row_hash", "zero", lambda old: 0)
in_index("shards", "fewer", lambda old: old[1:])
in_index("shards", "outside", lambda old: [["../../x", *shard[1:]] for shard in old])
in_index(
    "shards",
    "of 2^47 items",
    lambda old: [[*shard[:2], 2**47, 2**47, 1e300, *shard[5:]] for shard in old],
)
in_index("shards", "of no maker", lambda old: [[*shard[:6], 9] for shard in old])
in_index("makers", "in words", lambda old: [{"run": TEXT, "batching": TEXT, "mismatch": 10**300}])
in_index("makers", "as a number", lambda old: 5)

in_ledger("id", 5, "\ud800")
in_ledger("message", [1], "x" * (10 << 20))
in_ledger("reason", {}, None)
in_ledger("size", "x")
in_ledger("mtime_ns", 10**400)
in_ledger("start", "x", float("nan"), 10**400, 1e300)
in_ledger("channel", 10**400, 0.5)
in_ledger("generation", 10**400)
for what, values in {
    "of escapes": {"id": TEXT, "path": TEXT, "message": TEXT, "reason": TEXT},
    "of an utterance that is there": {"id": "utt-1"},
    "generation is 2^47": {"id": "utt-1", "path": "1.wav", "generation": 2**47},
}.items():
    edit(f"ledger: {what}", lambda cache, values=values: _with_failure(cache, values))

as_wanted("of 10^12 rows", {"rows": 10**12})
as_wanted("of -1 rows", {"rows": -1})
as_wanted("of escapes", {"manifest": TEXT})
as_wanted("of half a character", {"manifest": "\ud800"})
as_wanted("in place of a place outside", {"instead_of": ["../../outside"]})
as_wanted("in place of 10^5 others", {"instead_of": ["0" * 16] * 10**5})
as_wanted("twice the same rows", {}, lambda old: np.concatenate([old, old], axis=1))
as_wanted("no rows", {}, lambda old: old[:, :0])
as_wanted("other rows", {}, lambda old: old + np.uint64(1))
as_wanted(
    "generations of 2^64 - 1", {}, lambda old: np.stack([*old[:2], np.full_like(old[2], 2**64 - 1)])
)

in_tag("shards", ["../../outside"], ["0" * 16], ["0" * 16] * 10**4, "x")
in_tag("items", 10**400)
in_tag("made", TEXT)
in_tag("name", "other")
edit("tag: name of an escape", lambda cache: _with_tag(cache, {}, "a\x1b[31m"))

in_run("asked is a list", lambda it: it.update(asked=[1]))
in_run("asked is text", lambda it: it.update(asked="x"))
in_run(
    "counts of 10^400",
    lambda it: it["asked"].update(utterances=10**400, new=10**400) or it.pop("finished"),
)
in_run("counts are text", lambda it: it["asked"].update(utterances="x", new="y"))
in_run(
    "of escapes",
    lambda it: it["asked"].update(manifest=TEXT, root=TEXT, host=TEXT) or it.pop("finished"),
)
in_run(
    "of half a character",
    lambda it: it["asked"].update(manifest="\ud800", root="\ud800") or it.pop("finished"),
)
in_run("root with NUL", lambda it: it["asked"].update(root="a\0b"))
in_run("root is a list", lambda it: it["asked"].update(root=[1]))
in_run("started is a number", lambda it: it.update(started=5, finished={}))
in_run("outcome is a list", lambda it: it.update(outcome=[[1]]))
in_run(
    "outcome is odd",
    lambda it: it.update(outcome={"items": 10**400, "extracted": "x", "interrupted": []}),
)

as_probe("device is a list", {"device": [1], "date": 1, "fastest": None})
as_probe("device is an escape", {"device": TEXT, "date": TEXT, "fastest": None})
as_probe("fastest is text", {"device": "cpu", "date": "x", "fastest": "y"})
as_probe("fastest is empty", {"device": "cpu", "date": "x", "fastest": {}})
as_probe("a list", [1])
as_probe("measured is text", {"device": "cpu", "date": "x", "fastest": None, "measured": "y"})
