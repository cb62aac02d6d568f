"""What `--json` prints: each command's keys are those of docs/json.md, and errors are
documents, too."""

import json
import re
import shutil

import click
import numpy as np
import pytest
from pages import text_of

from featcache.cli import main


def tables():
    """The keys that the page lists under each heading, in full: `.bytes` is
    `versions[].bytes`."""
    sections = re.split(r"^## (.*)$", text_of("docs/json.md"), flags=re.MULTILINE)
    listed = {}
    for heading, text in zip(sections[1::2], sections[2::2], strict=True):
        cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
        keys = {key for cell in cells for key in re.findall(r"`([^`]*)`", cell)}
        full = {f"versions[]{key}" if key.startswith(".") else key for key in keys}
        listed[heading.removeprefix("featcache ")] = full | {"versions"} if full != keys else keys
    return listed


KEYS = tables()


def keys_of(document, known, prefix=""):
    """The keys of a document, and of those in it of whose own keys the page lists any."""
    found = set()
    for key, value in document.items():
        found.add(name := f"{prefix}{key}")
        inner, below = (value, f"{name}[].") if isinstance(value, list) else ([value], f"{name}.")
        for one in inner:
            if isinstance(one, dict) and any(listed.startswith(below) for listed in known):
                found |= keys_of(one, known, below)
    return found


@pytest.fixture(scope="module")
def home(cli, plain, tmp_path_factory):
    """A cache with a failure and a tag, and one without; manifests of what is in it, of a
    file that is missing, of a row that is new, and of some rows."""
    home = tmp_path_factory.mktemp("home")
    rows = [{"id": row["id"], "path": row["path"]} for row in plain.rows]
    plain.manifest([*rows, {"id": "gone", "path": "gone.wav"}], "with-gone.csv")
    plain.manifest(rows, "there.csv")
    plain.manifest([*rows, {"id": "new", "path": "00.wav"}], "with-new.csv")
    plain.manifest(rows[:2], "few.csv")
    assert cli("extract", plain.folder / "with-gone.csv", "-o", home / "c").code == 3
    shutil.copytree(home / "c", home / "untagged")
    assert cli("tag", home / "c", "first").code == 0
    lines = [f"{row['id']},{row['path']},{n % 2},words" for n, row in enumerate(plain.rows)]
    spoken = plain.folder / "spoken.csv"
    spoken.write_text("\n".join(["id,path,speaker,text", *lines]))
    pooled = home / "pooled.yaml"
    pooled.write_text("name: vector\nextractor: fbank\nstore: {pool: mean+std}\n")
    configs = ("-c", "fbank80", "-c", "audio-stats", "-c", pooled)
    assert cli("extract", spoken, *configs, "-o", home / "stats").code == 0
    (home / "theirs").mkdir()
    np.save(home / "theirs/utt.npy", np.ones((9, 80), np.float32))
    config = home / "speech.yaml"
    config.write_text("name: speech\nextractor: speech_by_level:SpeechByLevel\n")
    assert cli("extract", plain.folder / "there.csv", "-c", config, "-o", home / "s").code == 0
    return home


MANIFESTS = {"few": "few", "gone": "with-gone", "new": "with-new", "there": "there"}
MANIFESTS["spoken"] = "spoken"
COMMANDS = {
    "extract": "extract {gone} -o {home}/again",
    "extract --dry-run": "extract {gone} -o {home}/dry --dry-run --trial",
    "info": "info {cache}",
    "ls": "ls {cache}",
    "show": "show {cache} utt-03",
    "tag": "tag {cache} second",
    "prune": "prune {home}/untagged --manifest {few} --force --yes",
    "why": "why {cache} {new} -c fbank80 --id utt-03",
    "rm": "rm {cache}@first --dry-run",
    "verify": "verify {cache} --manifest {new} --recompute 1",
    "repair": "repair {cache} --manifest {new}",
    "diff": "diff {cache} {cache} --values 1",
    "stats": "stats {cache} --manifest {there} --by path",
    "report": "report {home}/stats --manifest {spoken}",
    "index": "index {cache}",
    "copy": "copy {cache} {home}/copy",
    "copy --dry-run": "copy {cache} {home}/no-copy --dry-run",
    "export": "export --to numpy {cache} -o {home}/numpy --manifest {new}",
    "import": "import {home}/theirs --name theirs --made-by x --frame-rate 100 -o {home}/imported",
    "manifest": "manifest {gone} -o {home}/manifest.jsonl",
    "probe": "probe fbank80 {new} -o {cache}",
    "vad": "vad {home}/s -o {home}/segments.csv --min-speech 0",
    "fit-kmeans": "fit-kmeans {cache} -k 2 -o {home}/units.safetensors",
}


def test_the_page_has_every_command_that_prints_json():
    context = click.Context(main)
    commands = {name: main.get_command(context, name) for name in main.list_commands(context)}
    with_json = {
        name
        for name, command in commands.items()
        if any(it.name == "as_json" for it in command.params)
    }
    sections = KEYS.keys() - {"Words", "Errors", "Corpora", "extract --progress json"}
    assert {section.partition(" ")[0] for section in sections} == with_json
    assert sections == COMMANDS.keys()


@pytest.mark.parametrize("section", COMMANDS)
def test_the_keys_are_those_of_the_page(cli, plain, home, section):
    manifests = {name: plain.folder / f"{file}.csv" for name, file in MANIFESTS.items()}
    ended = cli(
        *COMMANDS[section].format(home=home, cache=home / "c", **manifests).split(), "--json"
    )
    assert keys_of(ended.json(), KEYS[section]) == KEYS[section], ended.err


def test_the_keys_of_progress_are_those_of_the_page(cli, plain, scratch):
    made = cli("extract", plain.manifest(), "-o", scratch / "c", "--progress", "json")
    (line,) = map(json.loads, made.err.splitlines())
    assert line.keys() == KEYS["extract --progress json"]


def test_a_corpus_has_the_keys_of_the_page_besides_the_command_s(cli, plain, scratch):
    manifests = [plain.manifest(plain.rows[:2], "a.csv"), plain.manifest(plain.rows[2:4], "b.csv")]
    made = cli("extract", *manifests, "-o", scratch / "c", "--json").json()
    looked = cli("ls", scratch / "c", "--json").json()
    own = {"corpus", "exit_code", "unchanged"}
    assert made.keys() == {*own, "parts"}
    assert made["parts"][0].keys() == {"part", "unchanged"} | {
        key for key in KEYS["extract"] if "[]" not in key
    }
    assert looked["parts"][1].keys() == {"part", "exit_code", "versions"}
    for damaged in (scratch / "c" / "a").glob("*/zarr.json"):
        damaged.write_text("{")
    (scratch / "c" / "b").rename(scratch / "b")
    parts = cli("index", scratch / "c", "--json").json()["parts"]
    assert [part["error"]["type"] for part in parts] == ["DamagedError", "StoreError"]
    assert all(part["error"].keys() == {"type", "message", "exit_code"} for part in parts)


@pytest.mark.parametrize(
    ("command", "kind", "code"),
    [
        ("info nowhere --json", "StoreError", 1),
        ("extract --json", "UsageError", 2),
        ("extract nowhere.csv --json", "ManifestError", 2),
        ("extract nowhere.csv -c nonsense --json", "ConfigError", 2),
        ("extract nowhere.csv --json --trial", "ArgumentError", 2),
        ("extract nowhere.csv --threads 0 --json", "UsageError", 2),
        ("stats nowhere --nonsense --json", "UsageError", 2),
        ("nonsense --json", "UsageError", 2),
        ("repair cache --json", "UsageError", 2),
        ("verify cache --manifest gone.csv --json", "ManifestError", 2),
        ("verify nowhere --sources=x --json", "UsageError", 2),
    ],
)
def test_an_error_is_the_document(cli, scratch, command, kind, code):
    """Before anything is written. (Paths and numbers: test_cli_arguments.py.)"""
    (scratch / "cache").mkdir()
    ended = cli(*command.split(), cwd=scratch)
    plain_text = cli(*[word for word in command.split() if word != "--json"], cwd=scratch)
    assert (ended.code, plain_text.code, plain_text.out) == (code, code, "")
    error = ended.json()["error"]
    assert (error["type"], error["exit_code"]) == (kind, code)
    assert {f"error.{key}" for key in error} == KEYS["Errors"]
    assert error["message"] in ended.err
    assert ended.err == plain_text.err
    assert "Traceback" not in ended.err
    assert [path.name for path in scratch.rglob("*")] == ["cache"]


@pytest.mark.parametrize("words", [["show", ".", "--"], ["verify", "nowhere", "--manifest"]])
def test_a_word_that_is_no_option_is_none(cli, scratch, words):
    ended = cli(*words, "--json", cwd=scratch)
    assert (ended.code > 0, ended.out, ended.err > "") == (True, "", True)
