"""Small models that tests of codecs share: each is made once."""

from functools import cache

import pytest
import small_models


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Maps the name of a function of `small_models` to the folder into which it has saved
    its model."""
    return cache(lambda name: getattr(small_models, name)(tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def folder(saved, request):
    """The folder of the model that the module's `MODEL` names."""
    return saved(request.module.MODEL)
