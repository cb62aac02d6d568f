"""What a manifest holds, whether it is what another is, and the faults that it is refused
for."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest

from featcache.errors import ManifestError
from featcache.manifest.read import read_manifest
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest


def faults_of(path: Path | str, **options) -> list[str]:
    """The lines of the message below its first, which must count them."""
    with pytest.raises(ManifestError) as caught:
        read_manifest(path, **options)
    summary, *faults = str(caught.value).splitlines()
    name = "<stdin>" if path == "-" else path
    assert summary == f"{name}: {len(faults)} error{'s' if len(faults) > 1 else ''}"
    assert all(fault.startswith("  ") for fault in faults)
    return [fault[2:] for fault in faults]


def refused(path: Path, **options) -> str:
    """The one line with which a manifest is refused, without its name."""
    with pytest.raises(ManifestError) as caught:
        read_manifest(path, **options)
    name, colon, what = str(caught.value).partition(f"{path}: ")
    assert (name, bool(colon), "\n" in what) == ("", True, False)
    return what


def rows_of(manifest: Manifest) -> list[Utterance]:
    return [manifest[row] for row in range(len(manifest))]


def manifest_of(folder, rows, columns=("id", "speaker"), name="manifest.csv"):
    path = folder / name
    path.write_text("\n".join(",".join(row) for row in [columns, *rows]), encoding="utf-8")
    return path


_texts = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=8).filter(
    lambda cell: cell.strip() == cell and not cell.endswith("|")
)
_cells = st.fixed_dictionaries(
    {
        "path": _texts,
        "start": st.none() | st.floats(0, 1e6),
        "duration": st.none() | st.floats(0.001, 1e6),
        "channel": st.none() | st.integers(0, 9),
        "speaker": st.none() | _texts,
    }
)

small_tables = st.dictionaries(_texts, _cells, min_size=1, max_size=9).map(
    lambda rows: [{"id": name, **row} for name, row in rows.items()]
)
"""The rows of a small table, in which cells may be missing, as dictionaries."""


def assert_same_manifest(ours: Manifest, theirs: Manifest) -> None:
    """Both must have the same rows and columns."""
    assert ours.ids == theirs.ids
    assert ours.paths == theirs.paths
    assert ours.columns == theirs.columns
    for name in ("start", "duration", "channel"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    np.testing.assert_array_equal(ours.hashes(), theirs.hashes())
