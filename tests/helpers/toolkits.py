"""What the tests of adapters share: two versions of the same utterances, and a manifest."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from make_cache import make_features, make_version

import featcache


@dataclass
class Made:
    """Versions of 40 utterances, and a manifest of 30 of them, in another order."""

    folder: Path
    """The folder where everything is; the cache is `features` in it."""
    fbank: dict[str, np.ndarray]
    """The stored features by id, float16 `[frames, 80]` at 100 Hz."""
    codes: dict[str, np.ndarray]
    """The stored codes by id, uint16 `[frames, 8]` at 75 Hz."""
    manifest: Path
    """A manifest with the columns `path`, `start`, `duration`, `channel`, `text`,
    `speaker`, `digit`, `score`.

    Some cells of `start` and `duration` are empty."""
    rows: dict[str, dict[str, str | float | None]]
    """The manifest's rows by id."""

    def cache(self, name: str = "fbank80", **options) -> featcache.Cache:
        return featcache.open(self.folder / "features", name, **options)

    def dataset(self, **options) -> featcache.FeatureDataset:
        return featcache.FeatureDataset(self.cache(), self.manifest, **options)

    def both(self, **options) -> featcache.FeatureDataset:
        return featcache.FeatureDataset(
            {"fbank": self.cache(), "codes": self.cache("codec")}, self.manifest, **options
        )


def make(folder: Path) -> Made:
    fbank = make_features(40, seed=5)
    ids = list(fbank)
    rows = {
        id_: {
            "id": id_,
            "path": f"speech/{number // 4}.flac",
            "start": number % 4 * 1.5,
            "duration": len(fbank[id_]) / 100 if number % 3 else None,
            "channel": number % 2,
            "text": f"wörd, {number}",
            "speaker": f"s{number % 3}",
            "digit": number % 10,
            "score": number / 4,
        }
        for number, id_ in enumerate(reversed(ids[5:35]))
    }
    places = {
        id_: {name: row[name] for name in ("path", "start", "duration", "channel")}
        for id_, row in rows.items()
    }
    shards = [
        {id_: fbank[id_] for id_ in ids[first:last]} for first, last in ((0, 9), (9, 30), (30, 40))
    ]
    make_version(folder / "features", *shards, rows=places)
    random = np.random.default_rng(6)
    lengths = {id_: max(1, len(array) * 3 // 4) for id_, array in fbank.items()}
    codes = {
        id_: random.integers(0, 1024, (length, 8)).astype(np.uint16)
        for id_, length in lengths.items()
    }
    make_version(folder / "features", codes, name="codec", frame_rate=75.0, rows=places)
    manifest = folder / "train.csv"
    with manifest.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[ids[5]]))
        writer.writeheader()
        writer.writerows(rows.values())
    return Made(folder, fbank, codes, manifest, rows)
