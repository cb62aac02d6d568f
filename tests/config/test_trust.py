"""A cache is data: nothing that it names is imported or downloaded, unless its reader
says so."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import hub_server
import msgspec
import pytest
import saved_models
from cache_contents import only_version
from click.testing import CliRunner, Result
from damage import flip
from hub_server import BEHIND_TRANSFORMERS, CONFIG, environment
from parsed_configs import parse_config
from processes import commands

import featcache
from featcache import trust
from featcache.cli import main
from featcache.errors import ConfigError
from featcache.format.documents import encode_line
from featcache.format.writing import seal_group
from featcache.version.records import read_run, run_names
from featcache.version.version import Version

PLANTED = """
import pathlib
from featcache.extractors.kaldi import Fbank
pathlib.Path(__file__).with_name("trace").touch()
class X(Fbank):
    pass
"""
REFUSED = (
    "which is not registered (see docs/extractors.md#your-own); commands that extract import it "
    "with --trust-remote-code"
)

IMPORTED = ["venv.__main__", "antigravity", "planted"]


@dataclass
class Shell:
    """Runs commands in this process, in the folder of a cache."""

    cache: Path
    manifest: Path

    def __call__(self, name: str, *options: str) -> Result:
        """Run one command; repair and whatever extracts are given the manifest."""
        cache, manifest = str(self.cache), str(self.manifest)
        commands = {
            "verify": ["verify", cache],
            "recompute": ["verify", cache, "--recompute", "2"],
            "repair": ["repair", cache, "--manifest", manifest],
            "info": ["info", cache],
            "show": ["show", cache, "utt-03"],
            "sound": ["show", cache, "utt-03", "--wav", "utt-03.wav"],
            "stats": ["stats", cache],
            "fit-kmeans": ["fit-kmeans", cache, "-k", "4", "-o", "units.safetensors", "--force"],
            "units": ["extract", manifest, "-c", "units.yaml", "-o", "made"],
            "from": ["extract", manifest, "-c", "units.yaml", "-o", "made", "--from", cache],
            "probe": ["probe", "fbank80", manifest, "-o", "made", "--utterances", "2"],
            "extract": ["extract", manifest, "-o", cache, "--dry-run"],
        }
        return CliRunner().invoke(main, [*commands[name], *options], catch_exceptions=False)

    def refuses(self, command: str, name: str, code: int = 2) -> None:
        """A command ends with a line that says that the cache names this extractor."""
        done = self(command)
        assert (done.exit_code, done.stderr.count("\n")) == (code, 1)
        assert f"names {name}, {REFUSED}" in done.stderr

    @property
    def imported(self) -> list[str]:
        """What was imported of what caches name here."""
        assert ("planted" in sys.modules) == Path("trace").exists()
        assert not Path("pyvenv.cfg").exists()
        return [name for name in IMPORTED if name in sys.modules]


def save_config(version: Version, config: object) -> None:
    """Have a version's metadata, sealed, hold another config."""
    document = {**msgspec.to_builtins(version.info), "config": config}
    (version.path / "zarr.json").write_bytes(seal_group(document, version.path))


def rename_extractor(version: Version, name: str) -> None:
    """Have a version's metadata, sealed, and its runs' records name another extractor."""
    save_config(version, {**version.info.config, "extractor": name})
    for run in run_names(version.store):
        record = msgspec.to_builtins(read_run(version.store, run))
        record["asked"]["config"]["extractor"] = name
        version.store.put(f"runs/{run}.json", encode_line(record))


def spoil(version: Version) -> None:
    """Damage the features of the first utterance of a shard."""
    flip(version.shard(version.shard_names()[0]).folder / "features" / "c" / "0" / "0", 3)


@pytest.fixture
def shell(cache, plain, monkeypatch):
    """In a cache from a stranger, with a module beside its version, in the current
    folder, where Python finds it."""
    (cache / "planted.py").write_text(PLANTED)
    (cache / "units.yaml").write_text(
        "name: units\nextractor: units\nparams: {weights: units.safetensors}\n"
    )
    monkeypatch.chdir(cache)
    monkeypatch.syspath_prepend(cache)
    monkeypatch.setattr(trust, "_remote_code_is_allowed", False)
    yield Shell(cache, plain.manifest())
    sys.modules.pop("planted", None)


@pytest.mark.parametrize("name", ["os:system", "venv.__main__:X", "antigravity:X", "planted:X"])
def test_no_command_imports_what_a_cache_names(shell, name):
    version = only_version(shell.cache)
    rename_extractor(version, name)
    assert f"names {name}, {REFUSED}" in shell("verify").stdout
    for command in ("verify", "info", "show", "stats", "probe", "fit-kmeans"):
        assert shell(command).exit_code == 0, command
    opened = featcache.open(shell.cache, check=True)
    assert len(featcache.FeatureDataset(opened, manifest=shell.manifest)[0]["features"])
    for command in ("sound", "recompute", "units", "from"):
        shell.refuses(command, name)
    assert shell("extract").exit_code == 0

    spoil(version)
    before = version.shard_names()
    shell.refuses("repair", name)
    (version.path / "zarr.json").unlink()
    shell.refuses("repair", name, code=1)
    assert version.shard_names() == before, "nothing is removed"
    assert shell.imported == []


@pytest.mark.parametrize("command", ["verify", "recompute", "repair", "restore", "units"])
def test_the_option_imports_it(shell, command):
    version = only_version(shell.cache)
    rename_extractor(version, "planted:X")
    if command == "repair":
        spoil(version)
    if command == "restore":
        (version.path / "zarr.json").unlink()
    if command == "units":
        assert shell("fit-kmeans").exit_code == 0
    assert shell.imported == []
    done = shell("repair" if command == "restore" else command, "--trust-remote-code")
    assert shell.imported == ["planted"]
    assert REFUSED not in done.output
    # for the others, it is not the extractor that made the version
    if command in ("verify", "recompute"):
        assert done.exit_code == 0, done.output


def test_units_in_a_cache_import_no_extractor_that_their_file_names(shell):
    """The file of units is as much a stranger's as the cache whose config names it."""
    assert shell("fit-kmeans").exit_code == 0
    assert shell("units").exit_code == 0
    rename_extractor(only_version(shell.cache), "planted:X")
    # the same centroids, of features that another extractor is to make
    assert shell("fit-kmeans").exit_code == 0
    shell.cache = shell.cache / "made"
    assert shell("verify").exit_code == 0
    shell.refuses("recompute", "planted:X")
    assert shell.imported == []


def test_an_installed_packages_extractor_is_taken_by_both_its_names(shell):
    """An entry point is what an installed package registers; a config may name its class
    as well."""
    package = shell.cache / "planted-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[featcache.extractors]\ntheirs = planted:X\n")
    for name in ("theirs", "planted:X"):
        rename_extractor(only_version(shell.cache), name)
        assert shell("recompute").exit_code == 0
        assert shell.imported == ["planted"]
    assert parse_config("name: a\nextractor: theirs\n").extractor_class.__name__ == "X"
    with pytest.raises(ConfigError, match="theirs"):
        parse_config("name: a\nextractor: ours\n")


@pytest.mark.parametrize(
    ("configs", "code", "words"),
    [
        (
            [{}, {"extractor": "os"}, {"name": 3, "extractor": "fbank"}],
            0,
            "its config does not load here",
        ),
        (
            [[], "fbank", {"extractor": ["os:system"]}, {"extractor": 5}],
            1,
            "zarr.json: damaged: Expected `",
        ),
    ],
)
def test_metadata_that_holds_no_config_is_a_note_and_what_can_be_none_is_damage(
    cli, cache, configs, code, words
):
    version = only_version(cache)
    for config in configs:
        save_config(version, config)
        assert words in cli("verify", cache).with_code(code).out


# Weights


def test_no_weights_are_downloaded_because_a_cache_names_them(
    cli, written, plain, tmp_path, scratch
):
    """Not by `verify`, nor by `repair`; they are used where they are on this machine."""
    model, cache, manifest = tmp_path / "model", scratch / "cache", plain.manifest()
    saved_models.encodec_model().save_pretrained(model)
    (model / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 24000}))
    with hub_server.serve(model) as hub, commands(modules=BEHIND_TRANSFORMERS, beside=cli) as shell:
        here, nowhere = environment(hub, tmp_path / "home"), environment(hub, scratch / "empty")
        config = written(
            CONFIG.format(weights=hub.name, revision=hub.commit).replace("6.0", "3.0"),
            "encodec.yaml",
        )
        shell("extract", manifest, "-c", config, "-o", cache, env=here).with_code(0)
        hub.requests.clear()
        assert (
            "3 bit-identical"
            in shell("verify", cache, "--recompute", 3, env=here).with_code(0, err="").out
        )

        version, remedy = (
            only_version(cache),
            f"run `hf download {hub.name} --revision {hub.commit}`",
        )
        done = shell("verify", cache, env=nowhere).with_code(0)
        assert f"{hub.name} is not in {scratch / 'empty' / 'hub'}" in done.out
        assert remedy in done.out
        spoil(version)
        done = shell("verify", cache, "--recompute", 3, env=nowhere).with_code(1)
        error, advice = done.err.splitlines()
        assert remedy in error
        assert advice.startswith("1 shard is damaged")
        done = shell("repair", cache, "--manifest", manifest, env=nowhere).with_code(2)
        assert remedy in done.err
        assert done.err.count("\n") == 1
        (version.path / "zarr.json").unlink()
        assert (
            remedy in shell("repair", cache, "--manifest", manifest, env=nowhere).with_code(2).err
        )
        assert hub.requests == []
        assert not (scratch / "empty").exists()
