"""Make the speech of this folder again: `python make_speech.py`, with espeak-ng 1.51 on
the PATH."""

import csv
import io
import subprocess
from pathlib import Path

import numpy as np
import soundfile
import soxr

HERE = Path(__file__).parent
VOICES = {"anna": "en-gb+f3", "ben": "en-us+m3"}


def speak(voice: str, text: str) -> np.ndarray:
    """What espeak-ng says, float32 `[num_samples]` at its own 22.05 kHz."""
    command = ["espeak-ng", "-v", VOICES[voice], "-s", "165", "--stdout", text]
    wav = subprocess.run(command, check=True, capture_output=True).stdout
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    assert rate == 22050
    return samples


def main() -> None:
    """Write every file of the manifest: 16 kHz and mono, but where its name says
    otherwise."""
    with (HERE / "manifest.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for path in dict.fromkeys(row["path"] for row in rows):
        channels = [speak(row["voice"], row["text"]) for row in rows if row["path"] == path]
        rate = 22050 if "22k" in path else 16000
        if rate != 22050:
            channels = [soxr.resample(channel, 22050, rate) for channel in channels]
        samples = np.zeros((max(map(len, channels)), len(channels)), np.float32)
        for number, channel in enumerate(channels):
            samples[: len(channel), number] = channel
        soundfile.write(HERE / path, samples, rate, subtype="PCM_16")


if __name__ == "__main__":
    main()
