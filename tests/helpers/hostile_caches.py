"""A list of edits that make a cache hostile: sealed, so that every checksum holds, and odd all the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cache_contents import only_version
from featcache.store import zarr3
from featcache.store.checksums import hex_crc32c
from featcache.store.documents import UNSEALED, seal

from featcache.version.index import index_name

Edit = Callable[[Path], None]

EDITS: dict[str, Edit] = {}
"""The edits of a cache, by name."""

QUANTISED: dict[str, Edit] = {}
"""The edits of a cache of quantised features, by name."""

TEXT = "\x1b[2J\x1b]0;title\x07\u202e\r\n\x00\x9b31m"
"""What would clear a terminal, name its window, turn text around, and begin a line of its own."""


# What is edited


def version_folder(cache: Path) -> Path:
    (folder,) = [path for path in cache.iterdir() if (path / "shards").is_dir()]
    return folder


def shard_folder(cache: Path) -> Path:
    return min(path for path in (version_folder(cache) / "shards").iterdir() if path.is_dir())


def run_folder(cache: Path) -> Path:
    return min((version_folder(cache) / "runs").iterdir())


def index_of(cache: Path) -> Path:
    version = only_version(cache)
    return index_name(version, version.shard_names())


def reseal(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the attributes of a group, and seal them again; with NaN and infinity, as some writers have them."""
    attributes = zarr3.read_group(folder)
    change(attributes)
    document = {"zarr_format": 3, "node_type": "group", "attributes": {"featcache": attributes}}
    attributes["checksum"] = UNSEALED
    write_sealed(folder / "zarr.json", json.dumps(document, indent=2).encode())


def write_sealed(path: Path, unsealed: bytes) -> None:
    head, mark, tail = unsealed.rpartition(b'"checksum": "00000000"')
    assert mark
    path.write_bytes(head + f'"checksum": "{hex_crc32c(unsealed)}"'.encode() + tail)


def put(path: Path, kind: str) -> None:
    """Put something else in the place of a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(7 << 40)
    elif kind == "deep":
        path.write_bytes(b"[" * 200_000)
    elif kind == "deep object":
        path.write_bytes(b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
    elif kind == "long number":
        path.write_bytes(b'{"attributes": {"featcache": ' + b"9" * 10_000 + b"}}")
    elif kind == "list":
        path.write_bytes(b"[1, 2, 3]")
    elif kind == "not text":
        path.write_bytes(b'{"a": "\xff\xfe"}')
    else:
        raise ValueError(kind)


# How the edits are declared


def edit(name: str, function: Edit) -> None:
    edits = QUANTISED if name.startswith("side") else EDITS
    assert name not in edits, name
    edits[name] = function


def in_version(name: str, change: Callable[[dict[str, Any]], None]) -> None:
    edit(f"version: {name}", lambda cache: reseal(version_folder(cache), change))


def in_spec(key: str, *values: Any) -> None:
    for value in values:
        in_version(f"{key} {str(value)[:30]!r}", lambda it, value=value: it["spec"].update({key: value}))


def in_shard(key: str, *values: Any) -> None:
    for value in values:
        change = lambda it, value=value: it.update({key: value})  # noqa: E731
        edit(f"shard: {key} {str(value)[:30]!r}", lambda cache, change=change: reseal(shard_folder(cache), change))


def as_array(name: str, what: str, make: Callable[[np.ndarray], np.ndarray]) -> None:
    """Write a column of a shard as another array, with every checksum right."""

    def apply(cache: Path) -> None:
        shard = shard_folder(cache)
        old, _ = zarr3.read_array(shard / name)
        shutil.rmtree(shard / name)
        array = make(old.copy())
        metadata = zarr3.array_metadata(array.shape, array.dtype, [f"dim_{axis}" for axis in range(array.ndim)])
        zarr3.write_array(shard / name, array, metadata)
        reseal(shard, lambda it: it["metadata"].update({name: hex_crc32c(metadata)}))

    edit(f"{name}: {what}", apply)


def as_metadata(name: str, what: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the `zarr.json` of a shard's array says, with every checksum right."""

    def apply(cache: Path) -> None:
        shard = shard_folder(cache)
        document = json.loads((shard / name / "zarr.json").read_bytes())
        change(document)
        data = json.dumps(document).encode()
        (shard / name / "zarr.json").write_bytes(data)
        reseal(shard, lambda it: it["metadata"].update({name: hex_crc32c(data)}))

    edit(f"{name}'s zarr.json: {what}", apply)


def in_index(name: str, what: str, make: Callable[[np.ndarray], np.ndarray | bytes]) -> None:
    """Write an array of the index as another, or as some bytes, with every checksum right."""

    def apply(cache: Path) -> None:
        folder = index_of(cache)
        made = make(np.load(folder / f"{name}.npy"))
        if isinstance(made, bytes):
            (folder / f"{name}.npy").write_bytes(made)
        else:
            np.save(folder / f"{name}.npy", made, allow_pickle=True)
        document = json.loads((folder / "index.json").read_bytes())
        document["crc32c"][name] = hex_crc32c((folder / f"{name}.npy").read_bytes())
        document["checksum"] = UNSEALED
        write_sealed(folder / "index.json", json.dumps(document).encode())

    edit(f"index: {name} {what}", apply)


def index_describes(what: str, make: Callable[[dict], object]) -> None:
    """Let the index say something else of its shards, sealed."""

    def apply(cache: Path) -> None:
        path = index_of(cache) / "index.json"
        document = json.loads(path.read_bytes())
        document |= {"described": make(document["described"]), "checksum": zarr3.UNSEALED}
        write_sealed(path, json.dumps(document).encode())

    edit(f"index describes shards {what}", apply)


def instead_of(what: str, find: Callable[[Path], Path], *kinds: str) -> None:
    for kind in kinds:
        edit(f"{what}: {kind}", lambda cache, kind=kind: put(find(cache), kind))


def in_ledger(what: str, **values: Any) -> None:
    """Add a line to the failure ledger: a record of a failure with some values changed."""

    def apply(cache: Path) -> None:
        record = {"id": "gone", "path": "gone.wav", "start": None, "duration": None, "channel": None}
        record |= {"reason": "file_missing", "message": "no such file", "size": None, "mtime_ns": None, **values}
        with (run_folder(cache) / "failures.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    edit(f"ledger: {what}", apply)


def in_run(what: str, change: Callable[[dict[str, Any]], Any]) -> None:
    def apply(cache: Path) -> None:
        path = run_folder(cache) / "run.json"
        document = json.loads(path.read_bytes())
        document.pop("checksum", None)
        document = change(document) or document
        path.write_text(json.dumps(document))

    edit(f"run: {what}", apply)


def as_probe(what: str, document: Any) -> None:
    def apply(cache: Path) -> None:
        (version_folder(cache) / "probes").mkdir(exist_ok=True)
        sealed = seal({"probe": document, "checksum": UNSEALED})
        (version_folder(cache) / "probes" / "20260101T000000.000000Z-0000.json").write_bytes(sealed)

    edit(f"probe: {what}", apply)


# The edits

FILES = ("pipe", "folder", "device", "loop", "sparse", "deep", "deep object", "long number", "list", "not text")
ODD = ("pipe", "device", "deep")

instead_of("version's zarr.json", lambda cache: version_folder(cache) / "zarr.json", *FILES)
instead_of("shards/zarr.json", lambda cache: version_folder(cache) / "shards" / "zarr.json", *ODD)
instead_of("shard's zarr.json", lambda cache: shard_folder(cache) / "zarr.json", *FILES)
instead_of("features' zarr.json", lambda cache: shard_folder(cache) / "features/zarr.json", *FILES)
instead_of(
    "features' chunk", lambda cache: shard_folder(cache) / "features/c/0/0", "pipe", "folder", "device", "sparse"
)
instead_of("ids' chunk", lambda cache: shard_folder(cache) / "ids/c/0", "pipe", "folder", "device", "sparse")
instead_of("shard", shard_folder, "pipe", "loop", "list")
instead_of("run.json", lambda cache: run_folder(cache) / "run.json", *FILES)
instead_of("failures.jsonl", lambda cache: run_folder(cache) / "failures.jsonl", *FILES)
instead_of("mark", lambda cache: run_folder(cache) / "in_flight.0", *ODD)
instead_of("run", run_folder, "pipe", "loop", "list")
instead_of("runs", lambda cache: version_folder(cache) / "runs", "pipe", "loop", "list")
instead_of("index.json", lambda cache: index_of(cache) / "index.json", *FILES)
instead_of("index's ids", lambda cache: index_of(cache) / "ids.npy", "pipe", "folder", "device")
instead_of("index", lambda cache: version_folder(cache) / "index", "pipe", "loop")
instead_of("work", lambda cache: version_folder(cache) / "work", "pipe", "loop")
instead_of("probe", lambda cache: version_folder(cache) / "probes" / "0.json", *ODD)

in_spec("item_shape", [10**12], [-80], [0], [80.0], [2**40, 2**40], [], "80", None, [1] * 40, [True], [[80]])
in_spec("dtype", "O", "object", "float32,float32", "V8", "float64", "<U10", "complex64", 5, "datetime64[s]", ">f4")
in_spec("frame_rate", 0, -100, float("nan"), float("inf"), "100", 1e300, 10**400, None, 1e-300)
in_spec("sample_rate", 0, -1, 1.5, "16000", 10**400)
in_spec("frame_length", -1, 10**400, "x")
in_spec("padded_to", -1, 10**400, 0.5)
in_spec("codebook_sizes", [10**12], [1024] * 80, [-1], "x", [2**24] * 100, 5)
in_spec("units", TEXT, "\ud800", 5, "x" * 10**6)
in_spec("side", "x", [{}], [{"name": "../x", "item_shape": [], "dtype": "float32", "units": ""}])
in_version("side of 10^12", lambda it: it["spec"].update(side=[side(item_shape=[10**12])]))
in_version("side of objects", lambda it: it["spec"].update(side=[side(dtype="O")]))
in_version("side that is not there", lambda it: it["spec"].update(side=[side()]))
in_version("quantised, it says", lambda it: it["spec"].update(side=[side(name="quantization", item_shape=[2, 80])]))
in_version("quantised otherwise", lambda it: it["spec"].update(side=[side(name="quantization", item_shape=[3])]))
in_version("no spec", lambda it: it.pop("spec"))
in_version("spec is a list", lambda it: it.update(spec=[1]))
in_version("config is a list", lambda it: it.update(config=[1]))
in_version("config is empty", lambda it: it.update(config={}))
in_version("speed is text", lambda it: it["config"].update(augment={"speed": "x", "noise": None}))
in_version("speed without end", lambda it: it["config"].update(augment={"speed": [1.5] * 10**5, "noise": None}))
in_version("speed 0", lambda it: it["config"].update(augment={"speed": [0.0], "noise": None}))
in_version("noise is true", lambda it: it["config"].update(augment={"speed": [1.0, 1.1], "noise": True}))
in_version("noise of a pipe", lambda it: it["config"].update(augment={"speed": [1.0], "noise": noise("/dev/zero")}))
in_version("many mel bins", lambda it: it["config"]["params"].update(num_mel_bins=10**6))
in_version("params are text", lambda it: it["config"].update(params="x"))
in_version("extractor of the shell", lambda it: it["config"].update(extractor="os:system"))
in_version("name of a place outside", lambda it: it.update(name="../../outside"))
in_version("name with an escape", lambda it: it.update(name=TEXT))
in_version("long name", lambda it: it.update(name="x" * 5000))
in_version("fingerprint of a place outside", lambda it: it.update(fingerprint="../" * 20))
in_version("made_by nested", lambda it: it.update(made_by={"a": {"b": 1}}))
in_version("made_by with escapes", lambda it: it.update(made_by={TEXT: TEXT}))
in_version("format 2", lambda it: it.update(format=2))
in_version("format 10^400", lambda it: it.update(format=10**400))
in_version("format text", lambda it: it.update(format="1"))
in_version("an unknown key", lambda it: it.update(surprise=1))
edit("version: of an escape", lambda cache: version_folder(cache).rename(cache / "\x1b[31mred"))

in_shard("items", 10**12, 0, -1, 1.5, "4", True, 10**400, 3)
in_shard("frames", 10**15, 0, -1, 10**400, "x")
in_shard("seconds", float("nan"), float("inf"), -1, "x", 10**400)
in_shard("row", 10**400, -1, None, "x", 2**60)
in_shard("metadata", [1], {"features": 5}, {}, {"features": "x" * 10**6})
in_shard(
    "made_by", [1], {"run": 5}, {"run": TEXT}, {"fingerprint": 5}, {"mismatch": "x", "batching": "y"}, {"device": {}}
)
in_shard("digest", "x", 5, "0" * 64, "../" * 20)
in_shard("supersedes", [1], {"../../x": [0]}, {"x": "y"}, {"0" * 12: [10**12]}, {"0" * 12: "y"})
for items in ([0], [10**9], [-1], [2**63], [0.5], "x", [[0]], [], [10**400], None):
    edit(
        f"shard: supersedes {items} of every shard",
        lambda cache, items=items: reseal(
            shard_folder(cache),
            lambda it: it.update(generation=2),
        ),
    )

as_array("offsets", "beyond int64", lambda old: np.array([*old[:-1], 2**63 + 5], np.uint64))
as_array("offsets", "falling", lambda old: old[::-1].copy())
as_array("offsets", "negative", lambda old: np.array([0, 2**64 - 5, *old[2:]], np.uint64))
as_array("offsets", "far beyond the frames", lambda old: old * np.uint64(10**12))
as_array("offsets", "too few", lambda old: old[:1])
as_array("offsets", "too many", lambda old: np.arange(10**5, dtype=np.uint64))
as_array("offsets", "empty", lambda old: old[:0])
as_array("offsets", "floats", lambda old: old.astype(np.float64))
as_array("offsets", "in two dimensions", lambda old: old[:, None].copy())
as_array("ids", "not UTF-8", lambda old: np.full(len(old), 0xFF, np.uint8))
as_array("ids", "escapes", lambda old: np.full(len(old), 0x1B, np.uint8))
as_array("ids", "floats", lambda old: old.astype(np.float32))
as_array("ids", "empty", lambda old: old[:0])
as_array("id_offsets", "beyond", lambda old: old + np.uint64(1000))
as_array("id_offsets", "falling", lambda old: old[::-1].copy())
as_array("id_offsets", "within a character", lambda old: old // np.uint64(2))
as_array("paths", "not UTF-8", lambda old: np.full(len(old), 0xFF, np.uint8))
as_array("paths", "NUL", lambda old: np.zeros(len(old), np.uint8))
as_array("paths", "up the tree", lambda old: np.frombuffer((b"../" * len(old))[: len(old)], np.uint8))
as_array("path_offsets", "beyond", lambda old: old * np.uint64(2**40))
as_array("segments", "infinite", lambda old: np.full_like(old, np.inf))
as_array("segments", "far away", lambda old: np.full_like(old, -1e300))
as_array("segments", "of three", lambda old: np.zeros((len(old), 3)))
as_array("segments", "too few", lambda old: old[:1])
as_array("channels", "large", lambda old: np.full_like(old, 2**31 - 1))
as_array("channels", "text", lambda old: old.astype(np.int64))
as_array("num_samples", "large", lambda old: np.full_like(old, 2**64 - 1))
as_array("num_samples", "none", lambda old: np.zeros_like(old))
as_array("sources", "large", lambda old: np.full_like(old, 2**63 - 1))
as_array("sources", "small", lambda old: np.full_like(old, -(2**63)))
as_array("crc32c", "too few", lambda old: old[:1])
as_array("crc32c", "of another dtype", lambda old: old.astype(np.uint64))
as_array("features", "of another dtype", lambda old: old.astype(np.float64))
as_array("features", "of another shape", lambda old: old[:, :5].copy())
as_array("features", "NaN", lambda old: np.full_like(old, np.nan))
as_array("features", "fewer", lambda old: old[:-1].copy())
as_array("features", "flat", lambda old: old.reshape(-1).copy())
for column in ("features", "ids", "offsets"):
    as_metadata(column, "10^12 long", lambda it: it.update(shape=[10**12, *it["shape"][1:]]))
    as_metadata(column, "negative", lambda it: it.update(shape=[-1, *it["shape"][1:]]))
    as_metadata(column, "shape of floats", lambda it: it.update(shape=[1.5]))
    as_metadata(column, "shape is a number", lambda it: it.update(shape=5))
    as_metadata(column, "shape of 100 dimensions", lambda it: it.update(shape=[1] * 100))
    as_metadata(column, "objects", lambda it: it.update(data_type="object"))
    as_metadata(column, "structured", lambda it: it.update(data_type={"name": "structured", "configuration": {}}))
    as_metadata(
        column, "other codecs", lambda it: it.update(codecs=[{"name": "gzip", "configuration": {"level": 10**9}}])
    )
    as_metadata(column, "codecs are text", lambda it: it.update(codecs="x"))
    as_metadata(column, "fill value is an object", lambda it: it.update(fill_value={"a": 1}))
    as_metadata(column, "no grid", lambda it: it.pop("chunk_grid"))
    as_metadata(column, "chunks of none", lambda it: it["chunk_grid"]["configuration"].update(chunk_shape=[0]))
    as_metadata(column, "version 2", lambda it: it.update(zarr_format=2))

as_array("side_quantization", "NaN", lambda old: np.full_like(old, np.nan))
as_array("side_quantization", "too few", lambda old: old[:1].copy())
as_array("side_quantization", "of another dtype", lambda old: old.astype(np.float64))
as_array("side_quantization", "of another shape", lambda old: old[:, :1].copy())
as_array("side_quantization_offsets", "falling", lambda old: old[::-1].copy())
as_array("side_quantization_offsets", "none for each", lambda old: np.zeros_like(old))
as_array("side_quantization_offsets", "beyond", lambda old: old * np.uint64(2**40))
as_metadata("side_quantization", "10^12 long", lambda it: it.update(shape=[10**12, *it["shape"][1:]]))

in_index("ids", "not UTF-8", lambda old: np.full(len(old), 0xFF, np.uint8))
in_index("ids", "of another dtype", lambda old: old.astype(np.float64))
in_index("id_offsets", "falling", lambda old: old[::-1].copy())
in_index("id_offsets", "beyond", lambda old: old * 1000)
in_index("item", "beyond", lambda old: old + np.uint32(10**9))
in_index("first_frame", "negative", lambda old: old - 10**6)
in_index("first_frame", "beyond", lambda old: old + 2**62)
in_index("num_frames", "10^12", lambda old: np.full_like(old, 10**12))
index_describes("in a list", lambda old: [1, 2])
index_describes("less", lambda old: old | {"items": old["items"][1:]})
index_describes("of 2^53 items", lambda old: old | {"items": [2**53] * len(old["items"])})
index_describes("in words", lambda old: old | {"seconds": ["many"] * len(old["items"])})
in_index("num_frames", "negative", lambda old: -old)
in_index("num_frames", "nearly all of int64", lambda old: np.full_like(old, 2**63 - 1))
in_index("shard", "beyond", lambda old: old + np.uint32(1000))
in_index("by_hash", "beyond", lambda old: old + np.uint32(1000))
in_index("by_hash", "of one", lambda old: np.zeros_like(old))
in_index("id_hash", "falling", lambda old: old[::-1].copy())
in_index("row_hash", "zero", lambda old: np.zeros_like(old))
in_index("row_hash", "of objects", lambda old: np.array([{}] * len(old), object))
in_index("row_hash", "structured", lambda old: np.zeros(len(old), "u4,u4"))
in_index("row_hash", "of a header of 3 GB", lambda old: b"\x93NUMPY\x02\x00" + (3 << 30).to_bytes(4, "little") + b"{")
in_index(
    "row_hash", "of a deep header", lambda old: b"\x93NUMPY\x01\x00" + (60000).to_bytes(2, "little") + b"(" * 60000
)
in_index("row_hash", "10^12 long", lambda old: npy_header("(1000000000000,)"))
in_index("row_hash", "of negative length", lambda old: npy_header("(-1,)"))

in_ledger("id is a number", id=5)
in_ledger("id is half a character", id="\ud800")
in_ledger("id of escapes", id=TEXT, path=TEXT, message=TEXT, reason=TEXT)
in_ledger("message is a list", message=[1])
in_ledger("reason is an object", reason={})
in_ledger("size is text", size="x")
in_ledger("mtime is 10^400", mtime_ns=10**400)
in_ledger("start is text", start="x")
in_ledger("start is NaN", start=float("nan"))
in_ledger("start is 10^400", start=10**400)
in_ledger("channel is 10^400", channel=10**400)
in_ledger("channel is a fraction", channel=0.5)
in_ledger("replaces is text", replaces="x")
in_ledger("replaces is odd", replaces={"run": 5, "row_hash": [1]})
in_ledger("replaces has more", replaces={"a": 1})
in_ledger("has no reason", reason=None)
in_ledger("of an utterance that is there", id="utt-1", replaces={"run": "", "row_hash": "x"})
in_ledger("of 10 MB", message="x" * (10 << 20))

in_run("is empty", lambda it: {"a": 1})
in_run("asked is a list", lambda it: it.update(asked=[1]))
in_run("asked is text", lambda it: it.update(asked="x"))
in_run("counts of 10^400", lambda it: it["asked"].update(utterances=10**400, new=10**400, held=0) or it.pop("finished"))
in_run("counts below zero", lambda it: it["asked"].update(utterances=-5, new=5, held=-50) or it.pop("finished"))
in_run("counts are text", lambda it: it["asked"].update(utterances="x"))
in_run("of escapes", lambda it: it["asked"].update(manifest=TEXT, root=TEXT, new=50) or it.pop("finished"))
in_run(
    "of half a character", lambda it: it["asked"].update(manifest="\ud800", root="\ud800", new=9) or it.pop("finished")
)
in_run("root with NUL", lambda it: it["asked"].update(root="a\0b"))
in_run("root is a list", lambda it: it["asked"].update(root=[1]))
in_run("started is a number", lambda it: it.update(started=5, finished={}))
in_run("outcome is a list", lambda it: it.update(outcome=[[1]]))
in_run("outcome is odd", lambda it: it.update(outcome={"items": 10**400, "extracted": "x", "interrupted": []}))
in_run("more items than there are", lambda it: it["outcome"].update(items=10**6))

as_probe("device is a list", {"device": [1], "date": 1, "fastest": None})
as_probe("device is an escape", {"device": TEXT, "date": TEXT, "fastest": None})
as_probe("fastest is text", {"device": "cpu", "date": "x", "fastest": "y"})
as_probe("fastest is empty", {"device": "cpu", "date": "x", "fastest": {}})
as_probe("a list", [1])
as_probe("measured is text", {"device": "cpu", "date": "x", "fastest": None, "measured": "y"})


def side(**values: Any) -> dict[str, Any]:
    return {"name": "x", "item_shape": [], "dtype": "float32", "units": "", **values}


def noise(manifest: str) -> dict[str, Any]:
    return {"manifest": manifest, "snr": [10.0], "seed": 0}


def npy_header(shape: str) -> bytes:
    text = f"{{'descr': '<u8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
