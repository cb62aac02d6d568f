"""Lhotse's cuts: over the shards of a cache, or with features in a Shar. Both are written
without Lhotse. `featcache.adapters.lhotse` makes its cuts of the same JSON."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from featcache.errors import ArgumentError
from featcache.export.rows import FILE_BYTES, Rows, add_members, encode_npy, place_of, unfit
from featcache.loader.cache import Cache
from featcache.loader.corpus import Corpus
from featcache.manifest.columns import json_line
from featcache.manifest.copies import copies_of
from featcache.manifest.formats.lhotse import SAID
from featcache.manifest.strings import Strings

TRACK = "#track="
"""Separates a version's folder from the name of a track."""


def write_lhotse(rows: Rows, file: Path, target: Path) -> list[str]:
    """Write cuts whose features lie in the cache."""
    cache = rows.cache
    if not isinstance(cache.version.path, Path) or isinstance(cache, Corpus):
        where = place_of(cache)
        raise ArgumentError(f"{where}: cuts name one version in a folder: --to shar copies")
    folder = str(Path(folder_of(cache)).absolute())
    if not target.name.endswith((".jsonl", ".jsonl.gz")):
        raise ArgumentError(f"-o: {target}: Lhotse reads cuts in .jsonl or .jsonl.gz")
    cuts = CutMaker(cache, rows.ids)
    with _opened(file, target.suffix == ".gz") as out:
        for row in rows:
            storage = stored_in_cache(folder, row.id)
            cut = cuts.make(row.number, row.id, len(row.features), row.columns, storage)
            out.write(json_line(cut))
    return ["features stay in the cache: import featcache.adapters.lhotse before reading cuts"]


def write_shar(rows: Rows, folder: Path, target: Path) -> list[str]:
    """Write a Shar: `cuts.N.jsonl.gz` and `features.N.tar`, with features as `.npy`."""
    rows.refuse_names()
    cuts = CutMaker(rows.cache, rows.ids)
    storage = {"storage_type": "shar", "storage_path": "", "storage_key": ""}
    for number, group in rows.groups(FILE_BYTES):
        with (
            tarfile.open(folder / f"features.{number:06d}.tar", "w") as tar,
            _opened(folder / f"cuts.{number:06d}.jsonl.gz", True) as out,
        ):
            for row in group:
                cut = cuts.make(row.number, row.id, len(row.features), row.columns, storage)
                cut["start"] = 0.0
                cut["features"]["start"] = 0
                features = json.dumps(cut["features"]).encode() + b"\n"
                npy = encode_npy(row.features)
                add_members(tar, {f"{row.id}.npy": npy, f"{row.id}.json": features})
                out.write(json_line(cut))
    return []


@contextmanager
def _opened(file: Path, is_packed: bool) -> Iterator[TextIO]:
    """Open a file to write text; a packed one without its hidden name and the time in it."""
    with ExitStack() as stack:
        out: Any = stack.enter_context(file.open("wb"))
        if is_packed:
            out = stack.enter_context(gzip.GzipFile("", "wb", fileobj=out, mtime=0))
        yield stack.enter_context(io.TextIOWrapper(out, encoding="utf-8"))


def folder_of(cache: Cache) -> str:
    """Return a version's folder, with `@` and its tag if it has one, as `open` takes it. For
    another track than the main one, the track's name follows."""
    folder = str(cache.version.path)
    if cache.version.tag:
        folder += f"@{cache.version.tag}"
    if cache._track_of is not None:
        folder += f"{TRACK}{cache.track_name}"
    return folder


def stored_in_cache(folder: str, id_: str) -> dict[str, str]:
    """Return the fields of Lhotse's by which `featcache.adapters.lhotse` finds features."""
    return {"storage_type": "featcache", "storage_path": folder, "storage_key": id_}


class CutMaker:
    """Makes the cuts of a version's utterances, as JSON. Raises ArgumentError if a frame is
    not one row of numbers, or the number of samples from one frame to the next is not
    whole."""

    def __init__(self, cache: Cache, ids: Strings) -> None:
        spec = cache.spec
        if len(spec.item_shape) != 1 or not spec.axis.exact_rate:
            raise unfit(cache, "but Lhotse's cuts need [frames, dims]")
        hop = float(spec.sample_rate / spec.axis.exact_rate)
        self._hop = round(hop)  # samples from one frame to the next
        if abs(hop - self._hop) > 1e-6 * hop:
            what = f"and has {hop:g} samples from one frame to the next"
            raise unfit(cache, f"{what}, but Lhotse needs a whole number")
        self._spec = spec
        self._kind = cache.config.get("extractor", cache.version.info.name)
        copies = copies_of(cache.config)
        self._speeds = copies.speeds[copies.numbers(ids)]

    def make(
        self,
        number: int,
        id_: str,
        num_frames: int,
        columns: dict[str, Any],
        storage: dict[str, str],
    ) -> dict[str, Any]:
        """Make the cut of the utterance with that number among the ids. `columns` are cells
        that have a value; `storage` is where Lhotse finds the features."""
        speed = float(self._speeds[number])
        columns = dict(columns)
        sample_rate = self._spec.sample_rate
        duration = num_frames * self._hop / sample_rate
        start = columns.pop("start", 0.0) / speed
        channel = max(0, columns.pop("channel", 0))
        columns.pop("duration", None)
        path = columns.pop("path", "")
        recording = str(columns.pop("recording_id", path))
        if recording and speed != 1:
            recording += f"_sp{speed:g}"  # the suffix that Lhotse's perturb_speed adds
        recording = recording or id_
        supervision: dict[str, Any] = {
            "id": id_,
            "recording_id": recording,
            "start": 0.0,
            "duration": duration,
            "channel": channel,
            **{name: str(columns.pop(name)) for name in SAID if name in columns},
        }
        if columns:
            supervision["custom"] = columns
        features = {
            "type": self._kind,
            "num_frames": num_frames,
            "num_features": self._spec.item_shape[0],
            "frame_shift": self._hop / sample_rate,
            "sampling_rate": sample_rate,
            "start": start,
            "duration": duration,
            **storage,
            "recording_id": recording,
            "channels": channel,
        }
        segment = {"id": id_, "start": start, "duration": duration, "channel": channel}
        return {**segment, "supervisions": [supervision], "features": features, "type": "MonoCut"}
