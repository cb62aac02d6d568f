"""Saved probes of a version's extractor: how batching and precision change its values on a device.

    probes/<UTC time>-<4 hex>.json      a document of any form under `probe`, sealed by a `checksum`

It is derived: losing a record costs another measurement. So one that cannot be read is skipped.
"""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from featcache.errors import StoreError
from featcache.store import zarr3
from featcache.store.own_folders import folder_to_write


def write_probe(version: Path, document: dict[str, Any]) -> None:
    """Add a record to the version in the folder `version`; it appears whole or not at all.

    Raises:
        StoreError: it cannot be written, or `probes/` is a link.
        ValueError: the document holds NaN or infinity, which JSON has not.
    """
    sealed = zarr3.seal({"probe": document, "checksum": zarr3.UNSEALED})
    try:
        folder = folder_to_write(version, "probes")
        zarr3.sync(version)
    except OSError as error:
        raise StoreError(f"{version / 'probes'}: cannot be written: {error.strerror}") from error
    zarr3.write_file(folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z-{secrets.token_hex(2)}.json", sealed)


def read_probes(version: Path) -> list[dict[str, Any]]:
    """All sound records of the version in the folder `version`, the earliest first."""
    documents = []
    for path in sorted((version / "probes").glob("*.json")):
        try:
            data = path.read_bytes()
            record = json.loads(data)
            if zarr3.is_sealed(data, record["checksum"]):
                documents.append(record["probe"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return documents
