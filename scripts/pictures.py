"""Draw what each packaged config makes of one sentence, for docs/pictures.md; or measure the
sound that is made of features again.

    python scripts/pictures.py                        the pictures, and the page that shows them
    python scripts/pictures.py --measure AUDIO [...]  how near the sound of log mels comes, in dB

Configs that load weights are left out. The sentence is examples/speech/anna-1.flac, so a clone
draws the same pictures.
"""

import argparse
import math
import re
from pathlib import Path

import numpy as np
import soundfile
import torch

import featcache
from featcache.config import load_config, packaged_configs
from featcache.media.pictures import picture_of
from featcache.spec import MAIN

ROOT = Path(__file__).resolve().parents[1]
SENTENCE = ROOT / "examples" / "speech" / "anna-1.flac"
PICTURES = ROOT / "docs" / "pictures"

LOUD_DB = 40
"""Values count that are at most so far below the loudest of a file."""

HEAD = """# Pictures of the packaged configs

`featcache show` draws one utterance, in a terminal, as a file and in a notebook:

```sh
featcache extract examples/manifest.csv -c fbank80
featcache show features/fbank80 anna-1 --plot anna-1.svg --wav anna-1.wav
```

Each packaged config that loads no weights has drawn `anna-1` of [examples/](../examples/README.md) here. The script
`scripts/pictures.py` made the pictures and this page.

* Time goes to the right. The first dimension of a spectrogram is below, the first codebook of codes is above.
* The darkest shade is the 2nd percentile of the values, the brightest the 99.5th. Values at the floor of a logarithm, such
  as digital silence, take no part.
* Pitch is a line in Hz, brighter the more certain it is. One number a frame, such as a probability, is an area; numbers
  from 0 to 1 have this scale.
* A vector is drawn as bars from zero. Named values have a bar each if all have the same unit, else they are a table.
  A terminal prints them.
* Events are blocks with their labels; events that overlap have lanes of their own.

## What can be heard

`--wav` makes sound of codes and latents by the model's own decoder, with the weights that made them: EnCodec, DAC, Mimi,
SNAC, X-Codec, X-Codec2, NeuCodec, SpeechTokenizer, WavTokenizer, Higgs Audio v2, Pocket TTS and VibeVoice. Only the
codes of Qwen3-TTS need its own package. `--wav` makes sound of `fbank` and `log_mel` by Griffin-Lim: 60 steps of the fast variant, after the mel
energies are spread over the spectrum by non-negative updates. featcache refuses MFCC, hidden states, units, vectors and
events: they have no sound.

The table shows how near that sound comes. The features of 20 sentences of LJSpeech were stored as float16, turned into
sound, and extracted again. The difference is the mean of absolute differences in dB, over all values within 40 dB of
the sentence's loudest. Loudness is the power of the sound relative to that of the recording.

| config | difference | loudness | CPU time for a second of audio |
|---|---|---|---|
"""

TAIL = """
`python scripts/pictures.py --measure AUDIO …` measured it, on one CPU core, with the first 20 files of LJSpeech. The mel
energies say nothing about phases, which are guessed.
"""


def sound_of(config, extractor, waveform):
    tracks = {MAIN: extracted(extractor, waveform).half().float()}
    with torch.inference_mode():
        heard = extractor.synthesize(tracks)[: len(waveform)]
    return torch.nn.functional.pad(heard, (0, len(waveform) - len(heard)))


def extracted(extractor, waveform):
    from featcache.extractors import Clip

    with torch.inference_mode():
        return extractor.extract([Clip("sentence", waveform)])[0]


def decibels(config, features):
    """The power of mel energies in dB, of configs with a logarithm."""
    params = config.params.model_dump()
    if params.get("log") == "whisper":
        return features * 40 - 40
    factor = 20 if params.get("power") == 1 else 10
    return features * factor / math.log(10)


def measure(paths):
    from time import process_time

    from featcache.audio.resample import AudioPolicy, to_waveform

    torch.set_num_threads(1)
    for name in ("fbank80", "fbank80-lhotse", "whisper-mel80", "hifigan-mel80"):
        config = load_config(name)
        extractor = config.build(torch.device("cpu"))
        policy = AudioPolicy(sample_rate=config.audio.sample_rate)
        differences, gains, spent, seconds = [], [], 0.0, 0.0
        for path in paths:
            samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
            waveform = torch.from_numpy(to_waveform(samples, rate, policy, None).copy())
            began = process_time()
            heard = sound_of(config, extractor, waveform)
            spent += process_time() - began
            seconds += len(waveform) / policy.sample_rate
            before = decibels(config, extracted(extractor, waveform))
            after = decibels(config, extracted(extractor, heard.contiguous()))
            is_loud = before > before.max() - LOUD_DB
            differences.append(float((after - before)[is_loud].abs().mean()))
            gains.append(float(10 * (heard.square().mean() / waveform.square().mean()).log10()))
        print(
            f"| `{name}` | {np.mean(differences):.2f} dB | {np.mean(gains):+.2f} dB "
            f"| {spent / seconds:.3f} s |"
        )


def drawn():
    """The configs that run without weights, each with its picture, and its named values."""
    for name, text in packaged_configs().items():
        config = load_config(name) if "weights" not in text else None
        if config is None or config.extractor == "torchaudio":
            continue
        live = featcache.extractor(config=config, device="cpu")
        features = live.file(SENTENCE, id="anna-1")
        spec = live.spec
        picture = picture_of(f"{name}: anna-1", spec, features, 1200, 320)
        named = dict(zip(spec.named_units.items(), features.tolist(), strict=False))
        comment = " ".join(re.match(r"(#.*\n)+", text)[0].replace("#", "").split())
        first_sentence = re.match(r".*?[.:](?= |$)", comment)[0].rstrip(":")
        yield name, first_sentence.rstrip(".") + ".", picture, named


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", nargs="+", metavar="AUDIO")
    paths = parser.parse_args().measure
    if paths:
        measure(paths)
        return
    PICTURES.mkdir(exist_ok=True)
    page = ROOT / "docs" / "pictures.md"
    rows = "".join(
        f"{line}\n"
        for line in (page.read_text() if page.exists() else "").splitlines()
        if line.startswith("| `")
    )
    parts = [HEAD, rows, TAIL]
    for name, what, picture, named in drawn():
        if named:
            rows = (f"| {name} | {value:.4g} {unit} |" for (name, unit), value in named.items())
            table = "\n".join(["| value of anna-1 | |", "|---|---|", *rows])
            parts.append(f"\n## {name}\n\n{what}\n\n{table}\n")
            continue
        (PICTURES / f"{name}.svg").write_text(picture.as_svg() + "\n")
        parts.append(f"\n## {name}\n\n{what}\n\n![{name} of anna-1](pictures/{name}.svg)\n")
    page.write_text("".join(parts))


if __name__ == "__main__":
    main()
