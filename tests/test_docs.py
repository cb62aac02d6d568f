"""The documentation is held to the code: what it shows runs, what it lists is complete,
its links resolve."""

import re
import runpy
import shlex
import shutil
from typing import get_args

import click
import numpy as np
import pytest
import soundfile
from damage import flip
from make_cache import add_shard, make_features, make_version
from pages import ROOT, blocks_of, text_of
from processes import run_here

import featcache
from featcache import config as configs
from featcache.cli import main as cli
from featcache.cli import options
from featcache.errors import Reason
from featcache.extractors import find
from featcache.extractors.base import _BUILT_IN
from featcache.extractors.model import ModelParams
from featcache.format import shard as shards
from featcache.manifest.utterances import SPELLINGS
from featcache.spec import Track
from featcache.version import index as indexes
from featcache.version.selection import select_version

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
]
PAGES += sorted((ROOT / "docs").glob("*.md"))
CONTEXT = click.Context(cli)
COMMANDS = {name: cli.get_command(CONTEXT, name) for name in cli.list_commands(CONTEXT)}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder that looks like the clone after README's first command: examples/ and
    features/."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples", folder / "examples")
    run_here(
        "extract",
        folder / "examples" / "manifest.csv",
        "-o",
        folder / "features",
        "--device",
        "cpu",
    )
    return folder


# What is generated


def test_generated_pages_are_what_the_code_says():
    assert runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))["stale"]() == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_an_example_and_its_place_in_the_docs(name):
    command = COMMANDS[name]
    assert command.help
    assert not command.get_short_help_str(61).endswith("...")
    assert re.search(rf"Examples?:(\n +featcache {name}\b.*)+\s*$", command.help), (
        "help ends in an example"
    )
    assert f"## featcache {name}\n" in text_of("docs/commands.md")
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter


# What is shown


def commands_shown():
    """Every `featcache …` line in the pages' shell blocks and in the commands' own
    examples."""
    texts = [block.text for page in PAGES for block in blocks_of(page, "sh")]
    texts += [command.help for command in (cli, *COMMANDS.values())]
    for text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"(?:&&|\||;| > )(?=(?:[^']*'[^']*')*[^']*$)", line):
                if found := re.match(r"\s*(?:\.venv/bin/)?featcache ([a-z]+.*)", part):
                    yield re.split(r" {3,}", found[1].strip())[0]


@pytest.mark.parametrize("line", sorted(set(commands_shown())))
def test_commands_shown_have_the_options_shown(line, monkeypatch):
    # the folders that are shown need not be here
    monkeypatch.setattr(options._ROOT, "exists", False)
    name, *arguments = shlex.split(line, comments=True)
    parsed = COMMANDS[name].make_context(name, arguments)
    assert parsed.args == []


def test_the_training_loop_of_the_readme_is_that_of_the_examples(clone, monkeypatch, capsys):
    shown = [
        block.text.removeprefix("import torch\n\n") for block in blocks_of("README.md", "python")
    ]
    assert any(block in text_of("examples/train.py") for block in shown)
    monkeypatch.chdir(clone)
    runpy.run_path(str(clone / "examples" / "train.py"))
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert losses[-1] < 0.5 * losses[0]


def test_the_readme_names_the_files_of_a_cache(clone):
    (version,) = (clone / "features").iterdir()
    assert version.name in text_of("README.md"), "the fingerprint of fbank80, in the output shown"
    for entry in version.glob("*/"):
        assert entry.name in text_of("README.md")


def test_the_page_of_pictures_is_what_its_script_writes():
    page = text_of("docs/pictures.md")
    script = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))
    assert page.startswith(script["HEAD"])
    measured, tail, _ = page.removeprefix(script["HEAD"]).partition(script["TAIL"])
    assert tail
    assert all(row.endswith(" s |") for row in measured.splitlines())


def test_examples_are_small_and_are_what_their_names_say():
    files = sorted((ROOT / "examples" / "speech").iterdir())
    assert sum(path.stat().st_size for path in files) < 500_000
    for path in files:
        found = soundfile.info(path)
        assert found.samplerate == (22050 if "22k" in path.name else 16000)
        assert found.channels == (2 if path.stem == "both" else 1)


# The format page


@pytest.fixture(scope="module")
def reader():
    (block,) = blocks_of("docs/format.md", "python")
    namespace = {}
    exec(compile(block.text, block.page, "exec"), namespace)
    return namespace["read_version"]


def check_reader(reader, cache):
    """The page's reader gives what the package gives, in the same order."""
    opened = featcache.open(cache)
    items = reader(opened.version.path)
    assert list(items) == list(opened.ids)
    for id_, features in items.items():  # of what is quantised, in float64
        np.testing.assert_allclose(
            np.array(features), opened[id_], rtol=1e-6, atol=1e-5 if opened.spec.side else 0
        )
    return items


@pytest.mark.parametrize(
    "kind", ["float16", "uint16", "uint8", "float64", "side arrays", "quantised"]
)
def test_the_format_pages_reader_knows_which_item_counts(reader, tmp_path, kind):
    dtype = kind if hasattr(np, kind) else "float32"
    side = (Track("marks", (2,), "uint16", ""),) if kind == "side arrays" else ()
    first, second, third = (
        make_features(8, (4,), dtype, max_frames=5, seed=seed) for seed in range(3)
    )
    version = make_version(tmp_path, first, side=side, quantized=kind == "quantised")
    # of one generation: it comes later
    add_shard(version, {"new": second["utt-0"], "utt-5": second["utt-5"]}, row=3)
    add_shard(
        version,
        {id_: second[id_] for id_ in ("utt-1", "utt-2")},
        row=0,
        generation={"utt-1": 2, "utt-2": 3},
    )
    add_shard(version, {"utt-2": third["utt-2"]}, row=1, generation=2)
    items = check_reader(reader, tmp_path)
    counting = {**first, "new": second["utt-0"], "utt-1": second["utt-1"], "utt-2": second["utt-2"]}
    assert {id_: len(features) for id_, features in items.items()} == {
        id_: len(x) for id_, x in counting.items()
    }


@pytest.mark.parametrize("name", ["zarr.json", "features/c/0/0", "items/c/0/0", "text/c/0"])
def test_the_format_pages_reader_reads_a_version_and_notices_a_flipped_bit(
    reader, clone, tmp_path, name
):
    cache = shutil.copytree(clone / "features", tmp_path / "features")
    assert (
        len(check_reader(reader, cache)) == len(text_of("examples/manifest.csv").splitlines()) - 1
    )
    version = select_version(cache)
    path = version.path / "shards" / version.shard_names()[0] / name
    data = path.read_bytes()
    flip(path, data.index(b'"row": 0') + 7 if name == "zarr.json" else 3)
    with pytest.raises(ValueError, match="damaged"):
        reader(version.path)


@pytest.mark.parametrize("extractor", sorted(_BUILT_IN))
def test_the_format_page_names_the_parameters_that_fingerprints_leave_out(extractor):
    params = find(extractor).Params
    inner = [part for field in params.model_fields.values() for part in get_args(field.annotation)]
    later = {name for part in (params, *inner) for name in getattr(part, "added_later", ())}
    page = text_of("docs/format.md")
    assert {name for name in later if not re.search(rf"[`.]{name}`", page)} == set()


def test_the_format_page_has_every_column():
    """Of a shard and of an index, with their dtypes."""
    page = text_of("docs/format.md")
    of_shards, of_index = (
        dict(rows_of(page, title)) for title in ("A shard", "What is derived, and what is not")
    )
    assert of_shards == {**shards.COLUMNS, "side_<name>_offset": "uint64"}
    assert {*of_index} == {*indexes.COLUMNS}


def rows_of(page, title):
    """The columns that a section's first table names, and the cell behind them."""
    section = page.partition(f"\n## {title}\n")[2]
    (table, *_) = re.findall(r"\| column \|.*?\n\n", section, re.DOTALL)
    for row in table.strip().splitlines()[2:]:
        names, dtype, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        yield from ((name, dtype) for name in re.findall(r"`(.*?)`", names))


# What is listed


@pytest.mark.parametrize("name", configs.packaged_configs())
def test_packaged_configs_begin_with_what_they_are(name):
    first = configs.packaged_configs()[name].splitlines()[0]
    assert re.fullmatch(r"# [A-Z0-9].{20,}", first)
    assert first.removeprefix("# ") in run_here("configs")
    assert f"| `{name}` |" in text_of("docs/configs.md")


@pytest.mark.parametrize("extractor", sorted(_BUILT_IN))
def test_every_parameter_is_on_the_config_page(extractor):
    def section(title):
        return text_of("docs/configs.md").partition(f"\n## {title}\n")[2].partition("\n## ")[0]

    params, own = find(extractor).Params, section(f"`{extractor}`")
    shared = [section(f"`{name}`") for name in re.findall(r"\]\(#(\w+)\)", own)]
    shared += [section("Models")] if issubclass(params, ModelParams) else []
    for name in params.model_fields:
        assert f"| `{name}` |" in "".join([own, *shared])
    assert f"`{extractor}`" in text_of("docs/extractors.md")


def test_the_manifest_page_has_every_spelling_and_every_reason():
    page = text_of("docs/manifest.md")
    for column, spellings in SPELLINGS.items():
        assert f"| `{column}` | {', '.join(f'`{spelling}`' for spelling in spellings)} |" in page
    assert re.findall(
        r"^\| `(\w+)` \|", page.partition("## Utterances that fail")[2], re.MULTILINE
    ) == [*Reason]


# Links


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve_and_no_machine_is_named(page):
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"/(work|root|tmp|home|opt)/", text)
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_ci_can_be_run():
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert ".ci/run" in text_of("README.md")
