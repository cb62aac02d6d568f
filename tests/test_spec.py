"""What specs ask of the arrays that they describe."""

import numpy as np
import pytest

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
