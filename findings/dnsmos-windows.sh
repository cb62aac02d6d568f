#!/usr/bin/env bash
# speechmos, the package of DNSMOS, leaves windows out because of rounding.
#
# Scores are means over windows of 9.01 s, one for each second. A window of second i is
# audio[i * 16000 : int((i + 9.01) * 16000)]. For some i, that product falls just below a
# whole number, so int() gives one sample less. Such a window counts as too short, and is
# skipped without a word: all from i = 7 to 20.
#
# Seen, of speechmos 0.0.1.1:
#    15 s: 6 of 6 windows are scored
#    20 s: 7 of 11 windows are scored
#    30 s: 7 of 21 windows are scored
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
from importlib.metadata import version

import numpy as np
from speechmos import dnsmos

print("speechmos", version("speechmos"))
seen = {}
for seconds in (15, 20, 30):
    audio = 0.1 * np.random.default_rng(0).standard_normal(seconds * 16000).clip(-5, 5)
    scored = []

    class Counting(dnsmos.DNSMOS):
        def audio_melspec(self, audio, **options):
            scored.append(len(audio))
            return super().audio_melspec(audio, **options)

    folder = dnsmos.__file__.rpartition("/")[0] + "/dnsmos_models"
    model = Counting(f"{folder}/sig_bak_ovr.onnx", f"{folder}/model_v8.onnx")
    model(audio.astype(np.float32), 16000, False)
    windows = int(seconds - 9.01) + 1
    print(f"{seconds} s: {len(scored)} of {windows} windows are scored")
    seen[seconds] = len(scored), windows
assert seen == {15: (6, 6), 20: (7, 11), 30: (7, 21)}, "this has changed"
PYTHON

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check speechmos==0.0.1.1 \
    onnxruntime==1.32.0 librosa==0.11.0 requests==2.34.2
"$folder/venv/bin/python" "$folder/try.py"
