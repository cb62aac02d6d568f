"""What holds of all adapters: they say what is missing. (The examples of their page run
in tests/test_pages.py.)"""

import pytest
from processes import run_script


@pytest.mark.parametrize(
    ("module", "package", "call"),
    [
        ("speechbrain", "speechbrain", ".item(featcache.open(sys.argv[1], 'fbank80'))"),
        ("lhotse", "lhotse", ""),
        ("huggingface", "datasets", ""),
    ],
)
def test_a_toolkit_that_is_not_there_is_named(cli, made, module, package, call):
    code = f"""
        import importlib, sys
        sys.modules[{package!r}] = None
        import featcache
        from featcache.errors import MissingDependencyError
        try:
            importlib.import_module("featcache.adapters.{module}"){call}
        except MissingDependencyError as error:
            print(error)
    """
    printed = run_script(cli, code, made.folder / "features")
    assert f"featcache.adapters.{module} needs the package {package!r}" in printed
    assert printed.endswith(f"pip install {package}\n")
