"""Codes that lie on a tie: where the latents agree to rounding, and another codeword is as near."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import pad

from featcache.extractors.codec import CodecExtractor


def latent_distances(extractor: CodecExtractor, waveform: torch.Tensor) -> np.ndarray:
    """How far each frame's latents in a batch of rows are from those of the clip alone, relative in norm: `[F]`."""
    latents = []
    with torch.inference_mode():
        for policy in ("padded", "single"):
            extractor.chosen_batching = policy
            pieces = []
            for piece in extractor.pieces(len(waveform)):
                length = extractor.padded_length(piece.num_samples)
                count = extractor.rows(length, waveform.device)
                samples = waveform[piece.start : piece.start + piece.num_samples]
                padded = pad(samples, (0, length - len(samples))).expand(count, -1).contiguous()
                lengths = torch.full((count,), len(samples), device=waveform.device)
                pieces.append(extractor.latents(padded, lengths)[0, piece.skip : piece.skip + piece.num_frames])
            latents.append(torch.cat(pieces).double())
    extractor.chosen_batching = None
    batched, alone = latents
    return ((batched - alone).norm(dim=1) / alone.norm(dim=1).clamp(min=1e-30)).cpu().numpy()
