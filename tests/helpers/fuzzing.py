"""Changes bytes of manifests, configs, caches and audio files, and reads them: a value,
or an error of featcache.

`cli(READER, SECONDS, SEED, FOLDER, entry="fuzzing:run")`, or `python fuzzing.py` with
these, runs one reader in a process whose memory is limited, and which native code may
crash. Each input follows from the seed and its number, and lies in FOLDER while it is
read. The last line on stdout is JSON: how many inputs there were, and what was wrong."""

import gzip
import json
import random
import re
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from crc32c import crc32c
from every_command import limit_memory

from featcache.errors import FeatcacheError

SECONDS = 30
"""The time that reading one input may take: a limit for what hangs."""

NAMES = ("fbank", "mfcc", "log_mel")
"""The extractors whose configs are changed: these need no weights."""

MOST_WRONG = 5
"""The number of wrong inputs after which a run ends."""

NUMBERS = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    2**63 - 1,
    2**64 - 1,
]
WORDS = [
    b"\n",
    b"\r",
    b'"',
    b",",
    b"\t",
    b"\0",
    b"{",
    b"[" * 500,
    b"}",
    b"]",
    b":",
    b"NaN",
    b"1e999",
    b"9" * 400,
    b"-",
]
WORDS += [
    b"\xff",
    b"\xf0\x9f",
    b"\xe2\x80\xae",
    b"\\ud800",
    b"\x1b[2J",
    b"&a *a",
    b"null",
    b"true",
    b"'",
    b"|",
]
WORDS += [b"!!int ", b"!!timestamp ", b"!!bool ", b"!!set ", b"!!float ", b"<<: ", b".nan"]
WORDS += [b"[" * 5000, b"{a: " * 300, b"9" * 11]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Bytes with a few changes: single ones, whole stretches, numbers of the kinds at
    which code goes wrong."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        farthest = len(changed) if chance.random() < 0.5 else min(len(changed), 64)
        at = chance.randrange(farthest + 1)
        length = chance.choice([1, 1, 2, 4, 8, 64, 1000])
        match chance.randrange(8):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = chance.choice(WORDS)
            case 4:
                changed[at:at] = changed[at : at + length] * chance.choice([1, 2, 50])
            case 5:
                size, order = chance.choice([1, 2, 4, 8]), chance.choice(["little", "big"])
                value = (chance.choice(NUMBERS) + chance.randrange(-1, 2)) % (1 << 8 * size)
                changed[at : at + size] = value.to_bytes(size, order)
            case 6:
                del changed[at:]
            case 7:
                other = chance.randrange(len(changed) + 1)
                changed[at : at + length] = changed[other : other + length]
    return bytes(changed)


def with_odd_value(text: bytes, chance: random.Random) -> bytes:
    """YAML with something before, or in place of, a value."""
    places = [found.end() for found in re.finditer(rb": ", text)]
    at = chance.choice(places)
    end = (
        at
        if chance.random() < 0.5
        else min(end for end in (text.find(b"\n", at), len(text)) if end >= 0)
    )
    return text[:at] + chance.choice(WORDS) + text[end:]


def mutated_values(value: Any, chance: random.Random) -> Any:
    """A JSON document with a value or two exchanged for odd ones."""
    odd = [
        None,
        True,
        -1,
        0,
        0.5,
        10**12,
        2**63,
        10**400,
        "",
        "x",
        "\x1b",
        "\ud800",
        [],
        {},
        [[]],
        [10**12],
        {"x": 1},
    ]
    if chance.random() < 0.1:
        return chance.choice(odd)
    if isinstance(value, dict) and value:
        key = chance.choice([*value])
        if chance.random() < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: mutated_values(value[key], chance)}
    if isinstance(value, list) and value:
        at = chance.randrange(len(value))
        return [*value[:at], mutated_values(value[at], chance), *value[at + 1 :]] * chance.choice(
            [1, 1, 1, 2]
        )
    return chance.choice(odd)


# The readers: what makes an input in a folder, and what reads it


_recording = {
    "id": "r",
    "sources": [{"type": "file", "channels": [0, 1], "source": "a.wav"}],
    "sampling_rate": 8000,
}
_said = {"id": "s", "text": "a word", "speaker": "x", "custom": {"y": [1]}}
_cut = {
    "id": "a",
    "start": 0.5,
    "duration": 1.0,
    "channel": [0, 1],
    "recording": _recording,
    "supervisions": [_said],
}


def manifests(folder: Path) -> Callable[[random.Random], Callable[[], object]]:
    from featcache.manifest.read import read_manifest

    rows = [
        ("id", "path", "start", "duration", "channel", "speaker"),
        ("a", "a.wav", 0.5, 1, 0, "x"),
    ]
    rows += [(f"ü{n}", f"dir/{n}.flac", "", "", "", "y z") for n in range(5)]
    csv, tsv = (
        "\n".join(mark.join(map(str, row)) for row in rows).encode() for mark in (",", "\t")
    )
    lines = [json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows[1:]]
    tables = {
        "m.csv": csv,
        "m.tsv": tsv,
        "m.jsonl": "\n".join(lines).encode(),
        "m.csv.gz": gzip.compress(csv),
        "m": csv,
        "wav.scp": b"a a.wav\nb dir/b.wav\n",
        "m.list": b"a.wav|x|en|what was said\nb.wav|y|en|and more\n",
        "fairseq.tsv": b"/corpora\na.wav\t100\ndir/b.wav\t200\n",
        "sb.json": b'{"a": {"wav": "a.wav", "text": "\\ud83d\\ude00"},\n "b": {"wav": "b.wav", '
        b'"x": [1, {}]}}',
        "cuts.jsonl": json.dumps(_cut).encode()
        + b"\n"
        + json.dumps({**_cut, "id": "b", "channel": 0}).encode(),
    }

    def make(chance: random.Random) -> Callable[[], object]:
        name = chance.choice([*tables])
        path = folder / name
        path.write_bytes(mutated(tables[name], chance))
        return lambda: read_manifest(path, audio=chance.random() < 0.5)

    return make


def configs(folder: Path) -> Callable[[random.Random], Callable[[], object]]:
    import torch

    from featcache.config import load_config, packaged_configs

    texts = [
        text
        for text in packaged_configs().values()
        if re.search(rf"extractor: ({'|'.join(NAMES)})\n", text)
    ]
    assert texts
    # Without comments most changes are changes of values.
    plain = [re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).encode() for text in texts]

    def read() -> None:
        config = load_config(folder / "config.yaml")
        config.fingerprint()
        if config.extractor in NAMES:
            config.build(torch.device("cpu"))

    def make(chance: random.Random) -> Callable[[], object]:
        text = chance.choice(plain)
        odd = mutated(text, chance) if chance.random() < 0.5 else with_odd_value(text, chance)
        (folder / "config.yaml").write_bytes(odd)
        return read

    return make


def shards(folder: Path) -> Callable[[random.Random], Callable[[], object]]:
    from hostile_caches import rename_shard, sealed
    from make_cache import add_shard, make_features, make_version
    from small_shards import SIDE

    import featcache
    import featcache.loader
    from featcache.care.verify import verify
    from featcache.version.indexing import open_index
    from featcache.version.ledger import Failure
    from featcache.version.records import Run
    from featcache.version.tags import make_tag
    from featcache.version.version import Version

    warnings.simplefilter("ignore", featcache.FeatcacheWarning)
    version = make_version(folder / "made", make_features(3, (2,), "float32"), side=SIDE)
    add_shard(version, make_features(3, (2,), "float32", prefix="more"), row=3, run="r")
    run = Run(
        version,
        {"manifest": "m", "root": "/", "utterances": 7, "new": 7, "config": {"name": "mine"}},
    )
    run.fail(
        [
            Failure(
                id="gone", path="gone.wav", reason="file_missing", message="there is no such file"
            )
        ]
    )
    run.finish({"extracted": 6, "items": 6})
    open_index(version)
    make_tag(version, "paper", open_index(version))
    files = [
        path.relative_to(folder / "made")
        for path in sorted((folder / "made").rglob("*"))
        if path.is_file()
    ]
    cache = folder / "cache"

    def read() -> None:
        found = featcache.open(cache)
        repr(found)
        for id_ in found.ids:
            found.item(id_)
        found.batch(range(len(found)), check=True)

    def check() -> None:
        for path in cache.iterdir():
            verify(Version.open(path))

    def odd(data: bytes, chance: random.Random) -> bytes:
        """Of a document, often one with other values under a seal that is right."""
        head, newline, tail = data.partition(b"\n") if not data.endswith(b"}") else (data, b"", b"")
        if b'"checksum"' not in head or chance.random() < 0.2:
            return mutated(data, chance)
        document = json.loads(head)
        if "attributes" in document:
            document["attributes"]["featcache"] = mutated_values(
                document["attributes"]["featcache"], chance
            )
        else:
            document = mutated_values(document, chance)
        try:
            return sealed(document) + newline + tail
        except (TypeError, ValueError):  # a list, or nothing
            return json.dumps(document).encode() + newline + tail

    def make(chance: random.Random) -> Callable[[], object]:
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(folder / "made", cache)
        path = cache / chance.choice(files)
        path.write_bytes(odd(path.read_bytes(), chance))
        if "shards" in path.parts and path.name != "zarr.json" and chance.random() < 0.7:
            data = path.read_bytes()[:-4]
            path.write_bytes(data + crc32c(data).to_bytes(4, "little"))
            rename_shard(next(parent for parent in path.parents if parent.parent.name == "shards"))
        return chance.choice([read, check])

    return make


def audio(folder: Path) -> Callable[[random.Random], Callable[[], object]]:
    import soundfile
    from audio_files import KINDS, write_kind

    from featcache.audio.decode import Cut, decode

    (folder / "made").mkdir()
    made = [write_kind(folder / "made", kind, seconds=0.2) for kind in KINDS]
    for container in soundfile.available_formats():
        for subtype in soundfile.available_subtypes(container):
            path = folder / "made" / f"{container}-{subtype}.{container.lower()}"
            try:
                soundfile.write(
                    path, soundfile.read(made[0])[0][:2000, :1], 16000, subtype, format=container
                )
                made.append(path)
            except (soundfile.LibsndfileError, TypeError, ValueError):
                path.unlink(missing_ok=True)  # not at this rate
    (folder / "read").mkdir()

    def make(chance: random.Random) -> Callable[[], object]:
        for old in (folder / "read").iterdir():
            old.unlink()
        source = chance.choice(made)
        path = folder / "read" / source.name
        path.write_bytes(mutated(source.read_bytes(), chance))
        cuts = chance.choice([[Cut()], [Cut(0.05, 0.02), Cut()], [Cut(0.1)]])

        def read() -> None:
            for _ in decode(path, cuts, max_seconds=600):
                pass

        return read

    return make


READERS = {"manifests": manifests, "configs": configs, "shards": shards, "audio": audio}


# Running them


def run(reader: str, seconds: str, seed: str, folder: str, only: str = "") -> None:
    """Run a reader for so many seconds, or until it has read the input of that number."""
    warnings.resetwarnings()  # which are errors in processes of tests
    make = READERS[reader](Path(folder))
    limit_memory()
    read, wrong, slowest, until = 0, [], 0.0, time.monotonic() + float(seconds)
    for number in [int(only)] if only else count():
        if time.monotonic() > until or len(wrong) == MOST_WRONG:
            break
        # it says which one has ended the process
        Path(folder, "number").write_text(str(number))
        use = make(random.Random(f"{seed} {number}"))
        signal.alarm(SECONDS)
        began = time.monotonic()
        try:
            use()
        except FeatcacheError as error:
            if not str(error):
                wrong.append([number, "an error without a message"])
        except BaseException:  # noqa: BLE001 - that is what is looked for
            wrong.append([number, traceback.format_exc(limit=-6)])
        signal.alarm(0)
        slowest = max(slowest, time.monotonic() - began)
        read += 1
    found = {"count": read, "wrong": wrong, "slowest": round(slowest, 2)}
    sys.stdout.write(f"\n{json.dumps(found)}\n")  # libraries print, too


if __name__ == "__main__":
    run(*sys.argv[1:])
