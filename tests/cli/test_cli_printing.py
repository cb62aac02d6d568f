"""What others have written into caches, manifests and file names does nothing to a
terminal, and breaks no line."""

import json

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner
from make_cache import make_version

from featcache.cli import main
from featcache.cli.common import print_json, printable
from featcache.version.ledger import Failure, put_failures
from featcache.version.records import write_probe
from featcache.version.selection import select_version

ODD = "\x1b[31mred\x1b]0;title\x07\r\n\x7f\x9b5m\u202egnirts\u2028"
OBEYED = {*map(chr, range(32)), "\x7f", *map(chr, range(0x80, 0xA0)), "\u202e", "\u2028"} - {"\n"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (ODD, r"\x1b[31mred\x1b]0;title\x07\r\n\x7f\x9b5m\u202egnirts\u2028"),
        ("a\tb\0", r"a\tb\x00"),
        ("half \udcff \ud800", r"half \udcff \ud800"),
        ("ünï-ço∂é 日本語 العربية 🎤", "ünï-ço∂é 日本語 العربية 🎤"),
        ("", ""),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text, shown):
    assert printable(text) == shown


def test_json_is_valid_whatever_it_holds_and_reads_as_it_was(capsys):
    document = {ODD: [ODD, "\udcff", float("nan"), float("-inf"), (1.5, None)]}
    print_json(document)
    printed = capsys.readouterr().out
    assert not OBEYED & {*printed}
    assert json.loads(printed) == {ODD: [ODD, "\udcff", None, None, [1.5, None]]}
    assert "NaN" not in printed


ID = "dlo \u202enew\u2066"
"""A manifest may have such an id: there are no control characters in it."""


def test_files_and_ids_with_escapes_work_and_reach_no_terminal(cli, tmp_path, written, scratch):
    soundfile.write(tmp_path / "odd\x1b[2J.wav", np.full(8000, 0.1), 16000)
    odd_corpus = written(f"id,path\n{ID},odd\x1b[2J.wav\ngone {ID},gone\x1b[2J.wav\n")
    cache = scratch / "features\x1b[31m"
    printed = [
        cli("extract", odd_corpus, "-o", cache),
        cli("info", cache, "--failures"),
        cli("info", cache, "--failures", "--json"),
        cli("show", cache, ID),
        cli("show", cache, f"gone {ID}"),
        cli("show", cache, f"no such {ID}"),
        cli("verify", cache, "--manifest", odd_corpus),
        cli("stats", cache),
        cli("extract", odd_corpus, "-o", cache, "--dry-run"),
        cli("extract", scratch / ODD, "-o", cache),
    ]
    assert [one.code for one in printed] == [3, 0, 0, 0, 1, 1, 3, 0, 0, 2]
    for one in printed:
        assert not (OBEYED - {"\t"}) & {*one.out, *one.err}
    _, failures, as_json, shown, failed, missing, *_ = printed
    assert (
        r"gone dlo \u202enew\u2066" + "\tfile_missing\t" + r"gone\x1b[2J.wav" + "\t" in failures.out
    )
    assert as_json.json()["versions"][0]["failures"][0]["id"] == f"gone {ID}"
    assert r"id           dlo \u202enew\u2066" + "\n" in shown.out
    assert failed.err.count("\n") == missing.err.count("\n") == 1


def test_a_manifest_whose_lines_are_odd_gets_one_line_for_each_fault(cli, written, scratch):
    manifest = written(f'id,path\n"{ODD}",a.wav\n"{ODD}",b.wav\n')
    refused = cli("extract", manifest, "-o", scratch / "cache").with_code(2)
    assert not OBEYED & {*refused.err}
    assert refused.err.count("\n") == 3  # how many errors, and the two


def test_what_a_cache_holds_of_urls_is_shown_without_passwords(scratch):
    """Another hand may have made it."""
    url = "https:/u:HUSH@h/a.wav"
    make_version(scratch, {"a": np.ones((3, 80), np.float16)}, rows={"a": {"path": f"{url}?x=1"}})
    version = select_version(scratch)
    failures = [Failure(id="b", path=url, reason="empty", message=f"not {url}")]
    put_failures(version, "run.000000", failures)
    write_probe(version, {"device": url})
    shown = ""
    for words in ("info --failures", "info", "show", "ls", "verify", "stats", "configs --from"):
        command, *options = words.split()
        ids = ["a"] if command == "show" else []
        for printing in ([], ["--json"]):
            ended = CliRunner().invoke(main, [command, *options, str(scratch), *ids, *printing])
            shown += ended.output
    assert "https:/…" in shown
    assert "HUSH" not in shown
