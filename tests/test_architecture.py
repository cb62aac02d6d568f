"""The house rules of docs/architecture.md, held against the imports and calls in the code
itself."""

import ast
import importlib
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest
from make_cache import make_features, make_version
from processes import run_python

import featcache

PACKAGE = Path(featcache.__file__).parent
CHECKOUT = Path(__file__).parents[1]

# Layers, from the ground up: a file or folder of the package may import from the layers
# below its own, and from its own folder.
LAYERS = {
    "ground": {"errors", "trust"},
    "model": {"spec"},
    "values": {"device", "masks", "sections"},
    "inputs": {"manifest", "storage", "weights"},
    "features": {"format", "audio", "extractors", "augment"},
    "configs": {"config", "version"},
    "shown": {"media"},
    "readers": {"loader"},
    "of versions": {"stats", "export", "extraction"},
    "runs": {"adapters", "cmvn", "engines", "report"},
    "care": {"care"},
    "commands": {"cli", "testing"},
    "process": {"__main__"},
}
LAYER_OF = {unit: number for number, units in enumerate(LAYERS.values()) for unit in units}
FLAT = {"errors", "spec", "manifest", "storage"}
"""What knows no audio, no extractor and no config."""

ONLY = {
    "manifest": {"errors"},
    "storage": {"errors"},
    "format": FLAT,
    "version": FLAT | {"format"},
    "extractors": {"device", "errors", "manifest", "sections", "spec", "trust", "weights"},
    "media": FLAT | {"config", "version"},
    "loader": FLAT | {"device", "format", "media", "version"},
    "masks": {"errors"},
    "augment": {"errors", "manifest", "masks"},
    "cmvn": {"errors", "loader", "masks", "stats"},
    "adapters": {"errors", "export", "loader", "manifest"},
    "export": {"errors", "loader", "manifest", "storage"},
    "report": FLAT | {"audio", "loader", "media", "stats", "version"},
}
EXTRACT_ONLY = {
    "pydantic",
    "yaml",
    "soundfile",
    "miniaudio",
    "soxr",
    "torchaudio",
    "transformers",
    "safetensors",
}
"""Packages of the extras `extract` and `models`, which a training environment does not
have."""

TOOLKITS = {"speechbrain": {"speechbrain"}, "lhotse": {"lhotse"}, "huggingface": {"datasets"}}
"""What each adapter imports that nothing else of the package does."""


@cache
def modules():
    return {
        path.relative_to(PACKAGE): ast.parse(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }


def unit_of(path):
    """`version/index.py` is of `version`, `plan.py` is `plan`; the package's own
    `__init__.py` is None."""
    return path.parts[0] if len(path.parts) > 1 else None if path.stem == "__init__" else path.stem


def imported(tree, needed_only=False):
    """Dotted names of all that a module imports, also in its functions and under
    TYPE_CHECKING.

    With `needed_only`, without what it does without: imports whose ImportError it catches."""
    done_without = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and "ImportError" in {
            ast.unparse(one.type) for one in node.handlers if one.type
        }:
            done_without.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if needed_only and node in done_without:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_by_unit(needed_only=False):
    """The files and folders of the package that each of them imports."""
    found = {unit: set() for unit in map(unit_of, modules()) if unit}
    for path, tree in modules().items():
        if unit := unit_of(path):
            parts = [
                name.split(".")
                for name in imported(tree, needed_only)
                if name.startswith("featcache.")
            ]
            found[unit] |= {part[1] for part in parts} & {*LAYER_OF} - {unit}
    return found


def test_every_file_has_its_place_and_imports_run_one_way():
    found = imports_by_unit()
    assert found.keys() <= LAYER_OF.keys()
    # audio knows the type of the config's audio section, and nothing else of config
    assert not [
        (unit, other)
        for unit in found
        for other in found[unit]
        if LAYER_OF[other] >= LAYER_OF[unit]
    ]


def test_a_version_knows_no_audio_and_no_extractor_and_the_loader_stands_on_versions_alone():
    found = imports_by_unit(needed_only=True)
    assert {
        unit: found[unit] - allowed
        for unit, allowed in ONLY.items()
        if found.get(unit, set()) - allowed
    } == {}


def test_no_room_but_extractors_asks_for_a_frame_rate():
    """Others ask the axis of a spec (`featcache/spec/`), which has one answer for all."""
    asks = {"frame_rate", "frame_length", "padded_to"}
    exempt = {"extractors", "spec", "testing"}
    asking = {
        str(path)
        for path, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in asks and unit_of(path) not in exempt
    }
    assert asking == set()


def test_opening_a_folder_and_reading_a_batch_loads_little_of_the_package(tmp_path):
    make_version(tmp_path, make_features(3))
    featcache.open(tmp_path)  # which builds the index
    script = """
import sys
from pathlib import Path
import featcache
featcache.open(sys.argv[1]).batch([0, 1])
files = {name: module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "featcache"}
print(sum(Path(file).stat().st_size for file in files.values()), *files)
"""
    size, *loaded = run_python(script, tmp_path).replace("featcache.", "").split()
    assert int(size) <= 225_000  # bytes of the package, which training has to trust
    around = {name for name in loaded if name.startswith(("loader.", "manifest.", "device"))}
    core = {"loader.opening", "loader.cache", "loader.buffers", "loader.shards"}
    assert around == core | {"manifest.segments", "manifest.strings"}
    others = {"storage.bucket", "version.corpus", "version.tags", "version.indexing"}
    assert not {*others, "format.writing"} & {*loaded}


def test_training_needs_no_package_of_the_extra_extract():
    modules_of = {
        ".".join(("featcache", *path.with_suffix("").parts)).removesuffix(".__init__"): path
        for path in modules()
    }
    units = {"loader", "masks", "augment", "cmvn", "adapters"}
    pending = [name for name, path in modules_of.items() if unit_of(path) in units] + [
        "featcache.care.verify"
    ]
    reached = set()
    while pending:
        if (name := pending.pop()) not in reached:
            reached.add(name)
            body = modules()[modules_of[name]].body
            without_types = [
                node for node in body if not ast.unparse(node).startswith("if TYPE_CHECKING:")
            ]
            names = [*imported(ast.Module(without_types, []), needed_only=True)]
            assert not EXTRACT_ONLY & {dotted.partition(".")[0] for dotted in names}, name
            parents = {
                ".".join(name.split(".")[:length]) for length in range(1, name.count(".") + 1)
            }
            pending += (parents | {*names}) & {*modules_of}


def test_an_adapter_imports_its_own_toolkit_and_nothing_else_any_toolkit_or_adapter():
    every = set.union(*TOOLKITS.values()) | {"lightning"}  # which needs no adapter
    for path, tree in modules().items():
        names = set(imported(tree))
        allowed = TOOLKITS.get(path.stem, set()) if unit_of(path) == "adapters" else set()
        assert {name.split(".")[0] for name in names} & every <= allowed, path
        if unit_of(path) != "adapters":
            assert not any(name.startswith("featcache.adapters") for name in names), path


def test_the_library_neither_prints_nor_ends_the_process():
    for path, tree in modules().items():
        if unit_of(path) not in ("cli", "__main__"):
            calls = {
                ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)
            }
            assert not calls & {"print", "exit", "quit", "sys.exit", "os._exit", "click.echo"}, path


def test_the_architecture_page_names_every_room_and_only_files_that_are_there():
    checkout = Path(__file__).parents[1]
    page = (checkout / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w/]+(?:/|\.py))`", page))
    assert {unit for unit in LAYER_OF if not {f"{unit}/", f"{unit}.py"} & names} == {"__main__"}
    files = {name for name in names if "/" in name.rstrip("/") and name.endswith(".py")}
    assert {
        name
        for name in files
        if not any((folder / name).exists() for folder in (PACKAGE, checkout))
    } == set()


@pytest.mark.parametrize("name", ["featcache", "featcache.adapters"])
def test_completion_offers_what_is_public_alone(name):
    package = importlib.import_module(name)
    assert {each for each in dir(package) if not each.startswith("__")} == {*package.__all__}


def read_house():
    """Load `scripts/house.py`, which measures the package."""
    path = CHECKOUT / "scripts" / "house.py"
    spec = importlib.util.spec_from_file_location("house", path)
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    return house


def test_the_package_is_no_denser_to_read_than_it_has_become():
    house = read_house()
    sources, trees = house.read_package(CHECKOUT)
    measured = house.density([*sources.values()], [*trees.values()])
    for measure, most in (
        ("mean line, characters", 50),
        (f"lines above {house.LONG}, %", 2),
        ("assignments in expressions in 1,000 lines", 1),
        ("conditional expressions in 1,000 lines", 13),
        ("docstrings that open with a riddle, %", 1),
    ):
        assert measured[measure] <= most, measure


def test_files_of_a_room_do_not_import_each_other_in_circles():
    house = read_house()
    _, trees = house.read_package(CHECKOUT)
    assert house.circles_inside(trees) == {}
