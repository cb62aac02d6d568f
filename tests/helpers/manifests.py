"""What a manifest holds, and the faults that it is refused for."""

from __future__ import annotations

from pathlib import Path

import pytest

from featcache.errors import ManifestError
from featcache.manifest import Manifest, Utterance, read_manifest


def faults_of(path: Path | str, **options) -> list[str]:
    """The lines of the message below its first, which must count them."""
    with pytest.raises(ManifestError) as caught:
        read_manifest(path, **options)
    summary, *faults = str(caught.value).splitlines()
    name = "<stdin>" if path == "-" else path
    assert summary == f"{name}: {len(faults)} error{'s' if len(faults) > 1 else ''}"
    assert all(fault.startswith("  ") for fault in faults)
    return [fault[2:] for fault in faults]


def rows_of(manifest: Manifest) -> list[Utterance]:
    """All of its utterances, in order."""
    return [manifest[row] for row in range(len(manifest))]


def manifest_of(folder, rows, columns=("id", "speaker"), name="manifest.csv"):
    path = folder / name
    path.write_text("\n".join(",".join(row) for row in [columns, *rows]), encoding="utf-8")
    return path
