#!/usr/bin/env bash
# soundfile reads an MP3 block by block to other samples than in one call.
#
# After each read, soundfile seeks to where it has just read to, if the file can be seeked. In
# WAV and FLAC that changes nothing. In an MP3, libsndfile's decoder begins anew there, a few
# frames before, and the frames that borrow bits from still earlier ones cannot be decoded. The
# number of samples is the same and no error is raised; libmpg123 writes a line about
# part2_3_length to stderr. Seen with soundfile 0.14.0 and libsndfile 1.2.2, also with
# SoundFile.read in a loop, for a tone with noise that libsndfile has encoded itself: the largest
# errors are as large as the noise, or half the tone. A subclass whose seekable() returns False
# does not seek, and gives the samples of one call of SoundFile.read. (soundfile.read, the
# function, seeks to 0 first: a quarter of its samples differ by one part in 2^24.)
#
# Seen:
#    16,000 Hz, blocks of  4,096: 160,000 samples, 34,432 differ, by up to 0.0761
#    16,000 Hz, without seeking:  160,000 samples, 0 differ, by up to 0.0000
#    24,000 Hz, blocks of 16,384: 240,000 samples, 46,526 differ, by up to 0.1241
#    24,000 Hz, without seeking:  240,000 samples, 0 differ, by up to 0.0000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
import sys

import numpy as np
import soundfile


class Forwards(soundfile.SoundFile):
    def seekable(self):
        return False


def read(kind, path, block):
    with kind(path) as file:
        blocks = []
        while len(samples := file.read(block, dtype="float32")):
            blocks.append(samples)
    return np.concatenate(blocks)


folder = sys.argv[1]
random = np.random.default_rng(0)
for rate, block in ((16000, 4096), (24000, 16384)):
    times = np.arange(10 * rate) / rate
    tone = 0.3 * np.sin(2 * np.pi * (200 + 300 * times) * times)
    path = f"{folder}/{rate}.mp3"
    noisy = tone + 0.05 * random.standard_normal(len(times))
    soundfile.write(path, noisy, rate, format="MP3", subtype="MPEG_LAYER_III")
    with soundfile.SoundFile(path) as file:
        whole = file.read(dtype="float32")
    for name, kind in ((f"blocks of {block:6,}:", soundfile.SoundFile), ("without seeking: ", Forwards)):
        joined = read(kind, path, block)
        error = np.abs(joined - whole)
        print(
            f"{rate:,} Hz, {name} {len(joined):,} samples, {(error > 0).sum():,} differ, "
            f"by up to {error.max():.4f}"
        )
        assert len(joined) == len(whole)
        assert (error.max() > 0.01) == (kind is soundfile.SoundFile), "it reads otherwise now"
PYTHON

python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q soundfile==0.14.0 numpy
"$folder/env/bin/python" -c "import soundfile; print(soundfile.__version__, soundfile.__libsndfile_version__)"
"$folder/env/bin/python" "$folder/try.py" "$folder" 2> "$folder/stderr" || { cat "$folder/stderr"; exit 1; }
grep -c part2_3_length "$folder/stderr" | sed 's/$/ lines of libmpg123 on stderr/'
