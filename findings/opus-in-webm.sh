#!/usr/bin/env bash
# The same Opus packets give three signals, by who decodes them.
#
# 1. FFmpeg's own Opus decoder, which PyAV takes for WebM, Matroska and MP4, is not the
#    reference in SILK and hybrid frames, which encoders choose for speech: it differs by a
#    tenth of the signal's rms and more. libopus, which PyAV's wheels bring too, gives what it
#    gives in Ogg.
# 2. FFmpeg 5 wrote a wrong CodecDelay into WebM if the sound came at 16 kHz: 104 samples
#    instead of 312. FFmpeg up to 8.0 (PyAV 17) ignores it in favour of Opus' own header;
#    FFmpeg 8.1 (PyAV 18) believes it, and gives 208 samples more, all of them shifted.
#
# Seen:
#    17.0.0 own header: 96000 samples; FFmpeg 5's CodecDelay: 96000; native against libopus: 0.106
#    18.1.0 own header: 96000 samples; FFmpeg 5's CodecDelay: 96208; native against libopus: 0.106
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
import sys
from fractions import Fraction

import av
import numpy as np

RATE = 48000
path, patched = sys.argv[1] + "/a.webm", sys.argv[1] + "/b.webm"
at = np.arange(2 * RATE) / RATE
voice = sum(np.sin(2 * np.pi * 120 * k * at + k) / k for k in range(1, 20))
samples = (0.1 * voice * (0.5 + 0.5 * np.sin(2 * np.pi * 3 * at)) * 32767).astype("i2")
with av.open(path, "w") as container:
    options = {"application": "voip", "b": "16000"}
    stream = container.add_stream("libopus", rate=RATE, layout="mono", options=options)
    frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
    frame.sample_rate, frame.pts, frame.time_base = RATE, 0, Fraction(1, RATE)
    container.mux([*stream.encode(frame), *stream.encode(None)])
right, wrong = (b"\x56\xaa\x83" + round(1e9 * n / RATE).to_bytes(3, "big") for n in (312, 104))
data = open(path, "rb").read()
assert data.count(right) == 1
open(patched, "wb").write(data.replace(right, wrong))


def decode(path, name=None):
    with av.open(path) as container:
        stream = container.streams.audio[0]
        context = stream.codec_context
        if name:
            context = av.CodecContext.create(name, "r")
            context.extradata = stream.codec_context.extradata
            context.options = {"request_sample_fmt": "flt"}
        frames = [frame for packet in container.demux(stream) for frame in context.decode(packet)]
    return np.concatenate([frame.to_ndarray().ravel() for frame in frames])


native, reference = decode(path), decode(path, "libopus")
off = np.sqrt(((native - reference) ** 2).mean() / (reference**2).mean())
delayed = len(decode(patched))
print(
    f"{av.__version__} own header: {len(native)} samples; FFmpeg 5's CodecDelay: {delayed}; "
    f"native against libopus: {off:.3f}"
)
assert off > 0.05, "FFmpeg's own decoder now equals libopus"
assert len(native) == len(reference) == 96000
assert delayed == (96000 if av.__version__ < "18" else 96208), "CodecDelay is read in another way"
PYTHON

for version in 17.0.0 18.1.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q "av==$version" numpy==2.3.5
  "$folder/$version/bin/python" "$folder/try.py" "$folder"
done
