"""The places of members in tars: those that tarfile and tar give, and nothing outside of
the tar, whatever it says."""

import io
import os
import shutil
import subprocess
import tarfile

import pytest
from containers import add, write_tar
from hypothesis import given
from hypothesis import strategies as st

from featcache.audio.tar import TarIndex
from featcache.errors import AudioError, Reason

NAMES = {
    "short.wav": b"a" * 700,
    "./dot/b.wav": b"b" * 512,
    "long/" + "x" * 120 + ".wav": b"c" * 513,
    "xx/" + "y" * 300 + "/z.wav": b"d",
    "p" * 80 + "/" + "q" * 90 + ".wav": b"h" * 9,
    "größe/日本.wav": b"e" * 1500,
    "/absolute.wav": b"f",
    "../above.wav": b"g",
}


def index_of(data: bytes) -> tuple[TarIndex, int]:
    descriptor = os.memfd_create("tar")
    os.write(descriptor, data)
    return TarIndex(descriptor, len(data)), descriptor


def content(data: bytes, name: str) -> bytes:
    index, descriptor = index_of(data)
    found = index.find(name)
    read = os.pread(descriptor, found.size, found.offset)
    os.close(descriptor)
    return read


def made(
    *members: tuple, form: int = tarfile.GNU_FORMAT, headers: dict[str, str] | None = None
) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form, pax_headers=headers) as tar:
        for member in members:
            add(tar, *member)
    return file.getvalue()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_wrote(scratch, form):
    """Long names, names that are not ASCII; and names that lead elsewhere are names like
    any other."""
    names = {
        name: data
        for name, data in NAMES.items()
        if form != tarfile.USTAR_FORMAT or "xx" not in name
    }
    data = write_tar(scratch / "a.tar", names, form).read_bytes()
    assert {name: content(data, name) for name in names} == names
    assert content(data, "dot/b.wav") == names["./dot/b.wav"]


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
@pytest.mark.parametrize("form", ["ustar", "gnu", "gnu --listed-incremental=times", "pax", "v7"])
def test_members_are_those_of_gnu_tar(scratch, form):
    folder = scratch / "corpus"
    (folder / "deep").mkdir(parents=True)
    names = {
        "a.wav": b"a" * 100,
        "deep/" + "n" * (60 if form == "v7" else 140 - 45 * (form == "ustar")): b"b" * 2000,
    }
    for name, data in names.items():
        (folder / name).write_bytes(data)
    os.link(folder / "a.wav", folder / "z.wav")
    subprocess.run(
        ["tar", *f"--format={form}".split(), "-cf", "c.tar", "-C", "corpus", "."],
        cwd=scratch,
        check=True,
    )
    data = (scratch / "c.tar").read_bytes()
    assert {name: content(data, name) for name in names} == names
    assert content(data, "z.wav") == names["a.wav"]  # a hard link, one way or the other


def test_the_last_of_several_members_of_a_name_counts():
    assert content(made(("a", b"first"), ("b", b"other"), ("a", b"second")), "a") == b"second"


def patched(data: bytes, at: int, value: bytes) -> bytes:
    """With other bytes in the header at byte 0, and the checksum that follows."""
    header = bytearray(data[:512])
    header[at : at + len(value)] = value
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data[512:]


SPARSE = tarfile.TarInfo("GNUSparseFile.0/a")
SPARSE.size = 521
SPARSE.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a"}


def with_pax(headers: dict[str, str]) -> bytes:
    return made(("a", b"data"), form=tarfile.PAX_FORMAT, headers=headers)


HOSTILE = {
    "a symbolic link": (
        made(("a", b"", tarfile.SYMTYPE, "/etc/passwd")),
        Reason.FILE_MISSING,
        "symbolic link",
    ),
    "a link to nowhere": (
        made(("a", b"", tarfile.LNKTYPE, "/etc/passwd")),
        Reason.FILE_MISSING,
        "link to what is not",
    ),
    "a link to itself": (
        made(("a", b"", tarfile.LNKTYPE, "a")),
        Reason.FILE_MISSING,
        "link to what is not",
    ),
    "a folder": (made(("a", b"", tarfile.DIRTYPE)), Reason.FILE_MISSING, "not a file"),
    "a device": (made(("a", b"", tarfile.CHRTYPE)), Reason.FILE_MISSING, "not a file"),
    "a sparse file": (patched(made(("a", b"data")), 156, b"S"), Reason.FILE_MISSING, "sparse"),
    "a sparse file of PAX": (
        SPARSE.tobuf(tarfile.PAX_FORMAT)
        + b"1\n0\n9\n".ljust(512, b"\0")
        + b"123456789".ljust(1536, b"\0"),
        Reason.FILE_MISSING,
        "sparse",
    ),
    "a sparse file without a map": (
        SPARSE.tobuf(tarfile.PAX_FORMAT) + bytes(2048),
        Reason.NOT_AUDIO,
        "no tar",
    ),
    "a size that is negative": (
        patched(made(("a", b"data")), 124, b"\xff" * 12),
        Reason.NOT_AUDIO,
        "no tar",
    ),
    "a size with a sign": (
        patched(made(("a", b"data")), 124, b"-0000000004\0"),
        Reason.NOT_AUDIO,
        "no tar",
    ),
    "a size beyond all": (
        patched(made(("a", b"d")), 124, b"\x80" + b"\xff" * 11),
        Reason.NOT_AUDIO,
        "no tar",
    ),
    "a size beyond the tar": (
        patched(made(("a", b"d")), 124, b"77777777777\0"),
        Reason.TRUNCATED,
        "cut short",
    ),
    "a huge PAX header": (
        patched(with_pax({"x": "y"}), 124, b"77777777777\0"),
        Reason.NOT_AUDIO,
        "header of more",
    ),
    "PAX headers of 1 MB": (
        with_pax({"x": "y" * (1 << 20)}),
        Reason.NOT_AUDIO,
        "header of more than 1,048,576 bytes",
    ),
    "a PAX size that is none": (with_pax({"size": "-1"}), Reason.NOT_AUDIO, "no tar"),
    "a PAX record of no length": (
        with_pax({"x": "y"}).replace(b"6 x=y", b"0 x=y"),
        Reason.NOT_AUDIO,
        "no tar",
    ),
    "a gzip": (b"\x1f\x8b" + bytes(2000), Reason.NOT_AUDIO, "no tar"),
    "text": (b"id,path\n" * 500, Reason.NOT_AUDIO, "no tar"),
    "nothing but zeros": (bytes(10240), Reason.FILE_MISSING, "no such member"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_no_file_of_the_tar_is_refused(kind):
    data, reason, words = HOSTILE[kind]
    with pytest.raises(AudioError, match=words) as refused:
        index_of(data)[0].find("a")
    assert refused.value.reason == reason


def test_attributes_are_passed_over_and_records_that_overlap():
    """These took the square of their 64 kB in tarfile."""
    member = tarfile.TarInfo("long/" + "a" * 200)
    member.size, member.pax_headers = 4, {"SCHILY.xattr.user.x": "2 " * (32 << 10)}
    data = member.tobuf(tarfile.PAX_FORMAT) + b"data".ljust(1536, b"\0")
    assert content(data, member.name) == b"data"
    overlapping = data.replace(b"65563 SCHILY.xattr.user.x=", b"2 " * 13)
    assert overlapping != data
    assert content(overlapping, member.name[:100]) == b"data"


def test_a_sparse_file_of_many_holes_leaves_the_others():
    sparse = patched(patched(made(("a", b"")), 156, b"S"), 482, b"\1")[:512]
    holes = (bytes(504) + b"\1").ljust(512, b"\0") * 500 + bytes(512)
    assert content(sparse + holes + made(("b", b"data")), "b") == b"data"


def test_an_endless_chain_of_headers_ends():
    header = with_pax({"x": "y"})[:1024]
    with pytest.raises(AudioError):
        index_of(header * 3000)[0].find("a")


def test_of_a_tar_that_is_cut_short_what_is_left_is_read():
    """Wherever it is cut: a member is read as it was, or its loss is told."""
    members = {f"{number}.wav": bytes([number]) * (300 * number) for number in range(1, 5)}
    whole = made(*members.items(), form=tarfile.USTAR_FORMAT)
    for length in range(1, whole.rindex(b"\x04") + 700, 97):
        data, lost = whole[:length], set()
        for name, expected in members.items():
            try:
                assert content(data, name) == expected
            except AudioError as error:
                lost.add((name, error.reason))
        ends = {name: whole.index(expected) + len(expected) for name, expected in members.items()}
        assert lost == {(name, Reason.TRUNCATED) for name, end in ends.items() if length < end}


@given(st.data())
def test_damaged_tars_give_ranges_inside_or_say_what_is_wrong(data):
    whole = bytearray(made(("a", b"1" * 600), ("long" * 60, b"2" * 100), ("b", b"3")))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(1, len(whole)))
    try:
        index, _ = index_of(bytes(whole[:length]))
        found = [index.find(name) for name in ("a", "b")]
    except AudioError:
        return
    assert all(0 <= place.offset <= place.offset + place.size <= length for place in found)
