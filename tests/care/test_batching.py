"""How a run batches: by what its extractor declares, and by what was probed."""

import pytest
import torch
from cache_contents import only_version
from extractions import write_config
from odd_extractors import EqualLengths, NothingSeen, Slow

from featcache.errors import ConfigError
from featcache.extraction.padded_rows import choose_batching

pytestmark = pytest.mark.usefixtures("trusted")


def extractor_of(kind, **params):
    return kind(kind.Params.model_validate(params), 16000, torch.device("cpu"))


def probe_of(device="cpu", date="2026-01-01", precision="fp32", **disturbed):
    """A document that found such shares to differ under policies."""
    measured = [
        {"policy": policy, "precision": precision, "error": None, "disturbed": share, "mismatch": share}
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
        (NothingSeen, [PADDED_UNCLEAN], "padded", "8 % of the frames: use --batching equal_length, or --allow-mis"),
        (NothingSeen, [BOTH_UNCLEAN], "equal_length", "1 % of the frames: use --batching single"),
        (EqualLengths, [], "padded", "looser than equal_length, .* EqualLengths declares: use --batching equal_length"),
        (EqualLengths, [CLEAN], "padded", "a probe found no difference in its sample"),
        (Slow, [], "padded", "Slow has only one batching policy, single: leave --batching out"),
        (NothingSeen, [], "sideways", "choose from single, equal_length, padded"),
    ],
)
def test_a_looser_policy_than_was_found_clean_is_refused(kind, probes, requested, words):
    """Saying what was measured, and what to do."""
    extractor = extractor_of(kind)
    with pytest.raises(ConfigError, match=words):
        choose_batching(extractor, probes, "cpu", requested)


@pytest.mark.parametrize(
    ("kind", "probes", "mismatch"),
    [(NothingSeen, [PADDED_UNCLEAN], 0.08), (EqualLengths, [], None), (EqualLengths, [CLEAN], 0.0)],
)
def test_a_mismatch_that_was_allowed_is_known(kind, probes, mismatch):
    """The choice carries what was measured, and a line that says so."""
    choice = choose_batching(extractor_of(kind), probes, "cpu", "padded", allow_mismatch=True)
    assert (choice.batching, choice.mismatch) == ("padded", mismatch)
    assert choice.note.startswith("batching padded: ")


def test_extractors_without_rows_have_one_way():
    """Which may be asked for by its name."""
    assert choose_batching(extractor_of(Slow), [], "cpu").batching == "single"
    assert choose_batching(extractor_of(Slow), [], "cpu", "single").batching == "single"


def test_extract_holds_to_what_was_probed(cli, speech, scratch):
    """What was found to change values is refused where it is asked for, and not taken by itself."""
    config = write_config(scratch, "PaddingSeen", name="seen")
    run = ("extract", speech.manifest(), "-c", config, "-o", scratch / "c", "--device", "cpu")
    assert cli("probe", config, speech.manifest(), "--utterances", 6, "--threads", 1, "-o", scratch / "c").code == 0
    refused = cli(*run, "--batching", "padded")
    assert refused.code == 2
    assert "--batching padded: the probe of cpu found that it changes" in refused.err
    assert len(refused.err.splitlines()) == 1
    taken = cli(*run)
    assert taken.code == 0, taken.err
    assert "by the probe of cpu, padded changes" in taken.err
    version = only_version(scratch / "c")
    (name,) = version.shard_names()
    made_by = version.shard(name).info.made_by
    assert (made_by["batching"], made_by["mismatch"]) == ("equal_length", 0.0)


def test_a_mismatch_that_is_allowed_is_kept_with_the_shards(cli, speech, scratch):
    config = write_config(scratch, "PaddingSeen", name="seen")
    assert cli("probe", config, speech.manifest(), "--utterances", 6, "--threads", 1, "-o", scratch / "c").code == 0
    options = ("-c", config, "-o", scratch / "c", "--device", "cpu", "--batching", "padded", "--allow-mismatch")
    assert cli("extract", speech.manifest(), *options).code == 0
    version = only_version(scratch / "c")
    (name,) = version.shard_names()
    made_by = version.shard(name).info.made_by
    assert made_by["batching"] == "padded"
    assert made_by["mismatch"] > 0
    assert "% mismatched when probed before" in cli("info", scratch / "c").out


def test_a_probe_after_the_extraction_is_told_apart_from_one_before(cli, speech, scratch):
    config = write_config(scratch, "PaddingSeen", name="seen")
    assert cli("extract", speech.manifest(), "-c", config, "-o", scratch / "c").code == 0
    probed = cli("probe", config, speech.manifest(), "--utterances", 6, "--threads", 1, "-o", scratch / "c")
    assert "100 %" in probed.out  # all frames differ, in batches
    told = cli("info", scratch / "c").out
    assert told.index("batching padded: not probed before") < told.index("probed on cpu")


def test_looser_than_declared_is_refused(cli, speech, scratch):
    config = write_config(scratch, "EqualLengths", name="declared")
    run = ("extract", speech.manifest(), "-c", config, "-o", scratch / "c", "--batching", "padded")
    refused = cli(*run)
    assert refused.code == 2
    assert "looser than equal_length" in refused.err
    assert not (scratch / "c").exists()
    assert cli(*run, "--allow-mismatch").code == 0
