"""Tars of audio, as WebDataset packs them: neighbours of one key are a sample, and a key
ends at the first dot of a name's last component. JSON and text beside audio are columns."""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from gzip import GzipFile
from itertools import groupby, islice
from typing import Any, NamedTuple

from featcache.errors import ManifestError, counted, listing
from featcache.manifest.audio_locations import names_container
from featcache.manifest.formats.source import AUDIO_SUFFIXES, PLACE, Batch, Rows, Source
from featcache.manifest.formats.tables import decode_object, json_batches
from featcache.manifest.formats.tar import DamagedTarError, members_of
from featcache.manifest.utterances import names_of_whole_files

_USTAR = re.compile(rb".{257}ustar", re.DOTALL)
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_LINKED_OR_WHOLE = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.LNKTYPE)
_COLUMNS = ("json", "txt")
_COLUMNS_BYTES = 1 << 20
_MOST_MEMBERS = 100
_SHOWN = 3


class _Member(NamedTuple):
    place: int
    key: str
    extension: str
    """The rest of its name, in lower case."""
    name: str
    size: int
    content: bytes
    """The beginning of JSON and text; empty for others."""


def is_tar(source: Source) -> bool:
    """Tell whether a file is a tar, by its name or its beginning."""
    if source.is_folder:
        return False
    return source.suffix in (".tar", ".tgz") or _USTAR.match(source.head) is not None


def read_tar(source: Source) -> Iterator[Batch]:
    """Read the samples of a tar that have audio. Raises ManifestError if the tar is damaged,
    has no audio, or has a name that paths into it cannot have."""
    name = source.path.name
    if source.is_folder:
        raise ManifestError("is a folder, and this format is a file's: of tars, give a pattern")
    if not names_container(f"{name}/"):
        what = "name it with .tar, .tar.gz or .tgz at its end, as a file"
        raise ManifestError(f"is a tar: {what}: features belong to its members")
    if isinstance(source.stream, GzipFile) != name.endswith((".gz", ".tgz")):
        what = "its name and its content differ in whether it is compressed"
        raise ManifestError(f"is a tar, but {what}: name it .tar, or compressed .tar.gz")
    source.renamed = partial(names_of_whole_files, PLACE)
    left_out: Counter[str] = Counter()
    try:
        yield from json_batches(_rows(source, left_out), source)
    except DamagedTarError as damage:
        raise ManifestError(f"is no tar, or {damage}: fetch or pack it again") from None
    if left_out:
        members = counted(left_out.total(), "member")
        source.note(f"{members} of the tar left out: {_counts(left_out)}")


def _rows(source: Source, left_out: Counter[str]) -> Rows:
    """Give each sample with audio. Counts the extensions of members that are not read."""
    has_audio = False
    for key, group in groupby(_members(source, left_out), lambda member: member.key):
        members = [*islice(group, _MOST_MEMBERS + 1)]
        if len(members) > _MOST_MEMBERS:
            raise ManifestError(f"has more than {_MOST_MEMBERS} members of the key {key!r}")
        audio = [each for each in members if f".{each.extension}".endswith(AUDIO_SUFFIXES)]
        if not audio:
            left_out.update(f"*.{member.extension} without audio" for member in members)
            continue
        has_audio = True
        first, *others = audio
        if others:
            names = listing(repr(member.name) for member in audio)
            what = f"{names} have one key, {key!r}, and are one sample: a key ends at the first dot"
            source.faults.add(others[0].place, what)
            continue
        beside = [member for member in members if member is not first]
        columns = _columns_of(beside, source, left_out)
        original_id = columns.pop("id", key)
        if original_id != key:
            columns["original_id"] = original_id
        yield first.place, {PLACE: f"{source.path.name}/{first.name}", "id": key, **columns}
    if not has_audio:
        raise ManifestError(
            f"is a tar of {_counts(left_out) or 'nothing'}: there is no audio in it"
        )


def _members(source: Source, left_out: Counter[str]) -> Iterator[_Member]:
    """List the files of a tar that belong to samples, as WebDataset does. Counts
    symbolic links, sparse files and the like, which paths into a tar do not reach."""
    base = source.faults.file("", "member")
    for number, header in enumerate(members_of(source.stream), base + 1):
        name = header.name
        while name.startswith("./"):
            name = name[2:]
        parts = _NAME.fullmatch(name)
        if not parts or header.isdir() or (name.startswith("__") and name.endswith("__")):
            continue
        extension, content = parts[2].lower(), b""
        if header.type not in _LINKED_OR_WHOLE:
            left_out[f"*.{extension} that is no plain file"] += 1
            continue
        if extension in _COLUMNS:  # now, since a compressed tar cannot go back
            source.stream.seek(header.offset_data)
            content = source.stream.read(min(header.size, _COLUMNS_BYTES))
        yield _Member(number, parts[1], extension, name, header.size, content)


def _columns_of(members: list[_Member], source: Source, left_out: Counter[str]) -> dict[str, Any]:
    """Read the columns beside audio: the keys of a JSON object, and a text as `text`, or if
    the object has that key, as `txt`."""
    columns: dict[str, Any] = {}
    beside: str | None = None
    for member in members:
        if member.extension not in _COLUMNS:
            left_out[f"*.{member.extension}"] += 1
            continue
        try:
            if member.size > len(member.content):
                raise ValueError(f"has more than {_COLUMNS_BYTES:,} bytes")
            text = member.content.decode()
            if member.extension == "json":
                columns = decode_object(text)
            else:
                beside = text.strip()
        except ValueError as error:
            source.faults.add(member.place, f"{member.name!r}: {error}")
    if beside is not None:
        columns["txt" if "text" in columns else "text"] = beside
    return columns


def _counts(left_out: Counter[str]) -> str:
    return listing(f"{count:,} {kind}" for kind, count in left_out.most_common(_SHOWN))
