"""The JSON of a cache is read within bounds, from regular files, and whatever is odd is a DamagedError."""

import os
import socket

import pytest

from featcache.errors import DamagedError
from featcache.store import documents
from featcache.store.documents import parse_object, read_bytes, read_lines


def nested(depth):
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"[" * 100_000, "nested more than 64 deep"),
        (nested(65), "nested more than 64 deep"),
        (b'{"a": [' + b"[]," * (1 << 18) + b"1]}", "more than 262,144 lists and objects"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": -Infinity}', "-Infinity is no JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "4300 digits"),
        (b'{"a": 1', "delimiter"),
        (b'{"a": "\\', "not JSON"),
        (b"\xff\xfe{\0}\0", "utf-8"),
        ('{"a": 1}'.encode("utf-16"), "utf-8"),
        (b"", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
    ],
    ids=lambda value: value[:12] if isinstance(value, bytes) else None,
)
def test_what_is_no_document_is_damaged_and_named(data, what):
    with pytest.raises(DamagedError, match=f"^here/zarr.json: damaged: .*{what}"):
        parse_object(data, "here/zarr.json")


def test_brackets_in_text_are_no_depth():
    assert parse_object(b'{"[[": "\\"' + b"[" * 1000 + b'", "\\\\": [1]}', "x") == {"[[": '"' + "[" * 1000, "\\": [1]}
    assert parse_object(nested(64), "x")["a"]["a"]


def test_only_regular_files_are_read_and_nothing_waits_for_the_writer_of_a_pipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    os.mkfifo("pipe")
    os.mkdir("folder")
    os.symlink("/dev/zero", "endless")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        for name in ("pipe", "folder", "endless", "socket"):
            for read in (read_bytes, lambda path: list(read_lines(path))):
                with pytest.raises(DamagedError, match=f"^{name}: damaged: not a regular file"):
                    read(name)
    with pytest.raises(FileNotFoundError):
        read_bytes("missing")


def test_a_link_to_a_regular_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b'{"a": 1}\n')
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b'{"a": 1}\n'
    assert list(read_lines(tmp_path / "link")) == [b'{"a": 1}\n']


def test_size_is_bounded_before_anything_is_read(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(7 << 40)  # 7 TiB, none of it on the disk
    with pytest.raises(DamagedError, match=f"{path}: damaged: 7,696,581,394,432 bytes, and at most 33,554,432"):
        read_bytes(path)
    with pytest.raises(DamagedError, match=f"{path}: damaged: line 1 has more than 4,194,304 bytes"):
        list(read_lines(path))


def test_a_document_of_the_largest_size_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "DOCUMENT_BYTES", 9)
    (tmp_path / "file").write_bytes(b'{"a": 12}')
    assert read_bytes(tmp_path / "file", 9) == b'{"a": 12}'
    with pytest.raises(DamagedError, match="9 bytes, and at most 8"):
        read_bytes(tmp_path / "file", 8)
    assert list(read_lines(tmp_path / "file", 9)) == [b'{"a": 12}']
