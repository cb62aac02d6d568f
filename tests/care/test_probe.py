"""`featcache probe`: what it finds of extractors known to be right or wrong."""

from pathlib import Path

import pytest
import soundfile
import torch
from cache_contents import only_version
from corpora import Corpus
from extractions import write_config
from odd_extractors import EqualLengths, NothingSeen, Slow
from small_models import encodec_24khz

from featcache.care.probe import probe, utterances_by_length
from featcache.config import load_config
from featcache.device import Device
from featcache.errors import ConfigError
from featcache.extraction.batching import choose_batching
from featcache.extractors.base import BATCHINGS
from featcache.manifest.read import read_manifest
from featcache.version.records import read_probes

pytestmark = pytest.mark.usefixtures("trusted")


def probed(config: Path | str, corpus: Corpus, utterances: int = 8):
    """A probe, and its measurements by precision and policy."""
    found = probe(
        load_config(config), read_manifest(corpus.manifest()), Device("cpu", 2), utterances
    )
    return found, {(one.precision, one.policy): one for one in found.measured}


# What it finds


@pytest.mark.parametrize(
    ("extractor", "clean"),
    [("NothingSeen", BATCHINGS), ("PaddingSeen", BATCHINGS[:2]), ("NeighboursSeen", BATCHINGS[:1])],
)
def test_policies_that_change_values_are_found(tmp_path, speech, extractor, clean):
    found, measured = probed(write_config(tmp_path, extractor), speech)
    assert {policy for (_, policy), one in measured.items() if not one.mismatch} == set(clean)
    assert all(one.mismatch == one.disturbed for one in found.measured)
    assert found.fastest.policy in clean
    assert found.fastest.times_real_time == max(
        measured["fp32", policy].times_real_time for policy in clean
    )
    # padding is always the same zeros, and strangers are not
    is_repeatable = extractor != "NeighboursSeen"
    assert [measured["fp32", policy].repeatable for policy in BATCHINGS] == [
        None,
        is_repeatable,
        is_repeatable,
    ]


def test_ties_are_told_from_mismatches(tmp_path, quarters):
    """Every code flips in a batch, by rounding; what moves latents by more is found,
    though their codes stay."""
    _, exact = probed(write_config(tmp_path, "Halves"), quarters)
    for policy in ("equal_length", "padded"):
        assert exact["fp32", policy].tied == exact["fp32", policy].differing == 1
        assert exact["fp32", policy].mismatch == exact["fp32", policy].disturbed == 0
    found, leaking = probed(write_config(tmp_path, "Halves", leaks=2), quarters)
    # minus a quarter has the same code as a quarter
    assert leaking["fp32", "padded"].mismatch == 0
    assert leaking["fp32", "padded"].disturbed > 0  # and yet is another
    assert found.fastest.policy != "padded"


def test_it_says_where_mismatches_are(tmp_path, quarters):
    """In the frames at the end that padding leaks into."""
    loud = Corpus(tmp_path)
    for row in quarters.rows:
        samples, rate = soundfile.read(quarters.folder / row["path"], dtype="float32")
        loud.record(row["id"], row["path"], 2 * samples, rate, subtype="FLOAT")
    found, measured = probed(write_config(tmp_path, "Halves", leaks=2), loud)
    padded = measured["fp32", "padded"]
    assert padded.last == 2
    assert padded.mismatch == pytest.approx(2 * len(loud.rows) / found.frames)
    assert measured["fp32", "equal_length"].mismatch == 0
    assert found.fastest.policy != "padded"


@pytest.mark.parametrize("is_clean", [True, False])
def test_extractors_without_rows_are_held_to_the_last_bit(tmp_path, speech, is_clean):
    found, measured = probed("fbank80" if is_clean else write_config(tmp_path, "OrderSeen"), speech)
    assert measured["fp32", "single"].mismatch == 0
    assert (
        (measured["fp32", "frames"].mismatch == 0)
        == measured["fp32", "frames"].repeatable
        == is_clean
    )
    assert found.rounding == {}
    assert is_clean or found.fastest.policy == "single"


def test_batches_that_do_not_fit_are_made_smaller(tmp_path, speech):
    """`Small` holds two rows at once: as many as the longest clips want, and fewer than
    the shortest."""
    found, _ = probed(write_config(tmp_path, "Small", module="row_extractors"), speech)
    assert [
        (trial.policy, trial.error, trial.mismatch)
        for trial in found.measured
        if trial.precision == "fp32"
    ] == [(policy, None, 0.0) for policy in BATCHINGS]


def test_the_sample_spreads_over_all_lengths(speech):
    """The shortest and the longest are in it, whether or not the manifest gives durations."""
    for rows in (
        speech.rows,
        [{**row, "duration": 0.2 + 0.2 * i} for i, row in enumerate(speech.rows)],
    ):
        manifest = read_manifest(speech.manifest(rows, "some.csv"))
        assert [utterance.id for utterance in utterances_by_length(manifest, 3)] in (
            ["utt-0", "utt-3", "utt-7"],
            ["utt-0", "utt-4", "utt-7"],
        )
        assert len(utterances_by_length(manifest, 100)) == len(speech.rows)


def test_what_cannot_be_extracted_is_left_out_and_named(tmp_path, speech):
    rows = [*speech.rows, {"id": "gone", "path": "gone.wav"}]
    config = load_config(write_config(tmp_path, "NothingSeen"))
    found = probe(config, read_manifest(speech.manifest(rows, "gone.csv")), Device("cpu", 1), 32)
    assert found.utterances == 8
    (fault,) = found.skipped
    assert fault.startswith("gone: file_missing")


# EnCodec


@pytest.fixture(scope="module")
def encodec(tmp_path_factory) -> Path:
    """The folder of a small EnCodec's weights."""
    return encodec_24khz(tmp_path_factory.mktemp("encodec"))


def encodec_config(folder: Path, weights: Path, extractor: str = "Encodec", **params):
    module = "featcache.extractors.encodec" if extractor == "Encodec" else "odd_extractors"
    path = write_config(
        folder, extractor, module=module, weights=str(weights), codebooks=4, **params
    )
    path.write_text(f"{path.read_text()}audio: {{sample_rate: 24000}}\n")
    return path


def test_naive_padding_of_encodec_is_found_and_ours_is_clean(tmp_path, speech, encodec):
    """Its tail: the last frames look into the zeros behind them."""
    for extractor, is_clean in (("NaiveEncodec", False), ("Encodec", True)):
        found, measured = probed(encodec_config(tmp_path, encodec, extractor), speech, 2)
        assert {precision for precision, _ in measured} == {"fp32", "bf16", "fp16"}
        padded = measured["fp32", "padded"]
        assert (padded.mismatch == 0) == is_clean
        assert (
            measured["fp32", "single"].differing == measured["fp32", "equal_length"].mismatch == 0
        )
        assert measured["bf16", "single"].error or measured["bf16", "single"].mismatch > 0
        if is_clean:
            assert padded.repeatable
        else:
            assert 1 <= padded.last <= 4
            assert found.fastest.policy != "padded"


@pytest.mark.slow
def test_chunks_are_held_to_the_whole(tmp_path, speech, encodec):
    """EnCodec's LSTM looks at all that was before, so a little overlap is not exact."""
    config = encodec_config(tmp_path, encodec, chunk={"seconds": 0.6, "overlap": 0.04})
    found, _ = probed(config, speech, 2)
    assert found.chunks.utterances == 1
    assert not found.chunks.exact
    assert found.chunks.mismatch > 0
    assert all(one.mismatch == 0 for one in found.measured if one.precision == "fp32")


# The command


def test_the_command_keeps_what_it_finds_where_it_is_told_to(cli, speech, scratch):
    """With the config's version, which extraction fills, and which `info` tells of."""
    config = write_config(scratch, "PaddingSeen", name="here")
    asked = ("probe", config, speech.manifest(), "--utterances", 3, "--threads", 1)
    told = cli(*asked, cwd=scratch).with_code(0)
    for words in (
        "equal_length",
        "throughout",
        "bit-identical whatever the neighbours: yes",
        "not saved",
    ):
        assert words in told.out
    assert not (scratch / "features").exists()
    kept = cli(*asked, "-o", "features", "--json", cwd=scratch).with_code(0)
    version = only_version(scratch / "features")
    (document,) = read_probes(version)
    assert {**document, "path": str(version.path.relative_to(scratch))} == kept.json()
    assert document["fingerprint"] == version.info.fingerprint
    assert document["fastest"]["policy"] in ("single", "equal_length")
    assert cli("extract", speech.manifest(), "-c", config, cwd=scratch).code == 0
    assert "fastest without a mismatch: " in cli("info", "features", cwd=scratch).out
    assert "saved in" in cli(*asked, cwd=scratch).out
    assert len(read_probes(version)) == 2


def test_where_it_can_measure_nothing_it_exits_with_2(cli, speech, scratch):
    gone = speech.manifest([{"id": "gone", "path": "gone.wav"}], "only-gone.csv")
    said = cli.refused("probe", write_config(scratch, "NothingSeen"), gone, "-o", scratch / "cache")
    assert len(said.splitlines()) == 1
    assert "none of the utterances that were tried can be extracted: gone: file_missing" in said
    assert not (scratch / "cache").exists()


# How a run batches: by what its extractor declares, and by what was probed


def extractor_of(kind, **params):
    return kind(kind.Params.model_validate(params), 16000, torch.device("cpu"))


def probe_of(device="cpu", date="2026-01-01", precision="fp32", **disturbed):
    """A document that found such shares to differ under policies."""
    measured = [
        {
            "policy": policy,
            "precision": precision,
            "error": None,
            "disturbed": share,
            "mismatch": share,
        }
        for policy, share in disturbed.items()
    ]
    return {"device": device, "date": date, "measured": measured}


CLEAN = probe_of(single=0.0, equal_length=0.0, padded=0.0)
PADDED_UNCLEAN = probe_of(single=0.0, equal_length=0.0, padded=0.08)
BOTH_UNCLEAN = probe_of(single=0.0, equal_length=0.01, padded=0.08)


@pytest.mark.parametrize(
    ("probes", "requested", "policy", "mismatch"),
    [
        ([], None, "padded", None),
        ([], "single", "single", None),
        ([CLEAN], None, "padded", 0.0),
        ([PADDED_UNCLEAN], None, "equal_length", 0.0),
        ([BOTH_UNCLEAN], None, "single", 0.0),
        ([PADDED_UNCLEAN], "single", "single", 0.0),
        ([PADDED_UNCLEAN, probe_of(date="2026-02-01", padded=0.0)], None, "padded", 0.0),
        ([probe_of("another GPU", padded=0.08)], None, "padded", None),
        ([probe_of(precision="bf16", padded=0.08)], None, "padded", None),
    ],
)
def test_a_run_takes_the_loosest_clean_policy(probes, requested, policy, mismatch):
    """Of those declared, by the newest probe of its own device, at its own precision."""
    choice = choose_batching(extractor_of(NothingSeen), probes, "cpu", requested)
    assert (choice.batching, choice.mismatch) == (policy, mismatch)
    assert (choice.note is None) == (requested is not None or policy == "padded")


@pytest.mark.parametrize(
    ("kind", "probes", "requested", "words"),
    [
        (
            NothingSeen,
            [PADDED_UNCLEAN],
            "padded",
            "8 % of the frames: use --batching equal_length, or add --allow-mis",
        ),
        (NothingSeen, [BOTH_UNCLEAN], "equal_length", "1 % of the frames: use --batching single"),
        (
            EqualLengths,
            [],
            "padded",
            "looser than equal_length, .* EqualLengths declares: use --batching equal_length",
        ),
        (EqualLengths, [CLEAN], "padded", "a probe found no difference in its sample"),
        (Slow, [], "padded", "Slow has one batching policy, single: leave --batching out"),
        (NothingSeen, [], "sideways", "choose from single, equal_length, padded"),
        (NothingSeen, [], "", "choose from single, equal_length, padded"),
    ],
)
def test_a_looser_policy_than_was_found_clean_is_refused(kind, probes, requested, words):
    extractor = extractor_of(kind)
    with pytest.raises(ConfigError, match=words):
        choose_batching(extractor, probes, "cpu", requested)


@pytest.mark.parametrize(
    ("kind", "probes", "mismatch"),
    [(NothingSeen, [PADDED_UNCLEAN], 0.08), (EqualLengths, [], None), (EqualLengths, [CLEAN], 0.0)],
)
def test_a_mismatch_that_was_allowed_is_known(kind, probes, mismatch):
    choice = choose_batching(extractor_of(kind), probes, "cpu", "padded", allow_mismatch=True)
    assert (choice.batching, choice.mismatch) == ("padded", mismatch)
    assert choice.note.startswith("batching padded: ")


def test_extractors_without_rows_have_one_way():
    assert choose_batching(extractor_of(Slow), [], "cpu").batching == "single"
    assert choose_batching(extractor_of(Slow), [], "cpu", "single").batching == "single"


@pytest.fixture
def run(cli, speech, scratch):
    """Extracts by an extractor that sees padding, as its probe has found."""
    config = write_config(scratch, "PaddingSeen", name="seen")
    assert (
        cli(
            "probe",
            config,
            speech.manifest(),
            "--utterances",
            6,
            "--threads",
            1,
            "-o",
            scratch / "c",
        ).code
        == 0
    )
    command = ("extract", speech.manifest(), "-c", config, "-o", scratch / "c", "--device", "cpu")
    return lambda *options: cli(*command, *options)


def made_by(cache: Path) -> dict:
    version = only_version(cache)
    (name,) = version.shard_names()
    return version.shard(name).info.made_by


def test_extract_holds_to_what_was_probed(run, scratch):
    """What was found to change values is refused where it is asked for, and not taken by
    itself."""
    refused = run("--batching", "padded").with_code(2)
    assert "--batching padded: by the probe of cpu, padded changes" in refused.err
    assert len(refused.err.splitlines()) == 1
    assert only_version(scratch / "c").shard_names() == []
    assert "by the probe of cpu, padded changes" in run().with_code(0).err
    assert (made_by(scratch / "c")["batching"], made_by(scratch / "c")["mismatch"]) == (
        "equal_length",
        0.0,
    )


def test_a_mismatch_that_is_allowed_is_kept_with_the_shards(cli, run, scratch):
    assert run("--batching", "padded", "--allow-mismatch").code == 0
    assert made_by(scratch / "c")["batching"] == "padded"
    assert made_by(scratch / "c")["mismatch"] > 0
    assert "% mismatched when probed before" in cli("info", scratch / "c").out


def test_a_probe_after_the_extraction_is_told_apart_from_one_before(cli, speech, scratch):
    config = write_config(scratch, "PaddingSeen", name="seen")
    assert cli("extract", speech.manifest(), "-c", config, "-o", scratch / "c").code == 0
    probed = cli(
        "probe", config, speech.manifest(), "--utterances", 6, "--threads", 1, "-o", scratch / "c"
    )
    assert "100 %" in probed.out  # all frames differ, in batches
    told = cli("info", scratch / "c").out
    assert told.index("batching padded: not probed before") < told.index("probed on cpu")
