"""Which frames may attend to which: padding, causal and chunked masks, on the device, without a loop.

    padding = padding_mask(lengths, features.shape[1])                                    # [batch, frames]
    chunks = chunk_mask(features.shape[1], 16, num_left_chunks=4, device=features.device)  # [frames, frames]
    mask = attention_mask(padding, chunks)                                                # [batch, 1, frames, frames]
    torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

**True means: may be attended to**, in every mask here, as in `scaled_dot_product_attention`, and in WeNet. To
`torch.nn.MultiheadAttention`, `torch.nn.TransformerEncoder` and SpeechBrain, True means masked:
`for_multihead_attention` inverts a mask for them.

Chunks are those of chunk-based attention (WeNet's U2, Zhang et al. 2020, arXiv:2012.05481): frames are cut into
chunks of `chunk_size`, the last one may be shorter, and a frame attends to its whole chunk and to `num_left_chunks`
chunks before it.

Causal and chunked masks are cached and **shared**: calls with the same arguments return the same tensor. So do not
change such a mask in place; `clone()` it first. A changed mask is never returned again: the next call for it raises
`ArgumentError`. (Changes that bypass torch, such as writing through `mask.numpy()`, are not detected.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock

import torch
from torch import Tensor

from featcache.errors import ArgumentError

__all__ = ["attention_mask", "causal_mask", "chunk_mask", "for_multihead_attention", "padding_mask"]

_KEPT_BYTES = 64 << 20  # on all devices together: sixteen masks of 2,000 frames


def padding_mask(lengths: Tensor, num_frames: int | None = None) -> Tensor:
    """True for the frames of a padded batch, False for padding.

    Args:
        lengths: integers `[batch]`, in frames.
        num_frames: number of frames that the batch is padded to. By default that of the longest row, but reading it
            waits for a GPU, so pass `features.shape[1]`.

    Returns:
        Bool `[batch, num_frames]` on the device of `lengths`, a new tensor. Rows longer than `num_frames` are True
        throughout.

    Raises:
        ArgumentError: `lengths` is not an integer tensor with one length per row.
    """
    if not isinstance(lengths, Tensor):
        raise ArgumentError(f"lengths is a {type(lengths).__name__}: give a tensor of integers [batch], in frames")
    if lengths.ndim != 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ArgumentError(f"lengths is {lengths.dtype} {list(lengths.shape)}: give integers [batch], in frames")
    if num_frames is None:
        num_frames = int(lengths.max()) if len(lengths) else 0
    _check("num_frames", num_frames, 0)
    return torch.arange(num_frames, device=lengths.device) < lengths[:, None]


def causal_mask(num_frames: int, *, device: torch.device | str | None = None) -> Tensor:
    """Each frame may attend to itself and to those before it: chunks of one frame.

    Returns:
        Bool `[num_frames, num_frames]`, queries by keys, shared: see the module.

    Raises:
        ArgumentError: as `chunk_mask` does.
    """
    return chunk_mask(num_frames, 1, device=device)


def chunk_mask(
    num_frames: int,
    chunk_size: int,
    num_left_chunks: int | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Each frame may attend to its whole chunk, and to the chunks before it.

    Args:
        num_frames: number of queries, and of keys.
        chunk_size: frames per chunk. With `num_frames` or more, all frames attend to all.
        num_left_chunks: how many chunks before a frame's own it may attend to; 0 for none, None for all.
            (WeNet's `num_left_chunks`, with -1 for all; SpeechBrain's `left_context_size`.)
        device: of the mask; by default torch's default device.

    Returns:
        Bool `[num_frames, num_frames]`, queries by keys, contiguous, shared: see the module.

    Raises:
        ArgumentError: a number is out of range, or the mask was changed in place after it was last returned.
    """
    _check("num_frames", num_frames, 0)
    _check("chunk_size", chunk_size, 1)
    chunk_size = min(chunk_size, max(num_frames, 1))
    others = max(-(-num_frames // chunk_size) - 1, 0)
    if num_left_chunks is None:
        num_left_chunks = others
    _check("num_left_chunks", num_left_chunks, 0, "; None is for all")
    num_left_chunks = min(num_left_chunks, others)
    device = torch.empty(0, device=device).device  # "cuda" has become "cuda:0", None the default
    if _is_recorded(device):
        return _chunk_mask(num_frames, chunk_size, num_left_chunks, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    # of one stream: another might read a mask before it is written
    key = (num_frames, chunk_size, num_left_chunks, device, stream)
    found = _shared.get(key)
    if found is None:
        with torch.inference_mode(False):  # a tensor of inference mode could not be used in training, later
            found = _shared.put(key, _chunk_mask(num_frames, chunk_size, num_left_chunks, device))
    return found


def attention_mask(padding: Tensor, frames: Tensor | None = None) -> Tensor:
    """Which frame of each row may attend to which, for `scaled_dot_product_attention`.

    No frame is left without a key: its softmax would be 0 / 0, and NaN would spread from layer to layer to all frames.
    So padding frames may also attend to themselves and, without `frames`, a row of length 0 may attend to all of its
    padding. What real frames attend to does not change.

    Args:
        padding: bool `[batch, frames]`, from `padding_mask`.
        frames: bool `[frames, frames]`, queries by keys, for example from `chunk_mask`. Without it, every frame of a
            row may attend to every other.

    Returns:
        Bool, for any number of heads: `[batch, 1, frames, frames]`, queries by keys; without `frames`
        `[batch, 1, 1, frames]`, the same keys for all queries. A new tensor.

    Raises:
        ArgumentError: the masks have other shapes, or are not bool.
    """
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
    """The inverse mask, where True means masked, for `torch.nn.MultiheadAttention` and other modules with that
    convention.

    Args:
        mask: bool, True for what may be attended to: `[batch, frames]` or `[frames, frames]`, or the result of
            `attention_mask`.
        num_heads: of the layer, for a mask from `attention_mask`.

    Returns:
        Bool, a new tensor: of the same shape, for `key_padding_mask` or `attn_mask`; for a mask from `attention_mask`,
        `[batch * num_heads, frames, frames]`, for `attn_mask`. The latter is larger, but has a key for every frame. If
        a padding mask and a chunk mask are passed separately, padding frames may have no key, and the layer returns NaN
        for them, which the next layer spreads.

    Raises:
        ArgumentError: another shape or dtype, or `num_heads` is missing.
    """
    if not isinstance(mask, Tensor) or mask.ndim == 2:
        _check_mask("mask", mask)
        return ~mask
    if mask.ndim != 4 or mask.dtype != torch.bool or num_heads is None:
        raise ArgumentError(
            f"mask is {mask.dtype} {list(mask.shape)}, num_heads {num_heads}: give a bool mask of two dimensions, "
            "or one from attention_mask, and num_heads"
        )
    batch, _, _, num_frames = mask.shape
    return (~mask).expand(batch, num_heads, num_frames, num_frames).flatten(0, 1)


def _chunk_mask(num_frames: int, chunk_size: int, num_left_chunks: int, device: torch.device) -> Tensor:
    """Make it: all rows are windows on one line, so that a single pass writes the mask.

    The line is True for as many chunks as a frame may attend to. The rows of the last chunk begin at its start, those
    of each chunk before at chunk_size further. With 3 chunks of 2 frames, and 1 to the left:

        line   0 0 1 1 1 1 0 0 0 0 0 0
        c = 2  0 0 1 1 1 1                  twice, as the other rows
        c = 1      1 1 1 1 0 0
        c = 0          1 1 0 0 0 0
    """
    num_chunks = -(-num_frames // chunk_size)
    end = num_chunks * chunk_size
    line = torch.zeros(end + num_frames, dtype=torch.bool, device=device)
    line[max(end - (num_left_chunks + 1) * chunk_size, 0) : end] = True
    rows = line.as_strided((num_chunks, chunk_size, num_frames), (chunk_size, 0, 1))
    return rows.flip(0).reshape(end, num_frames)[:num_frames]


def _is_recorded(device: torch.device) -> bool:
    """Whether operations are compiled, or captured in a CUDA graph: their tensors hold nothing until that runs."""
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


class _Shared:
    """The masks that were used last, up to a number of bytes; for several threads at once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Tensor, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> Tensor | None:
        """A mask that is kept.

        Raises:
            ArgumentError: it was changed in place. It is not kept any longer.
        """
        with self._lock:
            if key not in self._kept:
                return None
            mask, version = self._kept[key]
            if mask._version == version:  # which torch counts up with every change, also by a view
                self._kept.move_to_end(key)
                return mask
            self._drop(key)
        raise ArgumentError(
            f"a mask {list(mask.shape)} of chunk_mask or causal_mask was changed in place after it was returned: such "
            "masks are shared, so clone() a mask before you change it"
        )

    def put(self, key: Hashable, mask: Tensor) -> Tensor:
        """Keep a mask; the one to use, which is another thread's if that was faster."""
        with self._lock:
            if key in self._kept:
                return self._kept[key][0]
            if mask.untyped_storage().nbytes() <= self._max_bytes:
                self._kept[key] = mask, mask._version
                self._bytes += mask.untyped_storage().nbytes()
                while self._bytes > self._max_bytes:
                    self._drop(next(iter(self._kept)))
            return mask

    def _drop(self, key: Hashable) -> None:
        mask, _ = self._kept.pop(key)
        self._bytes -= mask.untyped_storage().nbytes()


_shared = _Shared(_KEPT_BYTES)


def _check(name: str, value: int, least: int, hint: str = "") -> None:
    if isinstance(value, (float, str)) or value is None:  # the numbers of torch.compile are no ints either
        raise ArgumentError(f"{name} is {value!r}: it must be a whole number{hint}")
    if value < least:
        raise ArgumentError(f"{name} is {value}: it must be {least} or more{hint}")


def _check_mask(name: str, mask: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise ArgumentError(f"{name} is a {type(mask).__name__}: give a tensor")
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ArgumentError(f"{name} is {mask.dtype} {list(mask.shape)}: it must be bool, of two dimensions")
