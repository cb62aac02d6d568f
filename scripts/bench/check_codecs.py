"""Compare every codec with the real model run on each clip alone, code for code, over
whole corpora.

    pip install '.[extract,models,speechtokenizer]'
    python scripts/bench/check_codecs.py [--only encodec24k ...] [--limit 500] [--json]

The models are small, with the real strides, rates and numbers of codebooks
(tests/helpers/small_models.py): no weights are needed. The corpora are those in
../shared/data: 3,000 spoken digits at 8 kHz, and 32 sentences at 22.05 kHz.

Each codec extracts each corpus three times: killed in the middle and resumed; in one go,
by another number of threads; and in rows as a GPU has them, up to 256 at once. The first
two must be the same bits. All must have the codes that the model's own `encode` gives for
each clip by itself. What differs is a tie where the latents agree to rounding, and an
error otherwise. `naive` is what a batch of 16 clips padded with zeros differs by, in the
same model."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from corpus import write_manifest
from harness import Table, options, present, temporary_folder
from small_models import (
    dac_16khz,
    dac_24khz,
    dac_44khz,
    encodec_24khz,
    encodec_48khz,
    higgs2,
    mimi,
    neucodec,
    qwen3_tts,
    snac_24khz,
    speechtokenizer,
    wavtokenizer_40hz,
    wavtokenizer_75hz,
    xcodec,
    xcodec2,
)
from ties import differences, waveforms_of
from torch.nn.functional import pad

import featcache
from featcache.config import Config, config_from
from featcache.device import Device
from featcache.extractors import rows
from featcache.extractors.codec import CodecExtractor
from featcache.manifest.read import read_manifest
from featcache.manifest.utterances import Manifest

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
WRONG = ("errors", "errors of 256 rows", "changed bits")
COUNTS = ("clips", "refused", "codes", "distinct", "ties", "errors", "ties of 256 rows", *WRONG[1:])
CORPORA = {"digits": DATA / "fsdd" / "manifest.csv", "sentences": DATA / "ljspeech" / "flac.csv"}
Waveforms = torch.Tensor
"""float32 `[R, n]`."""


@dataclass(frozen=True)
class Codec:
    make: Callable[[Path], Path]
    """Writes a small model into a folder."""
    extractor: str
    """The extractor's registered name."""
    rate: int
    """The model's sample rate in Hz."""
    model: str
    """The class of the real model."""
    encode: Callable[[Any, Waveforms], torch.Tensor]
    """The real model's codes `[R, F, Q]` of waveforms `[R, n]`."""
    params: dict[str, Any] = field(default_factory=dict)
    """The extractor's parameters besides the weights."""

    def load(self, folder: Path) -> Any:
        if self.model == "SpeechTokenizer":
            from speechtokenizer import SpeechTokenizer

            return SpeechTokenizer.load_from_checkpoint(
                folder / "config.json", folder / "SpeechTokenizer.pt"
            ).eval()
        if self.model == "SNAC":
            from snac import SNAC

            return SNAC.from_pretrained(str(folder)).eval()
        import transformers

        if self.make is qwen3_tts:  # whose encoder is that of this Mimi
            return transformers.MimiModel.from_pretrained(mimi(folder.with_name("mimi"))).eval()
        return getattr(transformers, self.model).from_pretrained(folder).eval()


def _mono(model: Any, x: Waveforms) -> torch.Tensor:
    return model.encode(x[:, None], bandwidth=24.0).audio_codes[0].mT


def _stereo(model: Any, x: Waveforms) -> torch.Tensor:
    """EnCodec for 48 kHz: chunks one after the other, without what fills up the last one."""
    found = model.encode(x[:, None].expand(-1, 2, -1), bandwidth=6.0)
    codes = torch.cat(list(found.audio_codes), dim=2)
    return codes[:, :, : codes.shape[2] - found.last_frame_pad_length].mT


def _whole_hops(model: Any, x: Waveforms) -> torch.Tensor:
    return model.encode(pad(x, (0, -x.shape[1] % model.config.hop_length))[:, None]).audio_codes.mT


def _eight(model: Any, x: Waveforms) -> torch.Tensor:
    return model.encode(x[:, None], num_quantizers=8).audio_codes.mT


def _sixteen(model: Any, x: Waveforms) -> torch.Tensor:
    return model.encode(x[:, None]).audio_codes[:, :16].mT


def _plain(model: Any, x: Waveforms) -> torch.Tensor:
    return model.encode(x[:, None]).audio_codes.mT


def _by_frame(model: Any, x: Waveforms) -> torch.Tensor:
    """SNAC: the codes of all tracks in a frame of the first."""
    first, *others = model.encode(x[:, None])
    tracks = [track.unflatten(1, (first.shape[1], -1)) for track in (first, *others)]
    return torch.cat(tracks, dim=2)


def _through_extractor(model: Any, x: Waveforms) -> torch.Tensor:
    """X-Codec2 and NeuCodec: as their feature extractors prepare a batch."""
    import transformers

    name = type(model).__name__.replace("Model", "FeatureExtractor")
    prepare = getattr(transformers, name)()
    clips = [clip.numpy() for clip in x]
    return model.encode(**prepare(clips, sampling_rate=16000, return_tensors="pt")).audio_codes.mT


def _codebooks_first(model: Any, x: Waveforms) -> torch.Tensor:
    return model.encode(x[:, None]).permute(1, 2, 0)


CODECS = {
    "encodec24k": Codec(
        encodec_24khz, "encodec", 24000, "EncodecModel", _mono, {"bandwidth": 24.0}
    ),
    "encodec48k": Codec(
        encodec_48khz, "encodec", 48000, "EncodecModel", _stereo, {"bandwidth": 6.0}
    ),
    "dac16k": Codec(dac_16khz, "dac", 16000, "DacModel", _whole_hops),
    "dac24k": Codec(dac_24khz, "dac", 24000, "DacModel", _whole_hops),
    "dac44k": Codec(dac_44khz, "dac", 44100, "DacModel", _whole_hops),
    "mimi": Codec(mimi, "mimi", 24000, "MimiModel", _eight, {"codebooks": 8}),
    "higgs2": Codec(higgs2, "higgs2", 24000, "HiggsAudioV2TokenizerModel", _whole_hops),
    "neucodec": Codec(neucodec, "neucodec", 16000, "NeuCodecModel", _through_extractor),
    "qwen3-tts-12hz": Codec(qwen3_tts, "mimi", 24000, "MimiModel", _sixteen, {"codebooks": 16}),
    "snac": Codec(snac_24khz, "snac", 24000, "SNAC", _by_frame),
    "wavtokenizer40": Codec(wavtokenizer_40hz, "wavtokenizer", 24000, "WavTokenizerModel", _plain),
    "wavtokenizer75": Codec(wavtokenizer_75hz, "wavtokenizer", 24000, "WavTokenizerModel", _plain),
    "xcodec": Codec(xcodec, "xcodec", 16000, "XcodecModel", _whole_hops),
    "xcodec2": Codec(xcodec2, "xcodec2", 16000, "Xcodec2Model", _through_extractor),
    "speechtokenizer": Codec(
        speechtokenizer, "speechtokenizer", 16000, "SpeechTokenizer", _codebooks_first
    ),
}


def check(codec: Codec, corpus: Path, folder: Path, limit: int | None) -> dict[str, Any]:
    weights = codec.make(folder / "model")
    params, audio = {"weights": str(weights), **codec.params}, {"sample_rate": codec.rate}
    config = config_from(
        {"name": "codes", "extractor": codec.extractor, "params": params, "audio": audio}
    )
    path = _manifest(corpus, folder, limit)
    manifest = read_manifest(path)
    _killed_and_resumed(path, config, folder)
    featcache.extract(manifest, config, folder / "whole", featcache.Options("cpu", 1))
    with mock.patch.dict(rows.ROW_SECONDS, cpu=240.0), mock.patch.dict(rows.MAX_ROWS, cpu=256):
        featcache.extract(manifest, config, folder / "many", featcache.Options("cpu", 2))
    resumed, whole, many = (featcache.open(folder / name) for name in ("resumed", "whole", "many"))
    model, extractor = codec.load(weights), config.build(torch.device("cpu"))
    assert isinstance(extractor, CodecExtractor)
    counts: Counter[str] = Counter(clips=len(manifest))
    seen: set[int] = set()
    for id_, waveform in waveforms_of(manifest, config):
        codes = [_all_tracks(cache, id_) for cache in (whole, resumed)]
        counts["changed bits"] += codes[0].tobytes() != codes[1].tobytes()
        try:
            with torch.inference_mode():
                alone = codec.encode(model, waveform[None])[0].numpy()
        except RuntimeError:  # of some lengths EnCodec's chunks do not stack
            counts["refused"] += 1
            continue
        counts["codes"] += alone.size
        seen.update(np.unique(alone[:, 0]).tolist())
        for rows_of, cache in (("", whole), (" of 256 rows", many)):
            found = differences(_all_tracks(cache, id_), alone, extractor, waveform)
            counts[f"ties{rows_of}"] += found["ties"]
            counts[f"errors{rows_of}"] += found["different"] - found["ties"]
    return {**counts, "distinct": len(seen), "naive": _naive(codec, model, manifest, config)}


def _all_tracks(cache: featcache.Cache, id_: str) -> np.ndarray:
    """The codes of all tracks in each frame of the main one, `[F, Q]`."""
    main = cache[id_]
    names = [track.name for track in cache.spec.outputs if track.codebook_sizes]
    others = [cache.track(name)[id_] for name in names]
    return np.concatenate([main, *(codes.reshape(len(main), -1) for codes in others)], axis=1)


def _naive(codec: Codec, model: Any, manifest: Manifest, config: Config, count: int = 16) -> float:
    """The share of codes in which zero-padded batches of some clips differ from each
    alone."""
    clips = [waveform for _, waveform in waveforms_of(manifest, config)]
    random.Random(0).shuffle(clips)
    differ = total = 0
    with torch.inference_mode():
        for first in range(0, min(len(clips), 4 * count), count):
            batch = clips[first : first + count]
            try:
                together = codec.encode(
                    model, torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
                )
                for row, clip in zip(together, batch, strict=True):
                    alone = codec.encode(model, clip[None])[0]
                    differ += int((row[: len(alone)] != alone[: len(row)]).sum())
                    total += min(len(alone), len(row)) * alone.shape[1]
            except RuntimeError:
                continue
    return differ / total if total else float("nan")


def _manifest(corpus: Path, folder: Path, limit: int | None) -> Path:
    """The corpus's manifest, with absolute paths, or a random part of it."""
    manifest = read_manifest(corpus)
    chosen = sorted(
        random.Random(0).sample(range(len(manifest)), min(limit or len(manifest), len(manifest)))
    )
    lines = ((manifest[row].id, manifest.resolve(manifest[row].path)) for row in chosen)
    return write_manifest(folder / "manifest.csv", lines, ("id", "path"))


def _killed_and_resumed(path: Path, config: Config, folder: Path) -> None:
    """Extract by the command, killed as soon as a shard is there, and again."""
    text = folder / "codes.yaml"
    text.write_text(json.dumps(config.resolved()))  # JSON is YAML
    command = [
        sys.executable,
        "-m",
        "featcache",
        "extract",
        path,
        "-c",
        text,
        "-o",
        folder / "resumed",
    ]
    command += ["--shard-size", "0.1", "--threads", "2", "--device", "cpu"]
    running = subprocess.Popen(
        list(map(str, command)), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    while running.poll() is None and not any((folder / "resumed").glob("*/shards/*/zarr.json")):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


def main() -> None:
    asked = options(__doc__, only=[*CODECS], corpora=[*CORPORA], limit=(int, "clips of a corpus"))
    Device("cpu", 2).configure_torch()  # one thread in each kernel, as in a run
    table = Table("codec, corpus", {**dict.fromkeys(COUNTS, "{:,}"), "naive": "{:.1%}"})
    wrong = 0
    for name in asked.only:
        for corpus in asked.corpora:
            with temporary_folder() as folder:
                found = check(CODECS[name], CORPORA[corpus], folder, asked.limit)
            print(f"{name}, {corpus}: {found}", file=sys.stderr)
            table.add(f"{name}, {corpus}", *(found.get(figure, 0) for figure in table.formats))
            wrong += sum(found.get(figure, 0) for figure in WRONG)
    present(asked, table)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
