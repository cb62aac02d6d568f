"""Draw the features that each packaged config makes of one sentence, for
docs/pictures.md. Or measure the sound that is made of features again.

    python scripts/pictures.py                        the pictures, and the page that shows them
    python scripts/pictures.py --measure AUDIO [...]  how near the sound of log mels comes, in dB

Configs that load weights or read label files are left out. The sentence is examples/speech/anna-1.flac, so a clone
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

`featcache show` draws an utterance in the terminal. `--plot` draws into a file, and `--wav` writes
the features as sound:

```sh
featcache extract examples/manifest.csv -c fbank80
featcache show features/fbank80 anna-1 --plot anna-1.svg --wav anna-1.wav
```

In a notebook, `cache.show("anna-1")` shows the picture and a player.

This page shows `anna-1` of [examples/](../examples/README.md) for each packaged config without
weights and label files. `scripts/pictures.py` makes the page and its pictures.

| features | how they are drawn |
|---|---|
| spectra, hidden states | time goes to the right; the first dimension is at the bottom |
| codes | time goes to the right; the first codebook is at the top |
| pitch | a line in Hz; the brighter, the more certain |
| one number for each frame, such as a probability | an area; its scale is 0 to 1 if all numbers are in this range |
| a vector | bars from zero |
| a vector of named values | bars if all have the same unit, otherwise a table |
| events, such as words | blocks with their labels; events that overlap are drawn in separate rows; the label of an event without duration is next to it |

Bright means high. The shades of spectra go from the 2nd percentile of the values to the 99.5th,
without values at the floor of a logarithm, such as digital silence. The shades of codes go from
code 0 to the last code of the codebook.

## What can be heard

| features | how `--wav` makes sound of them |
|---|---|
| codes and latents | with the model's own decoder, and the weights that made them |
| `fbank`, `log_mel` | by Griffin-Lim, see below |
| MFCC, hidden states, units, vectors, events | featcache refuses: they have no sound |

featcache also refuses codes of Qwen3-TTS: only its own package decodes them.

Griffin-Lim guesses phases, because mel energies hold none. First, non-negative updates spread the
mel energies over the spectrum. Then follow 60 steps of the fast variant.

**How close is this sound?** Features of the first 20 sentences of LJSpeech were stored as float16,
turned into sound, and extracted again:

| config | difference | loudness | CPU time for a second of audio |
|---|---|---|---|
"""

TAIL = """
* *Difference* is the mean absolute difference between both features in dB. It includes all values within 40 dB of the
  sentence's loudest value.
* *Loudness* is the power of the new sound, relative to the recording.
* *CPU time* is for one core. `python scripts/pictures.py --measure AUDIO …` measures all three.
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
        if config is None or config.extractor in ("labels", "torchaudio"):
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
        if re.match(r"\| `.* s \|$", line)
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
