"""Every code block of the documentation runs, page after page, in one folder, as for a
reader with a clone."""

import os
import shutil

import hub_server
import pytest
import yaml
from hub_server import environment
from pages import (
    ALONE,
    INSTALLS,
    PACKAGES,
    SLOW,
    SMALL,
    blocks_of,
    make_reader,
    pages_in_order,
    write_speech,
)
from processes import commands

from featcache.config import packaged_configs

MODULES = ["transformers.models.encodec.modeling_encodec", "transformers.models.mimi.modeling_mimi"]
MODULES += ["transformers.models.hubert.modeling_hubert", "transformers.models.auto.modeling_auto"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub that has the packaged configs' models, at their commits, but small."""
    pytest.importorskip("transformers")
    import small_models
    import small_ssl

    folder = tmp_path_factory.mktemp("models")
    models = {
        "encodec24k-6kbps": small_models.encodec_24khz(folder / "encodec24k"),
        "encodec48k-6kbps": small_models.encodec_48khz(folder / "encodec48k"),
        "mimi": small_models.mimi(folder / "mimi"),
        "hubert-base-l6": small_ssl.save("hubert", folder / "hubert", layers=6),
    }
    with hub_server.serve(folder / "mimi") as hub:
        for name, model in models.items():
            params = yaml.safe_load(packaged_configs()[name])["params"]
            hub.others[params["weights"]] = params["revision"], hub_server.files_in(model)
        hub.folder = folder
        yield hub


@pytest.fixture(scope="module")
def reader(cli, hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(hub.folder / "encodec24k", folder / "encodec")
    home = environment(hub, folder / "hub")
    with (
        commands(env=home, modules=MODULES, beside=cli) as shell,
        pytest.MonkeyPatch.context() as patch,
    ):
        assert shell("--version").code == 0
        patch.syspath_prepend(folder)
        made = make_reader(folder, shell.socket)
        write_speech(folder)
        made.env |= home
        yield made


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in SLOW else ())
        for page in pages_in_order()
    ],
)
def test_every_block_of_a_page_runs(reader, page):
    reader.read(page)


@pytest.mark.parametrize("page", sorted(ALONE))
def test_a_page_by_itself_prints_what_it_shows(cli, page, tmp_path):
    assert cli("--version").code == 0  # which starts its server
    make_reader(tmp_path, cli.socket).read_alone(page)


def test_what_is_not_run_or_made_small_is_on_the_pages():
    shown = "".join(block.text for page in pages_in_order() for block in blocks_of(page, "sh"))
    assert [command for command in (*INSTALLS, *SMALL) if command not in shown] == []
    assert {*PACKAGES} <= {*pages_in_order()}


def test_what_the_pages_compute(reader):
    augment, masks, stats = (
        reader.read(f"docs/{name}.md") for name in ("augment", "masks", "stats")
    )
    assert augment["features"].isfinite().all()
    assert augment["loss"].isfinite()
    assert masks["attended"].isfinite().all()
    assert masks["chunks"].shape == (120, 120)
    assert masks["draw"](0, 17, 120) == masks["draw"](0, 17, 120)
    assert stats["normalised"].isfinite().all()
    loader = reader.read("docs/loader.md")
    assert loader["batch"]["features"].shape[0] == len(loader["batch"]["speaker"])
    assert loader["sampler"].epoch == 2  # after the loop that resumes
    assert os.path.exists(reader.folder / "fbank40.yaml")
