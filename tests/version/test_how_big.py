"""How many bytes there are of a version: every command means the same, and counts all
that was extracted."""

import pytest
import yaml
import zarr
from cache_contents import only_version

KINDS = {
    "features": {"extractor": "fbank"},
    "quantised": {"extractor": "fbank", "store": {"dtype": "uint8"}},
    "with a side array": {"extractor": "row_extractors:Moments", "store": {"dtype": "float16"}},
}
"""What is quantised has a side array too: scales and offsets."""


def bytes_held(cache):
    """Of features and side arrays, as stock Zarr sees them."""
    version = only_version(cache)
    arrays = ["features", *(f"side_{side.name}" for side in version.info.spec.side)]
    shards = [
        zarr.open_group(version.shard(name).folder, mode="r") for name in version.shard_names()
    ]
    return sum(shard[name].nbytes for shard in shards for name in arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_counts_the_same_bytes(cli, plain, scratch, kind):
    config, cache = scratch / "some.yaml", scratch / "features"
    config.write_text(yaml.safe_dump({"name": "some", **KINDS[kind]}))
    five = (
        "extract",
        plain.manifest(plain.rows[:5], "five.csv"),
        "-c",
        config,
        "-o",
        cache,
        "--json",
    )
    planned = cli(*five, "--dry-run").json()["versions"][0]["bytes"]
    of_five = cli(*five).json()["versions"][0]
    assert of_five["bytes"] == bytes_held(cache) > 0
    # of which nobody knows beforehand; and a clip has two frames less than it lasts
    if kind != "with a side array":
        assert planned == pytest.approx(of_five["bytes"], rel=0.06)
    of_all = cli("extract", plain.manifest(), "-c", config, "-o", cache, "--json").json()[
        "versions"
    ][0]
    held = of_five["bytes"] + of_all["bytes"]
    (info,) = cli("info", cache, "--json").json()["versions"]
    files = [path for path in only_version(cache).path.rglob("*") if path.is_file()]
    assert info["bytes_on_disk"] == sum(path.stat().st_size for path in files) > info["bytes"]
    shown = (
        f"{held / 1e3:.3g} kB of features in 2 shards, {info['bytes_on_disk'] / 1e3:.3g} kB "
        "on disk in all; "
    )
    assert shown in cli("info", cache).out
    (verified,) = cli("verify", cache, "--json").json()["versions"]
    assert info["bytes"] == verified["bytes"] == bytes_held(cache) == held
