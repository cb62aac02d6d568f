"""What specs ask of the arrays that they describe."""

import numpy as np
import pytest
from processes import run_python

from featcache import spec
from featcache.spec import all_finite


def test_every_value_of_float16_is_finite_or_not_as_numpy_says():
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert [all_finite(value[None]) for value in values] == np.isfinite(values).tolist()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_found_in_any_block(dtype, value, monkeypatch):
    monkeypatch.setattr(spec, "_BLOCK", 8)
    largest = np.finfo(dtype).max
    array = np.array([largest, -largest, 0, -0.0, np.finfo(dtype).tiny] * 6, dtype).reshape(10, 3)
    assert all_finite(array)
    for place in (0, 7, 8, 29):
        other = array.copy()
        other.flat[place] = value
        assert not all_finite(other)


def test_codes_and_no_values_at_all_are_finite():
    assert all_finite(np.array([0, 65535], np.uint16))
    assert all_finite(np.empty((0, 80), np.float32))


FIRST_USE = """
import sys, threading
import msgspec
from featcache.spec import FeatureSpec

sys.setswitchinterval(1e-6)
begin = threading.Barrier(16)
spec = FeatureSpec((80,), "float32", 100.0, 400, 16000, "dB")

def convert():
    begin.wait()
    msgspec.convert(msgspec.to_builtins(spec), FeatureSpec)

threads = [threading.Thread(target=convert) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("all have converted it")
"""


def test_threads_may_use_a_spec_for_the_first_time_at_once():
    """Otherwise, two extractions that begin together end in a segmentation fault."""
    for _ in range(3):
        assert run_python(FIRST_USE) == "all have converted it\n"
