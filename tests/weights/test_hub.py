"""Weights from a hub: downloaded, kept, and used without network; every fault in one
line. The hub is on loopback."""

import json
import re
import shutil
import signal
import socket
from types import SimpleNamespace

import hub_server
import pytest
import small_models
from cache_contents import items, versions_in
from hub_server import BEHIND_TRANSFORMERS, CONFIG, environment
from huggingface_hub import constants
from processes import commands, on_terminal

from featcache.config import load_config
from featcache.errors import ConfigError, ExtractorError
from featcache.trust import without_downloads
from featcache.weights.hub import HubModel, errors_in_one_line, locate, require_space


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A folder with a model's files, and with others that are not wanted. The weights are
    only bytes."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "config.json").write_text("{}")
    (folder / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 24000}))
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
    (folder / "pytorch_model.bin").write_bytes(b"the same once more")
    (folder / "README.md").write_text("# EnCodec\n")
    (folder / ".gitattributes").write_text("*.bin filter=lfs\n")
    return folder


@pytest.fixture
def hub(repository):
    """A hub that has this repository."""
    with hub_server.serve(repository) as hub:
        yield hub


@pytest.fixture
def home(scratch):
    return scratch / "home"


@pytest.fixture
def snapshot(home, hub):
    """The folder there of the hub's commit, which a download makes."""
    return home / "hub" / "models--org--name" / "snapshots" / hub.commit


@pytest.fixture
def config(scratch, hub):
    """A config whose weights the hub has."""
    path = scratch / "encodec.yaml"
    path.write_text(CONFIG.format(weights=hub.name, revision=hub.commit))
    return path


@pytest.fixture
def fetch(cli, config, home, hub):
    """Runs `featcache extract`, which looks for the weights first, with a manifest that
    does not exist."""

    def fetch(env=(), **options):
        return cli(
            "extract", "gone.csv", "-c", config, env=environment(hub, home, **dict(env)), **options
        )

    return fetch


def require_fetched(done):
    """The weights are there, and stderr says what was downloaded, if anything, and that
    the manifest is missing."""
    assert done.code == 2, done.err
    *downloads, line = done.err.splitlines()
    assert "gone.csv" in line
    assert len(downloads) <= 1
    for told in downloads:
        assert re.fullmatch(
            r"downloading \S+ at \w{12} from http\S+ to \S+: \d+ files?, \d+\.\d MB", told
        )


def refused(done, code):
    """The one line on stderr, but for that of a download that has begun."""
    lines = [line for line in done.err.splitlines() if not line.startswith("downloading ")]
    assert (done.code, done.out, len(lines)) == (code, "", 1), done.err
    assert "params." in lines[0]
    return lines[0]


def left_over(home):
    """The files of downloads that are not complete."""
    return [path for path in home.rglob("*") if path.name.endswith(".incomplete")]


# Downloaded


def test_a_model_is_downloaded_once_and_then_used_without_network(cli, plain, scratch, home):
    model = small_models.encodec_24khz(scratch / "model")
    (model / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 24000}))
    (model / "README.md").write_text("# EnCodec\n")
    config = scratch / "encodec.yaml"
    job = ("extract", plain.manifest(), "-c", config, "-o")
    with hub_server.serve(model) as hub, commands(modules=BEHIND_TRANSFORMERS, beside=cli) as shell:
        config.write_text(CONFIG.format(weights=hub.name, revision=hub.commit))
        first = shell(*job, scratch / "hub", env=environment(hub, home)).with_code(0)
        asked = [*hub.requests]
        again = shell(*job, scratch / "again", env=environment(hub, home, HF_HUB_OFFLINE="1"))
    size = sum(
        path.stat().st_size for path in model.iterdir() if path.suffix in (".json", ".safetensors")
    )
    what = rf"{hub.name} at {hub.commit[:12]} from \S+ to {home}\S+: 3 files, {size / 1e6:.1f} MB"
    assert re.fullmatch(f"downloading {what}\n", first.err)
    assert len(hub.asked_for("GET /large/")) == 1
    assert not hub.asked_for("README")

    assert (again.code, again.err, hub.requests) == (0, "", asked)
    assert items(scratch / "again") == items(scratch / "hub")
    config.write_text(CONFIG.format(weights=model, revision="null"))
    (version,) = versions_in(scratch / "hub")
    assert version == f"encodec-{load_config(config).fingerprint()[:12]}"
    assert versions_in(scratch / "again") == {version}


@pytest.mark.parametrize("lacks", ["nothing", "preprocessor_config.json"])
def test_what_is_there_is_used_without_asking(fetch, hub, lacks):
    """A model that says nothing of waveforms is whole without."""
    hub.files.pop(lacks, None)
    require_fetched(fetch())
    assert not hub.asked_for("README|gitattributes|pytorch_model")
    asked = len(hub.requests)
    for offline in ("0", "1"):
        require_fetched(fetch(env={"HF_HUB_OFFLINE": offline}))
    assert len(hub.requests) == asked


@pytest.mark.parametrize("drop", ["close", "reset"])
def test_a_download_that_breaks_off_goes_on(fetch, hub, home, drop):
    hub.drop, hub.drops = drop, 1
    require_fetched(fetch())
    assert len(hub.asked_for("GET /large/")) == 2
    assert next(home.rglob("model.safetensors")).read_bytes() == hub.files["model.safetensors"]


def test_a_download_that_breaks_off_again_and_again_leaves_whole_files(fetch, hub, home):
    hub.drop, hub.drops = "reset", 3
    line = refused(fetch(), 1)
    assert f"the download from {hub.address} broke off (" in line
    assert "run it again" in line
    assert not left_over(home)
    require_fetched(fetch())
    assert len(hub.asked_for("GET .*/config.json")) == 1


def test_weights_that_another_program_has_loaded_lack_what_is_done_to_waveforms(
    fetch, hub, home, snapshot, repository
):
    """`from_pretrained` does not download preprocessor_config.json, which decides values,
    so it is downloaded now."""
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(repository / name, snapshot)
    line = refused(fetch(env={"HF_HUB_OFFLINE": "1"}), 2)
    assert f"org/name is not whole in {home}/hub, and HF_HUB_OFFLINE forbids" in line
    require_fetched(fetch())
    assert hub.asked_for("GET .*preprocessor_config.json")
    assert not hub.asked_for("GET /large/")
    require_fetched(fetch(env={"HF_HUB_OFFLINE": "1"}))


def test_a_whole_copy_of_the_repository_is_whole(fetch, snapshot, repository):
    """`hf download` makes such a copy, which may be taken to a machine without network."""
    shutil.copytree(repository, snapshot)
    (snapshot / "preprocessor_config.json").unlink()
    require_fetched(fetch(env={"HF_HUB_OFFLINE": "1"}))


def test_a_terminal_has_a_bar_of_each_file(cli, config, scratch, home, hub):
    _, shown = on_terminal(
        cli, 120, "extract", "gone.csv", "-c", config, env=environment(hub, home), cwd=scratch
    )
    # this hub names no large files
    for name, size in (("/config.json", "2.00"), ("[0-9a-f]", r"1\.02M")):
        assert re.search(rf"{name}: 100%\|.*/{size} \[.*B/s\]", shown)
    assert re.search(r"\nloading encodec: ", shown)


def test_a_download_can_be_interrupted(cli, config, hub, home):
    hub.drop, hub.drops = "hold", 1
    running = cli.start("extract", "gone.csv", "-c", config, env=environment(hub, home))
    running.wait_until(lambda: left_over(home) and hub.asked_for("GET /large/"))
    running.send(signal.SIGINT)
    assert running.wait().with_code(130).err.splitlines()[1:] == ["featcache: interrupted"]
    assert not left_over(home)


# Refused


@pytest.mark.parametrize(
    ("answers", "code", "words"),
    [
        ({"HEAD .*/resolve/": (401, {"X-Error-Code": "GatedRepo"})}, 2, ["access has to be requested at", "HF_TOKEN"]),
        ({"HEAD .*/resolve/": (403, {"X-Error-Code": "GatedRepo"})}, 2, ["access has to be requested at", "HF_TOKEN"]),
        ({"api/models": (401, {"X-Error-Message": "Invalid credentials"})}, 2, ["answers 401", "token is not valid"]),
        ({"HEAD .*/resolve/": (403, {"X-Error-Message": "not for you"})}, 2, ["answers 403 (not for you)", "token"]),
        ({"api/models": (429, {})}, 1, ["answers 429", "too many requests", "later"]),
        ({"api/models": (503, {})}, 1, ["answers 503", "later"]),
        ({"GET /large/": (500, {})}, 1, ["answers 500", "later"]),
        ({"api/models": (200, {"Content-Type": "text/html"})}, 2, ["does not answer as a hub does", "HF_ENDPOINT"]),
        ({"HEAD .*/resolve/": (200, {"ETag": '"1"'})}, 2, ["does not answer as a hub does", "HF_ENDPOINT"]),
    ],
)  # fmt: skip
def test_what_a_hub_refuses_is_said_in_one_line(fetch, hub, home, answers, code, words):
    """The line says what to do. The code is 2 if the config or the environment is wrong,
    1 if it may work later."""
    hub.answers = answers
    line = refused(fetch(), code)
    for word in (hub.address, *words):
        assert word in line
    assert not left_over(home)


def test_a_programming_error_is_not_taken_for_the_hubs(hub, home):
    """While files are listed, the same error means that the hub's answer was no list of
    files."""
    model, error = HubModel("org/name", hub.commit, hub.address, home), TypeError("not a mapping")
    words = r"does not answer as a hub does \(not a mapping\)"
    with pytest.raises(ConfigError, match=words), errors_in_one_line(model, is_listing=True):
        raise error
    with (
        pytest.raises(TypeError, match=r"^not a mapping$"),
        errors_in_one_line(model, is_listing=False),
    ):
        raise error


def test_a_model_and_a_commit_that_a_hub_does_not_have(fetch, config, hub):
    login = "if it is private, run `hf auth login`, or set HF_TOKEN"
    for name, revision, words in (
        (
            "org/name",
            hub.commit[::-1],
            f"params.revision: {hub.address}/org/name has no commit {hub.commit[::-1]}",
        ),
        (
            "org/other",
            hub.commit,
            f"org/other: {hub.address} has no public model of this name; {login}",
        ),
    ):
        config.write_text(CONFIG.format(weights=name, revision=revision))
        assert words in refused(fetch(), 2)


def test_a_commit_without_any_file_of_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=[])
    )
    with pytest.raises(ConfigError, match=r"org/name at 0{40} holds no weights that torch reads"):
        locate("org/name", "0" * 40)


@pytest.mark.parametrize("name", ["org/a--b", "org/" + "a" * 300])
def test_what_is_no_models_id_is_not_looked_for(scratch, monkeypatch, name):
    """Not even in the hub's cache, where a folder can have no name that is so long; and
    no command to download it is shown."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(scratch))
    with (
        pytest.raises(ConfigError, match=f"{name}: neither a folder nor a model id"),
        without_downloads(),
    ):
        locate(name, "0" * 40)


def test_without_network_it_says_what_to_download_to_where(fetch, hub, home):
    remedy = f"`hf download org/name --revision {hub.commit}`; then copy its HF_HOME to this one"
    line = refused(fetch(env={"HF_HUB_OFFLINE": "1"}), 2)
    assert f"org/name is not in {home}/hub, and HF_HUB_OFFLINE forbids downloading it" in line
    assert remedy in line
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
        line = refused(fetch(env={"HF_ENDPOINT": nobody}), 1)
        assert f"{nobody} cannot be reached (" in line
        assert remedy in line
        line = refused(fetch(env={"HF_ENDPOINT": "hub.example.org"}), 2)
        assert "HF_ENDPOINT is 'hub.example.org', and has to begin with https://" in line
        proxy = {
            "no_proxy": "",
            "http_proxy": f"http://user:secret@{nobody.removeprefix('http://')}",
        }
        line = refused(fetch(env=proxy), 1)
        assert f"{hub.address}, through the proxy of HTTP_PROXY, cannot be reached (" in line
        assert "secret" not in line
    assert not hub.requests


def test_a_disk_that_is_full_or_will_be(fetch, hub, home, scratch):
    kept, remedy = f"org/name cannot be kept in {home}/hub", "set another HF_HOME"
    assert f"{kept}: No space left on device; {remedy}" in refused(fetch(full=home / "hub"), 1)
    line = refused(fetch(limits={"FSIZE": len(hub.files["model.safetensors"]) // 2}), 1)
    assert f"{kept}: File too large; {remedy}" in line
    assert not left_over(home)
    model, free = (
        HubModel("org/name", hub.commit, hub.address, home),
        shutil.disk_usage(home.parent).free,
    )
    require_space(model, free // 2)
    with pytest.raises(
        ExtractorError,
        match=r"kept in .*: [\d,]+ bytes are to come, and [\d,]+ are free; set another",
    ):
        require_space(model, 2 * free)


def test_a_cache_that_may_not_be_written(fetch, home):
    """It may be another user's."""
    home.mkdir(mode=0o555)
    assert f"cannot be kept in {home}/hub: Permission denied; set another HF_HOME" in refused(
        fetch(powerless=True), 1
    )


def test_weights_that_arrive_damaged_are_not_kept(fetch, hub, home):
    """Their size is right, so huggingface_hub accepts them."""
    hub.corrupt = True
    assert f"model.safetensors arrived damaged from {hub.address} and was removed" in refused(
        fetch(), 1
    )
    assert not list(home.rglob("model.safetensors"))
    hub.corrupt = False
    require_fetched(fetch())
    assert next(home.rglob("model.safetensors")).read_bytes() == hub.files["model.safetensors"]
