"""Too few files, too little memory, too small files: one clear line, or none and
everything is there."""

import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from processes import python
from promises import TRIAL_SECONDS, assert_finishes, assert_is_after, assert_old_or_new, version_in

from featcache.errors import Reason
from featcache.version.ledger import read_failures

MEGABYTES = (0, 1, 2, 4, 8, 512, 1024)
"""Of address space. In between, a thread may start that has no memory to say so, and
CPython waits for it for ever."""


def limited(cli, scenario, trials, **limits) -> bool:
    """One trial; returns whether the command could do it all."""
    cache = scenario.prepare(trials / "cache")
    ended = cli.start(*scenario.arguments(cache), limits=limits).wait(TRIAL_SECONDS)
    version = version_in(cache)
    reasons = {failure.reason for failure in read_failures(version)} if version else set()
    # audio files: those utterances are in the ledger, and are tried again
    if Reason.FILE_UNREADABLE in reasons:
        assert_finishes(cli, replace(scenario, shards=frozenset()), cache, limits)
        return False
    if ended.code == scenario.code:
        assert not scenario.complaints(ended), f"{limits}: {ended}"
        assert_is_after(scenario, cache, limits)
    else:
        # 2 if the manifest or the config cannot be opened
        assert ended.code in (1, 2), f"{limits}: {ended}"
        complaints = scenario.complaints(ended)
        assert len(complaints) == 1, f"{limits}: {ended}"
        assert complaints[0].startswith("featcache: "), f"{limits}: {complaints}"
    assert_old_or_new(scenario, cache, limits)
    # Whoever cannot open /proc to say who it is leaves what is removed only when it is a
    # day old.
    assert_finishes(cli, scenario, cache, limits, leftovers="NOFILE" in limits)
    return ended.code == scenario.code


def address_space(cli) -> int:
    """The bytes that a process has mapped before it begins."""
    (kilobytes,) = re.findall(r"VmSize:\s+(\d+) kB", Path(f"/proc/{cli.pid}/status").read_text())
    return int(kilobytes) * 1024


def test_too_little_of_anything(faulty, from_nothing, repair, trials):
    """Few files may be open; files may not grow; there is little memory."""
    space = address_space(faulty)
    for few, enough in (
        ({"NOFILE": 8}, {"NOFILE": 60}),
        ({"AS": space + (1 << 20)}, {"AS": space + (2 << 30)}),
    ):
        assert not limited(faulty, from_nothing, trials, **few)
        assert limited(faulty, from_nothing, trials, **enough)
    for scenario in (from_nothing, repair):
        assert not limited(faulty, scenario, trials, FSIZE=500)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", ["from_nothing", "extraction_of_more", "repair", "indexing"], indirect=True
)
def test_any_limit(faulty, scenario, trials, tell):
    """Of what shows no progress: where no thread can be started, tqdm warns, and warnings
    are errors here."""
    done = {
        "NOFILE": [limited(faulty, scenario, trials, NOFILE=count) for count in range(3, 40)],
        "FSIZE": [
            limited(faulty, scenario, trials, FSIZE=size)
            for size in (600, 800, 1000, 1200, 1500, 2000)
        ],
        "AS": [
            limited(faulty, scenario, trials, AS=address_space(faulty) + (more << 20))
            for more in MEGABYTES
        ],
    }
    for name, could in done.items():
        tell(f"{scenario.name}: RLIMIT_{name}: {len(could)} trials, enough in {sum(could)}")


def test_no_room_for_torchs_libraries_is_one_line(plain, scratch):
    """Of some hundred MB, as schedulers limit jobs by `ulimit -v`."""
    room = 500 << 20

    def limited_python(*words):
        return python(
            *words,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (room, room)),
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each maps some 40 MB
        )

    manifest, cache = plain.manifest(), scratch / "cache"
    ended = limited_python("-m", "featcache", "extract", manifest, "-o", cache)
    assert (ended.code, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert re.match(
        r"featcache: libtorch\w*\.so: failed to map .*: give the process more", ended.err
    )
    ended = limited_python("-c", "import featcache; featcache.extract")
    assert re.match("ImportError: libtorch", ended.err.splitlines()[-1])
