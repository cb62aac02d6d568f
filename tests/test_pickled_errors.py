"""Errors and warnings: that they reach another process as they are."""

import copy
import importlib
import pickle
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

import featcache
from featcache.errors import (
    AudioError,
    DamagedError,
    FeatcacheError,
    FeatcacheWarning,
    MissingDependencyError,
    Reason,
)
from featcache.extraction.features import DoesNotFitError, RaisedError


def classes_of(base):
    """A class, and all that inherit from it, in every module of the package."""
    for module in pkgutil.walk_packages(featcache.__path__, "featcache."):
        if not module.name.startswith(("featcache.adapters.", "featcache.__main__")):
            importlib.import_module(module.name)
    found = [base]
    for each in found:
        found += each.__subclasses__()
    return [each for each in dict.fromkeys(found) if each.__module__.startswith("featcache")]


SPECIAL = {
    MissingDependencyError: ("torch", "a batch"),
    AudioError: (Reason.TRUNCATED, "too few samples"),
    DamagedError: ("a shard is damaged", "features/fbank80"),
    DoesNotFitError: (3.5, SimpleNamespace(label="cpu")),
    RaisedError: (ValueError("x"),),
}
"""The arguments of errors that take others than a message."""


def made(kind):
    by_base = next((args for base, args in SPECIAL.items() if kind is base), None)
    if by_base is None:
        by_base = SPECIAL[AudioError] if issubclass(kind, AudioError) else ("what is wrong",)
    return kind(*by_base)


@pytest.mark.parametrize(
    "kind", [*classes_of(FeatcacheError), FeatcacheWarning], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize(
    "send",
    [
        *(
            lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
            for protocol in range(6)
        ),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_reach_another_process_with_their_message_and_attributes(kind, send):
    error = made(kind)
    error.add_note("a note")
    arrived = send(error)
    assert type(arrived) is kind
    assert (str(arrived), arrived.args) == (str(error), error.args)
    assert vars(arrived) == vars(error)
    assert vars(arrived)["__notes__"] == ["a note"]


def refuse():
    raise AudioError(Reason.EMPTY, "a: empty")


def test_end_a_call_in_a_pool_of_processes_and_not_the_pool():
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        for _ in range(2):
            with pytest.raises(AudioError, match="a: empty") as caught:
                pool.submit(refuse).result()
            assert caught.value.reason is Reason.EMPTY
