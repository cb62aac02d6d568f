"""What is kept of an audio file's content: the hash of the bytes that were decoded,
computed once."""

import os
from unittest.mock import Mock, create_autospec

import numpy as np
import pytest
import soundfile
import xxhash
from cache_contents import only_version
from corpora import speech

import featcache
from featcache.audio import content_hash
from featcache.audio.content_hash import UNKNOWN_HASH, ContentHashes, hash_of_content
from featcache.audio.decode import Cut, decode
from featcache.audio.recording import Recording
from featcache.audio.remote import StoppedError
from featcache.errors import AudioError


@pytest.fixture
def hashing(monkeypatch) -> Mock:
    """What hashes the contents of files, and counts its calls."""
    monkeypatch.setattr(
        content_hash, "hash_of_content", hashing := Mock(side_effect=hash_of_content)
    )
    return hashing


@pytest.mark.parametrize("size", [0, 1, 1000, 256 << 10, (256 << 10) + 1, 3_000_000])
def test_it_is_xxh3_of_all_bytes_and_leaves_the_position(scratch, size):
    path = scratch / "file"
    path.write_bytes(data := np.random.default_rng(size).bytes(size))
    with path.open("rb", buffering=0) as file:
        file.seek(size // 2)
        assert hash_of_content(file.fileno()) == xxhash.xxh3_64_intdigest(data)
        assert file.tell() == size // 2


def test_a_file_is_hashed_once_until_it_changes(scratch, hashing):
    """By its inode, size and mtime: not by its path, in whose place another file may be."""
    path, hashes = scratch / "file", ContentHashes()

    def hash_now() -> int:
        with path.open("rb") as file:
            return hashes.of(file.fileno())

    path.write_bytes(b"one")
    assert hash_now() == hash_now() == xxhash.xxh3_64_intdigest(b"one")
    assert hashing.call_count == 1
    status = path.stat()
    (scratch / "other").write_bytes(b"two")
    os.utime(scratch / "other", ns=(status.st_atime_ns, status.st_mtime_ns))
    (scratch / "other").replace(path)
    assert hash_now() == xxhash.xxh3_64_intdigest(b"two")
    path.write_bytes(b"six")
    os.utime(path, ns=(0, status.st_mtime_ns + 1))
    assert hash_now() == xxhash.xxh3_64_intdigest(b"six")
    assert hashing.call_count == 3


@pytest.mark.parametrize("name", ["small.wav", "small.flac", "large.wav", "large.flac"])
def test_a_file_that_cannot_be_read_to_its_end_has_no_hash_and_is_decoded(
    scratch, monkeypatch, name
):
    """A bad sector need not be in the segment that is wanted."""
    soundfile.write(scratch / name, speech(1 if name.startswith("small") else 40), 16000)
    fail = Mock(side_effect=OSError(5, "Input/output error"))
    monkeypatch.setattr(content_hash, "hash_of_content", fail)
    monkeypatch.setattr(Recording, "_bytes_at", fail)
    (found,) = decode(scratch / name, [Cut()], hashes=ContentHashes())
    assert not isinstance(found, AudioError)
    assert found[1].content_hash == UNKNOWN_HASH


def test_every_item_has_the_hash_of_its_whole_file(reference, corpus):
    """Of any format, whole files and segments alike; in the shard's own array."""
    version = only_version(reference)
    (shard,) = map(version.shard, version.shard_names())
    expected = [
        xxhash.xxh3_64_intdigest((corpus.folder / path).read_bytes()) for path in shard.table.paths
    ]
    assert shard.table["source_hash"].tolist() == expected
    assert [item.content_hash for item in shard.items()] == expected
    assert len(set(expected)) < len(expected)


def test_a_long_file_is_hashed_once_in_a_run(scratch, hashing, monkeypatch):
    """Though its segments are decoded in many batches, by several threads."""
    monkeypatch.setattr(
        ContentHashes,
        "of",
        asked := create_autospec(ContentHashes.of, side_effect=ContentHashes.of),
    )
    soundfile.write(scratch / "long.wav", speech(300, 8000), 8000)
    rows = "".join(f"{i},long.wav,{i},0.9\n" for i in range(299))
    (scratch / "m.csv").write_text("id,path,start,duration\n" + rows)
    summary = featcache.extract(
        scratch / "m.csv", "fbank80", scratch / "cache", featcache.Options("cpu", 2)
    )
    assert summary.versions[0].extracted == 299
    assert (asked.call_count > 3, hashing.call_count) == (True, 1)


def test_a_file_of_holes_is_not_hashed(scratch):
    """1 TB, which would take minutes; its sound is read."""
    soundfile.write(scratch / "a.wav", samples := speech(0.5), 16000, "PCM_16")
    (before,) = decode(scratch / "a.wav", [Cut()])
    os.truncate(scratch / "a.wav", 1 << 40)
    (found,) = decode(scratch / "a.wav", [Cut()], hashes=ContentHashes())
    np.testing.assert_array_equal(found[0], before[0])
    assert len(found[0]) == len(samples)
    assert found[1].content_hash == UNKNOWN_HASH


def test_hashing_a_large_file_can_be_given_up(scratch, monkeypatch):
    monkeypatch.setattr(content_hash, "_WAIT_BYTES", content_hash._PIECE_BYTES)
    (scratch / "file").write_bytes(bytes(3 * content_hash._PIECE_BYTES))
    waiting = Mock(side_effect=[None, StoppedError])
    with (scratch / "file").open("rb") as file, pytest.raises(StoppedError):
        ContentHashes(waiting).of(file.fileno())
    assert waiting.call_count == 2
