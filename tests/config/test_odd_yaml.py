"""YAML that is odd, or made to do harm, is refused with one clear line, soon, and without
much memory."""

import os
import threading
import tracemalloc

import pytest
from parsed_configs import parse_config

from featcache.config import load_config
from featcache.errors import ConfigError

FBANK = "name: x\nextractor: fbank\n"


def bomb() -> str:
    """A list of lists of lists … of which each holds the one before it nine times: 9^9
    values in a few lines."""
    lines = ["a0: &a0 [lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join([*lines, FBANK])


def chain() -> str:
    """Each holds the one before it: deeper than it looks."""
    lines = ["a0: &a0 [lol]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 5000))]
    return "\n".join([*lines, FBANK])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "name: x\nextractor: !!timestamp x\n",
            "line 2, column 12: not valid YAML: 'x' is no timestamp",
        ),
        ("name: !!int x\n", "line 1, column 7: not valid YAML: 'x' is no int"),
        ("name: !!float x\n", "'x' is no float"),
        ("name: !!int\n", "'' is no int"),
        ("name: !!bool x\n", "'x' is no bool"),
        ("name: !!set x\n", "line 1, column 7: not valid YAML: "),
        ("name: !!pairs [1, 2]\n", "line 1, column "),
        ("name: !!binary x\n", "not valid YAML"),
        ("name: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("name: 2024-13-45\n", "'2024-13-45' is no timestamp: month must be in 1..12"),
        (f"name: {'9' * 5000}\n", "is no int: Exceeds the limit"),
        ("name: x\nparams: " + "[" * 5000, "nested more than 32 deep"),
        ("name: x\nparams: " + "{a: " * 300 + "1" + "}" * 300, "nested more than 32 deep"),
        ("- " * 10_000, "nested more than 32 deep"),
        (bomb(), "aliases (*) are not read: repeat the value"),
        (chain(), "aliases (*) are not read: repeat the value"),
        ("name: x\nparams: &x {a: *x}\n", "aliases (*) are not read: repeat the value"),
        (
            FBANK + "params: {a: 1, a: 2}\n",
            "line 3, column 16: not valid YAML: the key 'a' is given twice",
        ),
        (
            "<<: 5\nname: x\n",
            "line 1, column 1: not valid YAML: merge keys (<<) are not read: write the keys out",
        ),
        (
            FBANK + "params: {<<: {low_freq: 20}}\n",
            "line 3, column 10: not valid YAML: merge keys (<<) are not read",
        ),
        ("? [a]\n: b\n", "a list or mapping cannot be a key"),
        ("name: x\n---\nname: y\n", "another document"),
        ("name: \0x\n", "not valid YAML"),
        (f"name: {'x' * 300}\nextractor: fbank\n", "name: it has 300 characters, and may have 232"),
        (
            FBANK + "params: {num_mel_bins: 1000000}\n",
            "num_mel_bins: should be less than or equal to",
        ),
        (
            FBANK + "params: {frame_length: 1.0e+12}\n",
            "frame_length: should be less than or equal to",
        ),
        (
            "name: x\nextractor: log_mel\nparams: {n_fft: 100000000000}\n",
            "n_fft: should be less than or equal to",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_odd_yaml_is_refused_in_one_line_and_takes_no_memory(text, what):
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as raised:
            parse_config(text, "odd.yaml")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(raised.value)
    assert message.startswith("config odd.yaml: ")
    assert what in message
    assert "\n" not in message
    assert len(message) < 500
    assert peak < 100e6


def test_a_config_has_an_end(tmp_path):
    large = tmp_path / "large.yaml"
    large.write_text("name: x\n" + "# \n" * 100_000)
    for source in (large, "/dev/zero"):
        with pytest.raises(ConfigError, match=f"^config {source}: more than 262,144 bytes"):
            load_config(source)


def test_a_config_may_come_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=["name: piped\nextractor: fbank\n"])
    writer.start()
    assert load_config(pipe).name == "piped"
    writer.join()
