"""How far codes depend on what transformers' feature extractors do to a clip before EnCodec 48 kHz and X-Codec get it.

    python scripts/measure_preparation.py MANIFEST [--limit 32]

For EnCodec at 48 kHz, `EncodecFeatureExtractor` pads clips with zeros to whole chunks; featcache, as the authors' own
code, encodes the clip as it is. For X-Codec, `DacFeatureExtractor` pads clips with zeros to whole hops, and so does
featcache; the authors' own code does not. Each clip is encoded by transformers' model with and without; of each part of
the clip, the share of codes that differ. The models are small, with the real strides, rates and numbers of codebooks
(tests/small_models.py), since no weights are needed then: with the published weights, shares are others.

Measured on 32 sentences of LJSpeech: EnCodec, 69.0 % of the codes of the last chunk and none of the others, and one
chunk more of a clip; X-Codec, 73 % of all codes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile
import soxr
import torch

from featcache.manifest import read_manifest

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
import small_models

Shares = dict[str, list[float]]


def waveforms(path: Path, rate: int, limit: int) -> Iterator[torch.Tensor]:
    """The first channel of the first files of a manifest, at `rate`."""
    manifest = read_manifest(path)
    for row in range(min(limit, len(manifest))):
        samples, own = soundfile.read(manifest.resolve(manifest[row].path), dtype="float32", always_2d=True)
        yield torch.from_numpy(soxr.resample(samples[:, 0], own, rate))


def differ(codes: torch.Tensor, others: torch.Tensor) -> float:
    """The share of codes `[..., F]` that differ, over the frames that both have."""
    frames = min(codes.shape[-1], others.shape[-1])
    return float((codes[..., :frames] != others[..., :frames]).float().mean())


def of_encodec(path: Path, folder: Path, limit: int) -> Shares:
    """EnCodec at 48 kHz: the clip as it is, and padded to whole chunks."""
    from transformers import EncodecFeatureExtractor, EncodecModel

    model = EncodecModel.from_pretrained(small_models.encodec_48khz(folder)).eval()
    prepare = EncodecFeatureExtractor(feature_size=2, sampling_rate=48000, chunk_length_s=1.0, overlap=0.01)
    shares = defaultdict(list)
    for waveform in waveforms(path, 48000, limit):
        stereo = waveform.expand(2, -1)
        prepared = prepare(stereo.numpy(), sampling_rate=48000, return_tensors="pt")
        alone = model.encode(stereo[None], bandwidth=6.0)
        padded = model.encode(prepared["input_values"], prepared["padding_mask"], bandwidth=6.0).audio_codes
        last = len(alone.audio_codes) - 1
        frames = alone.audio_codes.shape[-1] - alone.last_frame_pad_length
        shares["last chunk"].append(differ(alone.audio_codes[last, ..., :frames], padded[last]))
        shares["other chunks"] += [differ(alone.audio_codes[i], padded[i]) for i in range(last)]
        shares["chunks more"].append(len(padded) - last - 1)
    return shares


def of_xcodec(path: Path, folder: Path, limit: int) -> Shares:
    """X-Codec: the clip as it is, and padded to whole hops."""
    from transformers import DacFeatureExtractor, XcodecModel

    model = XcodecModel.from_pretrained(small_models.xcodec(folder)).eval()
    prepare = DacFeatureExtractor(sampling_rate=16000, hop_length=model.config.hop_length)
    shares = defaultdict(list)
    for waveform in waveforms(path, 16000, limit):
        prepared = prepare(waveform.numpy(), sampling_rate=16000, return_tensors="pt")["input_values"]
        alone, padded = model.encode(waveform[None, None]).audio_codes, model.encode(prepared).audio_codes
        frames = alone.shape[-1]
        shares["last 3 frames"].append(differ(alone[..., -3:], padded[..., frames - 3 : frames]))
        shares["other frames"].append(differ(alone[..., :-3], padded[..., : frames - 3]))
        shares["frames more"].append(padded.shape[-1] - frames)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--limit", type=int, default=32, help="clips")
    asked = parser.parse_args()
    for name, measure in {"EnCodec 48 kHz": of_encodec, "X-Codec": of_xcodec}.items():
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            shares = measure(asked.manifest, Path(folder), asked.limit)
        for part, values in shares.items():
            mean = f"{np.mean(values):.2f} on average" if part.endswith("more") else f"{np.mean(values):.1%} differ"
            print(f"{name}, {part}: {mean}")


if __name__ == "__main__":
    main()
