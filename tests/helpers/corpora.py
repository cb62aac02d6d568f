"""Corpora that tests make: audio files, and manifests of them."""

from __future__ import annotations

import csv
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

COLUMNS = ("id", "path", "start", "duration", "channel")


@dataclass
class Corpus:
    """Audio files, and the rows of a manifest of them."""

    folder: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, id_: str, path: str | Path, **columns: Any) -> None:
        self.rows.append({"id": id_, "path": str(path), **columns})

    def record(
        self,
        id_: str,
        path: str,
        samples: np.ndarray,
        rate: int = 16000,
        *,
        subtype=None,
        **columns: Any,
    ):
        """Write a file of these samples, and add its row."""
        soundfile.write(self.folder / path, samples, rate, subtype)
        self.add(id_, path, **columns)

    def manifest(
        self, rows: list[dict[str, Any]] | None = None, name: str = "manifest.csv"
    ) -> Path:
        """Write a manifest of the given rows, or of all, beside the audio."""
        path = self.folder / name
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows if rows is None else rows)
        return path

    @property
    def ids(self) -> list[str]:
        return [row["id"] for row in self.rows]

    def copy(self, folder: Path) -> Corpus:
        """The same in another folder, with files to spoil."""
        shutil.copytree(self.folder, folder)
        return Corpus(folder, [dict(row) for row in self.rows])


def speech(seconds: float, rate: int = 16000, *, channels: int = 1, seed: int = 0) -> np.ndarray:
    """Noise that waxes and wanes over a tone, float64 `[num_samples, channels]`."""
    generator = np.random.default_rng(seed)
    at = np.arange(round(seconds * rate)) / rate
    envelope = 0.5 + 0.5 * np.sin(2 * np.pi * (2 + seed % 3) * at)
    tone = np.sin(2 * np.pi * (120 + 40 * seed % 300) * at)
    noise = generator.normal(scale=0.1, size=(len(at), channels))
    return (0.2 * tone[:, None] + noise) * envelope[:, None]
