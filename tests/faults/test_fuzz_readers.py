"""Whatever the bytes, reading gives a value or an error of featcache: no other exception,
crash, hang or gigabyte.

`FEATCACHE_FUZZ_SECONDS=3600 pytest -m slow tests/faults/test_fuzz_readers.py` does it for
an hour for each reader."""

import json
import os
import random

import fuzzing
import pytest
from scratch import scratch_folder

SLOW_SECONDS = float(os.environ.get("FEATCACHE_FUZZ_SECONDS", 60))


@pytest.mark.parametrize("seconds", [2, pytest.param(SLOW_SECONDS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", fuzzing.READERS)
def test_a_reader_gives_a_value_or_an_error_of_featcache(cli, reader, seconds):
    seed = int(os.environ.get("FEATCACHE_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    with scratch_folder() as folder:
        ended = cli(reader, seconds, seed, folder, entry="fuzzing:run")
        last = (folder / "number").read_text() if (folder / "number").exists() else "none"
    again = f"python tests/helpers/fuzzing.py {reader} 600 {seed} FOLDER NUMBER"
    assert ended.code == 0, (
        f"{again.replace('NUMBER', last)}\nends with {ended.code}: {ended.err[-2000:]}"
    )
    found = json.loads(ended.out.splitlines()[-1])
    assert not found["wrong"], "\n".join(
        f"{again.replace('NUMBER', str(n))}\n{what}" for n, what in found["wrong"]
    )
    assert found["count"]
    assert found["slowest"] < fuzzing.SECONDS
