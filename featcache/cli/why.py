"""`featcache why`: why a config is another version, and why utterances would be extracted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import note, print_json, read_manifest, refuse_unused, say
from featcache.cli.corpora import version_or_corpus
from featcache.cli.runs import not_tried_again
from featcache.cli.show import describe_in_each, origin_lines, say_lines
from featcache.errors import counted
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.care.why import Cause
    from featcache.config import Config
    from featcache.extraction.version_plan import VersionPlan
    from featcache.manifest import Manifest
    from featcache.manifest.audio_locations import AudioLocation
    from featcache.version.version import Version

_SHOWN = 5


@click.command(short_help="Say why a config is another version, and why utterances would be extracted.")
@version_or_corpus
@click.argument("manifest", type=options.TEXT, required=False)
@click.option(
    "-c", "--config", type=options.CONFIG, required=True, metavar="CONFIG", help="A YAML file, or a packaged config."
)
@click.option("--id", "utterance", metavar="ID", help="Say where this utterance's features came from.")
@options.root()
@options.manifest_and_config_keys
@click.option("--retry-failed", is_flag=True, help="As `featcache extract` would do it with this option.")
@click.option("--check-sources", is_flag=True, help="As `featcache extract` would do it with this option.")
@options.trust_remote_code
@options.as_json("Print the result as one JSON document, with all ids.")
def why(
    path: Location,
    manifest: str | None,
    config: str,
    utterance: str | None,
    root: AudioLocation | None,
    retry_failed: bool,
    check_sources: bool,
    as_json: bool,
    reading: dict[str, Any],
    keys: dict[str, Any],
) -> None:
    """Say how CONFIG differs from the versions in the cache: in which keys, in the extractor's revision, or in the
    content of its weights. With a MANIFEST, say which utterances `featcache extract` would extract, and why: they are
    new, their rows or files have changed, or they have failed before. Nothing is extracted or written.

    With --id, say where one utterance came from: its row, audio file, shard, run and library versions.

    \b
    Examples:
      featcache why features -c fbank80.yaml
      featcache why features -c fbank80 --set params.low_freq=0
      featcache why features train.csv -c fbank80
      featcache why features train.csv -c fbank80 --id LJ001-0001
    """
    from featcache.care.why import compare_versions, find_causes
    from featcache.config import load_config
    from featcache.version.selection import select_versions

    loaded = load_config(config, keys)
    if manifest is None:
        refuse_unused(reading["values"], loaded.keys)
    document: dict[str, Any] = {"name": loaded.name, "fingerprint": loaded.fingerprint()}
    compared = compare_versions(loaded, document["fingerprint"], select_versions(path))
    document["versions"] = [
        {
            "path": str(version.path),
            "same_fingerprint": version.info.fingerprint == document["fingerprint"],
            "differences": found.deciding,
            "other_differences": found.others,
        }
        for version, found in compared
    ]
    versions = [version for version, _ in compared]
    plan = None
    causes: list[Cause] = []
    if manifest is not None:
        read = read_manifest(manifest, {**reading, "root": root}, loaded.keys, carry=False)
        plan = _plan(loaded, read, versions[0].path.parent, retry_failed=retry_failed, check_sources=check_sources)
        causes = find_causes(plan)
        document["plan"] = _describe_plan(plan)
    if utterance is not None:
        own = [version for version in versions if version.info.fingerprint == document["fingerprint"]]
        document["utterance"] = _describe_utterance(utterance, own or versions, plan, causes)
    if not as_json:
        _print(document, causes)
        return
    if plan is not None:
        document["plan"]["causes"] = [
            {"why": one.why, "again": one.again, "utterances": len(one.ids), "example": one.example, "ids": [*one.ids]}
            for one in causes
        ]
    print_json(document)


def _plan(
    config: Config, manifest: Manifest, cache: Location, *, retry_failed: bool, check_sources: bool
) -> VersionPlan:
    """What `extract` would do; `--replace` is taken as given."""
    from featcache.extraction.options import Options
    from featcache.extraction.plan import plan_extraction

    chosen = Options(device="cpu", retry_failed=retry_failed, check_sources=check_sources, replace=True)
    return plan_extraction(manifest, [config], cache, chosen).versions[0]


def _describe_plan(plan: VersionPlan) -> dict[str, Any]:
    from featcache.care.why import refusal

    return {
        "path": str(plan.path),
        "is_new": plan.is_new,
        "utterances": len(plan.manifest),
        "present": int(plan.rows.present.sum()),
        "missing": plan.num_missing,
        "failed_before": plan.failed_before,
        "refused": refusal(plan) or None,
    }


def _describe_utterance(
    utterance: str, versions: list[Version], plan: VersionPlan | None, causes: list[Cause]
) -> dict[str, Any]:
    """Its row in the plan's manifest, and where each version that has it has it from."""
    from featcache.version.origin import describe_origin

    row = None if plan is None else plan.find(utterance)
    found, missing = describe_in_each(versions, utterance, describe_origin)
    if missing is not None and row is None and not found:
        raise missing
    document: dict[str, Any] = {"id": utterance, "row": None, "status": None, "versions": found}
    if plan is not None and row is not None:
        cause = next((one.why for one in causes if row in one.rows), "")
        status = "there" if plan.rows.present[row] else "failed before, and is not tried again"
        document |= {"row": plan.manifest[row].row(), "status": f"to extract: {cause}" if cause else status}
    return document | {"message": None if found else str(missing)}


def _print(document: dict[str, Any], causes: list[Cause]) -> None:
    if not document["versions"][0]["same_fingerprint"]:
        say(f"{document['name']}-{document['fingerprint'][:12]}: there is no such version")
    for version in document["versions"]:
        others = "".join(f"; {line}, which decides no values" for line in version["other_differences"])
        if version["same_fingerprint"]:
            say(f"{version['path']}: the version of this config{others}")
        else:
            say(f"{version['path']}: another version: {', '.join(version['differences']) or 'unknown'}{others}")
    if (found := document.get("plan")) is not None:
        _print_plan(found, causes)
    if (one := document.get("utterance")) is not None:
        say()
        if one["row"] is not None:
            cells = ", ".join(f"{name} {value}" for name, value in one["row"].items() if value is not None)
            say_lines({"row": cells, "status": one["status"]})
        if one["message"] is not None:
            say_lines({"missing": one["message"]})
        for origin in one["versions"]:
            say_lines(origin_lines(origin))


def _print_plan(found: dict[str, Any], causes: list[Cause]) -> None:
    say(f"{counted(found['utterances'], 'utterance')}: {found['present']:,} there, {found['missing']:,} to extract")
    for cause in causes:
        named = [cause.ids[at] for at in range(min(len(cause.ids), _SHOWN))]
        if cause.example:
            named[0] += f" ({cause.example})"
        more = " …" if len(cause.ids) > _SHOWN else ""
        say(f"  {len(cause.ids):,}{' again' if cause.again else ''}: {cause.why}: {', '.join(named)}{more}")
    if found["failed_before"]:
        say(f"  {not_tried_again(found['failed_before'])}")
    if found["refused"]:
        note(f"featcache extract refuses this manifest: {found['refused']}")
