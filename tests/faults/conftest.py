"""What the tests of faults share: processes with the shim loaded, and scenarios: commands
that change a small cache."""

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import shim
from cache_contents import check, items, only_version
from corpora import Corpus, speech
from damage import CHUNKS, flip
from processes import Cli, commands
from promises import CACHE, Scenario
from scratch import scratch_folder

from featcache.version.indexing import open_index
from featcache.version.ledger import standing_failures
from featcache.version.tags import make_tag


@pytest.fixture
def tell(record_property):
    """Notes a figure, to be shown at the end; by the processes of `pytest -n 2`, too."""
    return partial(record_property, "figure")


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
    ]
    figures = [
        text for report in reports for name, text in report.user_properties if name == "figure"
    ]
    if figures:
        terminalreporter.section("faults")
        for line in figures:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def faulty(tmp_path_factory):
    """Runs commands as `cli` does, with the shim loaded: `faulty(...,
    faults=Faults(...))`."""
    with commands(env={"LD_PRELOAD": str(shim.build(tmp_path_factory.mktemp("shim")))}) as cli:
        yield cli


@pytest.fixture(scope="session")
def kept():
    """A folder in memory that lives as long as the tests."""
    with scratch_folder() as folder:
        yield folder


@pytest.fixture(scope="session")
def small(kept) -> Corpus:
    """Six clips of 0.3 s, of which one is not there."""
    corpus = Corpus(kept / "audio")
    corpus.folder.mkdir()
    for i in range(6):
        corpus.record(f"utt-{i}", f"{i}.wav", speech(0.3, seed=i), duration=0.3)
    corpus.rows[1]["path"] = "nowhere.wav"
    return corpus


@pytest.fixture(scope="session")
def config(kept) -> Path:
    """The extractor of a small version: four values for each frame."""
    path = kept / "tiny.yaml"
    path.write_text("name: tiny\nextractor: fbank\nparams: {num_mel_bins: 4}\n")
    return path


def extract(manifest: Path, config: Path) -> tuple:
    """The command that extracts a manifest, two utterances a shard."""
    return ("extract", manifest, "-c", config, "-o", CACHE, "--shard-size", "0.001", "--threads", 1)


def undisturbed(cli: Cli, scenario: Scenario, folder: Path) -> Scenario:
    """The scenario, with what its command makes of the cache if nothing happens."""
    cache = scenario.prepare(folder / scenario.name)
    before = items(cache) if scenario.base else {}
    finished = cli(*scenario.arguments(cache)).with_code(scenario.code)
    version = only_version(cache)
    failed = frozenset(standing_failures(version, open_index(version)))
    shards, notes = frozenset(version.shard_names()), frozenset(finished.err.splitlines())
    return replace(
        scenario, before=before, after=items(cache), failed=failed, shards=shards, notes=notes
    )


@pytest.fixture(scope="session")
def from_nothing(faulty, small, config, kept) -> Scenario:
    """A first extraction, of two shards; one utterance fails."""
    manifest = small.manifest(small.rows[:4], "four.csv")
    return undisturbed(
        faulty, Scenario("extract", manifest, None, extract(manifest, config), code=3), kept
    )


@pytest.fixture(scope="session")
def changed(small) -> Corpus:
    """The same clips, where a row has another file."""
    return Corpus(
        small.folder,
        [{**row, "path": "5.wav"} if row["id"] == "utt-2" else row for row in small.rows],
    )


@pytest.fixture(scope="session")
def extraction_of_more(faulty, changed, config, kept, from_nothing) -> Scenario:
    """A longer manifest, in which a row has another file: two shards more, of which one
    replaces an item."""
    manifest = changed.manifest(changed.rows, "six.csv")
    command = (*extract(manifest, config), "--replace")
    return undisturbed(faulty, Scenario("more", manifest, kept / "extract", command, code=3), kept)


@pytest.fixture(scope="session")
def pruning(faulty, changed, config, kept, extraction_of_more) -> Scenario:
    """Four shards, of which two are tagged: what goes is an utterance, and what stays in
    its shard is written again."""
    base = Path(shutil.copytree(kept / "extract", kept / "to-prune"))
    make_tag(only_version(base), "paper", open_index(only_version(base)))
    assert faulty(*extraction_of_more.arguments(base)).code == 3
    manifest = changed.manifest([changed.rows[number] for number in (0, 1, 2, 5)], "fewer.csv")
    command = ("prune", CACHE, "--manifest", manifest, "--force", "--yes")
    made = undisturbed(faulty, Scenario("prune", manifest, base, command), kept)
    assert made.before.keys() - made.after.keys() == {"utt-4"}
    return made


@pytest.fixture(scope="session")
def repair(faulty, small, config, kept) -> Scenario:
    """Three shards, of which two have a damaged utterance."""
    rows = [small.rows[0], *small.rows[2:]]
    manifest = small.manifest(rows, "sound.csv")
    sound = undisturbed(faulty, Scenario("sound", manifest, None, extract(manifest, config)), kept)
    spoilt = Path(shutil.copytree(kept / "sound", kept / "spoilt"))
    version = only_version(spoilt)
    for name in open_index(version).shards[:2]:
        flip(version.shard(name).folder / CHUNKS["features"], 9)
    damaged = frozenset(problem.id for problem in check(spoilt).problems)
    assert len(damaged) == 2
    command = ("repair", CACHE, "--manifest", manifest, "--threads", 1)
    scenario = Scenario(
        "repair", manifest, spoilt, command, (command, extract(manifest, config)), damaged=damaged
    )
    made = undisturbed(faulty, scenario, kept)
    assert made.after == sound.after
    return made


@pytest.fixture(scope="session")
def indexing(faulty, kept, from_nothing) -> Scenario:
    """A cache without its index, which the command builds."""
    base = Path(shutil.copytree(kept / "extract", kept / "without-index"))
    for index in base.glob("*/index"):
        shutil.rmtree(index)
    command = ("info", CACHE)
    finish = (command, from_nothing.command)  # which removes what a killed one has left
    return undisturbed(
        faulty, Scenario("index", from_nothing.manifest, base, command, finish), kept
    )


@pytest.fixture(params=["from_nothing", "extraction_of_more", "repair", "pruning", "indexing"])
def scenario(request) -> Scenario:
    return request.getfixturevalue(request.param)


@pytest.fixture
def trials(kept):
    """A folder in memory for the caches of one test's trials."""
    folder = kept / f"trials-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
