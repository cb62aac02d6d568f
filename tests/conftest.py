"""The fixtures that tests of several folders share. Functions that tests import are in
`helpers/`."""

import gc
import itertools
import os
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pytest
import soundfile
from audio_files import KINDS, bad_files, forget_flac_length, forget_mp3_length, write_kind
from audio_server import AudioServer
from cache_contents import chunk_files, items
from corpora import Corpus, speech
from decoded_audio import read_whole, samples_of
from extractions import write_config
from hypothesis import HealthCheck, settings
from loopback import serving
from object_stores import s3, s3_of_module, s3_of_session  # noqa: F401
from processes import commands
from scratch import scratch_folder
from small_shards import create as create_version

from featcache import trust
from featcache.audio import remote
from featcache.storage import clients
from featcache.version import records
from featcache.version.version import Version

# How long an example takes says something about the machine, and nothing about the code.
# Examples are others each time, but where many changes are tested: there, one that fails
# is the fault of the change.
settings.register_profile(
    "featcache",
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.register_profile(
    "long", settings.get_profile("featcache"), max_examples=1000, derandomize=False
)
settings.load_profile("featcache")


def pytest_configure() -> None:
    """Torch is as a run's workers have it, with one thread of its own: small models, and
    several pytests on a machine, are slower with more. What is about threads sets
    them."""
    import torch

    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is on a GPU is skipped where there is none."""
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(scope="module", autouse=True)
def no_stand_ins() -> Iterator[None]:
    """SpeechBrain leaves modules that stand for others and warn whoever asks them for
    anything, as hypothesis does."""
    yield
    for name in [
        name
        for name, module in sys.modules.items()
        if type(module).__module__.startswith("speechbrain.")
    ]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws from torch's own generator is the same alone and after others."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="module")
def trusted() -> Iterator[None]:
    """In this process, what caches name is imported, registered or not: the word of
    `--trust-remote-code`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trust, "_remote_code_is_allowed", True)
        yield


@pytest.fixture(scope="session")
def cli():
    """Runs `featcache` commands: `cli("verify", cache)` gives a `Finished`,
    `cli.start(...)` a `Running`."""
    with commands() as cli:
        yield cli


class Traced(NamedTuple):
    """Bytes that a call has allocated."""

    held: int
    """That are still there when it returns, with what it returns."""
    peak: int
    """That were there at once."""


@pytest.fixture
def traced() -> Callable[[Callable[[], object]], Traced]:
    """Measures the memory of a function that takes nothing; of two calls, the lesser.

    So neither what is imported or kept at a first call counts, nor what another thread
    allocates meanwhile."""

    def trace(function: Callable[[], object]) -> Traced:
        gc.collect()
        tracemalloc.start()
        try:
            result = function()
            found = Traced(*tracemalloc.get_traced_memory())
            del result
        finally:
            tracemalloc.stop()
        return found

    return lambda function: Traced(*map(min, trace(function), trace(function)))


@pytest.fixture
def clock(monkeypatch) -> None:
    """Runs and probes are named by their times: each has one of its own here, a second
    after the one before it."""
    seconds = itertools.count()

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1, tzinfo=tz) + timedelta(seconds=next(seconds))

    monkeypatch.setattr(records, "datetime", Clock)


@pytest.fixture
def scratch():
    """A folder for caches, which goes after the test."""
    with scratch_folder() as folder:
        yield folder


# Corpora


@pytest.fixture
def version(scratch: Path) -> Version:
    return create_version(scratch)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    """Some 30 utterances of 0.03 to 3 s: several rates, formats, channels, and segments
    of longer files."""
    made = Corpus(tmp_path_factory.mktemp("corpus"))
    (made.folder / "plain").mkdir()
    lengths = (0.03, 0.9, 0.31, 1.7, 0.045, 0.6, 2.2, 0.5, 1.1, 0.25, 0.7, 1.3)
    for i, seconds in enumerate(lengths):
        made.record(
            f"plain-{i:02}", f"plain/{i:02}.{'flac' if i % 2 else 'wav'}", speech(seconds, seed=i)
        )
    for rate in (8000, 22050, 44100, 48000):
        made.record(f"rate-{rate}", f"rate-{rate}.wav", speech(0.8, rate, seed=rate), rate)
    made.record("stereo-mix", "stereo.flac", speech(1.0, channels=2, seed=5))
    made.add("stereo-left", "stereo.flac", channel=0)
    made.add("stereo-right", "stereo.flac", channel=1)
    soundfile.write(made.folder / "long.flac", speech(6.0, seed=7), 16000)
    for i in range(6):
        made.add(f"segment-{i}", "long.flac", start=round(0.9 * i + 0.013, 3), duration=0.85)
    made.record("vorbis", "vorbis.ogg", speech(2.0, seed=9))
    made.add("vorbis-middle", "vorbis.ogg", start=0.5, duration=0.7)
    made.record("mp3", "music.mp3", speech(2.0, 22050, channels=2, seed=11), 22050)
    made.add("ünï-ço∂é", "plain/01.flac")
    return made


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Corpus:
    """Twelve clips of half a second at 16 kHz, and their durations in the manifest: a
    shard each, if so asked."""
    made = Corpus(tmp_path_factory.mktemp("plain"))
    for i in range(12):
        seconds = 0.4 + 0.02 * i
        made.record(
            f"utt-{i:02}", f"{i:02}.wav", speech(seconds, seed=i), duration=round(seconds, 2)
        )
    return made


@pytest.fixture(scope="session")
def reference(cli, corpus, tmp_path_factory) -> Path:
    """A cache of the corpus, made by one thread in one shard."""
    cache = tmp_path_factory.mktemp("reference")
    cli("extract", corpus.manifest(), "-o", cache, "--threads", 1).with_code(0)
    assert len(chunk_files(cache)) == 1
    return cache


@pytest.fixture(scope="session")
def truth(reference) -> dict[str, tuple]:
    """The features of every utterance, as the reference has them."""
    return items(reference)


@pytest.fixture(scope="session")
def sound(cli, plain, tmp_path_factory) -> Path:
    """A sound cache of three shards."""
    cache = tmp_path_factory.mktemp("sound")
    assert cli("extract", plain.manifest(), "-o", cache, "--shard-size", "0.04").code == 0
    assert len(chunk_files(cache)) == 3
    return cache


@pytest.fixture
def cache(sound, scratch) -> Path:
    """A copy of the sound cache, to spoil."""
    return Path(shutil.copytree(sound, scratch / "cache"))


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A file of three seconds of each kind, with its samples; and two whose headers do
    not say how many."""
    folder = tmp_path_factory.mktemp("audio")
    found = {kind: (path := write_kind(folder, kind), read_whole(path)) for kind in KINDS}
    flac = forget_flac_length(shutil.copy(found["flac-16"][0], folder / "unknown.flac"))
    mp3 = forget_mp3_length(shutil.copy(found["mp3-constant"][0], folder / "unknown.mp3"))
    return found | {
        "flac-unknown": (flac, found["flac-16"][1]),
        "mp3-unknown": (mp3, samples_of(mp3)),
    }


@pytest.fixture(scope="session")
def bad(tmp_path_factory):
    """Files with something wrong; see `audio_files.bad_files`."""
    return bad_files(tmp_path_factory.mktemp("bad"))


@pytest.fixture(scope="session")
def server_of_session():
    server = AudioServer()
    with serving(server.answer) as server.address:
        yield server


@pytest.fixture
def server(server_of_session, monkeypatch):
    """A web server without files, and in this process clients that do not wait long."""
    server_of_session.reset()
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.001)
    monkeypatch.setattr(clients, "_connected", lru_cache(clients._connect))
    return server_of_session


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    """An empty hub cache, and a hub that cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def written(tmp_path):
    """Writes a file of some content, of that name, and gives its path."""

    def write(content: str | bytes, name: str = "train.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture(scope="session")
def slow_config(tmp_path_factory) -> Path:
    """A config of the extractor that may be slow: this one does not pause."""
    return write_config(tmp_path_factory.mktemp("config"), "Slow")


@pytest.fixture
def gate(tmp_path) -> Path:
    """The file of a gate, with which a test lets a run go so far and no further; not
    there yet."""
    return tmp_path / "gate"


@pytest.fixture
def gated_config(tmp_path, gate) -> Path:
    """A config whose extractor lets every clip through that gate."""
    return write_config(tmp_path, "Slow", "gated", gate=str(gate))


# Caches of made-up features


@pytest.fixture(scope="module")
def features():
    """Features of twenty utterances, by id."""
    from make_cache import make_features  # brings torch

    return make_features(20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, features):
    """A cache of one version of three shards that hold them; nobody changes it."""
    from make_cache import in_three_shards, make_version

    folder = tmp_path_factory.mktemp("features")
    make_version(folder, *in_three_shards(features))
    return folder


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """What `toolkits.make` makes; nobody changes it."""
    import toolkits  # brings torch

    return toolkits.make(tmp_path_factory.mktemp("toolkits"))
