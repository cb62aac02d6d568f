"""Whatever a stranger has put into a cache, every command ends soon, with a result or
with one clear line."""

import json
import shutil
from pathlib import Path

import pytest
from corpora import Corpus, speech
from hostile_caches import EDITS, QUANTISED
from scratch import scratch_folder

COMMANDS = 15 + 3
QUICK = 12
"""Every so many edits are tried each time; all of them with `-m slow`."""


@pytest.fixture(scope="module")
def audio(tmp_path_factory) -> Corpus:
    made = Corpus(tmp_path_factory.mktemp("audio"))
    for number in range(5):
        made.record(f"utt-{number}", f"{number}.wav", speech(0.2 + 0.05 * number, seed=number))
    made.add("utt-gone", "gone.wav")
    return made


@pytest.fixture(scope="module")
def made(cli, audio, tmp_path_factory) -> dict[str, Path]:
    """By their configs: a cache of several shards, with a failure in its ledger and an
    index; and the same of quantised features, which have side arrays."""
    caches = {
        config: tmp_path_factory.mktemp(config) / "cache" for config in ("fbank80", "fbank80-uint8")
    }
    for config, cache in caches.items():
        assert (
            cli("extract", audio.manifest(), "-c", config, "-o", cache, "--shard-size", "0.01").code
            == 3
        )
        assert cli("info", cache).code == 0
    return caches


@pytest.fixture
def outside():
    """A folder in which the cache lies beside what nothing may touch."""
    with scratch_folder() as folder:
        (folder / "outside").mkdir()
        (folder / "outside" / "precious").write_text("precious")
        yield folder


def contents(folder: Path, without: str) -> dict[str, object]:
    """Every file below a folder with its bytes, but for what lies below folders of that
    name."""
    paths = [
        path
        for path in folder.rglob("*")
        if not path.relative_to(folder).parts[0].startswith(without)
    ]
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in paths
    }


def try_everything(cli, outside: Path, audio: Corpus) -> list[dict]:
    """Run every command on the cache in `outside`, and check what holds for all of them."""
    before = contents(outside, "cache"), contents(audio.folder, "nothing")
    ended = cli.start(outside / "cache", audio.manifest(), entry="every_command:run").wait()
    found = [json.loads(line) for line in ended.out.splitlines()]
    assert ended.code == 0, f"code {ended.code} in {ended.err}"
    assert len(found) == COMMANDS
    for one in found:
        assert one["trace"] is None, f"{one['name']}: {one['trace']}"
        assert one["code"] in (0, 1, 2, 3), one
        assert "Traceback" not in one["err"] + one["out"], one
        assert not one["code"] or one["err"] or one["out"], (
            f"{one['name']}: exit code {one['code']} without a word"
        )
        for text in (one["out"], one["err"]):
            assert not [
                character for character in text if ord(character) < 32 and character not in "\n\t"
            ], one
            assert not set(text) & {"\x7f", "\x9b", "\u202e", "\u2028"}, one
        if one["name"].endswith("json") and one["code"] != 2 and one["out"]:
            json.loads(one["out"])
    assert (contents(outside, "cache"), contents(audio.folder, "nothing")) == before
    return found


def test_nothing_is_wrong_with_the_cache_that_is_edited(cli, made, audio, outside):
    shutil.copytree(made["fbank80"], outside / "cache")
    found = {one["name"]: one["code"] for one in try_everything(cli, outside, audio)}
    # an utterance has failed
    assert found.pop("verify") == found.pop("verify --manifest") == 3
    assert found.pop("extract") == 3
    assert set(found.values()) == {0}, found


SOME = [  # most are slow
    pytest.param(config, edit, id=name, marks=[] if number % QUICK == 0 else pytest.mark.slow)
    for config, edits in (("fbank80", EDITS), ("fbank80-uint8", QUANTISED))
    for number, (name, edit) in enumerate(edits.items())
]


@pytest.mark.parametrize(("config", "edit"), SOME)
def test_every_command_ends_well_on_a_hostile_cache(cli, made, audio, outside, config, edit):
    shutil.copytree(made[config], outside / "cache")
    edit(outside / "cache")
    try_everything(cli, outside, audio)
