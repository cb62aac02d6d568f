"""Which frames may attend to which: padding, causal and chunked masks, on the device,
without a loop.

    padding = padding_mask(lengths, num_frames)                      # [batch, frames]
    chunks = chunk_mask(num_frames, 16, 4, device=features.device)   # [frames, frames]
    mask = attention_mask(padding, chunks)                           # [batch, 1, frames, frames]
    torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

**True means: may be attended to**, in every mask here, as in
`scaled_dot_product_attention`, and in WeNet. To `torch.nn.MultiheadAttention`,
`torch.nn.TransformerEncoder` and SpeechBrain, True means masked:
`for_multihead_attention` inverts a mask for them.

Chunks are those of WeNet's U2 (Zhang et al. 2020, arXiv:2012.05481): frames are cut into
chunks of `chunk_size`, the last may be shorter, and a frame attends to its whole chunk
and `num_left_chunks` before it.

The last causal and chunked masks are cached and **shared**: calls with the same arguments
return the same tensor. Never change such a mask in place; `clone()` it first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeGuard

import torch
from torch import Tensor

from featcache.errors import ArgumentError

__all__ = ["attention_mask", "causal_mask", "chunk_mask", "for_multihead_attention", "padding_mask"]

_NUM_SHARED = 4
_MOST_SHARED_FRAMES = 4096
"""The length of the longest mask that is shared: 64 MiB for all of them."""


def padding_mask(lengths: Tensor, num_frames: int | None = None) -> Tensor:
    """Mark the frames of a padded batch True, padding False.

    Args:
        lengths: The lengths in frames, integers `[batch]`.
        num_frames: The number of frames that the batch is padded to. By default the length
            of the longest row, but reading it waits for a GPU, so pass `features.shape[1]`.

    Returns a new tensor on `lengths`' device, bool `[batch, num_frames]`; rows longer than
    `num_frames` are all True. Raises ArgumentError if `lengths` is no integer tensor
    `[batch]`."""
    if not is_whole(lengths) or lengths.ndim != 1:
        raise ArgumentError(
            f"lengths is {described(lengths)}: give a tensor of integers [batch], in frames"
        )
    if num_frames is None:
        num_frames = int(lengths.max()) if len(lengths) else 0
    _check("num_frames", num_frames, 0)
    return torch.arange(num_frames, device=lengths.device) < lengths[:, None]


def causal_mask(num_frames: int, *, device: torch.device | str | None = None) -> Tensor:
    """Let each frame attend to itself and to those before it: a `chunk_mask` of chunks of
    one frame."""
    return chunk_mask(num_frames, 1, device=device)


def chunk_mask(
    num_frames: int,
    chunk_size: int,
    num_left_chunks: int | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Let each frame attend to its whole chunk, and to the chunks before it.

    Args:
        num_frames: The number of queries, and of keys.
        chunk_size: The number of frames per chunk. With `num_frames` or more, all frames
            attend to all.
        num_left_chunks: The number of chunks before its own that a frame may attend to; None
            for all. (WeNet's `num_left_chunks`, with -1 for all; SpeechBrain's
            `left_context_size`.)
        device: The device of the mask; by default torch's default device.

    Returns a shared tensor (see the module), bool `[num_frames, num_frames]`, queries by
    keys, contiguous. Raises ArgumentError if a number is out of range."""
    _check("num_frames", num_frames, 0)
    _check("chunk_size", chunk_size, 1)
    chunk_size = min(chunk_size, max(num_frames, 1))
    others = max(-(-num_frames // chunk_size) - 1, 0)
    if num_left_chunks is None:
        num_left_chunks = others
    _check("num_left_chunks", num_left_chunks, 0, "; None is for all")
    num_left_chunks = min(num_left_chunks, others)
    # "cuda" becomes "cuda:0", and None the default device
    device = torch.empty(0, device=device).device
    # tensors that are compiled, or captured in a CUDA graph, have no values yet
    is_recorded = torch.compiler.is_compiling() or (
        device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    )
    if is_recorded or num_frames > _MOST_SHARED_FRAMES:
        return _chunk_mask(num_frames, chunk_size, num_left_chunks, device)
    # another stream might read a mask before it is written
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _shared_mask(num_frames, chunk_size, num_left_chunks, device, stream)


def attention_mask(padding: Tensor, frames: Tensor | None = None) -> Tensor:
    """Combine masks for `scaled_dot_product_attention`.

    No frame is left without a key, whose softmax would be NaN. So padding frames may also
    attend to themselves and, without `frames`, a row of length 0 to all of its padding.

    Args:
        padding: The padding mask, bool `[batch, frames]`, from `padding_mask`.
        frames: The frames that may attend to each other in every row, bool `[frames, frames]`,
            queries by keys, for example from `chunk_mask`; by default all.

    Returns a new bool tensor for any number of heads: `[batch, 1, frames, frames]`, queries
    by keys; without `frames` `[batch, 1, 1, frames]`, the same keys for all queries. Raises
    ArgumentError if the masks have other shapes, or are not bool."""
    _check_mask("padding", padding)
    if frames is None:
        return (padding | ~padding.any(1, keepdim=True))[:, None, None]
    _check_mask("frames", frames)
    if frames.shape != (padding.shape[1], padding.shape[1]):
        raise ArgumentError(f"frames is {list(frames.shape)}, and padding is {list(padding.shape)}")
    mask = padding[:, None] & frames
    mask.diagonal(dim1=1, dim2=2).logical_or_(~padding)
    return mask[:, None]


def for_multihead_attention(mask: Tensor, num_heads: int | None = None) -> Tensor:
    """Invert a mask, for `torch.nn.MultiheadAttention` and other modules to which True
    means masked.

    Args:
        mask: The mask, bool: `[batch, frames]`, `[frames, frames]`, or the result of
            `attention_mask`.
        num_heads: The layer's number of heads, for a mask from `attention_mask`.

    Returns a new bool tensor. For a mask of two dimensions it has the same shape, for
    `key_padding_mask` or `attn_mask`. For a mask from `attention_mask` it is `[batch *
    num_heads, frames, frames]`, for `attn_mask`, with a key for every frame. If two masks
    are passed separately, padding frames may have no key, and become NaN. Raises
    ArgumentError if the mask has another shape or dtype, or `num_heads` is missing."""
    if not isinstance(mask, Tensor) or mask.ndim == 2:
        _check_mask("mask", mask)
        return ~mask
    if mask.ndim != 4 or mask.dtype != torch.bool or num_heads is None:
        raise ArgumentError(
            f"mask is {described(mask)}, num_heads {num_heads}: give a bool mask of two "
            "dimensions, or one from attention_mask, and num_heads"
        )
    batch, _, _, num_frames = mask.shape
    return (~mask).expand(batch, num_heads, num_frames, num_frames).flatten(0, 1)


def check_floats(features: Tensor, *shape: str | int) -> None:
    """Raise ArgumentError unless `features` are floats of this shape. A name is any size;
    "..." at the end stands for any more dimensions."""
    if not isinstance(features, Tensor):
        raise ArgumentError(f"features is {described(features)}: give a tensor")
    sizes = [*shape]
    if shape[-1] == "...":
        sizes[-1:] = features.shape[len(shape) - 1 :]
    fits = len(sizes) == features.ndim and all(
        isinstance(size, str) or size == actual
        for size, actual in zip(sizes, features.shape, strict=True)
    )
    if not (features.is_floating_point() and fits):
        raise ArgumentError(
            f"features is {described(features)}: give floats [{', '.join(map(str, shape))}]"
        )


def frame_mask(features: Tensor, lengths: Tensor | None) -> Tensor:
    """Mark the frames of features, floats `[batch, frames, ...]`, that are not padding:
    bool `[batch, frames]`; all without lengths. Raises ArgumentError unless there is one
    length per row, on the features' device."""
    check_floats(features, "batch", "frames", "...")
    if lengths is None:
        return torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
    is_frame = padding_mask(lengths, features.shape[1])
    if lengths.shape != features.shape[:1] or lengths.device != features.device:
        raise ArgumentError(
            f"lengths is {list(lengths.shape)} on {lengths.device}, for {len(features)} rows on "
            f"{features.device}: give one length for each row, on the features' device"
        )
    return is_frame


def is_whole(value: object) -> TypeGuard[Tensor]:
    """Tell whether a value is a tensor of integers."""
    return isinstance(value, Tensor) and not (
        value.is_floating_point() or value.dtype == torch.bool
    )


def described(value: object) -> str:
    """Describe a tensor by its dtype and shape, other values by their type."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}"


def expand(values: Tensor, like: Tensor) -> Tensor:
    """Append dimensions of size 1 to `[batch]` or `[batch, frames]`, up to those of `like`."""
    return values.view(*values.shape, *[1] * (like.ndim - values.ndim))


def _chunk_mask(
    num_frames: int, chunk_size: int, num_left_chunks: int, device: torch.device
) -> Tensor:
    """Make a chunk mask in a single pass: all its rows are windows of one line.

    The line is True for as many chunks as a frame may attend to. The rows of the last chunk
    begin at the line's start, the rows of each chunk before it `chunk_size` further to the
    right. With 3 chunks of 2 frames, and 1 chunk to the left:

        line   0 0 1 1 1 1 0 0 0 0 0 0
        c = 2  0 0 1 1 1 1                  each row twice
        c = 1      1 1 1 1 0 0
        c = 0          1 1 0 0 0 0"""
    num_chunks = -(-num_frames // chunk_size)
    end = num_chunks * chunk_size
    line = torch.zeros(end + num_frames, dtype=torch.bool, device=device)
    line[max(end - (num_left_chunks + 1) * chunk_size, 0) : end] = True
    rows = line.as_strided((num_chunks, chunk_size, num_frames), (chunk_size, 0, 1))
    return rows.flip(0).reshape(end, num_frames)[:num_frames]


@lru_cache(_NUM_SHARED)
def _shared_mask(
    num_frames: int, chunk_size: int, num_left_chunks: int, device: torch.device, stream: int
) -> Tensor:
    # a tensor made in inference mode could not be used in training later
    with torch.inference_mode(False):
        return _chunk_mask(num_frames, chunk_size, num_left_chunks, device)


def _check(name: str, value: int, least: int, hint: str = "") -> None:
    # torch.compile passes numbers that are no ints
    if isinstance(value, (float, str)) or value is None:
        raise ArgumentError(f"{name} is {value!r}: it must be a whole number{hint}")
    if value < least:
        raise ArgumentError(f"{name} is {value}: it must be {least} or more{hint}")


def _check_mask(name: str, mask: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 2:
        raise ArgumentError(
            f"{name} is {described(mask)}: give a tensor of bools, of two dimensions"
        )
