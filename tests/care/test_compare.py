"""Two results of one clip: what differs by rounding, and what differs by more."""

import torch

from featcache.care.compare import ClipResult, compare, tied_frames


def test_rounding_is_relative_to_a_frame():
    """A code that differs is a tie where the latents agree, an error where they do not, or are not known."""
    latents = torch.ones(3, 4)
    moved = latents * torch.tensor([1 + 1e-5, 1 + 1e-4, 1.0])[:, None]
    codes = torch.zeros(3, 2, dtype=torch.long)
    others = torch.tensor([[0, 1], [1, 1], [0, 0]])
    found = compare(ClipResult(others, moved), ClipResult(codes, latents))
    assert (found.values, found.differing, found.mismatched) == (6, 3, 2)
    assert (found.first, found.last) == (2, 2)
    assert compare(ClipResult(others), ClipResult(codes)).mismatched == 3
    assert compare(ClipResult(latents * torch.nan), ClipResult(latents)).mismatched == 3


def test_noise_finds_ties_of_residual_codes():
    """Between two codewords that are equally near either is right; a code that is further away is not."""
    generator = torch.Generator().manual_seed(0)
    codebooks = [size * torch.randn(count, 8, generator=generator) for size, count in ((9, 16), (1, 2), (0.1, 16))]

    def quantize(latents):
        codes = []
        for codebook in codebooks:
            codes.append(torch.cdist(latents, codebook.expand(len(latents), -1, -1)).argmin(2))
            latents = latents - codebook[codes[-1]]
        return torch.stack(codes, dim=2)

    latents = codebooks[0] + codebooks[1].mean(0)
    codes = quantize(latents[None])[0]
    tied, wrong_before, wrong_after = codes.clone(), codes.clone(), codes.clone()
    tied[:, 1] = 1 - codes[:, 1]
    tied[:, 2] = 0  # behind a tie: means nothing
    wrong_before[:, 0] = (codes[:, 0] + 1) % 16
    wrong_before[:, 1] = 1 - codes[:, 1]
    wrong_after[:, 2] = (codes[:, 2] + 1) % 16
    assert tied_frames(quantize, latents, codes, tied).all()
    assert not tied_frames(quantize, latents, codes, wrong_before).any()
    assert not tied_frames(quantize, latents, codes, wrong_after).any()
    assert not tied_frames(quantize, latents + 0.01 * codebooks[1][0], codes, tied).all()
