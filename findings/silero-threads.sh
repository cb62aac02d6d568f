#!/usr/bin/env bash
# `import silero_vad` takes all threads but one from torch, in the whole process.
#
# The module silero_vad.model calls torch.set_num_threads(1) when it is imported, also where the
# ONNX model is used and torch is not. A program that finds speech and then trains or encodes on
# the CPU goes on with one thread, whatever was set before, and nothing says so. Setting the
# number again after the import helps; a package that is imported later, in a function, takes the
# threads away in the middle of a run. Seen with silero-vad 6.2.3, torch 2.14.1 and torchaudio
# 2.11.1.
#
# Seen:
#    before the import: 4 threads
#    after the import:  1 thread
#    set again:         4 threads
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
from importlib.metadata import version

import torch

torch.set_num_threads(4)
before = torch.get_num_threads()

import silero_vad  # noqa: E402, F401

after = torch.get_num_threads()
torch.set_num_threads(4)
again = torch.get_num_threads()
print("silero-vad", version("silero-vad"), "torch", torch.__version__)
print(f"before the import: {before} threads")
print(f"after the import:  {after} thread")
print(f"set again:         {again} threads")
assert (before, after, again) == (4, 1, 4), "this has changed"
PYTHON

python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check silero-vad==6.2.3 \
    torch==2.14.1 torchaudio==2.11.1 onnxruntime==1.32.0
"$folder/venv/bin/python" "$folder/try.py"
