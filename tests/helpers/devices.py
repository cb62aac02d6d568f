"""The devices that a test runs on."""

import pytest

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""For `parametrize`: a GPU is left out where there is none."""
