"""A small corpus whose rows and files tests change, and whether a cache's features are
still taken for theirs."""

from pathlib import Path

import pytest
from corpora import Corpus, speech

import featcache
from featcache.errors import ManifestError


def make_corpus(folder: Path) -> Corpus:
    """Clips a, b and d of 0.4 s at 16 kHz; junk.wav, which is no audio; rows u1 = a.wav,
    u2 = b.wav and 40 of d.wav."""
    made = Corpus(folder)
    made.folder.mkdir()
    (made.folder / "junk.wav").write_bytes(b"RIFF, in name only")
    for seed, (id_, name) in enumerate((("u1", "a.wav"), ("u2", "b.wav"), ("d0", "d.wav"))):
        made.record(id_, name, speech(0.4, seed=seed))
    for number in range(1, 40):
        made.add(f"d{number}", "d.wav")
    return made


def with_row(corpus: Corpus, id_: str, name: str = "changed.csv", **columns):
    rows = [{**row, **columns} if row["id"] == id_ else row for row in corpus.rows]
    return corpus.manifest(rows, name)


def dataset_of(cache, manifest, **options):
    return featcache.FeatureDataset(featcache.open(cache), manifest, **options)


def refusal(cache, manifest, **options) -> str:
    with pytest.raises(ManifestError) as caught:
        dataset_of(cache, manifest, **options)
    return str(caught.value)


def is_quiet(cli, cache, manifest) -> bool:
    """Whether nothing is wrong with a manifest and its version, by all that look."""
    again = cli("extract", manifest, "-o", cache, "--check-sources")
    verified = cli("verify", cache, "--manifest", manifest)
    dataset_of(cache, manifest)
    return (again.code, again.err, verified.code, verified.err) == (0, "", 0, "")
