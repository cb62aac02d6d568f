"""A corpus: several manifests that were extracted into one folder, each into a cache of its own, its part.

<corpus>/
  corpus.json     the parts, and what was known of each when it was complete; sealed
  <part>/         a cache: the versions of one manifest, named after the manifest's file

What is known of a part is derived from its versions, and says of which shards: so a reader sees at once whether it
still holds. If not, the part is looked at. Several jobs may write `corpus.json`, each after its part: in a folder, a
lock keeps them apart; in an object store, a request that fails if somebody else has written it since. What is lost
where neither works costs time, and nothing else.
"""

from __future__ import annotations

import glob
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from featcache.errors import ArgumentError, DamagedError, StoreError
from featcache.storage.location import Location
from featcache.storage.objects import Objects
from featcache.storage.store import store_of
from featcache.store.fields import any_text, anything, fields, listed, mapped, text, whole
from featcache.store.files import make_folders, write_file
from featcache.store.index import Index, index_folder, latest_index
from featcache.store.locks import Claim
from featcache.store.records import read_document, sealed_document
from featcache.store.version import Version

CORPUS = "corpus.json"
FORMAT = 1

_MOST_PARTS = 1 << 16
_ATTEMPTS = 100
"""How often a change is tried in an object store, where others may be first; with pauses, some two minutes."""

_PART_NAME = r"[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]*"
_HASH = text("([0-9a-f]{16})?")
_VERSION = fields(
    {name: whole() for name in ("utterances", "failed", "frames", "longest", "shards")}
    | {"manifest": _HASH, "index": text("[0-9a-f]{12}")}
)
_PART = fields(
    {
        "name": text(_PART_NAME, 200),
        "manifest": any_text(8192),
        "rows": whole(),
        "size": whole(),
        "mtime_ns": whole(high=2**63),
    }
    | {"hash": _HASH, "versions": mapped(text(at_most=255), _VERSION)}
)
_CORPUS = fields({"format": whole(FORMAT, FORMAT), "parts": listed(_PART, _MOST_PARTS)}, others=anything)


@dataclass(frozen=True)
class PartVersion:
    """A version of a part, as it was when it held all that it was to hold."""

    manifest: str
    """The hash of the manifest's file then, and of how it was read; empty if it is not known."""
    utterances: int
    """How many utterances it held."""
    failed: int
    """How many were in the failure ledger instead."""
    frames: int
    """The frames of all its utterances."""
    longest: int
    """The frames of the longest one."""
    shards: int
    """How many shards there were."""
    index: str
    """The name of the index of its shards: it has changed since if its shards have another one."""

    @classmethod
    def of(cls, version: Version, index: Index, failed: int = 0, manifest: str = "") -> PartVersion:
        """What there is to know of a version, by its index."""
        frames, longest = int(index.num_frames.sum()), int(index.num_frames.max(initial=0))
        name = index_folder(version, index.shards).name
        return cls(manifest, len(index), failed, frames, longest, len(index.shards), name)

    def shards_of(self, version: Version) -> list[str] | None:
        """The names of the version's shards, if they are those that it had then."""
        names = version.listed_shards()
        if index_folder(version, names).name != self.index and not isinstance(version.path, Path):
            if (older := latest_index(version, names)) is not None:
                version.take_for_whole(older.shards)
            names = version.shard_names()  # without those that are still being written
        return names if index_folder(version, names).name == self.index else None


@dataclass(frozen=True)
class Part:
    """A part of a corpus: one manifest, and the cache of what was extracted from it."""

    name: str
    """The name of the part's folder: that of the manifest's file, without its suffix."""
    manifest: str
    """The path of the manifest, absolute, where it was extracted."""
    rows: int = 0
    """The rows of the manifest when it was extracted last, as are the next three; 0 if it never was."""
    size: int = 0
    """The bytes of the manifest's file."""
    mtime_ns: int = 0
    """When the manifest's file was changed last, in ns since 1970."""
    hash: str = ""
    """The XXH3-64 of the manifest's bytes, 16 hex digits."""
    versions: dict[str, PartVersion] = field(default_factory=dict)
    """What is known of its versions, by the names of their folders."""


def is_corpus(location: Location) -> bool:
    """Whether there is a corpus at a location."""
    return store_of(location).exists(location / CORPUS)


def corpus_of(location: Location) -> tuple[Location, str] | None:
    """The corpus that a path names, and the name of a version in its parts (empty for all); None if it names no corpus.

    As in a cache, the last part of the path may be a config's name: `corpus/fbank80`.
    """
    if is_corpus(location):
        return location, ""
    if is_corpus(location.parent) and not store_of(location).exists(location):
        return location.parent, location.name
    return None


def read_parts(corpus: Location) -> list[Part]:
    """The parts of a corpus, in their order.

    Raises:
        FileNotFoundError: There is no corpus.
        DamagedError: Its `corpus.json` is not what was written.
    """
    try:
        document = _CORPUS(read_document(corpus / CORPUS))
        if len({part["name"] for part in document["parts"]}) < len(document["parts"]):
            raise ValueError("two parts have the same name")
    except (DamagedError, ValueError) as error:
        what = error.what if isinstance(error, DamagedError) else f"{corpus / CORPUS}: damaged: {error}"
        raise DamagedError(
            f"{what}; remove it, and run `featcache extract` with all manifests: what is there is not extracted again"
        ) from error
    return [
        Part(**{**part, "versions": {name: PartVersion(**one) for name, one in part["versions"].items()}})
        for part in document["parts"]
    ]


def update_parts(corpus: Location, change: Callable[[dict[str, Part]], None]) -> list[Part]:
    """Change what `corpus.json` says of parts, by their names, while nobody else does; returns them in their new order.

    In an object store, `change` is called again if somebody else has written it meanwhile.

    Raises:
        DamagedError: It is not what was written.
        StoreError: It cannot be written.
    """
    try:
        if isinstance(corpus, Path):
            make_folders(corpus)
            with Claim(corpus / f".{CORPUS}.lock") as claim:
                claim.take(wait=True)
                before, after = _changed(corpus, change)
                if after != before:
                    write_file(corpus / CORPUS, _document(after))
                return after
        store = Objects()
        for attempt in range(_ATTEMPTS):
            tag = store.tag(corpus / CORPUS)
            before, after = _changed(corpus, change)
            if after == before or store.put_if_unchanged(corpus / CORPUS, _document(after), tag):
                return after
            time.sleep(random.uniform(0, min(0.05 * 2**attempt, 2)))
        raise StoreError(f"{corpus / CORPUS}: cannot be written: others keep changing it: run the same command again")
    except OSError as error:
        raise StoreError(f"{corpus / CORPUS}: cannot be written: {error.strerror}") from error


def _changed(corpus: Location, change: Callable[[dict[str, Part]], None]) -> tuple[list[Part], list[Part]]:
    before: list[Part] = []
    with suppress(FileNotFoundError):
        before = read_parts(corpus)
    parts = {part.name: part for part in before}
    change(parts)
    return before, sorted(parts.values(), key=lambda part: part.name)


def _document(parts: Sequence[Part]) -> bytes:
    return sealed_document({"format": FORMAT, "parts": [asdict(part) for part in parts]})


def record_version(version: Version, known: PartVersion) -> None:
    """Record what is known of a version, if it is one of a part of a corpus; without a manifest's hash, the one that is
    recorded stays.

    Raises:
        StoreError, DamagedError: As in `update_parts`.
    """
    part, corpus = version.path.parent.name, version.path.parent.parent
    if not is_corpus(corpus):
        return

    def change(parts: dict[str, Part]) -> None:
        if part in parts:
            versions = parts[part].versions
            before = versions.get(version.path.name)
            now = replace(known, manifest=before.manifest) if before and not known.manifest else known
            parts[part] = replace(parts[part], versions={**versions, version.path.name: now})

    update_parts(corpus, change)


def manifests_of_parts(given: Sequence[str | Path]) -> dict[str, Path] | None:
    """The manifests of parts, by the names of the parts; None if what is given is one manifest, and no corpus.

    Paths of manifests are given, or patterns as in a shell, of which each may stand for any number of them.

    Raises:
        ArgumentError: Two parts would have the same name, a name is not one for a folder, nothing fits a pattern, or
            there are several manifests, and one is standard input.
    """
    found: list[Path] = []
    is_several = len(given) > 1
    for one in map(str, given):
        files = [Path(one)]
        if glob.has_magic(one) and not Path(one).exists():
            files = sorted(map(Path, glob.glob(one, recursive=True)))
            is_several = True
            if not files:
                raise ArgumentError(f"{one}: there is no such file, and as a pattern, it fits none")
        found += files
    if not is_several:
        return None
    return by_part_name(found)


def by_part_name(manifests: Iterable[Path]) -> dict[str, Path]:
    """Manifests by the names of their parts, sorted; a manifest that is given twice counts once.

    Raises:
        ArgumentError: Two parts would have the same name, or one is standard input.
    """
    parts: dict[str, Path] = {}
    check = text(_PART_NAME, 200)
    for manifest in manifests:
        if str(manifest) == "-":
            raise ArgumentError("-: standard input is one manifest, and the parts of a corpus are named after files")
        name = part_name(manifest)
        try:
            check(name)
        except ValueError as error:
            raise ArgumentError(
                f"{manifest}: {name!r} cannot name a part: give the manifest a name that does not begin with a dot, "
                "without control characters, of at most 200 characters"
            ) from error
        if parts.setdefault(name, manifest).absolute() != manifest.absolute():
            raise ArgumentError(
                f"{parts[name]} and {manifest} would both be the part {name}: parts are named after their manifests, "
                "so rename one"
            )
    return dict(sorted(parts.items()))


def part_name(manifest: Path) -> str:
    """The name of a manifest's part: `train-00` for `train-00.parquet`, `train-00.csv.gz` and the folder `train-00`."""
    if manifest.is_dir():
        return manifest.resolve().name
    return (manifest.with_suffix("") if manifest.suffix.lower() == ".gz" else manifest).stem
