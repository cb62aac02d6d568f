"""Datasets that spawned processes map instead of copying."""

from multiprocessing import get_context

import numpy as np
import pytest

import featcache
from featcache.loader.shared import InSharedMemory
from featcache.strings import Strings


def read(value, connection) -> None:
    """Send what a process sees of a dataset, or of a dictionary of arrays."""
    if isinstance(value, dict):
        connection.send(
            {name: (array.tolist(), array.flags.owndata) for name, array in value.items()}
        )
        return
    batch = value.batch([2, 0])
    features, numbers = batch["features"].numpy(), batch["number"].tolist()
    connection.send((batch["ids"], features, batch["text"], numbers))


def in_process(method: str, value: object) -> object:
    """Return what a new process sees of a value."""
    context = get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=read, args=(value, there))
    process.start()
    seen = here.recv()
    process.join()
    assert process.exitcode == 0
    return seen


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arrays_are_mapped_and_equal(method):
    arrays = {"numbers": np.arange(1000), "none": np.zeros(0), "odd": np.arange(7, dtype=np.uint8)}
    shared = InSharedMemory(arrays)
    for _ in range(2):  # several processes map one file
        seen = in_process(method, shared)
        assert {name: values for name, (values, _) in seen.items()} == {
            name: array.tolist() for name, array in arrays.items()
        }
        assert not any(owns for _, owns in seen.values())


def test_a_spawned_process_sees_the_dataset_as_it_is_now(plain, scratch):
    featcache.extract(plain.manifest(), "fbank80", scratch, featcache.Options("cpu", 1))
    rows = [
        {"id": f"utt-{number:02}", "number": number, "text": f"text {number}"}
        for number in range(12)
    ]
    dataset = featcache.FeatureDataset(featcache.open(scratch), rows)
    for changed in (dataset, dataset.subset([5, 4, 3]), dataset):
        expected = changed.batch([2, 0])
        ids, features, text, number = in_process("spawn", changed)
        assert ids == expected["ids"]
        assert np.array_equal(features, expected["features"].numpy())
        assert (text, number) == (expected["text"], expected["number"].tolist())
    dataset.columns["text"] = Strings.of(["changed"] * 12)
    assert in_process("spawn", dataset)[2] == ["changed", "changed"]
