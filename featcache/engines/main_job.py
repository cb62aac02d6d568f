"""The main job as one call, and the engine that does it: by the names that `--engine` and `--device` take."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from featcache.config import Config, as_config
from featcache.engines.devices import ALL, on_devices, parse_devices
from featcache.engines.local import run_locally
from featcache.engines.ray import RAY, on_ray
from featcache.errors import ArgumentError, listing
from featcache.extraction.corpus import CorpusSummary, extract_parts, plan_corpus
from featcache.extraction.extraction import exclusively, run_extraction
from featcache.extraction.jobs import Engine, Progress
from featcache.extraction.plan import SHARD_MEGABYTES, Options, plan_extraction
from featcache.extraction.summary import Summary
from featcache.extraction.version_plan import BuiltConfig
from featcache.manifest import Manifest, read_manifest
from featcache.manifest.audio_locations import as_root
from featcache.manifest.read import Table, is_table, manifest_of
from featcache.storage.location import Location, as_location
from featcache.version.selection import is_corpus

LOCAL = "local"

_READING = ("format", "values", "allow_commands", "allow_queries")

_log = logging.getLogger(__name__)


def choose_engine(name: str, options: Options) -> tuple[Engine, Options]:
    """The engine `local`, `ray` or `ray://host:port`, and the options to plan with: if other processes extract, this
    one plans on the CPU. In the options of a run, `device` may name several of this machine: `all`, `cuda:0,cuda:2`.

    Raises:
        ArgumentError: There is no such engine, or it takes no such device.
        ConfigError: There is no such device.
        MissingDependencyError: Ray is not installed.
    """
    device = options.device
    if name == LOCAL:
        if device is None or (device != ALL and "," not in device):
            return run_locally, options
        devices = parse_devices(device)
        return on_devices(devices, options), dataclasses.replace(options, device="cpu", workers=",".join(devices))
    if name == RAY or name.startswith(f"{RAY}://"):
        return on_ray(name, options), dataclasses.replace(options, device="cpu", workers=RAY)
    raise ArgumentError(f"engine {name!r}: there is no such engine; use local, ray or ray://host:port")


def extract(
    manifest: str | Path | Manifest | Table | Sequence[str | Path],
    configs: str | Path | Config | Sequence[str | Path | Config] = "fbank80",
    cache: str | Path = "features",
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002
    engine: str | Engine = LOCAL,
    device: str | None = None,
    threads: int | None = None,
    root: str | Path | None = None,
    reading: Mapping[str, Any] | None = None,
    shard_megabytes: float = SHARD_MEGABYTES,
    retry_failed: bool = False,
    max_failures: str | int | None = None,
    source: str | Path | None = None,
    batching: str | None = None,
    allow_mismatch: bool = False,
    allow_mixed_devices: bool = False,
    check_sources: bool = False,
    replace: bool = False,
    partition: str | None = None,
    wait: bool = False,
    progress: Callable[[Progress], None] | None = None,
    stop: threading.Event | None = None,
) -> Summary | CorpusSummary:
    """Extract the features of a manifest's utterances into a cache: what `featcache extract` does, as one call.

    What the cache holds already is not extracted again, so a task of Airflow or Prefect may be retried as it is.
    Utterances that cannot be extracted are no error: `summary.failed_by_reason` counts them, and they are in the
    version's failure ledger. In the whole process, torch gets one thread of its own, and TF32 is turned off. What the
    library has to say goes to the logger `featcache`.

    Args:
        manifest: A manifest in any of the formats of docs/manifest.md, or one that was read; or a table in memory: a
            data frame of pandas or Polars, a table of Arrow, a list of dictionaries. A list of manifests, or a pattern
            as in a shell, makes a corpus, of which each is a part; so does one for a cache that is a corpus.
        configs: YAML files, names of packaged configs, or configs; a version is filled for each.
        cache: The folder that holds the versions, which is made if it is missing; or a URL: `s3://bucket/features`.
        set: Values of keys of all configs, by their dotted paths: `{"params.num_mel_bins": 40}`.
        engine: `local`; `ray`, for the Ray cluster that this process is in, or that runs on this machine, or else one
            that is started for the run; `ray://host:port`, for a cluster elsewhere; or an engine of one's own.
        device: `cpu`, `cuda`, `cuda:1`; with the local engine also `all` or several, as `cuda:0,cuda:2`, each of which
            gets a process. None for cuda if there is one; with Ray, for GPUs if the cluster has any.
        threads: The budget for everything; with Ray, of each actor. None for every core, on the CPU at most 8.
        root: The folder or URL that relative paths are relative to; None for the manifest's folder, or for a table the
            current one.
        reading: How manifests are read: `format`, `values`, `allow_commands`, `allow_queries`, as for `read_manifest`.
        shard_megabytes: The size of a shard, approximately.
        retry_failed: Try utterances that failed in earlier runs again, even if their files are unchanged.
        max_failures: Stop when more utterances have failed in this run: a number, or a share as `5%`.
        source: A version, or the cache that holds it, whose features are used instead of audio; for `units` only.
        batching: How clips share a model's batch: `single`, `equal_length` or `padded`.
        allow_mismatch: Accept that batching even though it may change values.
        allow_mixed_devices: Let devices of several models extract, which round differently.
        check_sources: Extract utterances again whose file has changed in size or mtime.
        replace: Extract utterances again whose path has changed even if they are more than 5 % of the version.
        partition: Extract this partition only: `3/8`, counted from 0, or `auto`, as the job's scheduler says. Of a list
            of manifests or a pattern, it is every eighth manifest.
        wait: Wait while somebody else is at work in a version; otherwise, that is an error.
        progress: Called with a `Progress` now and then, from any thread, by one at a time. It is the same object each
            time, and goes on changing: `audio_seconds` that were extracted, `failures` by reason, committed `shards`,
            seconds of worker threads by `stages`.
        stop: Set it to end the run: what has been taken is finished and committed, and nothing more is taken.

    Returns:
        What was done: `summary.failed` utterances are in the ledger, and `summary.interrupted` says whether it was
        stopped. Of a corpus, a `CorpusSummary`, which has such a summary of each part; a part whose manifest has faults
        does not keep the others from being extracted: it is in `errors`.

    Raises:
        ArgumentError: An argument is invalid.
        ConfigError: A config has faults, or there is no such device.
        ManifestError: The manifest has faults, or looks like that of another corpus.
        MissingDependencyError: The engine needs a package that is not installed.
        StoreError: Somebody else is at work in a version; or the cache cannot be written. What was committed stays.
        ExtractorError: The extractor broke its contract.
    """
    place = as_location("cache", cache)
    options = Options.parse(
        device=device,
        threads=threads,
        shard_megabytes=shard_megabytes,
        retry_failed=retry_failed,
        check_sources=check_sources,
        replace=replace,
        source=source,
        batching=batching,
        allow_mismatch=allow_mismatch,
        max_failures=max_failures,
        allow_mixed_devices=allow_mixed_devices,
        partition=partition,
        wait=wait,
    )
    chosen, options = choose_engine(engine, options) if isinstance(engine, str) else (engine, options)
    loaded = [as_config(one, set) for one in ([configs] if isinstance(configs, str | Path | Config) else configs)]
    reading = dict(reading or {})
    if unknown := reading.keys() - _READING:
        raise ArgumentError(f"reading: there is no {listing(sorted(unknown))}: give {listing(_READING, len(_READING))}")

    def run(given: str | Path | Manifest, configs: Sequence[Config | BuiltConfig], cache: Location) -> Summary:
        manifest = given if isinstance(given, Manifest) else read_manifest(given, root=root, carry=False, **reading)
        ended = stop or threading.Event()
        with exclusively(plan_extraction(manifest, configs, cache, options), ended) as plan:
            return run_extraction(plan, chosen, progress or (lambda _: None), ended)

    if is_table(manifest):
        manifest = manifest_of(manifest, audio=True, root=root, carry=False)
    if isinstance(manifest, Manifest):
        if is_corpus(place):
            raise ArgumentError(f"{cache}: is a corpus, whose parts are named after files: give the manifest's path")
        return run(manifest, loaded, place)
    paths: Any = [manifest] if isinstance(manifest, str | Path) else manifest
    corpus = plan_corpus(place, paths, options, reading, is_list=paths is manifest)
    if corpus is None:
        return run(paths[0], loaded, place)
    options = corpus.options
    return extract_parts(corpus, loaded, None if root is None else as_root(str(root)), run, _log.info)
