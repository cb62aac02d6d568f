"""What holds of all adapters: their page runs, and they say what is missing."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import toolkits
from processes import run_script

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
SECTIONS = {
    "Lightning and DDP": "lightning",
    "SpeechBrain": "speechbrain",
    "Lhotse": "lhotse",
    "Hugging Face datasets": "datasets",
}
MODULES = {"speechbrain": "speechbrain", "lhotse": "lhotse", "huggingface": "datasets"}


def section(title):
    return PAGE.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_has_no_other_sections():
    assert re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == list(SECTIONS)


@pytest.mark.parametrize("title", SECTIONS)
def test_the_pages_examples_run(cli, title, tmp_path):
    if find_spec(SECTIONS[title]) is None:
        pytest.skip(f"{SECTIONS[title]} is not installed")
    toolkits.make(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", section(title), re.DOTALL | re.MULTILINE)
    # Lightning wants workers, and srun where there is one, and asks torch for what it calls otherwise by now.
    ignore = (
        "The 'train_dataloader' does not have many workers",
        "The `srun` command is available",
        "`isinstance(treespec, LeafSpec)` is deprecated",
    )
    run_script(cli, code, ignore=ignore, cwd=tmp_path)


@pytest.mark.parametrize("module", MODULES)
def test_a_toolkit_that_is_not_there_is_named(cli, module, tmp_path):
    folder = toolkits.make(tmp_path).folder
    calls = {
        "speechbrain": "import featcache.adapters.speechbrain as it; it.item(featcache.open(sys.argv[1], 'fbank80'))",
        "lhotse": "import featcache.adapters.lhotse",
        "huggingface": "import featcache.adapters.huggingface",
    }
    code = f"""
        import sys
        sys.modules[{MODULES[module]!r}] = None
        import featcache
        from featcache.errors import MissingDependencyError
        try:
            {calls[module]}
        except MissingDependencyError as error:
            print(error)
    """
    printed = run_script(cli, code, folder / "features")
    package = MODULES[module]
    assert f"featcache.adapters.{module} needs the package {package!r}" in printed
    assert printed.endswith(f"pip install {package}\n")
