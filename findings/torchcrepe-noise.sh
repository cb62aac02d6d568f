#!/usr/bin/env bash
# torchcrepe gives another pitch in every call, and torch.manual_seed does not change that.
#
# Where it turns bins into frequencies, torchcrepe adds noise of up to 20 cents, the width of a
# bin, and draws it from numpy's global state, also in inference. So two calls on the same audio
# differ by up to some 30 cents, a seed of torch does not repeat them, and a seed of numpy does.
# `weighted_argmax` adds no noise to what it returns. Seen with torchcrepe 0.0.24, its weights
# `tiny`, and torch 2.14.1.
#
# Seen:
#    argmax, two calls:                    differ by up to 30 cents
#    argmax, each after torch.manual_seed: differ by up to 30 cents
#    argmax, each after np.random.seed:    differ by up to 0 cents
#    weighted_argmax, two calls:           differ by up to 0 cents
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
from importlib.metadata import version

import numpy as np
import torch
import torchcrepe

print("torchcrepe", version("torchcrepe"), "torch", torch.__version__)
RATE = 16000
time = np.arange(2 * RATE) / RATE
voice = sum(np.sin(2 * np.pi * 150 * number * time) / number for number in range(1, 20))
audio = torch.from_numpy((0.2 * voice).astype(np.float32))[None]


def cents_between_calls(name, seed=None):
    """The largest difference of two calls of a decoder, each after the seed."""
    calls = []
    for _ in range(2):
        if seed is not None:
            seed(0)
        decoder = getattr(torchcrepe.decode, name)
        calls.append(torchcrepe.predict(audio, RATE, 160, 50, 550, "tiny", decoder=decoder)[0])
    return float((1200 * torch.log2(calls[0] / calls[1])).abs().max())


for what, name, seed, repeats in (
    ("argmax, two calls:", "argmax", None, False),
    ("argmax, each after torch.manual_seed:", "argmax", torch.manual_seed, False),
    ("argmax, each after np.random.seed:", "argmax", np.random.seed, True),
    ("weighted_argmax, two calls:", "weighted_argmax", None, True),
):
    cents = cents_between_calls(name, seed)
    print(f"{what:37} differ by up to {cents:.0f} cents")
    assert (cents == 0) == repeats and cents < 41, "this has changed"
PYTHON

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torchcrepe==0.0.24 \
    librosa==1.0.0 resampy==0.4.3 torch==2.14.1 torchaudio==2.11.1 numpy==2.5.5
"$folder/venv/bin/python" "$folder/try.py"
