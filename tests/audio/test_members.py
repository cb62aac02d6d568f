"""Single members: values of tables by column and row, what is wrong with others, and what
is kept of containers."""

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from containers import COMPRESSORS, compress, write_tables, write_tar
from damage import flip
from forking import fork, join
from processes import open_files

from featcache.audio import members, tables
from featcache.audio.kept import Kept
from featcache.audio.members import check_container, copy_of, stamp_now
from featcache.audio.remote import TriedInVainError
from featcache.errors import AudioError, Reason
from featcache.manifest.audio_locations import LocalFile, Member, Url, locate

VALUES = [b"zero", b"1" * 900, None, b"", b"four" * 99, b"five", b"six"]


def content(container, name) -> bytes:
    fetched = copy_of(Member(container, name))
    assert fetched.stamp == stamp_now(Member(container, name))
    with fetched.open() as file:
        return file.read()


def refused(container, name) -> tuple[Reason, str]:
    with pytest.raises(AudioError) as caught:
        copy_of(Member(container, name))
    return caught.value.reason, str(caught.value)


def test_paths_into_containers(scratch):
    (scratch / "folder.tar").mkdir()
    for path, inside in {
        "a.tar/b/c.wav": ("a.tar", "b/c.wav"),
        "x/train-0.parquet/audio/12": ("x/train-0.parquet", "audio/12"),
        "data.arrow/audio/3": ("data.arrow", "audio/3"),
        "a.tar.gz/b.wav": ("a.tar.gz", "b.wav"),
        "folder.tar/a.tar/b.tar/c": ("folder.tar/a.tar", "b.tar/c"),
    }.items():
        assert locate(scratch, path) == Member(f"{scratch}/{inside[0]}", inside[1])
        assert str(locate(scratch, path)) == str(scratch / path)
    for path in ("a.wav", "a.tar", "b.tar.wav/c", "tar/c.wav", "folder.tar/c.wav"):
        assert locate(scratch, path) == LocalFile(scratch / path)
    assert locate(scratch / "a.tar", "b.wav") == Member(f"{scratch}/a.tar", "b.wav")
    assert locate(scratch, "/x/a.tar/b.wav") == locate(Url("s3://b"), "file:///x/a.tar/b.wav")
    for url, inside in {
        "s3://bucket/a.tar/b/c.wav": ("s3://bucket/a.tar", "b/c.wav"),
        "https://host/x/train.parquet/audio/12": ("https://host/x/train.parquet", "audio/12"),
        "gs://bucket/raw.1.ark:1234": ("gs://bucket/raw.1.ark", "1234"),
        "az://bucket/a.tar.gz/b.wav": ("az://bucket/a.tar.gz", "b.wav"),
    }.items():
        assert locate(scratch, url) == Member(Url(inside[0]), inside[1])
        assert str(locate(scratch, url)) == url
    for url in ("s3://a.tar/b.wav", "https://host/a.wav?of=a.tar/b.wav", "s3://bucket/a.tar"):
        assert locate(scratch, url) == Url(url)
    assert locate(Url("s3://bucket/a.tar"), "b.wav") == Member(Url("s3://bucket/a.tar"), "b.wav")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_values_of_tables(scratch, kind):
    """Of structs with a field `bytes`, and of bytes; over several row groups, and none
    that is null or empty."""
    table = write_tables(scratch, VALUES)[kind == "arrow"]
    for row, value in enumerate(VALUES):
        for column in ("audio", "raw"):
            if value:
                assert content(table, f"{column}/{row}") == value
            else:
                assert refused(table, f"{column}/{row}") == (Reason.EMPTY, "the row holds no bytes")
    for name, words in {
        "audio/7": "the table has 7 rows, counted from 0",
        "audio/-1": "a path into a table ends in a column and a row, as in audio/123",
        "audio/0/": "no such column of bytes (did you mean audio?); there are: audio, raw",
        "id/0": "no such column of bytes; there are: audio, raw",
    }.items():
        assert refused(table, name) == (Reason.FILE_MISSING, words)


def test_tables_of_arrow_in_its_file_format_and_compressed(scratch):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"audio": [b"one", b"two" * 999]})
    path = scratch / "file.arrow"
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    assert [content(path, f"audio/{row}") for row in range(2)] == table["audio"].to_pylist()
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with (
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table)
    reason, words = refused(path, "audio/0")
    assert (reason, "write it without compression" in words) == (Reason.TRUNCATED, True)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_tables_that_are_cut_short_or_none(scratch, kind):
    """Of Arrow, the rows before the cut are read; Parquet cannot be read without its end."""
    table = write_tables(scratch, VALUES)[kind == "arrow"]
    whole = table.read_bytes()
    last = whole.rindex(b"six") if kind == "arrow" else len(whole) - 1
    table.write_bytes(whole[:last])
    assert refused(table, "audio/6")[0] == Reason.TRUNCATED
    if kind == "arrow":
        assert content(table, "audio/1") == VALUES[1]
    table.write_bytes(b"no table " * 100)
    assert refused(table, "audio/0")[0] == (
        Reason.TRUNCATED if kind == "parquet" else Reason.NOT_AUDIO
    )


def test_row_groups_are_bounded(scratch, monkeypatch):
    table, _ = write_tables(scratch, [b"1" * 100, b"2" * 100, b"3" * 2000, b"4"], rows_per_group=2)
    monkeypatch.setattr(tables, "_LARGEST_GROUP", 1000)
    assert content(table, "audio/1") == b"2" * 100
    reason, words = refused(table, "audio/3")
    assert (reason, "write it with smaller ones" in words) == (Reason.OUT_OF_MEMORY, True)


def test_a_container_that_is_another_file_now_is_read_anew(scratch):
    tar = write_tar(scratch / "a.tar", {"a.wav": b"first"})
    assert content(tar, "a.wav") == b"first"
    write_tar(scratch / "b.tar", {"b.wav": b"more", "a.wav": b"second"}).replace(tar)
    assert content(tar, "a.wav") == b"second"


def test_an_arrow_file_that_is_cut_while_it_is_indexed(scratch, monkeypatch):
    """It is mapped then: what is behind its end must not be touched."""
    values = [bytes([row]) * 50_000 for row in range(9)]
    _, table = write_tables(scratch, values, rows_per_group=1)

    def cut(*args, real=tables._places):
        places = real(*args)
        os.truncate(table, 200_000)
        return places

    monkeypatch.setattr(tables, "_places", cut)
    reason, words = refused(table, "audio/8")
    assert reason == Reason.TRUNCATED
    assert "became shorter" in words


def test_of_a_container_that_changes_while_it_is_read_nothing_is_taken(scratch, monkeypatch):
    """Its index may be that of the file before, or of half a file."""
    labels = scratch / "all.ctm"
    labels.write_text("one 1 0 1 word\n")
    table, _ = write_tables(scratch, VALUES)
    tar = write_tar(scratch / "a.tar", {"a.wav": b"first"})

    def changed(member, *args, real=members._find):
        found = real(member, *args)
        os.utime(member.container, ns=(1, 1))
        return found

    monkeypatch.setattr(members, "_find", changed)
    for container, name in ((labels, "one"), (table, "audio/0"), (tar, "a.wav")):
        fault = Reason.FILE_UNREADABLE, "the container changed while it was read"
        assert refused(container, name) == fault


def test_a_label_file_of_many_that_is_cut_while_it_is_indexed(scratch):
    path = scratch / "all.ctm"
    path.write_text("one 1 0 1 word\n")
    with path.open("rb") as file, pytest.raises(AudioError, match="changed while it was read"):
        members.LineIndex(0, file.fileno(), 100)


def test_what_is_no_container(scratch):
    os.mkfifo(scratch / "pipe.tar")
    (scratch / "empty.tar").touch()
    for name in ("pipe.tar", "empty.tar", "none.tar", "none\0.tar"):
        reason = Reason.TRUNCATED if name == "empty.tar" else Reason.FILE_MISSING
        assert refused(scratch / name, "a.wav")[0] == reason
        with pytest.raises(AudioError):
            check_container(scratch / name)


def test_what_is_kept_is_made_once_and_as_much_of_it_as_fits():
    kept: Kept[str] = Kept(10, len)
    made: list[str] = []
    start = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                lambda _: (start.wait(), kept.get("a", lambda: made.append("a") or "aaaa")),
                range(4),
            )
        )
    assert made == ["a"]
    for key in "bab":
        kept.get(key, lambda key=key: made.append(key) or key * 4)
    assert made == ["a", "b"]
    kept.get("c", lambda: made.append("c") or "c" * 4)
    kept.get("b", lambda: made.append("b") or "b" * 4)
    kept.get("a", lambda: made.append("a again") or "a" * 99)
    assert made == ["a", "b", "c", "a again"]


def test_a_fault_of_audio_is_kept_for_a_minute_others_are_not_and_a_result_as_long_as_is_said(
    monkeypatch,
):
    clock, made = [0.0], []
    monkeypatch.setattr("featcache.audio.kept.time.monotonic", lambda: clock[0])
    kept: Kept[str] = Kept(10, seconds=100)

    def make(result):
        made.append((result, clock[0]))
        if isinstance(result, Exception):
            raise result
        return result

    for clock[0] in (0, 59, 61, 99, 150):
        for key, fault in (
            ("audio", TriedInVainError(Reason.FILE_UNREADABLE, "not now")),
            ("disk", OSError("full")),
        ):
            with pytest.raises(type(fault), match=str(fault)):
                kept.get(key, lambda fault=fault: make(fault))
    assert [when for fault, when in made if isinstance(fault, AudioError)] == [0, 61, 150]
    assert [when for fault, when in made if isinstance(fault, OSError)] == [0, 59, 61, 99, 150]
    for clock[0] in (200, 299, 301):
        kept.get("good", lambda: make("good"))
    assert made[8:] == [("good", 200), ("good", 301)]


def test_a_child_makes_what_its_parent_was_making():
    kept, begun, go_on = Kept(1), threading.Event(), threading.Event()

    def slow():
        begun.set()
        go_on.wait()

    thread = threading.Thread(target=kept.get, args=("slow", slow))
    thread.start()
    begun.wait()
    child = fork(lambda: kept.get("slow", lambda: "made"))
    assert join(child) == 0
    go_on.set()
    thread.join()


@pytest.fixture
def packed(scratch):
    """Makes a compressed tar of members whose bytes do not compress, beginning in the
    middle of large blocks."""

    def pack(suffix, members=None):
        tar = write_tar(
            scratch / "a.tar",
            members or {f"{number}.wav": os.urandom(200_000) for number in range(4)},
        )
        return compress(tar, suffix), tar

    return pack


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_tars(packed, suffix):
    """Their members are there in any order; of one that was cut short, those before the
    cut."""
    values = {f"{number}.wav": os.urandom(200_000) for number in range(4)}
    tar, _ = packed(suffix, values)
    for name in ("2.wav", "0.wav", "3.wav"):
        assert content(tar, name) == values[name]
    assert refused(tar, "4.wav") == (Reason.FILE_MISSING, "the tar has no such member")
    data = tar.read_bytes()
    tar.write_bytes(data[: 3 * len(data) // 4 - 50_000])
    assert content(tar, "1.wav") == values["1.wav"]
    assert refused(tar, "3.wav")[0] == Reason.TRUNCATED
    tar.write_bytes(b"RIFF" + data)
    assert refused(tar, "0.wav") == (
        Reason.NOT_AUDIO,
        "the container is not compressed as its name says",
    )


@pytest.mark.parametrize("suffix", [".tgz", ".tar.bz2", ".tar.xz"])
def test_nothing_is_taken_of_a_compressed_tar_whose_checksum_is_wrong(packed, suffix):
    tar, _ = packed(suffix)
    flip(tar, tar.stat().st_size - 100_000)
    reason, words = refused(tar, "0.wav")
    assert (reason, words.split(":")[0]) == (Reason.TRUNCATED, "the container cannot be unpacked")


def test_a_compressed_tar_is_unpacked_once_and_within_bounds(packed, scratch, monkeypatch):
    monkeypatch.setattr(members, "_unpacked", unpacked := Mock(side_effect=members._unpacked))
    tar, _ = packed(".tgz", {"a.wav": bytes(9_000_000), "b.wav": b"b"})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: content(tar, name), ("a.wav", "b.wav") * 4))
    assert unpacked.call_count == 1
    assert not [path for path in scratch.iterdir() if path != tar]

    with monkeypatch.context() as patched:  # without room, what is kept of others makes some
        answers = iter([False])
        patched.setattr(members, "_has_room", lambda *_: next(answers, True))
        other = tar.with_name("b.tgz")
        other.write_bytes(tar.read_bytes())
        assert content(other, "b.wav") == b"b"
    assert content(tar, "b.wav") == b"b"
    assert unpacked.call_count == 3
    other.unlink()

    monkeypatch.setattr(members, "_ALWAYS_ALLOWED", 1_000_000)
    os.utime(tar, ns=(1, 1))
    message = "the tar unpacks to over 1,000,000 bytes: unpack it yourself"
    assert refused(tar, "b.wav") == (Reason.FILE_UNREADABLE, message)
    monkeypatch.setattr(members, "_LEFT_FREE", 1 << 60)
    os.utime(tar, ns=(2, 2))
    reason, words = refused(tar, "b.wav")
    assert reason == Reason.FILE_UNREADABLE
    assert words.endswith("would not be left free there: set TMPDIR to a disk with more room")


def test_unpacked_tars_do_not_take_all_descriptors(packed, monkeypatch):
    monkeypatch.setattr(members, "_MOST_COPIES", 3)
    tar, _ = packed(".tgz", {"a.wav": b"a"})
    for modified in range(3):
        os.utime(tar, ns=(1, modified))
        assert content(tar, "a.wav") == b"a"
    before = len(open_files(tempfile.gettempdir()))
    for modified in range(3, 9):
        os.utime(tar, ns=(1, modified))
        assert content(tar, "a.wav") == b"a"
    assert len(open_files(tempfile.gettempdir())) == before


def test_a_disk_without_a_place_for_copies_is_named(packed, scratch, monkeypatch):
    tar, _ = packed(".tgz", {"a.wav": b"a"})
    monkeypatch.setattr(tempfile, "tempdir", str(scratch / "gone"))
    message = f"a copy cannot be kept in {scratch}/gone: No such file or directory"
    assert refused(tar, "a.wav") == (Reason.FILE_UNREADABLE, message)


def test_archives_of_kaldi(scratch):
    """Those of wav-copy, which kaldiio writes too, and those of ESPnet, with audio of any
    format in them."""
    kaldiio, soundfile = pytest.importorskip("kaldiio"), pytest.importorskip("soundfile")
    signals = {
        f"u{number}": (np.arange(500 + number) % 99 * 99).astype(np.int16) for number in range(3)
    }
    places = {}
    of_espnet = {"write_function": "soundfile", "write_kwargs": {"format": "FLAC"}}
    for name, options in (("wav", {}), ("flac", of_espnet)):
        ark, scp = f"{scratch}/{name}.ark", f"{scratch}/{name}.scp"
        kaldiio.save_ark(
            ark, {id_: (8000, signal) for id_, signal in signals.items()}, scp, **options
        )
        lines = (scratch / f"{name}.scp").read_text().splitlines()
        places |= {(name, line.split()[0]): locate(scratch, line.split()[1]) for line in lines}
    for (name, id_), member in places.items():
        with copy_of(member).open() as file:
            assert file.read(4) == {"wav": b"RIFF", "flac": b"fLaC"}[name]
            file.seek(0)
            samples, rate = soundfile.read(file, dtype="int16")
        assert rate == 8000
        np.testing.assert_array_equal(samples, signals[id_])
    ark, wav = scratch / "wav.ark", places["wav", "u2"]
    assert str(wav) == f"{ark}:{wav.name}"
    assert refused(ark, str(int(wav.name) - 3))[0] == Reason.NOT_AUDIO
    data = ark.read_bytes()
    ark.write_bytes(data[:-1])
    message = "the archive was cut short: it has 1,047 of the member's 1,048 bytes"
    assert refused(ark, wav.name) == (Reason.TRUNCATED, message)
    assert refused(ark, "999999")[0] == Reason.TRUNCATED
    ark.write_bytes(data[: int(wav.name) + 4] + b"\xff" * 4 + data[int(wav.name) + 8 :])
    assert refused(ark, wav.name)[0] == Reason.NOT_AUDIO
