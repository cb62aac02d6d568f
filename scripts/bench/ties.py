"""Find codes that lie on a tie: the latents agree to rounding, and another codeword is
as near."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from featcache.audio.resample import to_waveform
from featcache.care.compare import ROUNDING, SampledClip, extract_results, frame_differences
from featcache.config import Config
from featcache.device import Device
from featcache.errors import AudioError
from featcache.extraction.from_audio import decode_all
from featcache.extractors.codec import CodecExtractor
from featcache.manifest.utterances import Manifest


def waveforms_of(manifest: Manifest, config: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """Each utterance's id and waveform, as the extractor gets it."""
    for decoded in decode_all([manifest[row] for row in range(len(manifest))], manifest.root):
        assert not isinstance(decoded.audio, AudioError)
        samples, source = decoded.audio
        waveform = to_waveform(samples, source.sample_rate, config.audio, decoded.utterance.channel)
        yield decoded.utterance.id, torch.from_numpy(waveform)


def differences(
    codes: np.ndarray, alone: np.ndarray, extractor: CodecExtractor, waveform: torch.Tensor
) -> Counter[str]:
    """How many codes `[F, Q]` a clip has, how many are `different` from the model's
    alone, and which are `ties`."""
    if codes.shape != alone.shape:
        return Counter(codes=alone.size, different=alone.size)
    differ = codes != alone
    counts = Counter(codes=differ.size, different=int(differ.sum()))
    if counts["different"]:
        counts["ties"] = int(differ[latent_distances(extractor, waveform) <= ROUNDING].sum())
    return counts


def latent_distances(extractor: CodecExtractor, waveform: torch.Tensor) -> np.ndarray:
    """How far each frame's latents in a batch of rows are from those of the clip alone,
    relative in norm: `[F]`."""
    device, clip, latents = (
        Device(str(waveform.device), 1),
        SampledClip("", waveform.cpu().numpy()),
        [],
    )
    with torch.inference_mode(), device.slot():
        for policy in ("padded", "single"):
            extractor.chosen_batching = policy
            (result,) = extract_results(extractor, [clip], device)
            latents.append(result.latents)
    extractor.chosen_batching = None
    return frame_differences(*latents)[0].cpu().numpy()
