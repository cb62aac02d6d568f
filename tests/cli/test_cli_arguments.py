"""What is given on the command line, and cannot be: one line that names the option, exit
code 2, nothing written."""

import os
import re
from pathlib import Path

import click
import pytest
import torch
from make_cache import make_version
from processes import run_here

import featcache
from featcache.cli import main
from featcache.cli.options import refuse_unwritable
from featcache.config import load_config
from featcache.device import Device
from featcache.errors import ArgumentError, ConfigError, ManifestError, StoreError
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest.read import read_manifest

URL = "is a URL: mount or copy what is there, and give a path on this machine"
SECRET = "which may be a signature: give the URL without it, and credentials by the environment"
OTHER_URL = ": a cache is in a folder, or has a URL that begins with s3://, gs://, az://"


def listed(folder):
    return sorted(folder.rglob("*"))


@pytest.fixture
def paths(plain, scratch):
    """What the commands below are given."""
    (scratch / "file").write_text("")
    (scratch / "dangling").symlink_to("nowhere")
    return {"manifest": plain.manifest(), "cache": scratch / "cache", "folder": scratch}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("extract {manifest} --root {folder}/gone", "--root: there is no folder {folder}/gone"),
        ("extract {manifest} --root {folder}/file", "--root: {folder}/file is not a folder"),
        ("verify {folder} --root {folder}/gone", "--root: there is no folder {folder}/gone"),
        ("extract {manifest} -o {folder}/file", "-o: {folder}/file is not a folder"),
        ("extract {manifest} -o /dev/null", "-o: /dev/null is not a folder"),
        (
            "extract {manifest} -o {folder}/dangling",
            "-o: {folder}/dangling is a link to nowhere, which is not there",
        ),
        ("stats {folder} -o {folder}", "-o: {folder} is not a file"),
        ("stats {folder} -o /dev/null", "-o: /dev/null is not a file"),
        ("stats {folder} -o -", "-o: - is no path here: give another, or ./-"),
        ("export --to kaldi {folder} -o -", "-o: - is no path here: give another, or ./-"),
        ("copy {folder} -", "TO: - is no path here: give another, or ./-"),
        ("report {folder} -o x.pdf", "-o: x.pdf does not end in .html"),
        ("extract s3://b/m.csv", f"MANIFEST: s3://b/m.csv {URL}"),
        ("extract {manifest} -o https://b/x", f"-o: https://b/x{OTHER_URL}"),
        ("extract {manifest} -c https://h/c.yaml", f"-c: https://h/c.yaml {URL}"),
        ("extract {manifest} --root hf://b", f"--root: hf://b {URL}"),
        ("extract {manifest} --root s3://b/x?y", f"--root has a query or a fragment, {SECRET}"),
        ("extract {manifest} -o s3://b/x#y", f"-o has a query or a fragment, {SECRET}"),
        ("extract {manifest} --from hf://b/x", f"--from: hf://b/x{OTHER_URL}"),
        (
            "info s3:///x",
            "CACHE[/VERSION]: s3:///x names no location in a bucket: give s3://BUCKET/FOLDER",
        ),
        ("info file:///x", f"CACHE[/VERSION]: file:///x{OTHER_URL}"),
        (
            "ls S3:/b/x",
            "CACHE[/VERSION]: S3:/b/x is no URL: did you mean s3://b/x? A path of that "
            "name is ./S3:/b/x",
        ),
        ("verify {folder} --manifest s3://b/m.csv", f"--manifest: s3://b/m.csv {URL}"),
        ("stats {folder} -o s3://b/x.npz", f"-o: s3://b/x.npz {URL}"),
    ],
)
def test_paths_that_cannot_be_are_refused(cli, scratch, paths, command, message):
    before = listed(scratch)
    assert (
        cli.refused(*command.format(**paths).split(), cwd=scratch) == "featcache: "
        f"{message.format(**paths)}\n"
    )
    assert listed(scratch) == before


@pytest.mark.parametrize(
    "command",
    [
        "extract {manifest} -o {place}",
        "extract {manifest} -o {place}/deeper",
        "probe fbank80 {manifest} -o {place}",
        "copy {cache} {place}",
        "stats {cache} -o {place}",
        "fit-kmeans {cache} -k 2 -o {place}",
        "manifest {manifest} -o {place} --to csv",
    ],
)
@pytest.mark.parametrize("folder", ["/proc", "/dev/null"])
def test_a_place_where_nothing_can_be_made_is_refused_before_the_work(
    cli, paths, features, command, folder
):
    """Also for root, who may do everything."""
    make_version(paths["cache"], features)
    said = cli.refused(*command.format(**paths, place=f"{folder}/x").split(), code=1)
    assert re.fullmatch(f"featcache: {folder}/x.*: cannot be written: .* {folder}.*\n", said)
    assert "zarr.json" not in said


def test_a_current_folder_that_was_removed_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in ("ls features", "extract m.csv", "report features", "export --to kaldi a -o b"):
        said = run_here(*words.split(), code=2)
        assert (
            said == "featcache: the current folder has been removed: change to another, with cd\n"
        )


def options_that_count_once():
    """The words of a command that gives an option twice, for each that takes one value."""
    context = click.Context(main)
    for name in main.list_commands(context):
        for option in main.get_command(context, name).params:
            if isinstance(option, click.Option) and not option.multiple and not option.is_flag:
                yield name, option.opts[0]


@pytest.mark.parametrize(("command", "option"), [*options_that_count_once()], ids=str)
def test_no_option_is_given_twice(command, option):
    """click would take the last, and `prune --manifest` remove what the first one has."""
    arguments = [f"{option}=1", f"{option}=2"] if option.startswith("--") else [option, "1"] * 2
    said = run_here(command, "x", *arguments, code=2)
    assert said == f"featcache: {option}: it is given twice\n"


def test_flags_may_be_given_twice_unless_they_may_contradict(scratch, features):
    make_version(scratch / "cache", features)
    run_here("verify", scratch / "cache", "--json", "--json")
    said = run_here("verify", scratch / "cache", "--data", "--no-data", code=2)
    assert said == "featcache: --data: it is given twice\n"


def path_parameters():
    """What users call each parameter of each command that is a path, and the words before
    its value."""
    context = click.Context(main)
    for command in main.list_commands(context):
        words = [command]
        for param in main.get_command(context, command).params:
            is_argument = isinstance(param, click.Argument)
            if isinstance(param.type, click.Path):
                name = (
                    param.human_readable_name.removesuffix("...") if is_argument else param.opts[0]
                )
                yield name, words if is_argument else [command, name]
            words = [*words, "x"] if is_argument else words


@pytest.mark.parametrize(("name", "words"), [*path_parameters()], ids=str)
@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("", " is empty"),
        ("gs:b", ": gs:b is no URL: did you mean gs://b? A path of that name is ./gs:b"),
        (
            "https:/h/x",
            ": https:/h/x is no URL: did you mean https://h/x? A path of that name is ./https:/h/x",
        ),
    ],
)
def test_no_path_is_empty_or_almost_a_url(name, words, path, fault):
    """An unset variable of the shell makes it empty."""
    assert run_here(*words, path, code=2) == f"featcache: {name}{fault}\n"


@pytest.mark.parametrize(("name", "words"), [*path_parameters()], ids=str)
@pytest.mark.parametrize(
    "path",
    [
        *["https://u:HUSH@h/x", "https:/u:HUSH@h/x", "x/ftp:/u:HUSH@h/x", "//u:HUSH@h/x"],
        *["HTTPS%3A%2Fu%3AHUSH%40h%2Fx", "s3:/u:HUSH@b/x", "https:/h/x?sig=HUSH"],
    ],
)
def test_no_path_with_a_secret_is_taken_or_shown(name, words, path):
    for printing in ([], ["--json"]):
        said = run_here(*words, path, *printing, code=2)
        assert "HUSH" not in said
        assert said.startswith(f"featcache: {name} has a ") or "No such option" in said


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0", "1e999"])
def test_a_size_is_a_number(cli, paths, scratch, value):
    said = cli.refused(
        "extract", paths["manifest"], "-o", scratch / "c", "--dry-run", f"--shard-size={value}"
    )
    number = float(value)
    assert (
        said == f"featcache: shard_megabytes (--shard-size) is {number}: it must be a number from "
        "0.000001 to 1,000,000,000\n"
    )
    assert not (scratch / "c").exists()


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
def test_what_a_command_reads_is_never_written(cli, plain, scratch, link):
    """Not with --force, and not by another name."""
    manifest, data = plain.copy(scratch / "corpus").manifest(), plain.manifest().read_bytes()
    output = manifest if link is None else scratch / "link.csv"
    if link is not None:
        getattr(output, link)(manifest)
    said = cli.refused("manifest", manifest, "-o", output, "--force")
    assert said == f"featcache: {output}: is what this command reads: give another file\n"
    assert manifest.read_bytes() == data


def test_no_output_is_a_versions_file(cli, scratch, features):
    place = make_version(scratch / "cache", features).path / "zarr.json"
    before = place.read_bytes()
    assert "is a file of the version" in cli.refused(
        "stats", scratch / "cache", "-o", place, "--force"
    )
    assert place.read_bytes() == before


def test_urls_are_no_paths_in_python_either(plain, scratch, monkeypatch):
    """`Path("s3://b/x")` is `s3:/b/x`."""
    monkeypatch.chdir(scratch)
    manifest = read_manifest(plain.manifest())
    for call in (lambda url: featcache.open(scratch, copy_to=url), read_manifest):
        for url in ("s3://b/x", Path("s3://b/x"), "https://b/x"):
            with pytest.raises(ArgumentError, match=f"{url} {URL}"):
                call(url)
    with pytest.raises(ArgumentError, match=f"root: s3:/b/x {URL}"):
        read_manifest(plain.manifest(), root=Path("s3://b/x"))
    for url, said in {"https://b/x": OTHER_URL, Path("s3://b/x"): "give the URL as text"}.items():
        with pytest.raises(ArgumentError, match=said):
            featcache.open(url)
        with pytest.raises(ArgumentError, match=said):
            plan_extraction(manifest, [load_config("fbank80")], url, Options("cpu", 1))
    assert listed(scratch) == []
    (scratch / "a:").mkdir()
    with pytest.raises(StoreError, match="holds no version"):
        featcache.open("a:/")


def test_the_home_folder_is_what_a_tilde_says_where_the_shell_leaves_it(cli, plain, scratch):
    """As in `--root=~/audio`, which bash passes on as it is."""
    plain.copy(scratch / "audio").manifest()
    home = {"HOME": str(scratch)}
    cli(
        "extract", plain.manifest(), "--root=~/audio", "--output=~/features", env=home, cwd=scratch
    ).with_code(0)
    assert sorted(path.name for path in scratch.iterdir()) == ["audio", "features"]
    assert cli("verify", "~/features", "--manifest=~/audio/manifest.csv", env=home).code == 0
    (scratch / "~backup").mkdir()
    assert (
        cli(
            "extract",
            plain.manifest(),
            "--root",
            plain.folder,
            "-o",
            "~backup",
            env=home,
            cwd=scratch,
        ).code
        == 0
    )
    assert list((scratch / "~backup").iterdir())


@pytest.mark.parametrize(
    "command", [["stats"], ["fit-kmeans", "-k", 3]], ids=lambda command: command[0]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(cli, scratch, features, command):
    make_version(scratch / "cache", features)
    output = scratch / "file.npz"
    name, *options = command
    command = (name, scratch / "cache", *options, "-o", output)
    output.write_text("of another day's work")
    said = cli.refused(*command)
    assert (
        said
        == f"featcache: {output}: already exists: give another name, or --force to replace it\n"
    )
    assert output.read_text() == "of another day's work"
    assert cli(*command, "--force").code == 0
    assert output.stat().st_size > 100
    said = cli.refused(name, scratch / "cache", *options, "-o", scratch / "nowhere" / "x", code=1)
    assert said.endswith(f"x: cannot be written: there is no folder {scratch / 'nowhere'}\n")
    folder = scratch / "read-only"
    folder.mkdir(mode=0o555)
    said = cli.refused(
        name, scratch / "cache", *options, "-o", folder / "x", powerless=True, code=1
    )
    assert (
        said == f"featcache: {folder / 'x'}: cannot be written: nothing can be made in "
        f"{folder}: Permission denied\n"
    )


def test_an_option_in_the_place_of_a_number_is_no_number():
    for option, words in {"--values": "diff a b --values", "--pad": "vad a -o b --pad"}.items():
        said = run_here(*words.split(), option, code=2)
        assert re.search(rf"'{option}': '{option}' is not a valid (whole )?number\.\n$", said)


def test_numbers_that_are_none_or_that_no_computer_holds(cli, plain, scratch):
    said = cli.refused("extract", plain.manifest(), "-o", scratch / "c", "--threads", 2**63)
    assert f"{2**63} is not in the range 1<=x<=4096" in said
    with pytest.raises(
        ArgumentError,
        match="threads is 9223372036854775808: it must be a whole number, 1 or more, at",
    ):
        Device("cpu", 2**63)
    assert (
        cli("probe", "fbank80", plain.manifest(), "--utterances", 2**63, "-o", scratch / "c").code
        == 0
    )


@pytest.mark.parametrize(
    ("manifest", "what"),
    [
        ("", "the manifest's path is empty"),
        ([], "there are no rows"),
        ([None], "row 1: is a NoneType, not a dictionary"),
        (b"a.csv", "manifest is a bytes: give a path, a data frame"),
    ],
)
def test_in_python_a_manifest_is_a_path_or_a_table(scratch, manifest, what):
    with pytest.raises((ArgumentError, ManifestError), match=what):
        featcache.extract(manifest, cache=scratch / "c")


def test_in_python_a_device_is_a_name_or_torchs_own(plain, scratch):
    with pytest.raises(
        ConfigError, match="device '3': not a torch device; use cpu, cuda, or cuda:0 and so on"
    ):
        featcache.extract(plain.manifest(), cache=scratch / "c", options=featcache.Options(3))
    options = featcache.Options(torch.device("cpu"))
    assert featcache.extract(plain.manifest(), cache=scratch / "c", options=options).device == "cpu"


def test_a_cache_that_another_run_makes_at_this_moment_is_a_folder(plain, scratch, monkeypatch):
    """Just after it was asked for: as two runs that begin together do."""
    cache, is_folder = scratch / "cache", os.path.isdir

    def made_meanwhile(path):
        found = is_folder(path)
        cache.mkdir(exist_ok=True)
        return found

    monkeypatch.setattr(os.path, "isdir", made_meanwhile)
    run_here("extract", plain.manifest(), "-o", cache)


def test_an_interrupt_of_the_check_of_a_folder_leaves_nothing(tmp_path, monkeypatch):
    make = os.mkdir

    def interrupted(*given):
        make(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "mkdir", interrupted)
    with pytest.raises(KeyboardInterrupt):
        refuse_unwritable(tmp_path)
    assert not [*tmp_path.iterdir()]
