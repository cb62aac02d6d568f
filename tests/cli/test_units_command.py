"""Units by the commands: `featcache fit-kmeans`, `extract`, and `extract --from`."""

import json
from shutil import rmtree

import numpy as np
import pytest
import torch
from cache_contents import items, only_version, provenance
from small_units import nearest

import featcache
from featcache.extractors.units import Units
from featcache.stats.kmeans import fit_version
from featcache.version.selection import select_version


@pytest.fixture(scope="module")
def fitted(cli, corpus, tmp_path_factory):
    """A folder with a cache of mfcc13, units of it and their config; in `said.json`, what
    fit-kmeans printed."""
    folder = tmp_path_factory.mktemp("fitted")
    cli("extract", corpus.manifest(), "-c", "mfcc13", "-o", folder / "features", "--device", "cpu")
    options = ("-k", 25, "-o", folder / "units.safetensors", "--device", "cpu", "--json")
    done = cli("fit-kmeans", folder / "features", *options).with_code(0)
    (folder / "units.yaml").write_text(
        "name: mfcc-km25\nextractor: units\nparams: {weights: units.safetensors}\n"
    )
    (folder / "said.json").write_text(done.out)
    return folder


@pytest.fixture(scope="module")
def of_audio(cli, fitted, corpus):
    """Units that were made of the audio."""
    done = cli(
        "extract",
        corpus.manifest(),
        "-c",
        fitted / "units.yaml",
        "-o",
        fitted / "units",
        "--device",
        "cpu",
    )
    assert done.code in (0, 3), done.err
    return featcache.open(fitted / "units")


def test_fit_kmeans_says_what_it_did(cli, fitted):
    said = json.loads((fitted / "said.json").read_text())
    cache = featcache.open(fitted / "features")
    assert said["path"] == str(cache.version.path)
    assert (said["k"], said["dimensions"], said["frames"]) == (25, 13, int(cache.lengths.sum()))
    assert 0 < said["smallest"] <= said["frames"] / 25 <= said["largest"]
    options = ("-k", 25, "-o", fitted / "again.safetensors", "--device", "cpu", "--threads", 1)
    again = cli("fit-kmeans", said["path"], *options).with_code(0)
    assert f"inertia {said['inertia']:.6g} per frame, over {said['frames']:,} frames" in again.out
    assert (fitted / "again.safetensors").read_bytes() == (
        fitted / "units.safetensors"
    ).read_bytes()


def test_from_audio_to_units(fitted, of_audio):
    features, units = featcache.open(fitted / "features"), of_audio
    codebook, _ = fit_version(select_version(fitted / "features"), 25)
    assert list(units.ids) == list(features.ids)
    assert (units.spec.dtype, units.spec.codebook_sizes) == ("uint8", (25,))
    for name in units.ids:
        np.testing.assert_array_equal(units[name], nearest(features[name], codebook))


# From features, by the command


def test_from_features_to_units_without_audio(cli, fitted, of_audio, corpus, scratch):
    """The same version as from audio, though no file is there: values, and what is known
    of each item."""
    (scratch / "empty").mkdir()
    options = (
        "--from",
        fitted / "features",
        "--root",
        scratch / "empty",
        "--device",
        "cpu",
        "--json",
    )
    made = cli(
        "extract", corpus.manifest(), "-c", fitted / "units.yaml", "-o", scratch / "units", *options
    )
    assert made.code == 0, made.err
    assert made.json()["versions"][0]["extracted"] == len(corpus.rows)
    assert "resampled" not in made.err
    assert only_version(scratch / "units").info.fingerprint == of_audio.version.info.fingerprint
    assert items(scratch / "units") == items(fitted / "units")
    assert provenance(scratch / "units") == provenance(fitted / "units")


def test_a_dry_run_writes_no_index_of_its_source(cli, fitted, corpus, scratch):
    cli("copy", fitted / "features", scratch / "source").with_code(0)
    (version,) = (scratch / "source").iterdir()
    rmtree(version / "index")
    options = (
        "-c",
        fitted / "units.yaml",
        "--from",
        scratch / "source",
        "-o",
        scratch / "units",
        "--device",
        "cpu",
    )
    cli("extract", corpus.manifest(), *options, "--dry-run").with_code(0)
    assert not (version / "index").exists()
    cli("extract", corpus.manifest(), *options).with_code(0)
    assert (version / "index").exists()


def test_features_at_which_an_exception_is_raised_are_one_failure(
    fitted, of_audio, corpus, scratch, monkeypatch
):
    features, from_features = featcache.open(fitted / "features"), Units.from_features
    bad = features.ids[4]

    def raises(extractor, frames):
        if (frames == torch.from_numpy(features[bad][1].copy())).all(1).any():
            raise ValueError("too odd")
        return from_features(extractor, frames)

    monkeypatch.setattr(Units, "from_features", raises)
    options = featcache.Options("cpu", source=fitted / "features")
    summary = featcache.extract(
        corpus.manifest(), fitted / "units.yaml", scratch / "units", options
    )
    assert summary.failed_by_reason["extractor_error"] == 1
    whole, units = of_audio, featcache.open(scratch / "units")
    assert {*units.ids} == {*whole.ids} - {bad}
    assert all((units[id_] == whole[id_]).all() for id_ in units.ids)


def test_what_the_features_lack_is_a_failure_until_they_have_it(cli, fitted, corpus, scratch):
    """And is tried again by itself, though the audio file has not changed."""
    some = scratch / "features"
    manifest = corpus.manifest(corpus.rows[:5], "some.csv")
    assert cli("extract", manifest, "-c", "mfcc13", "-o", some, "--device", "cpu").code == 0
    options = (
        "-c",
        fitted / "units.yaml",
        "-o",
        scratch / "units",
        "--from",
        some,
        "--device",
        "cpu",
        "--json",
    )
    first = cli("extract", corpus.manifest(), *options).with_code(3)
    assert first.json()["failed_by_reason"] == {"not_in_source": len(corpus.rows) - 5}
    assert (
        cli("extract", corpus.manifest(), "-c", "mfcc13", "-o", some, "--device", "cpu").code == 0
    )
    second = cli("extract", corpus.manifest(), *options).with_code(0)
    assert second.json()["versions"][0]["extracted"] == len(corpus.rows) - 5


def test_from_is_for_units_of_these_very_features(cli, fitted, corpus, scratch):
    said = cli.refused(
        "extract",
        corpus.manifest(),
        "-c",
        "mfcc13",
        "-o",
        scratch / "x",
        "--from",
        fitted / "features",
    )
    assert "--from is only for units and for store.pool: mfcc of mfcc13 takes audio" in said
    cli("extract", corpus.manifest(), "-c", "fbank80", "-o", scratch / "others", "--device", "cpu")
    options = (
        "-c",
        fitted / "units.yaml",
        "-o",
        scratch / "x",
        "--from",
        scratch / "others",
        "--device",
        "cpu",
    )
    assert "it holds fbank80-" in cli.refused("extract", corpus.manifest(), *options)
    assert not (scratch / "x").exists()
