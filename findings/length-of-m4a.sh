#!/usr/bin/env bash
# The length of an M4A or MOV depends on the release of FFmpeg.
#
# AAC comes in packets of 1,024 samples. An edit list states where the sound begins and ends
# inside of them. FFmpeg applies its beginning, but decodes the last packet to its end until
# 8.1 (PyAV 18); since PyAV 19 it cuts there, too. The last frame's `duration`, or the
# stream's, is right in both. In fragmented MP4 neither release cuts the end, and only the
# last frame's `duration` is right.
#
# Seen, of 321,930 samples that were encoded:
#    18.1.0 m4a: 322560, by the stream 321930; fragmented: 322560, by the last frame 321930
#    19.0.0 m4a: 321930, by the stream 321930; fragmented: 322560, by the last frame 321930
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
import sys
from fractions import Fraction

import av
import numpy as np

RATE, ENCODED = 44100, 321930
samples = (3000 * np.sin(np.arange(ENCODED) / 20)).astype("i2")


def lengths(path, options):
    with av.open(path, "w", options=options) as container:
        stream = container.add_stream("aac", rate=RATE, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = RATE, 0, Fraction(1, RATE)
        container.mux([*stream.encode(frame), *stream.encode(None)])
    with av.open(path) as container:
        stream = container.streams.audio[0]
        frames = list(container.decode(stream))
        last = frames[-1]
        return sum(frame.samples for frame in frames), stream.duration, last.pts + last.duration


decoded, by_stream, _ = lengths(sys.argv[1] + "/a.m4a", {})
fragments = {"movflags": "+delay_moov+frag_keyframe", "frag_duration": "300000"}
fragmented, _, by_frame = lengths(sys.argv[1] + "/b.mp4", fragments)
print(
    f"{av.__version__} m4a: {decoded}, by the stream {by_stream}; "
    f"fragmented: {fragmented}, by the last frame {by_frame}"
)
assert by_stream == by_frame == ENCODED
assert decoded == (ENCODED if av.__version__ >= "19" else 322560), "the end is cut otherwise"
assert fragmented == 322560, "the end of fragmented MP4 is cut"
PYTHON

for version in 18.1.0 19.0.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install -q "av==$version" numpy==2.3.5
  "$folder/$version/bin/python" "$folder/try.py" "$folder"
done
