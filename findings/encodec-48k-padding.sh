#!/usr/bin/env bash
# In transformers, the codes of EnCodec 48 kHz depend on the zeros behind a clip.
#
# EncodecFeatureExtractor pads a clip to whole chunks of a second, also if it is alone, and
# returns a padding_mask. EncodecModel.encode sets the padding to zero by that mask, and
# _encode_frame says that the mask "is required to compute the correct scale"; but it takes the
# root mean square of the whole chunk, zeros included, and the encoder's group norm averages
# over them, too. So half a second has a scale that is too small by the square root of 2, other
# codes than without padding in the frames that have sound, and a second chunk of zeros. The
# same clip without padding, which encode takes, too, has its true scale, and one chunk. Seen
# with transformers 5.24.0, in a small model with random weights and the settings of
# facebook/encodec_48khz.
#
# Seen:
#    0.5 s of noise, root mean square 0.0704
#    unpadded:          1 chunks, scale 0.0704, 0% of the codes of 75 frames differ
#    by the extractor:  2 chunks, scale 0.0498, 66% of the codes of 75 frames differ
#    beside 1.5 s:      3 chunks, scale 0.0498, 66% of the codes of 75 frames differ
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/try.py" <<'PYTHON'
import numpy as np
import torch
import transformers
from transformers import EncodecConfig, EncodecFeatureExtractor, EncodecModel

print("transformers", transformers.__version__, "torch", torch.__version__)
torch.manual_seed(0)
config = EncodecConfig(
    target_bandwidths=[3.0, 6.0, 12.0, 24.0],
    sampling_rate=48000,
    audio_channels=2,
    normalize=True,
    chunk_length_s=1.0,
    overlap=0.01,
    use_causal_conv=False,
    norm_type="time_group_norm",
    num_filters=8,
    hidden_size=32,
    codebook_dim=32,
    codebook_size=64,
)
model = EncodecModel(config).eval()
for layer in model.quantizer.layers:
    layer.codebook.embed.normal_()
extractor = EncodecFeatureExtractor(
    feature_size=2, sampling_rate=48000, chunk_length_s=1.0, overlap=0.01
)
random = np.random.default_rng(0)
clip, longer = (
    (0.1 * random.standard_normal((2, count))).astype(np.float32) for count in (24000, 72000)
)
loudness = float(np.sqrt(np.square(clip.mean(0)).mean()))
print(f"0.5 s of noise, root mean square {loudness:.4f}")


@torch.inference_mode()
def encoded(*clips):
    inputs = extractor([*clips], sampling_rate=48000, return_tensors="pt")
    return model.encode(inputs["input_values"], inputs["padding_mask"], bandwidth=6.0)


with torch.inference_mode():
    unpadded = model.encode(torch.from_numpy(clip)[None], bandwidth=6.0)
frames = unpadded.audio_codes.shape[-1]
for name, output in (
    ("unpadded:", unpadded),
    ("by the extractor:", encoded(clip)),
    ("beside 1.5 s:", encoded(clip, longer)),
):
    first, scale = output.audio_codes[0, 0, :, :frames], float(output.audio_scales[0][0])
    differ = float((first != unpadded.audio_codes[0, 0]).float().mean())
    chunks = len(output.audio_codes)
    print(f"{name:18} {chunks} chunks, scale {scale:.4f}, {differ:.0%} of the codes of {frames} frames differ")
    if output is unpadded:
        assert chunks == 1 and abs(scale - loudness) < 1e-4
    else:
        assert chunks > 1 and abs(scale - loudness / 2**0.5) < 1e-4, "the scale leaves out the padding"
        assert differ > 0.3, "the codes hardly depend on the padding"
PYTHON

python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q transformers==5.24.0 torch==2.14.1 numpy
"$folder/env/bin/python" "$folder/try.py"
