"""`featcache export`: features in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from featcache.cli import options
from featcache.cli.common import (
    FAILURES_LEFT,
    as_document,
    first_few,
    note,
    open_cache,
    say,
    say_json,
)
from featcache.cli.progress import Steps
from featcache.cli.runs import by_reason
from featcache.errors import counted, megabytes
from featcache.storage.location import Location

_SHOWN = 5


@options.command()
@click.option(
    "--to",
    "kind",
    metavar="FORMAT",
    required=True,
    help="The format: lhotse, shar, kaldi, datasets, webdataset, numpy or qwen3-tts.",
)
@options.version_location
@options.output_target(
    help="The folder to write, new or empty; for lhotse and qwen3-tts a file.", required=True
)
@options.manifest(help="Export only the utterances of this manifest, and its columns.")
@options.manifest_format
@options.force
def export(
    path: Location, kind: str, output: Path, manifest: str | None, force: bool, **reading: Any
) -> int:
    """Write features for other tools. Each utterance is compared with its checksum. The
    output appears only when it is complete.

    export prints what the format cannot hold. It exits with 1 if utterances of the manifest
    are missing, and with 3 if some have failed.

    \b
    Examples:
      featcache export --to kaldi features/fbank80 -o exp/fbank --manifest train.csv
      featcache export --to datasets features/mimi -o mimi-parquet
      featcache export --to qwen3-tts features/qwen3-tts-12hz -o train.jsonl --manifest raw.jsonl
    """
    from featcache.export import FORMATS
    from featcache.export import export as write

    if kind in FORMATS and FORMATS[kind].is_file:
        options.refuse_output(output, force)
    else:
        options.refuse_unwritable(output.absolute().parent)
    cache, lacking = open_cache(path)
    for message in lacking:
        note(message)
    rows = None
    if manifest is not None:
        options.refuse_corpus(path, "--manifest")
        rows = options.read_manifest(manifest, {**reading, "root": None}, audio=False)
    total = len(cache) if rows is None else len(rows)
    with Steps(total, "utterances") as bar:
        exported = write(cache, kind, output, rows, bar.update)
    say_json({"path": str(path), **as_document(exported)})
    files, size = counted(exported.files, "file"), megabytes(exported.num_bytes)
    say(f"{output}: {counted(exported.utterances, 'utterance')} as {kind}, {files}, {size}")
    for line in exported.notes:
        say(f"  {line}")
    if exported.failed:
        failed = counted(sum(exported.failed.values()), "utterance")
        say(f"  {failed} left out, in the failure ledger: {by_reason(exported.failed)}")
    if exported.missing:
        missing = counted(len(exported.missing), "utterance")
        say(f"  {missing} missing in the version: {first_few(exported.missing, _SHOWN)}")
    if exported.missing or (rows is None and lacking):
        return 1
    return FAILURES_LEFT if exported.failed else 0
