"""Measure what the packaged configs of docs/analysis.md find in real speech: the
speaker, the pitch, and the quality of the recording.

    pip install '.[extract,analysis]'
    pip install --no-deps Resemblyzer==0.1.4
    python scripts/bench/analysis.py [--cache FOLDER] [--sentences 6]

Extracts speaker-ge2e and f0-swift of the 3,000 spoken digits of six speakers, and dnsmos of
some sentences, clean and with white noise; both corpora are in ../shared/data. A digit of
the split `test` is identified by the nearest of six means of the vectors in `train`."""

import argparse
import csv
from pathlib import Path

import numpy as np
import soundfile
from harness import temporary_folder

import featcache
from featcache.extractors.dnsmos import SCORES

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
DIGITS = DATA / "fsdd" / "manifest.csv"
SENTENCES = DATA / "ljspeech" / "flac.csv"
DECIBELS = (None, 30, 20, 10, 0)


def identify(cache: featcache.Cache, speakers: np.ndarray, is_test: np.ndarray) -> None:
    vectors = np.stack([cache[id_] for id_ in cache.ids])
    names = np.unique(speakers)
    means = np.stack([vectors[~is_test & (speakers == name)].mean(axis=0) for name in names])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    found = names[(vectors[is_test] @ means.T).argmax(axis=1)]
    right = found == speakers[is_test]
    print(f"identified: {right.sum()} of {len(right)} digits, {right.mean():.1%}")
    for name in names:
        own = right[speakers[is_test] == name]
        print(f"  {name:10} {own.sum()} of {len(own)}")


def pitches(cache: featcache.Cache, speakers: np.ndarray) -> None:
    for name in np.unique(speakers):
        frames = np.concatenate([cache[id_] for id_ in np.array([*cache.ids])[speakers == name]])
        voiced = frames[frames[:, 1] >= 0.5, 0]
        quartiles = np.percentile(voiced, (25, 50, 75))
        print(f"  {name:10} {' '.join(f'{hertz:4.0f}' for hertz in quartiles)} Hz", end="")
        print(f", {len(voiced) / len(frames):.0%} of the frames are voiced")


def scores_in_noise(count: int, folder: Path) -> None:
    """Noise is white, and seeded; its level is that of the sentence less the decibels."""
    random = np.random.default_rng(0)
    with SENTENCES.open(newline="") as file:
        paths = [SENTENCES.parent / row["path"] for row in csv.DictReader(file)][:count]
    rows = [["id", "path"]]
    for path in paths:
        waveform, rate = soundfile.read(path)
        noise = random.standard_normal(len(waveform)) * np.sqrt(np.mean(waveform**2))
        for decibels in DECIBELS:
            level = 0 if decibels is None else 10 ** (-decibels / 20)
            noisy = folder / f"{path.stem}_{decibels}.wav"
            soundfile.write(noisy, (waveform + level * noise).clip(-1, 1), rate, "PCM_16")
            rows.append([noisy.stem, str(noisy)])
    with (folder / "noisy.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    featcache.extract(str(folder / "noisy.csv"), ["dnsmos"], str(folder / "mos"))
    cache = featcache.open(str(folder / "mos"))
    print(f"dnsmos of {count} sentences: {', '.join(SCORES)}")
    for decibels in DECIBELS:
        mean = np.mean([cache[f"{path.stem}_{decibels}"] for path in paths], axis=0)
        name = "clean" if decibels is None else f"SNR {decibels} dB"
        print(f"  {name:10} {' '.join(f'{score:.2f}' for score in mean)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="where the digits are extracted, or are already")
    parser.add_argument("--sentences", type=int, default=6)
    asked = parser.parse_args()
    with temporary_folder() as folder:
        cache = str(asked.cache or folder / "digits")
        featcache.extract(str(DIGITS), ["speaker-ge2e", "f0-swift"], cache)
        with DIGITS.open(newline="") as file:
            rows = {row["id"]: row for row in csv.DictReader(file)}
        vectors = featcache.open(cache, "speaker-ge2e")
        speakers = np.array([rows[id_]["speaker"] for id_ in vectors.ids])
        is_test = np.array([rows[id_]["split"] == "test" for id_ in vectors.ids])
        identify(vectors, speakers, is_test)
        pitch = featcache.open(cache, "f0-swift")
        print("pitch: quartiles")
        pitches(pitch, np.array([rows[id_]["speaker"] for id_ in pitch.ids]))
        scores_in_noise(asked.sentences, Path(folder))


if __name__ == "__main__":
    main()
