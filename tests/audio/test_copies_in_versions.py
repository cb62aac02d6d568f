"""Copies of utterances in versions: which there are, what they hold, and that all
commands take them as utterances."""

import shutil
from unittest.mock import Mock

import pytest
import soundfile
from augment_section import SPEEDS, config_of, extract, section, write_config_of
from cache_contents import check, items
from corpora import speech

from featcache.audio import noise as noise_module
from featcache.audio.kept import Kept
from featcache.device import Device
from featcache.extraction import from_audio
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import WorkerTimes
from featcache.extraction.from_audio import AudioExtractor
from featcache.extraction.jobs import VersionCounts, VersionJob
from featcache.manifest.segments import Utterance

RATE = 16000
SUFFIXES = ("_sp0.9", "_sp0.9_snr5", "_sp0.9_snr15", "", "_snr5", "_snr15")


# Versions


def test_every_copy_is_there_and_the_clean_ones_are_what_they_were(plain, noises, scratch):
    extract(plain.manifest(), config_of(section(), noises), scratch / "copies")
    extract(plain.manifest(), config_of(None), scratch / "plain")
    copies, alone = items(scratch / "copies"), items(scratch / "plain")
    assert set(copies) == {f"{id_}{suffix}" for id_ in plain.ids for suffix in SUFFIXES}
    for row in plain.rows:
        assert copies[row["id"]] == alone[row["id"]]
        for suffix in SUFFIXES:
            num_samples = int(row["duration"] * RATE / (0.9 if "sp" in suffix else 1) + 0.5)
            assert copies[f"{row['id']}{suffix}"][1][0] == 1 + (num_samples - 400) // 160
        # each has its own values
        assert len({copies[f"{row['id']}{suffix}"][2] for suffix in SUFFIXES}) == 6
    assert check(scratch / "copies").problems == []


def test_without_speed_1_there_is_no_plain_copy_and_a_recording_is_decoded_once(
    plain, scratch, monkeypatch
):
    monkeypatch.setattr(from_audio, "decode", decode := Mock(side_effect=from_audio.decode))
    summary = extract(plain.manifest(), config_of({"speed": [0.9, 1.1]}), scratch, threads=1)
    assert set(items(scratch)) == {f"{id_}_sp{speed}" for id_ in plain.ids for speed in (0.9, 1.1)}
    assert (summary.utterances, summary.versions[0].utterances) == (12, 24)
    assert sum(len(call.args[1]) for call in decode.call_args_list) == len(plain.rows)


def test_an_utterance_is_noted_once_whoever_extracts_its_copies(tmp_path):
    """Each copy by a worker of its own: silent, and resampled."""
    soundfile.write(tmp_path / "a.wav", 0 * speech(0.5, 8000), 8000)
    built = BuiltConfig(config_of({"speed": SPEEDS}), Device("cpu"))
    counted = VersionCounts()
    for suffix in built.copies.suffixes:
        copy = Utterance(id=f"a{suffix}", path="a.wav")
        for (extracted,) in AudioExtractor(tmp_path, [built])([copy], WorkerTimes(float)):
            assert [item.id for item in extracted.items] == [copy.id]
            counted += VersionJob(built, None, None, None).count(extracted).versions["copies"]
    assert (counted.extracted, counted.upsampled, counted.silent) == (3, 1, 1)
    assert counted.first_silent.startswith("a: ")


def test_limits_are_on_the_copies(plain, scratch):
    """0.40 to 0.62 s: at 0.9 the longest last 0.69 s; a limit between them fails some
    copies, and them alone."""
    config = config_of({"speed": [0.9, 1.0]}, audio={"max_seconds": 0.63})
    summary = extract(plain.manifest(), config, scratch)
    lasting = {f"{row['id']}_sp0.9" for row in plain.rows if row["duration"] / 0.9 > 0.63}
    assert 0 < len(lasting) < 12
    assert set(items(scratch)) == {*plain.ids, *(f"{id_}_sp0.9" for id_ in plain.ids)} - lasting
    assert summary.failed_by_reason == {"too_long": len(lasting)}
    again = extract(plain.manifest(), config, scratch)
    assert (again.versions[0].extracted, again.versions[0].failed) == (0, len(lasting))


def test_a_clip_may_be_too_short_at_a_high_speed_alone(tmp_path, scratch):
    soundfile.write(tmp_path / "a.wav", speech(0.026), RATE)
    (tmp_path / "m.csv").write_text("id,path\na,a.wav\n")
    summary = extract(tmp_path / "m.csv", config_of({"speed": SPEEDS}), scratch)
    assert set(items(scratch)) == {"a", "a_sp0.9"}
    assert summary.failed_by_reason == {"too_short": 1}


def test_a_manifest_with_ids_of_copies_is_refused(cli, plain, scratch):
    rows = [{**plain.rows[0], "id": "utt-00_sp0.9"}, *plain.rows]
    config = write_config_of(scratch / "copies.yaml", {"speed": SPEEDS})
    done = cli(
        "extract", plain.manifest(rows, "marked.csv"), "-c", config, "-o", scratch / "features"
    )
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert (
        "1 of 13 ids end in a suffix of the config's copies (_sp0.9, _sp1.1), as "
        "utt-00_sp0.9" in done.err
    )


def test_values_depend_on_nothing_but_the_copy(corpus, noises, scratch, monkeypatch):
    """Threads, shard size, order of the manifest, neighbours, other copies, resuming,
    memory for noise: not a bit."""
    config = config_of(section(), noises)
    extract(corpus.manifest(), config, scratch / "a", threads=1)
    monkeypatch.setattr(noise_module, "_KEPT_BYTES", 30_000)
    monkeypatch.setattr(noise_module, "_DECODED", Kept(30_000, lambda samples: samples.nbytes))
    for rows in (corpus.rows[::-3], corpus.rows[::-1]):
        extract(
            corpus.manifest(rows, "backwards.csv"),
            config,
            scratch / "b",
            threads=3,
            shard_megabytes=0.01,
        )
    extract(
        corpus.manifest(corpus.rows[::3], "third.csv"),
        config_of(section([1.0], snr=[15]), noises),
        scratch / "c",
    )
    whole, third = items(scratch / "a"), items(scratch / "c")
    assert items(scratch / "b") == whole
    assert third == {id_: whole[id_] for id_ in third}
    assert len(third) == 2 * len([id_ for id_ in third if not id_.endswith("_snr15")])


# Commands


@pytest.fixture(scope="module")
def made(cli, plain, noises, tmp_path_factory):
    """A folder with a cache of copies, the config, and its noise."""
    folder = tmp_path_factory.mktemp("copies")
    shutil.copytree(noises, folder, dirs_exist_ok=True)
    config = write_config_of(folder / "copies.yaml", section())
    done = cli(
        "extract", plain.manifest(), "-c", config, "-o", folder / "features", "--shard-size", "0.05"
    )
    assert done.code == 0
    assert "72 utterances: 72 extracted" in done.out
    return folder


def test_a_dry_run_counts_copies_and_how_long_they_last(cli, plain, scratch):
    config = write_config_of(scratch / "copies.yaml", {"speed": [0.5, 1.0]})
    (version,) = cli(
        "extract", plain.manifest(), "-c", config, "--dry-run", "--json", cwd=scratch
    ).json()["versions"]
    seconds = sum(row["duration"] for row in plain.rows)
    assert (version["utterances"], version["missing"]) == (24, 24)
    assert version["audio_seconds"] == pytest.approx(3 * seconds, rel=0.01)


def test_verify_knows_the_copies(cli, plain, made):
    done = cli(
        "verify", made / "features", "--manifest", plain.manifest(), "--recompute", 72, "--json"
    ).with_code(0)
    (version,) = done.json()["versions"]
    assert (version["utterances"], version["surplus"], version["recomputed"]["identical"]) == (
        72,
        0,
        72,
    )
    more = plain.manifest([*plain.rows, {**plain.rows[0], "id": "another"}], "more.csv")
    (version,) = cli("verify", made / "features", "--manifest", more, "--json").json()["versions"]
    assert {problem["id"] for problem in version["problems"]} == {
        f"another{suffix}" for suffix in SUFFIXES
    }


def test_show_passes_by_versions_that_have_not_the_copy(cli, plain, made, scratch):
    cache = shutil.copytree(made / "features", scratch / "features")
    assert cli("extract", plain.manifest(), "-c", "mfcc13", "-o", cache).code == 0
    assert len(cli("show", cache, "utt-03", "--json").json()["versions"]) == 2
    (version,) = cli("show", cache, "utt-03_sp0.9", "--json").json()["versions"]
    assert "mfcc13" not in version["version"]
    assert version["num_samples"] == int(plain.rows[3]["duration"] * RATE / 0.9 + 0.5)
    refused = cli("show", cache, "utt-03_sp0.7")
    assert (refused.code, len(refused.err.splitlines())) == (1, 1)
    assert "'utt-03_sp0.7': no such utterance in " in refused.err


def test_reading_copies_needs_no_noise_and_extracting_them_again_does(cli, plain, made):
    cache = made / "features"
    assert "copies at speed 0.9, 1, clean and with noise of " in cli("info", cache).out
    assert cli("probe", made / "copies.yaml", plain.manifest(), "--utterances", 4).code == 0
    noises = (made / "noises.csv").rename(made / "elsewhere.csv")
    shown, verified = (
        cli("show", cache, "utt-00_snr15"),
        cli("verify", cache, "--manifest", plain.manifest()),
    )
    noises.rename(made / "noises.csv")
    assert (shown.code, verified.code) == (0, 0)
    assert "its config does not load here" in verified.out


def test_units_of_copies_are_the_same_from_features_and_from_audio(cli, plain, made, scratch):
    assert cli("fit-kmeans", made / "features", "-k", 8, "-o", made / "units.safetensors").code == 0
    units = {"extractor": "units", "params": {"weights": "units.safetensors"}}
    source = ("--from", made / "features")
    same = write_config_of(made / "same.yaml", section(), **units)
    for name, options in (("a", ()), ("b", source)):
        assert (
            cli("extract", plain.manifest(), "-c", same, "-o", scratch / name, *options).code == 0
        )
    assert items(scratch / "a") == items(scratch / "b")
    assert len(items(scratch / "a")) == 72
    lacking, different = section([0.8, 0.9]), section(seed=1)
    for other, said in (
        (lacking, "lacks: _sp0.8"),
        (different, "has different noise, or a different seed"),
    ):
        config = write_config_of(made / "other.yaml", other, **units)
        assert (
            said
            in cli("extract", plain.manifest(), "-c", config, "-o", scratch / "c", *source)
            .with_code(2)
            .err
        )
