"""What an extractor gives for clips: features, side arrays, and the latents that codes are made from."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from featcache.care.compare import ClipResult
from featcache.care.sampling import SampledClip
from featcache.device import Device
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.codec import CodecExtractor
from featcache.extractors.rows import Rows


def extract_results(extractor: Extractor[Params], clips: Sequence[SampledClip], device: Device) -> list[ClipResult]:
    """Extract clips in one call. The results are on the device, of which the caller holds a slot."""
    waveforms = device.upload([clip.waveform for clip in clips])
    given = [Clip(clip.id, waveform) for clip, waveform in zip(clips, waveforms, strict=True)]
    if (codec := extractor.as_codec_extractor()) is not None:
        num_codebooks = len(extractor.spec.codebook_sizes)
        return [
            ClipResult(rows.features[:, :num_codebooks].long(), rows.features[:, num_codebooks:], rows.side)
            for rows in _with_latents(codec).extract_rows(given)
        ]
    if (row_extractor := extractor.as_row_extractor()) is not None:
        return [ClipResult(_comparable(rows.features), side=rows.side) for rows in row_extractor.extract_rows(given)]
    return [ClipResult(_comparable(features)) for features in extractor.extract(given)]


def _comparable(features: torch.Tensor) -> torch.Tensor:
    return features if features.is_floating_point() else features.long()  # torch cannot compare all unsigned integers


def _with_latents(extractor: CodecExtractor[Any]) -> CodecExtractor[Any]:
    """A copy of the extractor whose features are float64 `[R, F, Q + D]`: codes, and the latents they are made from."""
    showing = copy.copy(extractor)

    def encode(waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        found: list[torch.Tensor] = []
        this_call = copy.copy(extractor)

        def latents(waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
            found.append(extractor.latents(waveforms, num_samples))
            return found[-1]

        this_call.latents = latents  # type: ignore[method-assign]
        rows = this_call.encode(waveforms, num_samples)
        (of_call,) = found
        return Rows(torch.cat([rows.features.double(), of_call.double()], dim=2), rows.side)

    showing.encode = encode  # type: ignore[method-assign]
    return showing
