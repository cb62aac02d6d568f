"""Measure EnCodec from FLAC files to codes on disk, and compare it with the model alone,
and with the loop that people write.

    pip install '.[extract,models]'
    python scripts/bench/tokenizing.py [--hours 0.1] [--threads 2] [--rounds 3] [--json]
    python scripts/bench/tokenizing.py --kind short
                        clips of 0.43 s at 8 kHz, the worst case for padding

The model is EnCodec for 24 kHz at its full size, with random weights
(`random_encodec.py`), at 6 kbps in fp32. In each round three things take turns:

model   `EncodecModel.encode` on tensors that lie on the device, without padding, in the fastest of several shapes, on
        a CPU by as many threads as the others have: the limit
featcache   `run_extraction`: decode, resample, extract, commit
loop    for each file: soundfile.read, torchaudio's resample, model.encode, np.save; over the first two minutes

The table has the median of the rounds; ratios are medians of the ratios within a round.
At the end every code that featcache has stored is held against the loop's: a difference
is a tie where the latents agree to rounding.
"""

import argparse
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import soundfile
import torch
from corpus import KINDS, make_corpus
from harness import (
    CORES,
    KEPT,
    Table,
    Timed,
    options,
    present,
    remark,
    take_turns,
    temporary_folder,
    timed,
)
from random_encodec import make_weights
from ties import differences, waveforms_of

import featcache
from featcache.config import Config, config_from
from featcache.device import Device
from featcache.extractors.codec import CodecExtractor
from featcache.manifest.read import read_manifest
from featcache.manifest.utterances import Manifest

LIMIT, OURS = "the model alone", "featcache, from files to shards"
RATE = 24000
BANDWIDTH = 6.0
SHAPES = [(1, 1.0), (4, 1.0), (1, 4.0), (2, 4.0), (1, 10.0)]
"""Rows and seconds of the batches among which the fastest is the limit."""
LIMIT_SECONDS, LOOP_SECONDS = 60.0, 120.0
"""How much audio the model alone and the loop are measured on."""


class Model:
    """The model alone, with weights from a folder."""

    def __init__(self, weights: Path, device: Device) -> None:
        from transformers import EncodecModel

        self._model = EncodecModel.from_pretrained(weights).to(device.torch_device).eval()
        for module in self._model.modules():
            if torch.nn.utils.parametrize.is_parametrized(module):
                torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
        self._workers = device.threads

    def encode(self, waveforms: torch.Tensor) -> torch.Tensor:
        """Codes `[R, Q, F]` of waveforms `[R, P]` on the device."""
        with torch.inference_mode():
            return self._model.encode(waveforms[:, None], bandwidth=BANDWIDTH).audio_codes[0]

    @property
    def codebooks(self) -> list[torch.Tensor]:
        """The codewords of each codebook, `[K, D]`."""
        return [layer.codebook.embed for layer in self._model.quantizer.layers]

    def fastest(self, seconds: float) -> tuple[str, Timed]:
        """The fastest shape, and what a second of audio takes in it, over about so many
        seconds of audio."""
        found = {}
        for rows, length in SHAPES:
            waveforms = 0.1 * torch.randn(rows, round(length * RATE))
            count = max(1, round(seconds / (rows * length * self._workers)))
            self._run(waveforms, 1)
            taken = timed(lambda waveforms=waveforms, count=count: self._run(waveforms, count))
            found[f"{rows} × {length:g} s"] = of_audio(taken, rows * length * count * self._workers)
        return min(found.items(), key=lambda each: each[1].seconds)

    def _run(self, waveforms: torch.Tensor, count: int) -> None:
        def work(_: int) -> None:
            for _ in range(count):
                self.encode(waveforms)

        with ThreadPoolExecutor(
            self._workers, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            list(pool.map(work, range(self._workers)))


def loop(manifest: Manifest, rows: Sequence[int], model: Model, threads: int, folder: Path) -> None:
    """What people write: one file after the other, one .npy for each."""
    import torchaudio

    folder.mkdir()
    torch.set_num_threads(threads)
    for row in rows:
        utterance = manifest[row]
        samples, rate = soundfile.read(manifest.resolve(utterance.path), dtype="float32")
        waveform = torchaudio.functional.resample(torch.from_numpy(samples), rate, RATE)
        np.save(
            folder / f"{utterance.id}.npy",
            model.encode(waveform[None])[0].T.numpy().astype(np.uint16),
        )
    torch.set_num_threads(1)


def compare(manifest: Manifest, config: Config, cache: Path, model: Model) -> str:
    """Hold every code in the cache against the model alone on the same waveforms; ties
    apart."""
    stored = featcache.open(cache)
    extractor = config.build(torch.device("cpu"))
    assert isinstance(extractor, CodecExtractor)
    counts: Counter[str] = Counter()
    distinct: set[int] = set()
    for id_, waveform in waveforms_of(manifest, config):
        alone = model.encode(waveform[None])[0].T.numpy()
        counts += differences(stored[id_], alone, extractor, waveform)
        distinct.update(alone[:, 0].tolist())
    return (
        f"{counts['codes']:,} codes, {len(distinct)} distinct in the first codebook; "
        f"{counts['different']} differ from "
        f"the model alone, {counts['ties']} of them ties"
    )


def measure(asked: argparse.Namespace) -> list[Table | str]:
    manifest = read_manifest(make_corpus(asked.folder, asked.kind, asked.hours))
    weights = make_weights(asked.folder)
    params, audio = {"weights": str(weights), "bandwidth": BANDWIDTH}, {"sample_rate": RATE}
    config = config_from(
        {"name": "encodec24k", "extractor": "encodec", "params": params, "audio": audio}
    )
    device = Device("cpu", asked.threads)
    device.configure_torch()
    model = Model(weights, device)
    seconds = float(manifest.duration.sum())
    in_loop = np.flatnonzero(np.cumsum(manifest.duration) <= LOOP_SECONDS).tolist() or [0]
    shapes, summaries = [], []
    with temporary_folder(asked.folder) as folder:

        def alone() -> Timed:
            shape, taken = model.fastest(LIMIT_SECONDS)
            shapes.append(shape)
            return taken

        def extraction() -> Timed:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            chosen = featcache.Options("cpu", asked.threads)
            taken = timed(
                lambda: summaries.append(
                    featcache.extract(manifest, config, folder / "cache", chosen)
                )
            )
            return of_audio(taken, seconds)

        def by_hand() -> Timed:
            shutil.rmtree(folder / "loop", ignore_errors=True)
            taken = timed(lambda: loop(manifest, in_loop, model, asked.threads, folder / "loop"))
            return of_audio(taken, float(manifest.duration[in_loop].sum()))

        turns = take_turns(
            {LIMIT: alone, OURS: extraction, "load, resample, encode, np.save": by_hand},
            asked.rounds,
        )
        compared = compare(manifest, config, folder / "cache", model)
    about = (
        f"{len(manifest):,} files, {seconds / 3600:.2f} h, {device.label}, {device.threads} threads"
    )
    table = Table(
        about, {"× real time": "{:,.1f}", "of the limit": "{:.2f}", "featcache is": "{:.1f} ×"}
    )
    for name in turns.taken:
        table.add(name, 1 / turns.median(name), turns.ratio(LIMIT, name), turns.ratio(name, OURS))
    stages = ", ".join(f"{name} {share:.1%}" for name, share in summaries[-1].stages.items())
    said = [
        f"the limit is in the shape {shapes[-1]}",
        f"time in stages: {stages}",
        compared,
        remark(turns.others),
    ]
    return [table, *said]


def of_audio(taken: Timed, seconds: float) -> Timed:
    """What a second of audio took."""
    return Timed(taken.seconds / seconds, taken.cpu_seconds / seconds, taken.others)


def main() -> None:
    asked = options(
        __doc__,
        folder=KEPT,
        kind=("long", f"of corpus: {' or '.join(sorted(KINDS))}"),
        hours=0.1,
        threads=CORES,
        rounds=3,
    )
    present(asked, *measure(asked))


if __name__ == "__main__":
    main()
