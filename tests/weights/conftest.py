"""Models of the real classes, saved, for tests of what is found, refused and loaded of
them."""

import shutil

import pytest
from saved_models import save_models


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Their folders, which nobody changes."""
    return save_models(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def hubert(saved, tmp_path):
    """A copy of the HuBERT's folder, which tests may change."""
    return shutil.copytree(saved / "hubert", tmp_path / "hubert")
