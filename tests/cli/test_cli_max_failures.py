"""`extract --max-failures`: a run that goes wrong ends early, and keeps what it has."""

import re

import pytest
from cache_contents import check, items, only_version

from featcache.errors import ArgumentError
from featcache.extraction.jobs import FailureLimit
from featcache.version.ledger import read_failures


def failing(plain, numbers, name="failing.csv", copies=1):
    """The manifest of the plain corpus, several times over, of whose rows some have no
    file."""
    rows = [{**row, "id": f"{row['id']}-{copy}"} for copy in range(copies) for row in plain.rows]
    return plain.manifest(
        [{**row, "path": "nowhere.wav"} if i in numbers else row for i, row in enumerate(rows)],
        name,
    )


@pytest.fixture
def extract(cli, slow_config, scratch):
    def run(manifest, *options, to="c"):
        one_each = ("--shard-size", "0.0003", "--threads", 1)
        return cli("extract", manifest, "-c", slow_config, "-o", scratch / to, *one_each, *options)

    return run


def last_line(ended):
    (line,) = [line for line in ended.err.splitlines() if line.startswith("featcache: ")]
    assert line == ended.err.splitlines()[-1]
    return line


def test_more_failures_than_allowed_stop_the_run(extract, plain, scratch):
    """With 1. What was extracted is there, what failed is in the ledger, and the next run
    does the rest."""
    manifest = failing(plain, {1, 3, 4})
    ended = extract(manifest, "--max-failures", 2).with_code(1)
    assert (
        "3 of the 5 utterances that were tried have failed, and --max-failures allows 2; "
        "why: " in last_line(ended)
    )
    assert "stopped: 2 extracted utterances kept, 7 left: run the same command again" in ended.out
    there = len(items(scratch / "c"))
    assert (there, len(read_failures(only_version(scratch / "c")))) == (2, 3)
    assert [problem.kind for problem in check(scratch / "c").problems] == ["unfinished"]
    resumed = extract(manifest)
    assert (resumed.code, len(items(scratch / "c"))) == (3, len(plain.rows) - 3)


def test_as_many_failures_as_allowed_do_not_stop_it_and_earlier_ones_do_not_count(extract, plain):
    manifest = failing(plain, {1, 3, 4})
    assert "max-failures" not in extract(manifest, "--max-failures", 3).with_code(3).err
    assert extract(manifest, "--max-failures", 0).code == 3


def test_a_share_is_judged_when_enough_were_tried_and_at_the_end(extract, plain, scratch):
    """The first utterance of twelve fails, which is a hundred percent of one: the run
    goes on to its end."""
    assert extract(failing(plain, {0}), "--max-failures", "10%").code == 3
    ended = extract(failing(plain, {12, 13}, "more.csv", copies=2), "--max-failures", "10%", to="d")
    assert (ended.code, ended.out.count("stopped")) == (3, 0)
    ended = extract(failing(plain, {0, 1}), "--max-failures", "10%", "--json", to="e").with_code(1)
    assert (
        "2 of the 12 utterances that were tried have failed, "
        "and --max-failures allows 10%" in last_line(ended)
    )
    document = ended.json()
    assert (document["interrupted"], document["versions"][0]["missing"]) == (False, 0)
    assert document["too_many_failures"].startswith("2 of the 12")


def test_a_file_that_fails_in_two_versions_is_one_failure(cli, plain, scratch):
    command = ("extract", failing(plain, {1, 3}), "-o", scratch, "-c", "fbank80", "-c", "mfcc13")
    assert cli(*command, "--max-failures", 2).code == 3


@pytest.mark.parametrize("text", ["", "-1", "101%", "1.5", "many", "%", "1e3", "٣"])
def test_a_limit_that_is_none_is_refused(text):
    said = f"--max-failures is {text!r}: give a number of utterances, or a percentage such as 1%"
    with pytest.raises(ArgumentError, match=re.escape(said)):
        FailureLimit.parse(text)


@pytest.mark.parametrize(
    ("limit", "failed", "tried", "is_end", "too_many"),
    [
        ("0", 0, 50, True, False),
        ("0", 1, 1, False, True),
        ("2", 2, 2, True, False),
        ("1%", 1, 99, False, False),
        ("1%", 1, 99, True, True),
        ("1%", 1, 100, False, False),
        ("1%", 2, 100, False, True),
        ("0.5 %", 1, 150, False, True),
        ("0%", 0, 1000, True, False),
        ("100%", 1000, 1000, True, False),
        ("0%", 0, 0, True, False),
    ],
)
def test_what_is_too_many(limit, failed, tried, is_end, too_many):
    assert bool(FailureLimit.parse(limit).fault(failed, tried, is_end)) is too_many
