"""EnCodec from FLAC files to codes on disk: beside the model alone, and beside the loop that people write.

    pip install '.[extract,models]'
    python scripts/bench/tokenizing.py [--hours 0.1] [--threads 2] [--rounds 3] [--device cpu] [--json]
    python scripts/bench/tokenizing.py --kind short          clips of 0.43 s at 8 kHz, the worst case for padding

The model is EnCodec for 24 kHz at its full size, with random weights and codebooks that are filled with what its
encoder gives, at 6 kbps in fp32. In each round three things take turns:

model   `EncodecModel.encode` on tensors that lie on the device, without padding, in the fastest of several shapes, on
        a CPU by as many threads as the others have: the limit
featcache   `run_extraction`: decode, resample, extract, commit
loop    for each file: soundfile.read, torchaudio's resample, model.encode, np.save; over the first `--loop-minutes`

The table has the median of the rounds; ratios are medians of the ratios within a round. At the end every code that
featcache has stored is held against the loop's: a difference is a tie where the latents agree to rounding.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch
from corpus import KINDS, make_corpus
from harness import CORES, KEPT, Timed, columns, options, present, remark, take_turns, timed
from ties import latent_distances

import featcache
from featcache.audio.resample import to_waveform
from featcache.care.compare import ROUNDING
from featcache.config import Config, config_from
from featcache.device import Device
from featcache.engines.local import run_locally
from featcache.extraction.extraction import run_extraction
from featcache.extraction.from_audio import decode_all
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.extractors.codec import CodecExtractor
from featcache.manifest import Manifest, read_manifest

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from small_models import save_encodec

RATE = 24000
BANDWIDTH = 6.0
SHAPES = {"cpu": [(1, 1.0), (4, 1.0), (1, 4.0), (2, 4.0), (1, 10.0)], "cuda": [(8, 10.0), (24, 10.0), (64, 10.0)]}
"""Rows and seconds of the batches among which the fastest is the limit."""


def make_weights(folder: Path) -> Path:
    """EnCodec at its full size, made once."""
    from transformers import EncodecConfig

    home = folder / "encodec-24khz-random"
    if not (home / "config.json").exists():
        save_encodec(EncodecConfig(), home)
    return home


class Model:
    """The model alone.

    Args:
        weights: The folder of the weights.
        device: The device to run on.
    """

    def __init__(self, weights: Path, device: Device) -> None:
        from transformers import EncodecModel

        self._model = EncodecModel.from_pretrained(weights).to(device.torch_device).eval()
        for module in self._model.modules():
            if torch.nn.utils.parametrize.is_parametrized(module):
                torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
        self._device = device
        self._workers = 1 if device.is_cuda else device.threads

    def encode(self, waveforms: torch.Tensor) -> torch.Tensor:
        """Codes `[R, Q, F]` of waveforms `[R, P]` on the device."""
        with torch.inference_mode():
            return self._model.encode(waveforms[:, None], bandwidth=BANDWIDTH).audio_codes[0]

    @property
    def codebooks(self) -> list[torch.Tensor]:
        """The codewords of each codebook, `[K, D]`."""
        return [layer.codebook.embed for layer in self._model.quantizer.layers]

    def fastest(self, seconds: float) -> tuple[str, Timed]:
        """The fastest shape, and what a second of audio takes in it, over about so many seconds of audio."""
        found = {}
        for rows, length in SHAPES[self._device.torch_device.type]:
            waveforms = 0.1 * torch.randn(rows, round(length * RATE), device=self._device.torch_device)
            count = max(1, round(seconds / (rows * length * self._workers)))
            self._run(waveforms, 1)
            taken = timed(lambda waveforms=waveforms, count=count: self._run(waveforms, count))
            audio = rows * length * count * self._workers
            found[f"{rows} × {length:g} s"] = Timed(taken.seconds / audio, taken.cpu_seconds / audio, taken.others)
        return min(found.items(), key=lambda each: each[1].seconds)

    def _run(self, waveforms: torch.Tensor, count: int) -> None:
        def work() -> None:
            torch.set_num_threads(1)
            for _ in range(count):
                self.encode(waveforms)

        workers = [threading.Thread(target=work) for _ in range(self._workers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if self._device.is_cuda:
            torch.cuda.synchronize()


def loop(manifest: Manifest, rows: Sequence[int], model: Model, device: Device, folder: Path) -> None:
    """What people write: one file after the other, one .npy for each."""
    import torchaudio

    folder.mkdir()
    torch.set_num_threads(device.threads)
    for row in rows:
        utterance = manifest[row]
        samples, rate = soundfile.read(manifest.resolve(utterance.path), dtype="float32")
        waveform = torchaudio.functional.resample(torch.from_numpy(samples).to(device.torch_device), rate, RATE)
        np.save(folder / f"{utterance.id}.npy", model.encode(waveform[None])[0].T.cpu().numpy().astype(np.uint16))
    torch.set_num_threads(1)


def compare(manifest: Manifest, config: Config, cache: Path, model: Model, device: Device) -> dict[str, int]:
    """Hold every code in the cache against the model alone on the same waveforms; ties apart."""
    stored = featcache.open(cache)
    extractor = config.build(device.torch_device)
    assert isinstance(extractor, CodecExtractor)
    counts = {"codes": 0, "distinct": 0, "different": 0, "ties": 0}
    seen: set[int] = set()
    for decoded in decode_all([manifest[row] for row in range(len(manifest))], manifest.root):
        assert decoded.samples is not None
        assert decoded.source is not None
        waveform = torch.from_numpy(to_waveform(decoded.samples, decoded.source.sample_rate, config.audio))
        waveform = waveform.to(device.torch_device)
        alone = model.encode(waveform[None])[0].T.cpu().numpy()
        found = stored[decoded.utterance.id]
        counts["codes"] += found.size
        seen.update(np.unique(found[:, 0]).tolist())
        if found.shape != alone.shape:
            counts["different"] += found.size
        elif (frames := np.flatnonzero((found != alone).any(1))).size:
            counts["different"] += int((found != alone).sum())
            far = latent_distances(extractor, waveform)[frames]
            counts["ties"] += int((found != alone)[frames[far <= ROUNDING]].sum())
    counts["distinct"] = len(seen)
    return counts


def measure(asked: argparse.Namespace) -> dict:
    """All rounds."""
    asked.folder.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest(make_corpus(asked.folder, asked.kind, hours=asked.hours, count=asked.count))
    weights = make_weights(asked.folder)
    params = {"weights": str(weights), "bandwidth": BANDWIDTH}
    config = config_from(
        {"name": "encodec24k", "extractor": "encodec", "params": params, "audio": {"sample_rate": RATE}}
    )
    device = Device(asked.device or None, asked.threads)
    device.configure_torch()
    model = Model(weights, device)
    seconds = float(manifest.duration.sum())
    in_loop = np.flatnonzero(np.cumsum(manifest.duration) <= asked.loop_minutes * 60).tolist() or [0]
    shapes, summaries = [], []
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)

        def alone() -> Timed:
            shape, taken = model.fastest(asked.limit_seconds)
            shapes.append(shape)
            return taken

        def extraction() -> Timed:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            options = Options(asked.device or None, asked.threads)
            plan = lambda: plan_extraction(manifest, [config], folder / "cache", options)  # noqa: E731
            return of_audio(timed(lambda: summaries.append(run_extraction(plan(), run_locally))), seconds)

        def by_hand() -> Timed:
            shutil.rmtree(folder / "loop", ignore_errors=True)
            taken = timed(lambda: loop(manifest, in_loop, model, device, folder / "loop"))
            return of_audio(taken, float(manifest.duration[in_loop].sum()))

        turns = take_turns({"model": alone, "featcache": extraction, "loop": by_hand}, asked.rounds)
        counts = compare(manifest, config, folder / "cache", model, device)
    return {
        "device": device.label,
        "threads": device.threads,
        "hours": seconds / 3600,
        "files": len(manifest),
        "shape": shapes[-1],
        **{name: 1 / turns.median(name) for name in turns.taken},
        "of_limit": turns.ratio("model", "featcache"),
        "of_loop": turns.ratio("loop", "featcache"),
        "others": turns.others,
        "stages": summaries[-1].stages,
        "codes": counts,
    }


def of_audio(taken: Timed, seconds: float) -> Timed:
    """What a second of audio took."""
    return Timed(taken.seconds / seconds, taken.cpu_seconds / seconds, taken.others)


def show(result: dict) -> str:
    codes = result["codes"]
    rows = [
        (f"model alone, {result['shape']}", f"{result['model']:,.1f}", "the limit"),
        ("featcache, from files to shards", f"{result['featcache']:,.1f}", f"{result['of_limit']:.2f} of the limit"),
        ("load, resample, encode, np.save", f"{result['loop']:,.1f}", f"1 / {result['of_loop']:.1f} of featcache"),
    ]
    return "\n".join(
        [
            f"{result['files']:,} files, {result['hours']:.2f} h, {result['device']}, {result['threads']} threads",
            columns(["", "× real time", ""], *rows),
            "time in stages: " + ", ".join(f"{name} {share:.1%}" for name, share in result["stages"].items()),
            f"{codes['codes']:,} codes, {codes['distinct']} distinct in the first codebook; {codes['different']} "
            f"differ from the model alone, {codes['ties']} of them ties",
            remark(result["others"]),
        ]
    )


def main() -> None:
    asked = options(
        __doc__,
        folder=KEPT,
        kind=("long", f"of corpus: {' or '.join(sorted(KINDS))}"),
        hours=(0.1, "of a long corpus"),
        count=(600, "files of a short corpus"),
        device="",
        threads=CORES,
        rounds=3,
        limit_seconds=(60.0, "audio in a measurement of the model alone"),
        loop_minutes=(2.0, "audio that the loop is measured on"),
    )
    present(measure(asked), show, asked)


if __name__ == "__main__":
    main()
