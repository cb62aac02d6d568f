#!/usr/bin/env bash
# Silero VAD's ONNX model takes windows of 512 samples without an error, and then hears no speech.
#
# The network of silero-vad 6.2 expects 576 samples: the 64 last ones of the window before, and
# the 512 of this one. The package's own wrapper takes windows of 512, says so in its error for
# others, and adds the 64 itself. The network's input has no fixed length, so a program that
# gives it windows of 512 gets no error, and a probability below 0.01 of everything. Seen with
# silero-vad 6.2.3 and onnxruntime 1.32.0, at 16 kHz.
#
# Seen:
#    576 samples: probability up to 1.00, speech in 30% of 93 windows
#    512 samples: probability up to 0.00, speech in 0% of 93 windows
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
import sys

import numpy as np
import onnxruntime

print("onnxruntime", onnxruntime.__version__)
RATE, WINDOW, CONTEXT = 16000, 512, 64


def syllables(seconds):
    """Harmonics of a voice of 120 Hz, in three formants, four syllables a second."""
    time = np.arange(seconds * RATE) / RATE
    phase = 2 * np.pi * np.cumsum(120 * (1 + 0.1 * np.sin(2 * np.pi * 3 * time))) / RATE
    sound = np.zeros_like(time)
    for number in range(1, 30):
        formants = ((700, 150), (1200, 200), (2600, 250))
        gain = sum(np.exp(-(((120 * number - at) / width) ** 2)) for at, width in formants)
        sound += gain * np.sin(number * phase)
    sound *= np.sqrt(np.clip(np.sin(2 * np.pi * 4 * time), 0, 1))
    return (0.3 * sound / np.abs(sound).max()).astype(np.float32)


def probabilities(session, sound, has_context):
    state = np.zeros((2, 1, 128), np.float32)
    before, found = np.zeros((1, CONTEXT), np.float32), []
    for first in range(0, len(sound) - WINDOW + 1, WINDOW):
        window = sound[None, first : first + WINDOW]
        samples = np.concatenate([before, window], 1) if has_context else window
        feed = {"input": samples, "state": state, "sr": np.array(RATE, np.int64)}
        probability, state = session.run(None, feed)
        found.append(float(probability[0, 0]))
        before = window[:, -CONTEXT:]
    return np.array(found)


session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
highest = {}
for has_context in (True, False):
    found = probabilities(session, syllables(3), has_context)
    size, highest[has_context] = WINDOW + CONTEXT * has_context, found.max()
    speech = f"speech in {(found > 0.5).mean():.0%} of {len(found)} windows"
    print(f"{size} samples: probability up to {found.max():.2f}, {speech}")
assert highest[True] > 0.9 and highest[False] < 0.05, "this has changed"
PYTHON

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 numpy==2.5.5
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check --no-deps silero-vad==6.2.3
"$folder/venv/bin/python" "$folder/try.py" \
    "$("$folder/venv/bin/python" -c 'from importlib.util import find_spec; print(find_spec("silero_vad").submodule_search_locations[0])')/data/silero_vad.onnx"
