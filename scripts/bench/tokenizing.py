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
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import soundfile
import torch
from clock import CORES, Timed, median, remark, timed, undisturbed
from corpus import KINDS, make_corpus
from ties import latent_distances

import featcache
from featcache.care.compare import ROUNDING
from featcache.config import Config, config_from
from featcache.device import Device
from featcache.engines.local import run_locally
from featcache.extraction.extraction import run_extraction
from featcache.extraction.plan import Options, plan_extraction
from featcache.extraction.summary import Summary
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

    def speed(self, seconds: float) -> tuple[float, str, Timed]:
        """Times real time in the fastest shape, over about so many seconds of audio, and which shape that is."""
        best = None
        for rows, length in SHAPES[self._device.torch_device.type]:
            waveforms = 0.1 * torch.randn(rows, round(length * RATE), device=self._device.torch_device)
            count = max(1, round(seconds / (rows * length * self._workers)))
            self._run(waveforms, 1)
            taken = timed(lambda waveforms=waveforms, count=count: self._run(waveforms, count))
            speed = rows * length * count * self._workers / taken.seconds
            if best is None or speed > best[0]:
                best = speed, f"{rows} × {length:g} s", taken
        assert best is not None
        return best

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
    from featcache.audio.resample import to_waveform
    from featcache.extraction.decoding import decode_all

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
    path = make_corpus(asked.folder, asked.kind, hours=asked.hours, count=asked.count)
    manifest = read_manifest(path)
    weights = make_weights(asked.folder)
    config = config_from(
        {
            "name": "encodec24k",
            "extractor": "encodec",
            "params": {"weights": str(weights), "bandwidth": BANDWIDTH},
            "audio": {"sample_rate": RATE},
        }
    )
    device = Device(asked.device, asked.threads)
    device.configure_torch()
    model = Model(weights, device)
    seconds = float(manifest.duration.sum())
    in_loop = np.flatnonzero(np.cumsum(manifest.duration) <= asked.loop_minutes * 60).tolist() or [0]
    rounds, summary = [], None
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        for number in range(asked.rounds):
            print(f"round {number + 1} of {asked.rounds}", file=sys.stderr)
            limit, shape, alone = model.speed(asked.limit_seconds)
            shutil.rmtree(folder / "cache", ignore_errors=True)
            summary, whole = _extract(manifest, config, folder / "cache", asked)
            shutil.rmtree(folder / "loop", ignore_errors=True)
            by_hand = timed(lambda: loop(manifest, in_loop, model, device, folder / "loop"))
            rounds.append(
                {
                    "model": limit,
                    "shape": shape,
                    "featcache": seconds / whole.seconds,
                    "loop": float(manifest.duration[in_loop].sum()) / by_hand.seconds,
                    "others": max(alone.others, whole.others, by_hand.others),
                }
            )
        counts = compare(manifest, config, folder / "cache", model, device)
    assert summary is not None
    return {
        "device": device.label,
        "threads": device.threads,
        "hours": seconds / 3600,
        "files": len(manifest),
        "shape": rounds[-1]["shape"],
        **{name: median([figures[name] for figures in rounds]) for name in ("model", "featcache", "loop")},
        "of_limit": median([figures["featcache"] / figures["model"] for figures in rounds]),
        "of_loop": median([figures["featcache"] / figures["loop"] for figures in rounds]),
        "others": max(figures["others"] for figures in rounds),
        "stages": summary.stages,
        "codes": counts,
    }


def _extract(manifest: Manifest, config: Config, cache: Path, asked: argparse.Namespace) -> tuple[Summary, Timed]:
    found: list[Summary] = []

    def run() -> Timed:
        shutil.rmtree(cache, ignore_errors=True)
        work: Callable[[], object] = lambda: found.append(  # noqa: E731
            run_extraction(
                plan_extraction(manifest, [config], cache, Options(asked.device, asked.threads)), run_locally
            )
        )
        return timed(work)

    taken = undisturbed(run)
    return found[-1], taken


def table(result: dict) -> str:
    """The result for people."""
    codes = result["codes"]
    lines = [
        f"{result['files']:,} files, {result['hours']:.2f} h, on {result['device']}, {result['threads']} threads",
        "",
        "| | × real time | |",
        "|---|---|---|",
        f"| model alone, {result['shape']} | {result['model']:,.1f} | the limit |",
        f"| featcache, from files to shards | {result['featcache']:,.1f} | {result['of_limit']:.2f} of the limit |",
        f"| load, resample, encode, np.save | {result['loop']:,.1f} | featcache is {result['of_loop']:.1f} × as fast |",
        "",
        "time in stages: " + ", ".join(f"{name} {share:.1%}" for name, share in result["stages"].items()),
        f"{codes['codes']:,} codes, {codes['distinct']} distinct in the first codebook; {codes['different']} differ "
        f"from the model alone, {codes['ties']} of them ties",
        remark(result["others"]),
    ]
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "featcache-bench")
    parser.add_argument("--kind", choices=sorted(KINDS), default="long")
    parser.add_argument("--hours", type=float, default=0.1, help="of a long corpus")
    parser.add_argument("--count", type=int, default=600, help="files of a short corpus")
    parser.add_argument("--device", default=None)
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit-seconds", type=float, default=60.0, help="audio in a measurement of the model alone")
    parser.add_argument("--loop-minutes", type=float, default=2.0, help="audio that the loop is measured on")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    started = perf_counter()
    result = measure(asked)
    print(json.dumps(result, indent=2) if asked.json else table(result))
    print(f"measured in {perf_counter() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
