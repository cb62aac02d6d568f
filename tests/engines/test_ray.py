"""Actors of a Ray cluster on this machine: what they make, and what deaths cost."""

import os
import re
import shutil
import signal
import socket
import tempfile
from pathlib import Path

import pytest
from cache_contents import items
from extractions import ONE_EACH, write_config
from forking import wait_until
from processes import TESTS, python
from test_devices import assert_whole, wait_for_end
from test_suspects import assert_it_cost_itself_alone, crashing

from featcache.engines.ray import _Actor, actors_on
from featcache.engines.worker import Inbox
from featcache.errors import ArgumentError, StoreError

pytest.importorskip("ray")

ACTORS = ("--engine", "ray", "--threads", 1)
ALONE = {
    "RAY_ADDRESS": "local",
    # so that it listens on the loopback interface only
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "disabled",  # no token is put into the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONWARNINGS": "",
}


@pytest.fixture
def alone():
    """The environment of a cluster of its own, and of a folder that goes after the test."""
    # short: paths of sockets are limited to 100 characters
    folder = tempfile.mkdtemp(prefix="ray-")
    yield {**ALONE, "RAY_TMPDIR": folder}
    shutil.rmtree(folder, ignore_errors=True)  # what was killed may still write into it


def test_a_clip_that_ends_its_process_costs_itself_and_the_rest_is_as_from_one_process(
    cli, plain, scratch, alone
):
    config = write_config(scratch, "Crashing")
    job = ("extract", crashing(plain, "segfault"), "-c", config, "--shard-size", ONE_EACH)
    done = cli(*job, "-o", scratch / "c", *ACTORS, "--json", env=alone).with_code(3)
    summary = done.json()  # and nothing of Ray's on standard output
    assert summary["failed_by_reason"] == {"crashed": 1}
    assert "nice" not in done.err  # as this process is, not behind all else
    assert summary["versions"][0]["extracted"] == 11
    # on a busy machine, one may do all of it before the other is there
    assert 1 <= summary["processes"] <= 2
    assert done.err.count("the process ended at work (Ray lost its process)") <= 1
    assert_it_cost_itself_alone(cli, plain, config, scratch / "c", "segfault")


def actors_at(gate: Path, count: int) -> set[int]:
    """The processes that stand at a gate, as the `count`th to enter of theirs."""
    return {
        int(path.suffix[1:])
        for path in gate.parent.glob(f"{gate.name}.*")
        if path.stat().st_size == count
    }


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_driver_that_ends_loses_at_most_the_shards_under_way(
    cli, plain, gate, gated_config, scratch, alone, number
):
    """If it is killed; an interrupt loses nothing. Either way, nothing of it is left, and
    the next does the rest."""
    gate.write_text("2")
    job = (
        "extract",
        plain.manifest(),
        "-c",
        gated_config,
        "-o",
        scratch / "c",
        "--shard-size",
        ONE_EACH,
        *ACTORS,
    )
    running = cli.start(*job, env=alone)
    wait_until(lambda: len(actors_at(gate, 3)) == 2)
    pids = [*actors_at(gate, 3)]
    running.send(number)
    if number == signal.SIGTERM:
        wait_until(lambda: "interrupted" in running.err())
        gate.unlink()
    assert running.wait().code == (130 if number == signal.SIGTERM else -number)
    wait_for_end(pids)
    there = {*items(scratch / "c")}
    assert len(there) >= 4
    gate.unlink(missing_ok=True)
    cli(*job, env=alone).with_code(0)
    assert there <= {*items(scratch / "c")}
    assert_whole(scratch / "c", plain.manifest())


LOSE_A_NODE = """
import logging, sys, time
from pathlib import Path

import ray
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster

import featcache

logging.basicConfig(level="INFO")
manifest, config, cache, gate, drained = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(address=cluster.address, log_to_driver=False)


def stand():
    return [path for path in Path(gate).parent.glob("gate.*") if path.stat().st_size == 2]


def lose(progress, lost=[]):
    if len(stand()) == 2 and not lost:
        lost.append(nodes[0])
        if drained:  # as a cloud does with a machine that it wants back
            reason, deadline = 2, 1000 * int(time.time() + 600)
            GcsClient(address=cluster.gcs_address).drain_node(nodes[0].node_id, reason, "preempted", deadline)
        cluster.remove_node(nodes[0], allow_graceful=False)
    elif lost and not all(Path(f"/proc/{path.suffix[1:]}").exists() for path in stand()):
        Path(gate).unlink(missing_ok=True)


options = featcache.Options(engine="ray", threads=1, shard_megabytes=0.0003)
summary = featcache.extract(manifest, config, cache, options, observer=featcache.Observer(progress=lose))
print("RESULT", summary.versions[0].extracted, summary.failed)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drained", "how"),
    [("", "(Ray lost its process|its node is gone)"), ("drained", "its node was preempted")],
)
def test_a_lost_node_costs_what_it_had_under_way(
    plain, gate, gated_config, scratch, alone, drained, how
):
    gate.write_text("1")
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    job = [plain.manifest(), gated_config, scratch / "c", gate, drained]
    done = python(
        "-c", LOSE_A_NODE, *job, env={**os.environ, **alone, "PYTHONPATH": path, "RAY_ADDRESS": ""}
    )
    assert done.code == 0, done.err
    assert "RESULT 12 0\n" in done.out, done.err
    assert len(re.findall(rf"the process ended at work \({how}\)", done.err)) == 1, done.err
    assert_whole(scratch / "c", plain.manifest())


def test_an_error_of_a_bucket_says_whose_environment_lacks_credentials():
    """The user has set them where the run was started. (On a disk, the path says enough.)"""
    actor = _Actor()
    actor._inbox = Inbox()
    for message in ("s3://b/c/zarr.json: there are no credentials: set …", "/d: is full"):
        actor._send(StoreError(message))
    assert [*map(str, actor.events())] == [
        f"Ray's worker on {socket.gethostname()}, with the environment of `ray start`: "
        "s3://b/c/zarr.json: there are no credentials: set …",
        "/d: is full",
    ]


def test_an_actor_for_each_gpu_or_for_so_many_cores():
    cores = [{"CPU": 64.0}, {"CPU": 4.0}, {}]
    gpus = [{"CPU": 64.0, "GPU": 4.0}, {"CPU": 32.0, "GPU": 4.0}, {"CPU": 8.0}]
    assert actors_on(cores, None, None) == (8, "cpu", 8)
    assert actors_on(cores, None, 4) == (17, "cpu", 4)
    assert actors_on(gpus, None, None) == (8, "cuda", 8)
    assert actors_on(gpus, "cpu", 16) == (6, "cpu", 16)
    with pytest.raises(ArgumentError, match="no GPU"):
        actors_on(cores, "cuda", None)
    with pytest.raises(ArgumentError, match="no node of the cluster has 65 cores: fewer --threads"):
        actors_on(cores, None, 65)
