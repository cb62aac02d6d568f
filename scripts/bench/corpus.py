"""Make the corpora that the benchmarks run on. A corpus is the same every time, and is
kept from one run to the next.

    python scripts/bench/corpus.py /tmp/corpora --kind long --hours 1.4
    python scripts/bench/corpus.py /tmp/corpora --kind short --hours 0.36

`long` are 16 kHz FLAC files with lengths like LibriSpeech's: 12.3 s on average, from 1.5
to 35 s. `short` are 8 kHz WAV files with lengths like those of the Free Spoken Digit
Dataset: 0.43 s on average, from 0.15 to 2.3 s.

They are cut out of the sentences of LJSpeech in ../shared/data, laid end to end, each
file at another place and with another gain. Where these are not found, out of syllables
with the formants and the pauses of speech. Prints the path of the manifest, a CSV with
id, path and duration."""

import csv
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import soxr
from harness import options
from numpy.typing import NDArray
from small_models import speech_like

SPEECH = Path(__file__).resolve().parents[3] / "shared" / "data" / "ljspeech" / "wav"


@dataclass(frozen=True)
class Kind:
    """Of corpus: what its files are, and how long."""

    sample_rate: int
    suffix: str
    mean_seconds: float
    shortest: float
    longest: float

    def lengths(self, random: np.random.Generator) -> Iterator[float]:
        """Seconds of one file after the other, without end."""
        while True:
            # LibriSpeech's: most are near 15 s, where its makers cut
            if self.suffix == "flac":
                seconds = (
                    random.normal(14.5, 1.5) if random.random() < 0.66 else random.gamma(2.2, 3.75)
                )
            else:
                seconds = random.gamma(9.0, self.mean_seconds / 9.0)
            if self.shortest <= seconds <= self.longest:
                yield seconds


KINDS = {"long": Kind(16000, "flac", 12.3, 1.5, 35.0), "short": Kind(8000, "wav", 0.43, 0.15, 2.3)}


def make_corpus(folder: Path, kind: str, hours: float) -> Path:
    """Make a corpus of one of `KINDS`, in its own folder under `folder`, unless it is
    there; returns its manifest."""
    home = folder / f"{kind}-{hours:g}h-{'speech' if is_speech() else 'made-up'}"
    manifest = home / "manifest.csv"
    if manifest.exists():
        return manifest
    (home / "audio").mkdir(parents=True, exist_ok=True)
    form = KINDS[kind]
    random = np.random.default_rng(0)
    pool = speech_at(form.sample_rate)
    rows, total = [], 0.0
    for number, seconds in enumerate(form.lengths(random)):
        if total >= hours * 3600:
            break
        samples = _cut(pool, random, round(seconds * form.sample_rate))
        name = f"{number:06d}"
        soundfile.write(
            home / "audio" / f"{name}.{form.suffix}", samples, form.sample_rate, subtype="PCM_16"
        )
        rows.append((name, f"audio/{name}.{form.suffix}", f"{len(samples) / form.sample_rate:.6f}"))
        total += seconds
    return write_manifest(manifest, rows)


def packed(manifest: Path, form: str) -> Path:
    """The manifest of the same corpus in another form, one of `FORMS`, which is made if
    it is not there.

    A tar has 1,000 members, as NeMo's may have; a row group of Parquet has 100 rows, as
    those of datasets have."""
    home = manifest.parent / form
    if (home / "manifest.csv").exists():
        return home / "manifest.csv"
    home.mkdir(exist_ok=True)
    with manifest.open(newline="") as file:
        rows = list(csv.DictReader(file))
    paths = FORMS[form](home, [manifest.parent / row["path"] for row in rows])
    found = [(row["id"], path, row["duration"]) for row, path in zip(rows, paths, strict=True)]
    return write_manifest(home / "manifest.csv", found)


def _tars(home: Path, files: list[Path]) -> Iterator[str]:
    for first in range(0, len(files), 1000):
        name = f"audio_{first // 1000}.tar"
        with tarfile.open(home / name, "w") as tar:
            for file in files[first : first + 1000]:
                tar.add(file, file.name)
                yield f"{name}/{file.name}"


def _parquet(home: Path, files: list[Path]) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    kind = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()})
    with pyarrow.parquet.ParquetWriter(
        home / "train.parquet", pyarrow.schema({"audio": kind})
    ) as writer:
        for first in range(0, len(files), 100):
            values = [
                {"bytes": file.read_bytes(), "path": file.name}
                for file in files[first : first + 100]
            ]
            writer.write_table(pyarrow.table({"audio": pyarrow.array(values, kind)}))
            yield from (f"train.parquet/audio/{first + row}" for row in range(len(values)))


def _encoded(home: Path, files: list[Path], suffix: str, form: str, subtype: str) -> Iterator[str]:
    for file in files:
        samples, rate = soundfile.read(file, dtype="float32")
        soundfile.write(home / f"{file.stem}.{suffix}", samples, rate, format=form, subtype=subtype)
        yield f"{file.stem}.{suffix}"


FORMS: dict[str, Callable[[Path, list[Path]], Iterator[str]]] = {
    "tar": _tars,
    "parquet": _parquet,
    "mp3": partial(_encoded, suffix="mp3", form="MP3", subtype="MPEG_LAYER_III"),
    "opus": partial(_encoded, suffix="opus", form="OGG", subtype="OPUS"),
    "wav": partial(_encoded, suffix="wav", form="WAV", subtype="PCM_16"),
}


def write_manifest(
    path: Path,
    rows: Iterable[Sequence[object]],
    columns: Sequence[str] = ("id", "path", "duration"),
) -> Path:
    """A CSV, which appears when it is whole."""
    beside = path.with_suffix(".part")
    with beside.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows(rows)
    return beside.rename(path)


def make_digits(folder: Path, count: int = 3000) -> Path:
    """Make what stands for the Free Spoken Digit Dataset where that is not found; returns
    its manifest.

    Files are as long as those of `short`. Each is a tone for its digit over a tone for
    its speaker, of six, and some noise. The last tenth is in the split `test`."""
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    random, form, rows = np.random.default_rng(0), KINDS["short"], []
    for number, seconds in zip(range(count), form.lengths(random), strict=False):
        digit, speaker = number % 10, number // 10 % 6
        at = np.arange(round(seconds * form.sample_rate)) / form.sample_rate
        tones = np.sin(2 * np.pi * (300 + 200 * digit) * at) + np.sin(
            2 * np.pi * (100 + 25 * speaker) * at
        )
        samples = 0.2 * tones + 0.01 * random.standard_normal(len(at))
        name = f"{digit}_{speaker}_{number // 60}"
        soundfile.write(
            folder / "audio" / f"{name}.wav", samples, form.sample_rate, subtype="PCM_16"
        )
        split = "test" if number >= 0.9 * count else "train"
        rows.append((name, f"audio/{name}.wav", digit, f"speaker-{speaker}", split))
    return write_manifest(
        folder / "manifest.csv", rows, ("id", "path", "digit", "speaker", "split")
    )


def is_speech() -> bool:
    """Whether there is real speech to cut from."""
    return any(SPEECH.glob("*.wav"))


def speech_at(sample_rate: int) -> NDArray[np.float32]:
    """All sentences of the real speech, or a minute that is like speech."""
    if not is_speech():
        return speech_like(60, sample_rate).numpy()
    sentences = []
    for path in sorted(SPEECH.glob("*.wav")):
        samples, rate = soundfile.read(path, dtype="float32")
        sentences.append(soxr.resample(samples, rate, sample_rate))
    return np.concatenate(sentences)


def _cut(
    pool: NDArray[np.float32], random: np.random.Generator, num_samples: int
) -> NDArray[np.float32]:
    """Some samples of the pool, which begins again where it ends, somewhat louder or
    softer."""
    start = int(random.integers(len(pool)))
    return pool[np.arange(start, start + num_samples) % len(pool)] * np.float32(
        random.uniform(0.5, 1.0)
    )


def main() -> None:
    asked = options(
        __doc__, "folder", kind=("long", f"of corpus: {' or '.join(sorted(KINDS))}"), hours=1.4
    )
    if not is_speech():
        print(f"no speech in {SPEECH}: what is like it stands for it", file=sys.stderr)
    print(make_corpus(asked.folder, asked.kind, asked.hours))


if __name__ == "__main__":
    main()
